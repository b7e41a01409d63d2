"""Writing a step's keys and values to a pool in host memory by compiled C.

Owns: the call of ``core/attention/_write_rows.c``, which is built when kvferry is installed if there is a C compiler. torch's
``index_copy_`` does the same, after it has made the step's keys and values contiguous.
"""

from __future__ import annotations

import ctypes
from functools import cache as cached

import numpy as np
import numpy.typing as npt
from torch import Tensor

from core.attention.base import KVLayout, PagedKVCache
from core.compiled import load_library

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64


class CompiledWrite:
    """Writes to one cache in host memory."""

    def __init__(self, cache: PagedKVCache) -> None:
        library = built_library()
        assert library is not None, "the caller has looked"
        self._cache = cache
        self._function = library.kvferry_write_rows
        self._item_bytes = cache.dtype.itemsize
        self._rows_per_token = 2 * (cache.num_kv_heads if cache.layout is KVLayout.HND else 1)

    def check(self, slots: npt.NDArray[np.int64]) -> None:
        """Check the slots whose rows are about to be written: the C code writes to any address."""
        num_slots = self._cache.num_blocks * self._cache.block_size
        assert not len(slots) or 0 <= slots.min() <= slots.max() < num_slots, "a slot is outside the pool"

    def takes(self, key_value: Tensor) -> bool:
        """Return True for keys and values of the pool's dtype, those of a token one after another."""
        _, _, num_heads, head_dim = key_value.shape
        return key_value.dtype is self._cache.dtype and key_value.stride()[1:] == (num_heads * head_dim, head_dim, 1)

    def write(self, layer: int, key_value: Tensor, write_rows: Tensor) -> None:
        """Copy ``key_value`` ``[T, 2, num_kv_heads, head_dim]`` to these rows, int64, of ``PagedKVCache.layer_rows``."""
        target, num_tokens = self._cache.layer_rows(layer), len(key_value)
        assert len(write_rows) == num_tokens * self._rows_per_token, "the plan is of other tokens"
        self._function(
            *(key_value.data_ptr(), write_rows.data_ptr(), target.data_ptr()),
            *(num_tokens, key_value.stride(0) * self._item_bytes, self._rows_per_token, target.shape[1] * self._item_bytes),
        )


def can_compile_write(cache: PagedKVCache) -> bool:
    """Return True if the library was built here and the pool is in host memory."""
    return cache.device.type == "cpu" and built_library() is not None


@cached
def built_library() -> ctypes.CDLL | None:
    """Return the library, None if it was not built here or is not for this machine."""
    library = load_library(ctypes.CDLL, "_write_rows", __package__, "kvferry_write_rows")
    if library is not None:
        library.kvferry_write_rows.restype = None
        library.kvferry_write_rows.argtypes = [_POINTER] * 3 + [_SIZE] * 4
    return library
