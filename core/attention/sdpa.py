"""The reference backend: gather each sequence's pages, then scaled dot product attention under an explicit mask.

Owns: the definition of what the other backends must compute. Does not know: speed. It runs on any device, dtype and layout,
and is the fallback wherever a faster kernel fails its probe. Called through ``core.attention.base.AttentionBackend``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from core.attention.base import AttentionBackend, AttentionBatch, AttentionPlan, AttentionSpec, KVLayout


@dataclass(slots=True)
class SequencePages:
    """Where one sequence's queries and keys are.

    ``block_ids``: int64 ``[ceil(seq_len / block_size)]`` on the pool's device.
    """

    query_start: int
    query_end: int
    seq_len: int
    block_ids: Tensor


@dataclass(slots=True)
class SdpaPlan(AttentionPlan):
    """One entry per sequence of the batch."""

    sequences: list[SequencePages]


def visible(query_positions: Tensor, key_positions: Tensor, spec: AttentionSpec) -> Tensor:
    """Return the bool mask ``[num_queries, num_keys]``, true where a query sees a key; see ``AttentionSpec``."""
    query, key = query_positions[:, None], key_positions[None, :]
    mask = key <= query
    if spec.sliding_window is not None:
        mask = mask & (key > query - spec.sliding_window)
    if spec.chunk_size is not None:
        mask = mask & (key // spec.chunk_size == query // spec.chunk_size)
    return mask


class SdpaBackend(AttentionBackend):
    """Attend sequence by sequence with ``F.scaled_dot_product_attention``."""

    name = "sdpa"
    preferred_layout = KVLayout.HND

    def plan(self, batch: AttentionBatch) -> SdpaPlan:
        """Copy each sequence's part of the block table to the pool's device."""
        block_tables = torch.from_numpy(batch.block_tables).to(device=self.cache.device, dtype=torch.int64)
        starts, seq_lens = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
        sequences = [
            SequencePages(starts[s], starts[s + 1], seq_len, block_tables[s, : -(-seq_len // self.cache.block_size)])
            for s, seq_len in enumerate(seq_lens)
        ]
        return SdpaPlan(self._write_rows(batch), sequences)

    def attend(self, layer: int, query: Tensor, spec: AttentionSpec, plan: AttentionPlan) -> Tensor:
        """See ``AttentionBackend.attend``."""
        assert isinstance(plan, SdpaPlan)
        output = torch.empty_like(query)
        for sequence in plan.sequences:
            rows = slice(sequence.query_start, sequence.query_end)
            output[rows] = self._attend_one(layer, query[rows], spec, sequence)
        return output

    def _attend_one(self, layer: int, query: Tensor, spec: AttentionSpec, sequence: SequencePages) -> Tensor:
        key = self._gather(self.cache.key(layer), sequence).to(query.dtype)
        value = self._gather(self.cache.value(layer), sequence).to(query.dtype)
        positions = torch.arange(sequence.seq_len, device=query.device)
        mask = visible(positions[sequence.seq_len - len(query) :], positions, spec)
        query = query.transpose(0, 1)  # [num_heads, num_queries, head_dim]
        output = F.scaled_dot_product_attention(
            query[None], key[None], value[None], attn_mask=mask, scale=spec.scale, enable_gqa=True
        )
        return output[0].transpose(0, 1)

    def _gather(self, pages: Tensor, sequence: SequencePages) -> Tensor:
        """Return the sequence's keys or values, ``[num_kv_heads, seq_len, head_dim]``."""
        picked = pages[sequence.block_ids]
        if self.cache.layout is KVLayout.NHD:
            picked = picked.transpose(1, 2)
        return picked.transpose(0, 1).flatten(1, 2)[:, : sequence.seq_len]
