"""The weights of a decoder as it uses them: fused linears, norms, embedding and head.

Owns their names. Knows neither where they are read from nor what is computed with them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from core.model.embedding import Embedding
from core.model.layers import RMSNorm
from core.model.linear import Linear


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one layer, fused: ``qkv`` gives query, key and value heads in this order, ``gate_up`` both halves.

    ``qk_norm`` ``[num_heads + num_kv_heads, head_dim]`` holds the weight of every query and key head, or is None. The norms
    ``attended`` and ``mlp_output`` are None unless ``ModelArch.has_post_norms``.
    """

    input_norm: RMSNorm
    qkv: Linear
    qk_norm: Tensor | None
    output: Linear
    attended_norm: RMSNorm | None
    mlp_norm: RMSNorm
    gate_up: Linear
    down: Linear
    mlp_output_norm: RMSNorm | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights of a model, on one device. ``head`` maps to logits."""

    embedding: Embedding
    layers: tuple[LayerWeights, ...]
    norm: RMSNorm
    head: Linear
