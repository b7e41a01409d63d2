"""CPU decode attention by compiled C over the pages of the pool; fp32 and bf16 pools, sums in fp32.

Owns: the call of ``core/attention/_paged_decode.c``, which is built when kvferry is installed if there is a C compiler, and the
split of a large step over torch's number of threads. Does not know: prefill. Where the library is missing,
``core.attention.paged_cpu`` takes the kernels on torch's operators instead.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
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

_BYTES_PER_THREAD = 1 << 20  # handing work to another thread takes as long as reading some 100 KiB
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64


class _Problem(ctypes.Structure):
    """``struct problem`` of the C code."""

    _fields_ = (
        *((name, _POINTER) for name in ("query", "output", "pool", "block_ids", "block_starts", "first_slots", "end_slots")),
        *((name, _SIZE) for name in ("query_stride", "block_stride", "head_stride", "token_stride", "value_offset")),
        *((name, _SIZE) for name in ("block_size", "num_kv_heads", "group", "head_dim", "is_bfloat16")),
        ("scale", ctypes.c_double),
    )


@dataclass(slots=True)
class CompiledDecodeIndex:
    """The visible pages of one step and mask: int64 arrays that the C code reads, and the work of each thread.

    parts: ranges of items; an item is one KV head of one sequence. scratch_size: elements of scratch memory of a thread.
    """

    problem: _Problem
    arrays: tuple[npt.NDArray[np.int64], ...]
    parts: list[tuple[int, int]]
    scratch_size: int


class CompiledDecode(CompiledKernel):
    """The compiled kernel over one cache in host memory."""

    def __init__(self, cache: PagedKVCache) -> None:
        library = built_library()
        assert library is not None, "the caller has looked"
        super().__init__(cache, library.kvferry_paged_decode)

    def index(self, sequences: Sequence[BatchedSequence], spec: AttentionSpec) -> CompiledDecodeIndex:
        """Prepare one-query sequences under the mask of ``spec``."""
        cache, size = self.cache, self.cache.block_size
        firsts = np.array([spec.first_visible(sequence.first_position) for sequence in sequences])
        ends = np.array([sequence.seq_len for sequence in sequences])
        pages = firsts // size
        tables = [sequence.block_ids[page:] for sequence, page in zip(sequences, pages.tolist(), strict=True)]
        block_ids = np.ascontiguousarray(np.concatenate(tables), dtype=np.int64)
        # The C code checks no index: a wrong one makes it read any address.
        assert 0 <= block_ids.min() <= block_ids.max() < cache.num_blocks, "a block id is outside the pool"
        starts = np.cumsum([0, *map(len, tables)], dtype=np.int64)
        first_slots, end_slots = firsts - pages * size, ends - pages * size
        assert (end_slots <= np.diff(starts) * size).all(), "a sequence is longer than its blocks"
        arrays = (block_ids, starts, first_slots, end_slots)
        problem = _Problem(
            **self.strides,
            **{name: array.ctypes.data for name, array in zip(("block_ids", "block_starts"), arrays[:2], strict=True)},
            first_slots=first_slots.ctypes.data,
            end_slots=end_slots.ctypes.data,
            block_size=size,
            num_kv_heads=spec.num_kv_heads,
            group=spec.num_heads // spec.num_kv_heads,
            head_dim=spec.head_dim,
            is_bfloat16=cache.dtype is torch.bfloat16,
            scale=spec.scale,
        )
        lengths = end_slots - first_slots
        longest = (-(-int(lengths.max()) // LANES) + 1) * LANES
        scratch_size = spec.num_heads * (longest + 2 * cache.head_dim)
        return CompiledDecodeIndex(problem, arrays, self._split(lengths, spec), scratch_size)

    def attend(self, layer: int, query: Tensor, index: CompiledDecodeIndex) -> Tensor:
        """Return ``[num_seqs, num_heads, head_dim]`` for a query of that shape, in the pool's dtype."""
        if query.stride(-1) != 1 or query.stride(-2) != query.shape[-1]:
            query = query.contiguous()
        output = torch.empty(query.shape, dtype=query.dtype)
        problem = index.problem
        problem.query, problem.query_stride = query.data_ptr(), query.stride(0)
        problem.output, problem.pool = output.data_ptr(), self.address_of(layer)
        self.run([(problem, *part) for part in index.parts], [index.scratch_size] * len(index.parts))
        return output

    def _split(self, lengths: npt.NDArray[np.int64], spec: AttentionSpec) -> list[tuple[int, int]]:
        """Cut the items into runs of about equal bytes, at most one for each of torch's threads."""
        row_bytes = 2 * spec.head_dim * self.cache.dtype.itemsize
        work = np.repeat(lengths, spec.num_kv_heads).cumsum()
        num_parts = int(min(torch.get_num_threads(), max(1, work[-1] * row_bytes // _BYTES_PER_THREAD)))
        borders = np.searchsorted(work, work[-1] * np.arange(1, num_parts) / num_parts) + 1
        ends = [0, *borders.tolist(), len(work)]
        return [(start, end) for start, end in pairwise(ends) if start < end]


def can_compile_decode(cache: PagedKVCache) -> bool:
    """Return True if the library was built here and takes the dtype and heads of this cache."""
    return takes(cache) and built_library() is not None


@cache
def built_library() -> ctypes.CDLL | None:
    """Return the library, None if it was not built here or is not for this machine."""
    library = load_library(ctypes.CDLL, "_paged_decode", __package__, "kvferry_paged_decode")
    if library is not None:
        declare(library.kvferry_paged_decode)
    return library
