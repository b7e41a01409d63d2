"""The CUDA backend where no kernel reads block tables: gather pages, then scaled dot product attention, decode rows together.

Owns: the batched kernel for sequences with one query each. Does not know: prefill, which the reference
(``core.attention.sdpa``) computes sequence by sequence. See ``core.attention.select``.

It reads and writes every visible key and value once more than a paged kernel does, so decode reaches a third of the memory's
bandwidth at best. Every index is a tensor on the device and every shape is known beforehand, so that a decode step can be
recorded as a graph; since the work grows with the width of the block table, one graph is recorded per power of two.

Slots that no query sees are set to zero after the gather: weight 0 is not enough (0 * NaN is NaN).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from core.attention.base import AttentionBackend, AttentionBatch, AttentionPlan, AttentionSpec, KVLayout
from core.attention.dense_tables import decode_arrays, powers_of_two
from core.attention.sdpa import SdpaBackend, SdpaPlan
from core.attention.torch_kernels import refill, upload

_GATHERED_BYTES = 256 << 20  # at a time, keys or values


@dataclass(slots=True)
class BatchedPlan(AttentionPlan):
    """The decode rows, and the reference's plan of all others.

    rows: int64 ``[N]``, their query rows, None if all rows are. seq_lens: int64 ``[N]``. block_tables: int64 ``[N, pages]``.
    """

    rows: Tensor | None
    seq_lens: Tensor
    block_tables: Tensor
    others: SdpaPlan | None = None
    masks: dict[AttentionSpec, Tensor] = field(default_factory=dict)


class BatchedSdpaBackend(AttentionBackend):
    """Gather + ``F.scaled_dot_product_attention``, in any layout and on any device."""

    name = "gather"
    preferred_layout = KVLayout.NHD
    device_types = frozenset({"cuda"})
    max_graph_blocks = 32 << 10  # beyond that, launches cost little of the time

    def plan(self, batch: AttentionBatch) -> BatchedPlan:
        """See ``AttentionBackend.plan``."""
        is_decode = np.diff(batch.query_start_loc) == 1
        decoding = np.flatnonzero(is_decode)
        tables, seq_lens = decode_arrays(batch, decoding, self.cache.block_size)
        device = self.cache.device
        others = None
        if len(decoding) < len(is_decode):
            reference = SdpaBackend(self.cache).plan(batch)
            others = SdpaPlan(reference.write_rows, [s for s in reference.sequences if s[0].num_queries > 1])
        return BatchedPlan(
            write_rows=self._write_rows(batch) if others is None else others.write_rows,
            rows=None if others is None else upload(batch.query_start_loc[decoding].astype(np.int64), device),
            seq_lens=upload(seq_lens, device),
            block_tables=upload(tables, device),
            others=others,
        )

    def attend(self, layer: int, query: Tensor, spec: AttentionSpec, plan: AttentionPlan) -> Tensor:
        """See ``AttentionBackend.attend``."""
        assert isinstance(plan, BatchedPlan)
        if plan.rows is None:
            return self._attend_decode(layer, query, spec, plan)
        assert plan.others is not None
        output = SdpaBackend(self.cache).attend(layer, query, spec, plan.others)
        if len(plan.rows):
            output.index_copy_(0, plan.rows, self._attend_decode(layer, query[plan.rows], spec, plan))
        return output

    def graph_widths(self, max_blocks: int) -> tuple[int, ...]:
        """Powers of two up to the widest."""
        return powers_of_two(max_blocks)

    def static_plan(self, num_seqs: int, num_blocks: int, specs: Sequence[AttentionSpec]) -> BatchedPlan:
        """See ``AttentionBackend.static_plan``."""
        device = self.cache.device
        plan = BatchedPlan(
            write_rows=self.cache.rows_of_slots(np.zeros(num_seqs, dtype=np.int64)),
            rows=None,
            seq_lens=torch.ones(num_seqs, dtype=torch.int64, device=device),
            block_tables=torch.zeros(num_seqs, num_blocks, dtype=torch.int64, device=device),
        )
        plan.masks = {spec: self._mask(plan, spec) for spec in specs}
        return plan

    def refill_plan(self, plan: AttentionPlan, batch: AttentionBatch) -> None:
        """See ``AttentionBackend.refill_plan``."""
        assert isinstance(plan, BatchedPlan)
        tables, seq_lens = decode_arrays(batch, np.arange(len(batch.seq_lens)), self.cache.block_size)
        refill(plan.write_rows, self.cache.row_indices(batch.slot_mapping))
        refill(plan.seq_lens, seq_lens)
        # Entries further right are masked by the lengths, and name blocks of this pool.
        refill(plan.block_tables[:, : tables.shape[1]], tables)
        for spec, mask in plan.masks.items():
            mask.copy_(self._mask(plan, spec))

    def _attend_decode(self, layer: int, query: Tensor, spec: AttentionSpec, plan: BatchedPlan) -> Tensor:
        mask = plan.masks.get(spec)
        if mask is None:
            mask = plan.masks[spec] = self._mask(plan, spec)
        num_seqs, num_pages = plan.block_tables.shape
        page_bytes = self.cache.pool[0, 0, 0].numel() * self.cache.dtype.itemsize
        rows = max(1, _GATHERED_BYTES // max(1, num_pages * page_bytes))
        slices = [slice(start, start + rows) for start in range(0, num_seqs, rows)]
        parts = [self._attend_part(layer, query[part], spec, plan.block_tables[part], mask[part]) for part in slices]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_part(self, layer: int, query: Tensor, spec: AttentionSpec, block_tables: Tensor, mask: Tensor) -> Tensor:
        """Return the output of ``query`` ``[N, num_heads, head_dim]`` under ``mask`` ``[N, num_slots]``."""
        key, value = (
            self._gather(pages, block_tables).masked_fill_(~mask[:, None, :, None], 0.0).to(query.dtype)
            for pages in (self.cache.key(layer), self.cache.value(layer))
        )
        # Heads that share a KV head become its queries: faster than enable_gqa.
        folded = query.reshape(len(query), spec.num_kv_heads, -1, query.shape[-1])
        attended = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask[:, None, None, :], scale=spec.scale)
        return attended.reshape(query.shape)

    def _gather(self, pages: Tensor, block_tables: Tensor) -> Tensor:
        """Return a copy ``[N, num_kv_heads, num_slots, head_dim]``."""
        picked = pages[block_tables]  # [N, pages, ...]
        if self.cache.layout is KVLayout.HND:
            return picked.transpose(1, 2).flatten(2, 3)
        return picked.flatten(1, 2).transpose(1, 2)

    def _mask(self, plan: BatchedPlan, spec: AttentionSpec) -> Tensor:
        """Return bool ``[N, num_slots]``, true where the last token of a sequence sees a slot."""
        last = plan.seq_lens[:, None] - 1
        slots = torch.arange(plan.block_tables.shape[1] * self.cache.block_size, device=last.device)[None, :]
        mask = slots <= last
        if spec.sliding_window is not None:
            mask = mask & (slots > last - spec.sliding_window)
        if spec.chunk_size is not None:
            mask = mask & (slots // spec.chunk_size == last // spec.chunk_size)
        return mask
