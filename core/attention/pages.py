"""The CUDA backend on torch's own FlashAttention 2, which takes no block table: each page is passed as a sequence of its own.

Owns: that translation, and the merge of the pages' results. Does not know: whether the kernel agrees; ``core.attention.select``
probes that. It needs no package besides torch.

The whole pool is one run of rows of keys (or values), and a page is a piece of it, so nothing is gathered to decode:

    pool rows  ... | page 7: k k k k | v v v v | ... | page 3: k k . . | v v . . | ...
    cu_seq_k          ^ start of page 7                 ^ start of page 3            seqused_k  4, 2

The query heads that share a KV head are the queries of each of these short sequences; the kernel's log-sum-exp weighs the pages
against each other. Tables are dense, ``[N, pages]``: where a sequence has no page, one slot of the null block is read with
weight 0. Shapes depend on N and the width only, so that a decode step can be recorded, once per power of two. A call of
the kernel takes a bounded number of pages; a sequence is in one call, so one of more than 65,535 pages cannot be attended.

Prefill chunks run as causal batches. They gather their keys and values, which takes little time compared with attention,
unless a step has whole prompts only: those are attended where they were computed, without a gather. A batch is cut where what
is gathered would exceed a bound; a single longer sequence is one by itself (``core.engine.trial_steps`` measures it).

The tests drive this file on the CPU with a stand-in that follows the documentation of ``varlen_attn``, and with the kernel on a
GPU; docs/gpu.md says when that was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from core.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionPlan,
    AttentionSpec,
    BatchedSequence,
    KVLayout,
    PagedKVCache,
    split_sequences,
)
from core.attention.dense_tables import decode_arrays, powers_of_two
from core.attention.torch_kernels import refill, upload, varlen_kernel_with_sums
from core.errors import ConfigError

MAX_PARTS = 32 << 10  # pages in one call of the kernel, whose grid takes 65,535 sequences
_SCRATCH_BYTES = 256 << 20  # of a call: queries and results of each page; see gathered_bytes


def _varlen_attn(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401 - torch's parameters
    """Call torch's kernel; return its output and log-sum-exps. Raises: ConfigError where there is none."""
    output, sums = varlen_kernel_with_sums()(*args, **kwargs)
    return output, sums


@dataclass(frozen=True, slots=True)
class _Intervals:
    """The rows that decode rows see, page by page: first pool row and number of rows, int32; bool ``[N, pages]`` which count.

    P is N * pages plus one slot of the null block with weight 0; see ``_num_extra``.
    """

    starts: Tensor  # [P + 1]
    lengths: Tensor  # [P]
    is_used: Tensor


@dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive queries of one sequence that see keys from one on: the query rows, and the pool rows of the keys."""

    rows: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of the kernel for some of the prefill chunks.

    queries: its rows, among those of all chunks. slots: int32, the pool rows of its keys, all of a step's on the device until
    it ends; None if these are the keys of the step itself, row by row.
    """

    queries: slice
    slots: Tensor | None
    query_starts: Tensor
    key_starts: Tensor
    max_query_len: int
    max_key_len: int


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Prefill chunks under one mask, in order. rows: int64, their query rows; None if they are all rows of the step."""

    rows: Tensor | None
    calls: list[_Call]


@dataclass(slots=True)
class PagesPlan(AttentionPlan):
    """The decode rows on the device, the prefill chunks on the host, and both under a layer's mask, once a layer needs it.

    decode_rows: int64, their query rows, None if all rows are. seq_lens: int64 ``[N]``. block_tables: int64 ``[N, pages]``.
    written: ``[T, 2, num_kv_heads, head_dim]``, what a layer has written, until it attends. None in a step with decode rows,
    and if the pool would round it.
    """

    decode_rows: Tensor | None
    seq_lens: Tensor
    block_tables: Tensor
    prefills: list[BatchedSequence] = field(default_factory=list)
    intervals: dict[AttentionSpec, _Intervals] = field(default_factory=dict)
    chunks: dict[AttentionSpec, _Chunks] = field(default_factory=dict)
    written: Tensor | None = None

    @property
    def has_only_prefills(self) -> bool:
        """True if no sequence of the step has a single query."""
        return bool(self.prefills) and not len(self.seq_lens)


class PagesBackend(AttentionBackend):
    """FlashAttention over the pages of a pool, each as a sequence. Raises: ConfigError if the pool is not NHD."""

    name = "pages"
    preferred_layout = KVLayout.NHD
    device_types = frozenset({"cuda"})
    max_graph_blocks: ClassVar[int | None] = MAX_PARTS  # beyond that, launches cost little of the time
    kernel: ClassVar[Callable[..., tuple[Tensor, Tensor]]] = _varlen_attn

    def __init__(self, cache: PagedKVCache) -> None:
        super().__init__(cache)
        if cache.layout is not KVLayout.NHD:
            raise ConfigError(f"attention backend pages needs KV layout NHD, got {cache.layout}")
        rows = cache.pool.view(-1, cache.num_kv_heads, cache.head_dim)
        self._rows_per_block = 2 * cache.num_layers * cache.block_size
        # From the layer's first row on one index serves all layers; all tables have one length.
        length = rows.shape[0] - self._rows_per_block + cache.block_size
        planes = [rows[plane * cache.block_size :][:length] for plane in range(2 * cache.num_layers)]
        self._keys, self._values = planes[0::2], planes[1::2]
        self._gathered_bytes = gathered_bytes(cache.device)

    def plan(self, batch: AttentionBatch) -> PagesPlan:
        """See ``AttentionBackend.plan``."""
        num_queries = np.diff(batch.query_start_loc)
        decoding = np.flatnonzero(num_queries == 1)
        tables, seq_lens = decode_arrays(batch, decoding, self.cache.block_size)
        device, is_mixed = self.cache.device, len(decoding) < len(num_queries)
        prefills = [s for s in split_sequences(batch, self.cache.block_size) if s.num_queries > 1] if is_mixed else []
        return PagesPlan(
            write_rows=self._write_rows(batch),
            decode_rows=upload(batch.query_start_loc[decoding].astype(np.int64), device) if is_mixed else None,
            seq_lens=upload(seq_lens, device),
            block_tables=upload(tables, device),
            prefills=prefills,
        )

    def write_kv(self, layer: int, key_value: Tensor, plan: AttentionPlan) -> None:
        """See ``AttentionBackend.write_kv``."""
        super().write_kv(layer, key_value, plan)
        self._keep_written(key_value, plan)

    def _keep_written(self, key_value: Tensor, plan: AttentionPlan) -> None:
        """Keep a layer's keys and values for its attention, which then need not be gathered from the pool."""
        assert isinstance(plan, PagesPlan)
        if plan.has_only_prefills and key_value.dtype == self.cache.dtype:
            plan.written = key_value

    def attend(self, layer: int, query: Tensor, spec: AttentionSpec, plan: AttentionPlan) -> Tensor:
        """See ``AttentionBackend.attend``."""
        assert isinstance(plan, PagesPlan)
        if plan.decode_rows is None:
            return self._attend_decode(layer, query, spec, plan)
        chunks = plan.chunks.get(spec)
        if chunks is None:
            chunks = plan.chunks[spec] = self._chunks(plan, spec)
        written, plan.written = plan.written, None
        if chunks.rows is None:
            return self._attend_chunks(layer, query, spec, chunks, written)
        output = query.new_empty(query.shape)
        output.index_copy_(0, chunks.rows, self._attend_chunks(layer, query[chunks.rows], spec, chunks, None))
        if len(plan.seq_lens):
            output.index_copy_(0, plan.decode_rows, self._attend_decode(layer, query[plan.decode_rows], spec, plan))
        return output

    def graph_widths(self, max_blocks: int) -> tuple[int, ...]:
        """Powers of two up to the widest."""
        return powers_of_two(max_blocks)

    def static_plan(self, num_seqs: int, num_blocks: int, specs: Sequence[AttentionSpec]) -> PagesPlan:
        """See ``AttentionBackend.static_plan``."""
        device = self.cache.device
        plan = PagesPlan(
            write_rows=self.cache.rows_of_slots(np.zeros(num_seqs, dtype=np.int64)),
            decode_rows=None,
            seq_lens=torch.ones(num_seqs, dtype=torch.int64, device=device),
            block_tables=torch.zeros(num_seqs, num_blocks, dtype=torch.int64, device=device),
        )
        plan.intervals = {spec: self._intervals(plan, spec) for spec in specs}
        return plan

    def refill_plan(self, plan: AttentionPlan, batch: AttentionBatch) -> None:
        """See ``AttentionBackend.refill_plan``."""
        assert isinstance(plan, PagesPlan)
        tables, seq_lens = decode_arrays(batch, np.arange(len(batch.seq_lens)), self.cache.block_size)
        refill(plan.write_rows, self.cache.row_indices(batch.slot_mapping))
        refill(plan.seq_lens, seq_lens)
        # Entries further right have no weight, by the lengths, and name blocks of this pool.
        refill(plan.block_tables[:, : tables.shape[1]], tables)
        for spec, intervals in plan.intervals.items():
            fresh = self._intervals(plan, spec)
            intervals.starts.copy_(fresh.starts)
            intervals.lengths.copy_(fresh.lengths)
            intervals.is_used.copy_(fresh.is_used)

    def _intervals(self, plan: PagesPlan, spec: AttentionSpec) -> _Intervals:
        """Cut the visible part of each sequence at the borders of pages."""
        size = self.cache.block_size
        ends = plan.seq_lens[:, None]
        firsts = torch.zeros_like(ends)
        if spec.sliding_window is not None:
            firsts = (ends - spec.sliding_window).clamp_(min=0)
        elif spec.chunk_size is not None:
            firsts = (ends - 1) // spec.chunk_size * spec.chunk_size
        page_starts = torch.arange(plan.block_tables.shape[1], device=ends.device)[None, :] * size
        lows = torch.maximum(firsts, page_starts)
        lengths = torch.minimum(ends, page_starts + size) - lows
        is_used = lengths > 0
        starts = torch.where(is_used, plan.block_tables * self._rows_per_block + lows - page_starts, 0)
        # The kernel needs one start more than there are sequences; ``lengths`` give their ends.
        end = starts.new_full((1,), len(self._keys[0]))
        starts = torch.cat((starts.flatten(), starts.new_zeros(1), end))
        lengths = torch.cat((torch.where(is_used, lengths, 1).flatten(), lengths.new_ones(1)))
        return _Intervals(starts.to(torch.int32), lengths.to(torch.int32), is_used)

    def _num_extra(self, num_pages: int, spec: AttentionSpec) -> int:
        """Return 1 if the kernel has as many queries as heads, so that the axes of the log-sum-exps could not be told apart."""
        return int(num_pages * (spec.num_heads // spec.num_kv_heads) == spec.num_kv_heads)

    def _attend_decode(self, layer: int, query: Tensor, spec: AttentionSpec, plan: PagesPlan) -> Tensor:
        intervals = plan.intervals.get(spec)
        if intervals is None:
            intervals = plan.intervals[spec] = self._intervals(plan, spec)
        num_seqs, num_pages = intervals.is_used.shape
        rows = max(1, self._max_parts(query, spec) // max(1, num_pages))
        parts = [
            self._attend_part(layer, query[start : start + rows], spec, intervals, start) for start in range(0, num_seqs, rows)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _max_parts(self, query: Tensor, spec: AttentionSpec) -> int:
        """Return how many pages a call of the kernel may take: query, padded query and result, the last twice in float32."""
        page_bytes = spec.num_heads * query.shape[-1] * (3 * query.dtype.itemsize + 2 * torch.float32.itemsize)
        return min(MAX_PARTS, _SCRATCH_BYTES // page_bytes)

    def _attend_part(self, layer: int, query: Tensor, spec: AttentionSpec, intervals: _Intervals, first: int) -> Tensor:
        """Return the output of ``query`` ``[n, num_heads, head_dim]``, the decode rows from ``first`` on."""
        is_used = intervals.is_used[first : first + len(query)]
        num_seqs, num_pages = is_used.shape
        group = spec.num_heads // spec.num_kv_heads
        folded = query.view(num_seqs, 1, spec.num_kv_heads, group, -1).transpose(2, 3)
        folded = folded.expand(-1, num_pages, -1, -1, -1).reshape(-1, spec.num_kv_heads, query.shape[-1])
        num_rows, num_parts = len(folded), is_used.numel() + self._num_extra(is_used.numel(), spec)
        start, end = first * num_pages, first * num_pages + num_parts
        folded = F.pad(folded, (0, 0, 0, 0, 0, num_parts * group - num_rows))
        query_starts = torch.arange(num_parts + 1, dtype=torch.int32, device=query.device) * group
        output, sums = type(self).kernel(
            folded,
            self._keys[layer],
            self._values[layer],
            query_starts,
            intervals.starts[start : end + 1],
            group,
            self.cache.block_size,
            scale=spec.scale,
            window_size=(-1, -1),
            enable_gqa=False,
            seqused_k=intervals.lengths[start:end],
        )
        by_query = sums if len(sums) == len(folded) else sums.t()
        sums = by_query[:num_rows].float().reshape(num_seqs, num_pages, group, spec.num_kv_heads)
        weights = sums.masked_fill(~is_used[:, :, None, None], -torch.inf).softmax(1)
        output = output[:num_rows].view(*sums.shape, -1).float()
        # Weight 0 is not enough for a slot that no query sees: 0 * NaN is NaN.
        output = output.masked_fill_(~is_used[:, :, None, None, None], 0.0)
        merged = (output * weights[..., None]).sum(1)
        return merged.transpose(1, 2).reshape(query.shape).to(query.dtype)

    def _chunks(self, plan: PagesPlan, spec: AttentionSpec) -> _Chunks:
        """Share the prefill chunks out to calls of the kernel."""
        pieces = [piece for sequence in plan.prefills for piece in self._pieces(sequence, spec)]
        is_written_now = plan.written is not None and all(len(piece.slots) == len(piece.rows) for piece in pieces)
        token_bytes = 2 * spec.num_kv_heads * self.cache.head_dim * self.cache.dtype.itemsize
        runs = [pieces] if is_written_now else _cut(pieces, self._gathered_bytes // token_bytes)
        ends = np.cumsum([0, *(sum(len(piece.rows) for piece in run) for run in runs)]).tolist()
        return _Chunks(
            rows=None if plan.has_only_prefills else self._upload([piece.rows for piece in pieces]),
            calls=[
                _Call(
                    queries=slice(*queries),
                    slots=None if is_written_now else self._upload([piece.slots for piece in run]),
                    query_starts=self._starts([len(piece.rows) for piece in run]),
                    key_starts=self._starts([len(piece.slots) for piece in run]),
                    max_query_len=max(len(piece.rows) for piece in run),
                    max_key_len=max(len(piece.slots) for piece in run),
                )
                for run, queries in zip(runs, pairwise(ends), strict=True)
            ],
        )

    def _pieces(self, sequence: BatchedSequence, spec: AttentionSpec) -> Iterator[_Piece]:
        """Cut a sequence where a chunk of local attention ends and its next one begins."""
        size, position = self.cache.block_size, sequence.first_position
        while position < sequence.seq_len:
            limit = sequence.seq_len
            if spec.chunk_size is not None:
                limit = min(limit, (position // spec.chunk_size + 1) * spec.chunk_size)
            seen = np.arange(spec.first_visible(position), limit, dtype=np.int32)
            first_row = sequence.query_start + position - sequence.first_position
            yield _Piece(
                rows=np.arange(first_row, first_row + limit - position),
                slots=sequence.block_ids[seen // size].astype(np.int32) * self._rows_per_block + seen % size,
            )
            position = limit

    def _upload(self, arrays: Sequence[npt.NDArray[np.int32 | np.int64]]) -> Tensor:
        return upload(np.concatenate(arrays), self.cache.device)

    def _starts(self, lengths: Sequence[int]) -> Tensor:
        return upload(np.cumsum([0, *lengths], dtype=np.int32), self.cache.device)

    def _attend_chunks(self, layer: int, query: Tensor, spec: AttentionSpec, chunks: _Chunks, written: Tensor | None) -> Tensor:
        outputs = [self._attend_call(layer, query[call.queries], spec, call, written) for call in chunks.calls]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend_call(self, layer: int, query: Tensor, spec: AttentionSpec, call: _Call, written: Tensor | None) -> Tensor:
        if call.slots is None:
            assert written is not None, "write_kv comes before attend"
            keys, values = written.to(query.dtype).unbind(1)
        else:
            slots = call.slots.long()
            keys, values = (plane[layer][slots].to(query.dtype) for plane in (self._keys, self._values))
        # The kernel counts the keys left of the query; a window counts the query too. -1: no limit.
        left = -1 if spec.sliding_window is None else spec.sliding_window - 1
        output, _ = type(self).kernel(
            query,
            keys,
            values,
            call.query_starts,
            call.key_starts,
            call.max_query_len,
            call.max_key_len,
            scale=spec.scale,
            window_size=(left, 0),
            enable_gqa=spec.num_heads != spec.num_kv_heads,
            seqused_k=None,
        )
        return output


def gathered_bytes(device: torch.device) -> int:
    """Return how many bytes of keys and values a call may gather: more on a large GPU, which few sequences do not fill."""
    total = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else 0
    return max(_SCRATCH_BYTES, total // 100)


def _cut(pieces: Sequence[_Piece], max_keys: int) -> list[list[_Piece]]:
    """Cut into runs of at most so many keys, or of one piece that has more."""
    runs: list[list[_Piece]] = []
    room = 0
    for piece in pieces:
        if not runs or len(piece.slots) > room:
            runs.append([])
            room = max_keys
        runs[-1].append(piece)
        room -= len(piece.slots)
    return runs
