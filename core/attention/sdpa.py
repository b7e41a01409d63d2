"""The reference backend: gather each sequence's pages, then scaled dot product attention under an explicit mask.

Owns: the definition of the results of all backends. Does not know: speed. It runs on any device, dtype and layout,
and is the fallback where a faster kernel fails its probe.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    split_sequences,
)
from core.attention.torch_kernels import upload

_SCORES_BYTES = 256 << 20  # of a call, in float32: some kernels of torch make all of them


@dataclass(slots=True)
class SdpaPlan(AttentionPlan):
    """Each sequence with its block ids, int64 ``[num_blocks_of_sequence]``, on the pool's device."""

    sequences: list[tuple[BatchedSequence, Tensor]]


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
    device_types = frozenset()

    def plan(self, batch: AttentionBatch) -> SdpaPlan:
        """Copy each sequence's part of the block table to the pool's device."""
        sequences = [
            (sequence, upload(sequence.block_ids, self.cache.device))
            for sequence in split_sequences(batch, self.cache.block_size)
        ]
        return SdpaPlan(self._write_rows(batch), sequences)

    def attend(self, layer: int, query: Tensor, spec: AttentionSpec, plan: AttentionPlan) -> Tensor:
        """See ``AttentionBackend.attend``."""
        assert isinstance(plan, SdpaPlan)
        output = query.new_empty(query.shape)
        for sequence, block_ids in plan.sequences:
            lowest = spec.first_visible(sequence.first_position)
            first_page, skipped = divmod(lowest, self.cache.block_size)
            keys = slice(skipped, skipped + sequence.seq_len - lowest)
            key = self._gather(self.cache.key(layer), block_ids[first_page:])[:, keys].to(query.dtype)
            value = self._gather(self.cache.value(layer), block_ids[first_page:])[:, keys].to(query.dtype)
            key_positions = torch.arange(lowest, sequence.seq_len, device=query.device)
            num_rows = max(1, _SCORES_BYTES // (4 * spec.num_heads * len(key_positions)))
            for start in range(sequence.query_start, sequence.query_end, num_rows):
                rows = slice(start, min(start + num_rows, sequence.query_end))
                query_positions = key_positions[start - sequence.query_end :][:num_rows]
                attended = F.scaled_dot_product_attention(
                    query[rows].transpose(0, 1)[None],
                    key[None],
                    value[None],
                    attn_mask=visible(query_positions, key_positions, spec),
                    scale=spec.scale,
                    enable_gqa=True,
                )
                output[rows] = attended[0].transpose(0, 1)
        return output

    def _gather(self, pages: Tensor, block_ids: Tensor) -> Tensor:
        """Return the pages' keys or values, concatenated, ``[num_kv_heads, num_slots, head_dim]``."""
        picked = pages[block_ids]
        if self.cache.layout is KVLayout.NHD:
            picked = picked.transpose(1, 2)
        return picked.transpose(0, 1).flatten(1, 2)
