"""The operations between the linears: by torch, or by kernels of our own that do in one pass what torch does in several.

The kernels are compiled C on the CPU (``core.model.compiled_layers``) and Triton on CUDA. Owns the choice, made once for each
device, dtype and sizes: the kernels must agree with torch first. Knows nothing of attention.
"""

from __future__ import annotations

import importlib
import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor

from core.log import event
from core.model import compiled_layers
from core.model.layers import RMSNorm, gelu_and_mul, residual_dtype, rotate_, silu_and_mul

logger = logging.getLogger(__name__)

# of results of a few units, rounded once instead of twice
_TOLERANCES = {
    "cuda": {torch.float16: 1e-2, torch.bfloat16: 6e-2},
    "cpu": {torch.float32: 1e-5, torch.bfloat16: 6e-2},
}


class LayerOps:
    """By torch's own operations, in any dtype and on any device."""

    def add_and_normalize(self, hidden: Tensor, update: Tensor, norm: RMSNorm) -> Tensor:
        """Add ``update`` to ``hidden`` ``[T, hidden_size]`` in place, and return the sum normalized."""
        return norm(hidden.add_(update))

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """Return ``silu(gate) * up`` ``[T, I]`` of ``gate_up`` ``[T, 2 * I]``."""
        return silu_and_mul(gate_up)

    def gelu_and_mul(self, gate_up: Tensor) -> Tensor:
        """Return ``gelu(gate) * up`` ``[T, I]`` of ``gate_up`` ``[T, 2 * I]``, gelu by its tanh approximation."""
        return gelu_and_mul(gate_up)

    def rotate_(self, heads: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate ``heads`` ``[T, num_heads, head_dim]`` in place; see ``RotaryEmbedding``."""
        rotate_(heads, cos, sin)


class CompiledLayerOps(LayerOps):
    """By compiled C on the CPU, in float32 and bfloat16, for sizes that fill its vectors; hidden states are float32.

    Raises: ImportError where it was not built.
    """

    def __init__(self) -> None:
        self._kernels = compiled_layers.LayerKernels()

    def add_and_normalize(self, hidden: Tensor, update: Tensor, norm: RMSNorm) -> Tensor:
        """See ``LayerOps``."""
        dtype = norm.output_dtype(hidden)
        return self._kernels.add_and_normalize(hidden, update.contiguous(), norm.scaled_weight, norm.squared_floor, dtype)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """See ``LayerOps``."""
        return self._kernels.gate_and_multiply(gate_up.contiguous(), "silu")

    def gelu_and_mul(self, gate_up: Tensor) -> Tensor:
        """See ``LayerOps``."""
        return self._kernels.gate_and_multiply(gate_up.contiguous(), "gelu")

    def rotate_(self, heads: Tensor, cos: Tensor, sin: Tensor) -> None:
        """See ``LayerOps``; the heads of a token lie one after another."""
        self._kernels.rotate_(heads, cos, sin)


class TritonLayerOps(LayerOps):
    """By kernels in Triton. Raises: ImportError where there is no Triton."""

    def __init__(self) -> None:
        self._kernels: Any = importlib.import_module("core.model.triton_layers")

    def add_and_normalize(self, hidden: Tensor, update: Tensor, norm: RMSNorm) -> Tensor:
        """See ``LayerOps``."""
        if not norm.keeps(hidden.dtype) or update.dtype != hidden.dtype:
            return super().add_and_normalize(hidden, update, norm)
        output: Tensor = self._kernels.add_and_normalize(hidden, update, norm.weight, norm.eps)
        return output

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """See ``LayerOps``."""
        output: Tensor = self._kernels.silu_and_mul(gate_up)
        return output

    def rotate_(self, heads: Tensor, cos: Tensor, sin: Tensor) -> None:
        """See ``LayerOps``."""
        self._kernels.rotate_(heads, cos, sin)


@cache
def layer_ops(device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...]) -> LayerOps:
    """Return the operations for a device and the dtype of the weights: kernels of our own, if they agree with torch's.

    ``sizes``: elements of a hidden state, of the gate, and of half a head.
    """
    tolerance = _TOLERANCES.get(device.type, {}).get(dtype)
    if tolerance is None:
        logger.warning(event("fused_layers_off", reason=f"there are none for {dtype} on {device.type}"))
        return LayerOps()
    if device.type == "cpu" and not compiled_layers.fills_vectors(*sizes):
        reason = f"of {', '.join(map(str, sizes))} elements some are no multiples of {compiled_layers.LANES}"
        logger.warning(event("fused_layers_off", reason=reason))
        return LayerOps()
    try:
        fused = CompiledLayerOps() if device.type == "cpu" else TritonLayerOps()
        difference = _largest_difference(fused, device, dtype)
    except Exception as error:
        logger.warning(event("fused_layers_off", reason=f"{type(error).__name__}: {error}".splitlines()[0]))
        return LayerOps()
    if not difference <= tolerance:  # true for NaN
        logger.warning(event("fused_layers_off", reason=f"they differ from torch by {difference:.2g}"))
        return LayerOps()
    return fused


def _largest_difference(fused: LayerOps, device: torch.device, dtype: torch.dtype) -> float:
    """Return how far the results of ``fused`` are from torch's in float32."""
    generator, exact = torch.Generator().manual_seed(1), LayerOps()

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    hidden, update, weight, gate_up = draw(5, 576), draw(5, 576), draw(576), draw(5, 2 * 1536)
    heads, cos, sin = draw(5, 12, 96), draw(5, 1, 96), draw(5, 1, 96)
    found, wanted = hidden.to(residual_dtype(device, dtype), copy=True), (hidden + update).float()
    normed = fused.add_and_normalize(found, update, RMSNorm(weight, 1e-5, dtype))
    wanted_normed = exact.add_and_normalize(wanted.clone(), torch.zeros_like(wanted), RMSNorm(weight.float(), 1e-5))
    rotated, wanted_rotated = heads.clone()[:, :9], heads.float()[:, :9]
    fused.rotate_(rotated, cos, sin)
    exact.rotate_(wanted_rotated, cos.float(), sin.float())
    pairs = [
        (found, wanted),
        (normed, wanted_normed),
        (fused.silu_and_mul(gate_up), exact.silu_and_mul(gate_up.float())),
        (fused.gelu_and_mul(gate_up), exact.gelu_and_mul(gate_up.float())),
        (rotated, wanted_rotated),
    ]
    return max(float((left.float() - right).abs().max()) for left, right in pairs)
