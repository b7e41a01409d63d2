"""The small parts between the linears: norms, rotary position embedding, gated activation.

Owns their arithmetic in any floating dtype, on any device. Knows nothing of attention or weights' files.
On CPU all of this is 4 % of a prefill step, so the plainest fast form is used; in decode the number of operations decides.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from core.model.arch import AttentionTemperature
from core.model.rope import Rope


class RMSNorm:
    """Divide by the root mean square over the last axis, times ``weight`` ``[hidden_size]`` (Zhang & Sennrich, 2019).

    On the CPU in fp32; elsewhere in fp32 if the weight or the hidden states are. The result has ``dtype``, the hidden states'
    if it is None.

        hidden * scaled_weight / sqrt(|hidden|^2 + squared_floor)
    """

    def __init__(self, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> None:
        self.weight = weight
        self.eps = eps
        self._dtype = dtype
        # rms = sqrt(|x|^2 / n + eps) = hypot(|x|, sqrt(n * eps)) / sqrt(n)
        self._is_composed = weight.device.type == "cpu"
        self.scaled_weight = weight.float() * len(weight) ** 0.5
        self.squared_floor = len(weight) * eps
        self._floor = torch.tensor(self.squared_floor**0.5)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return ``hidden`` ``[T, hidden_size]`` normalized."""
        dtype = self.output_dtype(hidden)
        if self._is_composed:
            # torch composes rms_norm of eight operations on the CPU. These four make a step of one row 3 % shorter.
            exact = hidden.float()
            norm = torch.linalg.vector_norm(exact, dim=-1, keepdim=True)
            return torch.div(exact, torch.hypot(norm, self._floor)).mul_(self.scaled_weight).to(dtype)
        if hidden.dtype != self.weight.dtype:
            return F.rms_norm(hidden.float(), self.weight.shape, self.weight, self.eps).to(dtype)
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps).to(dtype)

    def output_dtype(self, hidden: Tensor) -> torch.dtype:
        """Return the dtype of what ``hidden`` is normalized to."""
        return self._dtype or hidden.dtype

    def keeps(self, dtype: torch.dtype) -> bool:
        """Return True if hidden states of ``dtype`` are normalized by a weight of that dtype, to that dtype."""
        return self.weight.dtype == dtype and self._dtype in (None, dtype)


def residual_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the sum that every layer adds to: fp32 on the CPU, where it costs no time, else the weights'."""
    return torch.float32 if device.type == "cpu" else dtype


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` ``[T, I]`` of ``gate_up`` ``[T, 2 * I]`` (SwiGLU; Shazeer, 2020)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """Return ``gelu(gate) * up`` ``[T, I]`` of ``gate_up`` ``[T, 2 * I]``, gelu by its tanh approximation (GeGLU)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def query_factors(temperature: AttentionTemperature, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the factors ``[T, 1, 1]`` of queries at ``positions`` ``[T]``; see ``AttentionTemperature``."""
    floors = torch.floor((positions[:, None, None] + 1.0) / temperature.floor_tokens)
    return floors.log1p_().mul_(temperature.scale).add_(1.0).to(dtype)


class RotaryEmbedding:
    """Rotary position embedding, halves convention: element i is paired with element i + head_dim / 2 (Su et al., 2021)."""

    def __init__(self, head_dim: int, rope: Rope, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._half = head_dim // 2
        inv_freq = inverse_frequencies(head_dim, rope).to(device)
        self._inv_freq = torch.cat((inv_freq, inv_freq))
        # The first half is rotated with -sin: folding the sign in here spares negating half of every query and key.
        self._signs = torch.cat((-torch.ones(self._half), torch.ones(self._half))).to(device)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return (cos, signed sin), each ``[T, 1, head_dim]``, of ``positions`` ``[T]``; made once per step."""
        angles = positions[:, None, None] * self._inv_freq
        return angles.cos().to(self._dtype), angles.sin().mul_(self._signs).to(self._dtype)


def rotate_(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate ``heads`` ``[T, num_heads, head_dim]`` in place, by ``RotaryEmbedding.angles``; a strided view is fine."""
    swapped = torch.roll(heads, heads.shape[-1] // 2, dims=-1)
    heads.mul_(cos).addcmul_(swapped, sin)


def inverse_frequencies(head_dim: int, rope: Rope) -> Tensor:
    """Return the ``head_dim / 2`` angular frequencies in radians per token, fp32, on the CPU."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    inv_freq = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return inv_freq / rope.factor
    if rope.kind == "llama3":
        return _llama3_frequencies(inv_freq, rope)
    return inv_freq


def _llama3_frequencies(inv_freq: Tensor, rope: Rope) -> Tensor:
    """Divide slow frequencies by ``factor``, keep fast ones, blend linearly between (Llama 3.1, 2024).

    Fast and slow are counted in turns over the original context: above ``high_freq_factor``, below ``low_freq_factor``.
    """
    turns = rope.original_max_position_embeddings * inv_freq / (2 * math.pi)
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return (1 - keep) * inv_freq / rope.factor + keep * inv_freq
