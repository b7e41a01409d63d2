"""What the compiled attention kernels share: the pool as the C code sees it, and the call of a library.

Owns: strides and addresses of a pool, and scratch memory. Does not know: what a kernel computes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

from core.attention.base import KVLayout, PagedKVCache
from core.kernel_threads import KernelThreads

LANES = 16  # of the C code: head_dim is a multiple
_MAX_HEAD_DIM = 256  # the largest that is tested


class CompiledKernel:
    """A function ``(problem, first, end, scratch)`` of a library over one cache in host memory.

    Not thread-safe: it owns scratch memory. strides: by the names in the C code's structs, in elements.
    """

    def __init__(self, cache: PagedKVCache, function: Callable[..., None]) -> None:
        self.cache = cache
        planes = cache.block_size * cache.num_kv_heads * cache.head_dim
        is_hnd = cache.layout is KVLayout.HND
        self.strides = {
            "block_stride": 2 * cache.num_layers * planes,
            "head_stride": cache.head_dim * (cache.block_size if is_hnd else 1),
            "token_stride": cache.head_dim * (1 if is_hnd else cache.num_kv_heads),
            "value_offset": planes,
        }
        self._function = function
        self._layer_bytes = 2 * planes * cache.dtype.itemsize
        self._scratch = torch.empty(0, dtype=torch.float32, device="cpu")
        self._threads = KernelThreads("attention")

    def address_of(self, layer: int) -> int:
        """Return the address of the first key of a layer in block 0."""
        return self.cache.pool.data_ptr() + layer * self._layer_bytes

    def run(self, work: Sequence[tuple[Any, int, int]], scratch_sizes: Sequence[int]) -> None:
        """Compute (problem, first, end) each on a thread of its own, the first on this one, with so many floats of scratch."""
        if len(work) == 1:  # each step of few sequences, and there the rest takes longer than the kernel
            ((problem, first, end),) = work
            self._function(ctypes.byref(problem), first, end, self._scratch_of(scratch_sizes[0]))
            return
        offsets = list(accumulate(scratch_sizes, initial=0))
        scratch = self._scratch_of(offsets[-1])
        calls = [
            (ctypes.byref(problem), first, end, scratch + 4 * offset)
            for (problem, first, end), offset in zip(work, offsets, strict=False)
        ]
        self._threads.run(self._function, calls)

    def _scratch_of(self, size: int) -> int:
        """Return the address of so many floats, which the next call uses again."""
        if self._scratch.numel() < size:
            self._scratch = torch.empty(size, dtype=torch.float32, device="cpu")
        return self._scratch.data_ptr()


def takes(cache: PagedKVCache) -> bool:
    """Return True if the kernels take the device, dtype and heads of this cache."""
    has_type = cache.dtype in (torch.float32, torch.bfloat16) and cache.device.type == "cpu"
    return has_type and cache.head_dim % LANES == 0 and cache.head_dim <= _MAX_HEAD_DIM


def declare(function: Any) -> None:  # noqa: ANN401 - ctypes names no type for it
    """Tell ctypes the arguments of a kernel's function."""
    function.restype = None
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
