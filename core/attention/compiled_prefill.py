"""CPU attention of prefill chunks by compiled C over the pages of the pool; fp32 and bf16 pools, sums in fp32.

Owns: the call of ``core/attention/_paged_prefill.c``, which is built when kvferry is installed if there is a C compiler, and
the split of a sequence over torch's number of threads. Does not know: decode. Where the library is missing, was not compiled by
GCC 12 or newer for x86-64 Linux, or runs on a CPU without AVX2, ``core.attention.gathered`` does the same by torch's
operations.

Finite values given, a query's result does not depend on the chunk that it is computed in: see the C code.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.attention.base import AttentionSpec, BatchedSequence, PagedKVCache
from core.attention.compiled_kernel import LANES, CompiledKernel, declare, takes
from core.compiled import load_library

# Of the C code.
_KEYS = 64
_ROWS = 6
_PAIRS_PER_THREAD = 1 << 16  # of query heads and keys: less is not worth another thread
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
class _Part:
    """The work of one thread: some KV heads of some of a sequence's queries. queries: those, among the sequence's own."""

    problem: _Prefill
    queries: slice
    heads: tuple[int, int]
    scratch_size: int  # floats


@dataclass(slots=True)
class CompiledPrefillIndex:
    """One sequence under one mask. rows: its query rows. block_ids: int64, read by the C code."""

    rows: slice
    block_ids: npt.NDArray[np.int64]
    parts: list[_Part]


class CompiledPrefill(CompiledKernel):
    """The compiled kernel over one cache in host memory."""

    def __init__(self, cache: PagedKVCache) -> None:
        library = built_library()
        assert library is not None, "the caller has looked"
        super().__init__(cache, library.kvferry_paged_prefill)

    def index(self, sequence: BatchedSequence, spec: AttentionSpec) -> CompiledPrefillIndex:
        """Prepare one sequence under the mask of ``spec``."""
        cache = self.cache
        assert (spec.num_kv_heads, spec.head_dim) == (cache.num_kv_heads, cache.head_dim), "the heads are not the cache's"
        visible = sequence.block_ids[spec.first_visible(sequence.first_position) // cache.block_size :]
        # The C code checks no index: a wrong one makes it read any address.
        assert 0 <= visible.min() <= visible.max() < cache.num_blocks, "a block id is outside the pool"
        assert len(sequence.block_ids) * cache.block_size >= sequence.seq_len, "the sequence is longer than its blocks"
        block_ids = np.ascontiguousarray(sequence.block_ids, dtype=np.int64)
        parts = [
            self._part(block_ids, sequence.first_position, queries, heads, spec) for queries, heads in _split(sequence, spec)
        ]
        return CompiledPrefillIndex(slice(sequence.query_start, sequence.query_end), block_ids, parts)

    def attend(self, layer: int, query: Tensor, index: CompiledPrefillIndex, output: Tensor) -> None:
        """Fill ``output`` ``[num_queries, num_heads, head_dim]`` for the sequence's queries of that shape, in any dtype."""
        exact = query.to(self.cache.dtype)
        if exact.stride(-1) != 1 or exact.stride(-2) != exact.shape[-1]:
            exact = exact.contiguous()
        fits = output.dtype is self.cache.dtype and output.is_contiguous()
        result = output if fits else torch.empty(query.shape, dtype=self.cache.dtype, device="cpu")
        work = []
        for part in index.parts:
            problem = part.problem
            problem.query, problem.query_stride = exact[part.queries].data_ptr(), exact.stride(0)
            problem.output, problem.pool = result[part.queries].data_ptr(), self.address_of(layer)
            work.append((problem, *part.heads))
        self.run(work, [part.scratch_size for part in index.parts])
        if not fits:
            output.copy_(result)

    def _part(
        self, block_ids: npt.NDArray[np.int64], first_position: int, queries: slice, heads: tuple[int, int], spec: AttentionSpec
    ) -> _Part:
        num_queries, group = queries.stop - queries.start, spec.num_heads // spec.num_kv_heads
        problem = _Prefill(
            **self.strides,
            block_ids=block_ids.ctypes.data,
            block_size=self.cache.block_size,
            num_kv_heads=spec.num_kv_heads,
            group=group,
            head_dim=spec.head_dim,
            is_bfloat16=self.cache.dtype is torch.bfloat16,
            num_queries=num_queries,
            first_position=first_position + queries.start,
            window=spec.sliding_window or 0,
            chunk=spec.chunk_size or 0,
            scale=spec.scale,
        )
        num_rows = -(-num_queries * group // _ROWS) * _ROWS
        return _Part(problem, queries, heads, 2 * (num_rows * (spec.head_dim + LANES) + _KEYS * spec.head_dim))


def _split(sequence: BatchedSequence, spec: AttentionSpec) -> list[tuple[slice, tuple[int, int]]]:
    """Cut a sequence into parts of about equal work, at most one for each of torch's threads: by KV heads and by queries."""
    positions = np.arange(sequence.first_position, sequence.seq_len)
    most = spec.sliding_window or spec.chunk_size or sequence.seq_len
    work = np.minimum(positions + 1, most).cumsum()  # keys that the queries up to each see, or a little more
    num_threads = min(torch.get_num_threads(), int(work[-1]) * spec.num_heads // _PAIRS_PER_THREAD)
    num_heads = spec.num_kv_heads
    head_parts = num_heads if num_threads >= num_heads else num_threads if num_threads and num_heads % num_threads == 0 else 1
    query_parts = max(1, min(num_threads // head_parts, sequence.num_queries))
    cuts = np.searchsorted(work, work[-1] * np.arange(1, query_parts) / query_parts) + 1
    borders = [0, *cuts.tolist(), sequence.num_queries]
    per_part = num_heads // head_parts
    return [
        (slice(start, end), (head, head + per_part))
        for start, end in pairwise(borders)
        if start < end
        for head in range(0, num_heads, per_part)
    ]


def can_compile_prefill(cache: PagedKVCache) -> bool:
    """Return True if the library was built here, runs on this CPU, and takes the dtype and heads of this cache."""
    return takes(cache) and built_library() is not None


@cache
def built_library() -> ctypes.CDLL | None:
    """Return the library, None if it was not built here or is not for this machine."""
    library = load_library(ctypes.CDLL, "_paged_prefill", __package__, "kvferry_paged_prefill", "kvferry_has_paged_prefill")
    if library is None or not library.kvferry_has_paged_prefill():
        return None
    declare(library.kvferry_paged_prefill)
    return library
