"""CPU attention of prefill chunks by compiled C over the pages of the pool; fp32 and bf16 pools, sums in fp32.

Owns: the call of ``core/attention/_paged_prefill.c``, which is built when kvferry is installed if there is a C compiler, and
the split of a sequence's KV heads over torch's number of threads. Does not know: decode. Where the library is missing or the
CPU has no AVX-512, ``core.attention.gathered`` does the same by torch's operations.

A query's result does not depend on the chunk that it is computed in: see the C code.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.attention.base import AttentionSpec, BatchedSequence, KVLayout, PagedKVCache
from core.compiled import load_library

# Of the C code.
_LANES = 16  # head_dim is a multiple
_KEYS = 64
_ROWS = 6
_MAX_HEAD_DIM = 256
_PAIRS_PER_THREAD = 1 << 14  # of query rows and keys: less is not worth another thread
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64


class _Prefill(ctypes.Structure):
    """``struct prefill`` of the C code."""

    _fields_ = (
        *((name, _POINTER) for name in ("query", "output", "pool", "block_ids")),
        *((name, _SIZE) for name in ("query_stride", "block_stride", "head_stride", "token_stride", "value_offset")),
        *((name, _SIZE) for name in ("block_size", "num_kv_heads", "group", "head_dim", "is_bfloat16")),
        *((name, _SIZE) for name in ("num_queries", "first_position", "window", "chunk")),
        ("scale", ctypes.c_double),
    )


@dataclass(slots=True)
class CompiledPrefillIndex:
    """One sequence under one mask. rows: its query rows. block_ids: int64, read by the C code. parts: ranges of KV heads."""

    rows: slice
    problem: _Prefill
    block_ids: npt.NDArray[np.int64]
    parts: list[tuple[int, int]]
    scratch_size: int  # floats of a thread


class CompiledPrefill:
    """The compiled kernel over one cache in host memory. Not thread-safe: it owns scratch memory."""

    def __init__(self, cache: PagedKVCache) -> None:
        library = _library()
        assert library is not None, "the caller has looked"
        self._function = library.kvferry_paged_prefill
        self._cache = cache
        planes = cache.block_size * cache.num_kv_heads * cache.head_dim
        is_hnd = cache.layout is KVLayout.HND
        self._strides = {
            "block_stride": 2 * cache.num_layers * planes,
            "head_stride": cache.head_dim * (cache.block_size if is_hnd else 1),
            "token_stride": cache.head_dim * (1 if is_hnd else cache.num_kv_heads),
            "value_offset": planes,
        }
        self._layer_bytes = 2 * planes * cache.dtype.itemsize
        self._scratch = torch.empty(0)
        self._threads: ThreadPoolExecutor | None = None

    def index(self, sequence: BatchedSequence, spec: AttentionSpec) -> CompiledPrefillIndex:
        """Prepare one sequence under the mask of ``spec``."""
        cache, first = self._cache, sequence.first_position
        visible = sequence.block_ids[spec.first_visible(first) // cache.block_size :]
        # The C code checks no index: a wrong one makes it read any address.
        assert 0 <= visible.min() <= visible.max() < cache.num_blocks, "a block id is outside the pool"
        assert len(sequence.block_ids) * cache.block_size >= sequence.seq_len, "the sequence is longer than its blocks"
        block_ids = np.ascontiguousarray(sequence.block_ids)
        problem = _Prefill(
            **self._strides,
            block_ids=block_ids.ctypes.data,
            block_size=cache.block_size,
            num_kv_heads=spec.num_kv_heads,
            group=spec.num_heads // spec.num_kv_heads,
            head_dim=spec.head_dim,
            is_bfloat16=cache.dtype is torch.bfloat16,
            num_queries=sequence.num_queries,
            first_position=first,
            window=spec.sliding_window or 0,
            chunk=spec.chunk_size or 0,
            scale=spec.scale,
        )
        num_rows = -(-sequence.num_queries * problem.group // _ROWS) * _ROWS
        pairs = num_rows * sequence.seq_len * spec.num_kv_heads
        num_parts = max(1, min(torch.get_num_threads(), spec.num_kv_heads, pairs // _PAIRS_PER_THREAD))
        borders = [spec.num_kv_heads * number // num_parts for number in range(num_parts + 1)]
        scratch_size = 2 * (num_rows * (spec.head_dim + _LANES) + _KEYS * spec.head_dim)
        rows = slice(sequence.query_start, sequence.query_end)
        return CompiledPrefillIndex(rows, problem, block_ids, list(pairwise(borders)), scratch_size)

    def attend(self, layer: int, query: Tensor, index: CompiledPrefillIndex, output: Tensor) -> None:
        """Fill ``output`` ``[num_queries, num_heads, head_dim]`` for the sequence's queries of that shape, in any dtype."""
        exact = query.to(self._cache.dtype)
        if exact.stride(-1) != 1 or exact.stride(-2) != exact.shape[-1]:
            exact = exact.contiguous()
        fits = output.dtype is self._cache.dtype and output.is_contiguous()
        result = output if fits else torch.empty(query.shape, dtype=self._cache.dtype)
        if self._scratch.numel() < index.scratch_size * len(index.parts):
            self._scratch = torch.empty(index.scratch_size * len(index.parts))
        problem = index.problem
        problem.query, problem.query_stride, problem.output = exact.data_ptr(), exact.stride(0), result.data_ptr()
        problem.pool = self._cache.pool.data_ptr() + layer * self._layer_bytes
        reference, scratch = ctypes.byref(problem), self._scratch.data_ptr()
        calls = [(reference, *heads, scratch + 4 * number * index.scratch_size) for number, heads in enumerate(index.parts)]
        others = [self._pool().submit(self._function, *call) for call in calls[1:]]
        self._function(*calls[0])
        for other in others:
            other.result()
        if not fits:
            output.copy_(result)

    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="attention")
        return self._threads


def can_compile_prefill(cache: PagedKVCache) -> bool:
    """Return True if the library was built here, runs on this CPU, and takes the dtype and heads of this cache."""
    has_type = cache.dtype in (torch.float32, torch.bfloat16) and cache.device.type == "cpu"
    return has_type and cache.head_dim % _LANES == 0 and cache.head_dim <= _MAX_HEAD_DIM and _library() is not None


@cache
def _library() -> ctypes.CDLL | None:
    library = load_library(ctypes.CDLL, "_paged_prefill", __package__, "kvferry_paged_prefill", "kvferry_has_paged_prefill")
    if library is None or not library.kvferry_has_paged_prefill():
        return None
    library.kvferry_paged_prefill.restype = None
    library.kvferry_paged_prefill.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
    return library
