"""One decoder for Llama, Mistral, Qwen2 and Qwen3: what differs between them is in ``ModelArch`` and in the weights.

Owns the order of operations of a forward pass over a flat batch of tokens. Knows nothing of requests, paging, devices or
sampling: attention comes in as an argument together with one plan per KV cache group. Built by ``core.model.loader``,
called by ``core.engine.runner`` under ``torch.inference_mode``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from core.attention.base import AttentionBackend, AttentionPlan, AttentionSpec
from core.model.arch import ModelArch
from core.model.layers import RMSNorm, RotaryEmbedding, silu_and_mul
from core.model.linear import Linear


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one layer, fused: ``qkv`` gives query, key and value heads in this order, ``gate_up`` both halves.

    ``qk_norm`` ``[num_heads + num_kv_heads, head_dim]`` holds the weight of every query and key head, or is None.
    """

    input_norm: RMSNorm
    qkv: Linear
    qk_norm: Tensor | None
    output: Linear
    post_attention_norm: RMSNorm
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights of a model, on one device. ``embedding`` ``[vocab_size, hidden_size]``; ``head`` maps to logits."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: RMSNorm
    head: Linear


@dataclass(frozen=True, slots=True)
class _LayerPlace:
    """Where a layer's KV lies: its KV cache group, its number inside the group, and how it attends."""

    group_id: int
    index_in_group: int
    spec: AttentionSpec


class Decoder:
    """A causal language model over flat batches; holds weights and no state of any request."""

    def __init__(self, arch: ModelArch, weights: DecoderWeights, rotary: RotaryEmbedding) -> None:
        self.arch = arch
        self._weights = weights
        self._rotary = rotary
        self._places = _layer_places(arch)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: AttentionBackend,
        plans: Sequence[AttentionPlan],
        output_rows: Tensor | None = None,
    ) -> Tensor:
        """Run the tokens of one step, write their KV, and return normalized hidden states ``[T or R, hidden_size]``.

        Args:
            input_ids: int32 or int64 ``[T]``, all sequences of the step one after another.
            positions: int32 or int64 ``[T]``, each token's place in its own sequence.
            attention: writes and reads the KV cache.
            plans: one per entry of ``arch.kv_groups``, in that order.
            output_rows: int64 ``[R]``, the rows to return, in this order; None for all. Behind its attention the last layer
                then computes these rows only, which saves most of one layer in a prefill step. May be empty.
        """
        hidden = F.embedding(input_ids, self._weights.embedding)
        cos, sin = self._rotary.angles(positions)
        last_place = self._places[-1]
        for layer, place in zip(self._weights.layers, self._places, strict=True):
            query, key_value = self._query_key_value(layer, layer.input_norm(hidden), cos, sin)
            plan = plans[place.group_id]
            attention.write_kv(place.index_in_group, key_value, plan)
            attended = attention.attend(place.index_in_group, query, place.spec, plan)
            if place is last_place and output_rows is not None:
                hidden, attended = hidden[output_rows], attended[output_rows]
            hidden.add_(layer.output(attended.flatten(1)))
            hidden.add_(layer.down(silu_and_mul(layer.gate_up(layer.post_attention_norm(hidden)))))
        return self._weights.norm(hidden)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return fp32 logits ``[R, vocab_size]`` of ``hidden`` ``[R, hidden_size]``, rows picked from ``forward``'s result."""
        return self._weights.head(hidden).float()

    def _query_key_value(self, layer: LayerWeights, normed: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return query ``[T, Hq, D]`` and key with value ``[T, 2, Hkv, D]``, rotated, as views of one buffer.

        heads   | 0 .. Hq | Hq .. Hq + Hkv | Hq + Hkv .. Hq + 2 Hkv |
                  query     key              value
                  `------ rotated -------'
        """
        num_heads, num_kv_heads, head_dim = self.arch.num_heads, self.arch.num_kv_heads, self.arch.head_dim
        heads = layer.qkv(normed).view(-1, num_heads + 2 * num_kv_heads, head_dim)
        query_key = heads[:, : num_heads + num_kv_heads]
        if layer.qk_norm is not None:
            unit = F.rms_norm(query_key, (head_dim,), None, self.arch.rms_norm_eps)
            query_key.copy_(unit.mul_(layer.qk_norm))
        self._rotary.rotate_(query_key, cos, sin)
        return heads[:, :num_heads], heads[:, num_heads:].view(-1, 2, num_kv_heads, head_dim)


def _layer_places(arch: ModelArch) -> tuple[_LayerPlace, ...]:
    places: dict[int, _LayerPlace] = {}
    for group_id, layers in enumerate(arch.kv_groups):
        window = arch.sliding_windows[layers[0]]
        spec = AttentionSpec(arch.num_heads, arch.num_kv_heads, arch.head_dim, arch.attention_scale, window)
        for index, layer in enumerate(layers):
            places[layer] = _LayerPlace(group_id, index, spec)
    return tuple(places[layer] for layer in range(arch.num_layers))
