"""One decoder for Llama, Mistral, Qwen, Gemma 3 and Llama 4: their differences are in ``ModelArch`` and the weights.

Owns the order of operations of a forward pass over a flat batch of tokens. Knows nothing of requests, paging, devices or
sampling: attention is an argument, together with one plan per KV cache group. Runs under ``torch.inference_mode``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from core.attention.base import AttentionBackend, AttentionPlan, AttentionSpec
from core.model.arch import ModelArch
from core.model.decoder_weights import DecoderWeights, LayerWeights
from core.model.fused_layers import layer_ops
from core.model.layer_chain import make_layer_chain
from core.model.layers import RMSNorm, RotaryEmbedding, query_factors, residual_dtype
from core.model.rope import Rope


@dataclass(frozen=True, slots=True)
class EmbeddedRows:
    """Tokens of a step with given embeddings: ``values`` ``[M, hidden_size]`` for ``rows``, int64 ``[M]``."""

    rows: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class _LayerPlace:
    """A layer's place: its KV cache group, its number inside the group, its attention, and the number of its rope."""

    group_id: int
    index_in_group: int
    spec: AttentionSpec
    rope: int | None


class Decoder:
    """A causal language model over flat batches; holds weights and no state of any request."""

    def __init__(self, arch: ModelArch, weights: DecoderWeights, layer_groups: Sequence[Sequence[int]]) -> None:
        """Take the weights of ``arch``, and the layers of each KV cache group in the order of their slots in a block."""
        dtype, device = weights.embedding.dtype, weights.embedding.device
        ropes = [rope for rope in dict.fromkeys(arch.ropes) if rope is not None]
        self.arch = arch
        self.layer_groups = tuple(tuple(layers) for layers in layer_groups)
        self._weights = weights
        self._places = _layer_places(arch, layer_groups, ropes)
        self._rotaries = [RotaryEmbedding(arch.head_dim, rope, dtype, device) for rope in ropes]
        # rounded to the weights' dtype, as the model was trained
        self._embedding_scale = float(torch.tensor(arch.embedding_scale, dtype=dtype))
        self._residual_dtype = residual_dtype(device, dtype)
        self._ops = layer_ops(device, dtype, (arch.hidden_size, arch.intermediate_size, arch.head_dim // 2))
        self._gate = self._ops.gelu_and_mul if arch.activation == "gelu_pytorch_tanh" else self._ops.silu_and_mul
        # What normalizes the hidden states after each layer: the next one's norm, or the last of all.
        self._next_norms = [*(layer.input_norm for layer in weights.layers[1:]), weights.norm]
        self._chain = make_layer_chain(arch, weights.layers, self._ops)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self._weights.embedding.device

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: AttentionBackend,
        plans: Sequence[AttentionPlan],
        output_rows: Tensor | None = None,
        embedded: EmbeddedRows | None = None,
    ) -> Tensor:
        """Run the tokens of one step, write their KV, and return normalized hidden states ``[T or R, hidden_size]``.

        Args:
            input_ids: int32 or int64 ``[T]``, all sequences of the step one after another.
            positions: int32 or int64 ``[T]``, each token's place in its own sequence.
            attention: writes and reads the KV cache.
            plans: one per KV cache group, in their order.
            output_rows: int64 ``[R]``, the rows to return, in this order; None for all. After its attention the last layer
                then computes these rows only, which saves most of one layer in a prefill step. May be empty.
            embedded: tokens that are parts of images.
        """
        hidden = self._weights.embedding(input_ids).to(self._residual_dtype)
        if self._embedding_scale != 1.0:
            hidden.mul_(self._embedding_scale)
        if embedded is not None:
            hidden[embedded.rows] = embedded.values.to(hidden.dtype)
        angles = [rotary.angles(positions) for rotary in self._rotaries]
        temperature = self.arch.temperature
        factors = query_factors(temperature, positions, self._weights.embedding.dtype) if temperature is not None else None
        last_place, add_and_normalize = self._places[-1], self._ops.add_and_normalize
        chain = self._chain if self._chain is not None and self._chain.takes(hidden) else None
        normed, chained = self._weights.layers[0].input_norm(hidden), None
        for number, (layer, place, next_norm) in enumerate(
            zip(self._weights.layers, self._places, self._next_norms, strict=True)
        ):
            query, key_value = chained or self._query_key_value(layer, normed, place.rope, angles)
            if factors is not None and place.rope is None:
                query.mul_(factors)
            plan = plans[place.group_id]
            attention.write_kv(place.index_in_group, key_value, plan)
            attended = attention.attend(place.index_in_group, query, place.spec, plan)
            if chain is not None and place is not last_place:
                rope = self._places[number + 1].rope
                chained = chain.advance(number, hidden, attended, None if rope is None else angles[rope])
                continue
            if place is last_place and output_rows is not None:
                hidden, attended = hidden[output_rows], attended[output_rows]
            output = _normalized(layer.output(attended.flatten(1)), layer.attended_norm)
            gated = self._gate(layer.gate_up(add_and_normalize(hidden, output, layer.mlp_norm)))
            normed = add_and_normalize(hidden, _normalized(layer.down(gated), layer.mlp_output_norm), next_norm)
        return normed

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return logits ``[R, vocab_size]`` of ``hidden`` ``[R, hidden_size]``, rows of ``forward``'s result, of its dtype."""
        return self._weights.head(hidden)

    def _query_key_value(
        self, layer: LayerWeights, normed: Tensor, rope: int | None, angles: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Return query ``[T, Hq, D]`` and key with value ``[T, 2, Hkv, D]``, rotated by ``rope``, as views of one buffer.

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
        if rope is not None:
            self._ops.rotate_(query_key, *angles[rope])
        return heads[:, :num_heads], heads[:, num_heads:].view(-1, 2, num_kv_heads, head_dim)


def _normalized(output: Tensor, norm: RMSNorm | None) -> Tensor:
    return output if norm is None else norm(output)


def _layer_places(arch: ModelArch, layer_groups: Sequence[Sequence[int]], ropes: Sequence[Rope]) -> tuple[_LayerPlace, ...]:
    places: dict[int, _LayerPlace] = {}
    for group_id, layers in enumerate(layer_groups):
        for index, layer in enumerate(layers):
            rope = arch.ropes[layer]
            number = None if rope is None else ropes.index(rope)
            places[layer] = _LayerPlace(group_id, index, attention_spec(arch, layer), number)
    assert sorted(places) == list(range(arch.num_layers)), "the KV cache groups must cover every layer once"
    return tuple(places[layer] for layer in range(arch.num_layers))


def attention_spec(arch: ModelArch, layer: int) -> AttentionSpec:
    """Return the attention of a layer."""
    return AttentionSpec(
        arch.num_heads,
        arch.num_kv_heads,
        arch.head_dim,
        arch.attention_scale,
        sliding_window=arch.sliding_windows[layer],
        chunk_size=arch.attention_chunk_sizes[layer],
    )
