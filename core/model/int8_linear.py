"""Linear layers with 8-bit weights on CPU: a quarter of the bytes of float32, products of integers, exact sums.

    weight[n, k]  ~  weight_scale[n] * q[n, k]      a scale per output, q in -127..127; quantized once, at load
    x[t, k]       ~  row_scale[t] * p[t, k]         a scale per row, p in -127..127; quantized at each call, passed as p + 128
    y[t, n]       =  row_scale[t] * weight_scale[n] * sum_k q[n, k] p[t, k] + bias[n]

The sums are integers, so they have no rounding and no order. A scale per row, not one for the whole batch, keeps a request's
results independent of the batch that it is in, as those of ``PackedLinear`` are (``tests/core/model/test_int8_linear.py``).

Inputs are passed as unsigned numbers because CPUs multiply those by signed ones; for signed inputs oneDNN takes a kernel that
is several hundred times slower.

Owns the use of torch's private oneDNN ops for this; they are compared with exact sums at load, once for each shape.
"""

from __future__ import annotations

import torch
from torch import Tensor

from core.errors import ConfigError

_MAX = 127  # of either factor; -128 is not used, so that both signs have the same range
_ZERO = 128  # what is added to a factor to make it unsigned, by turning its highest bit
_PACK_ROWS = 16  # the batch size passed to the packer; its layout is good for all sizes
_TOLERANCE = 1e-5  # relative to the largest result: the sums are exact, their product with two scales is rounded

# (outputs, inputs) → whether the ops compute what they should
_is_right: dict[torch.Size, bool] = {}


class Int8Linear:
    """A linear layer with weights quantized to 8 bits; ``x`` float32 or bfloat16, the result in the type of ``x``. CPU.

    Raises: RuntimeError, AttributeError if this build of torch has no such ops.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        quantized, scale = quantize_rows(weight)
        self._op = torch.ops.onednn.qlinear_pointwise.default
        self._packed = torch.ops.onednn.qlinear_prepack.default(quantized, [_PACK_ROWS, weight.shape[1]])
        self._scale = scale.flatten()
        self._zeros = torch.zeros(weight.shape[0], dtype=torch.int32)  # of every scale
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer: ``x`` ``[T, in_features]``; returns a new ``[T, out_features]``."""
        rows, row_scale = quantize_rows(x)
        unsigned = rows.view(torch.uint8).bitwise_xor_(_ZERO)  # several times faster than a conversion of floats to uint8
        result: Tensor = self._op(
            unsigned, 1.0, _ZERO, self._packed, self._scale, self._zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        result.mul_(row_scale)
        if self._bias is not None:
            result.add_(self._bias)
        return result.to(x.dtype)


def quantize_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows ``[N, K]`` as int8, and the float32 scale ``[N, 1]`` of each: ``values`` ~ scale * int8.

    A row with NaN or infinity has such a scale, so none of its results is finite.
    """
    scale = values.abs().amax(1, keepdim=True).float().div_(_MAX)
    # A row of zeros, or of numbers that no float32 scale can tell from zero, is zeros at any scale.
    divisor = scale.clamp_min(torch.finfo(torch.float32).tiny)
    return values.div(divisor).round_().to(torch.int8), scale


def make_int8_linear(weight: Tensor, bias: Tensor | None = None) -> Int8Linear:
    """Return a layer with 8-bit weights; ``weight`` ``[out_features, in_features]`` may be dropped afterwards.

    Raises:
        ConfigError: this machine or this build of torch cannot compute it, or computes it wrong.
    """
    reason = _why_unavailable(weight)
    if reason:
        raise ConfigError(f"model.quantization = 'int8': {reason}; set it to 'none'", param="model.quantization")
    return Int8Linear(weight, bias)


def _why_unavailable(weight: Tensor) -> str:
    if weight.device.type != "cpu":
        return f"only a CPU computes it here, not {weight.device.type}"
    if not (hasattr(torch.ops.onednn, "qlinear_prepack") and hasattr(torch.ops.onednn, "qlinear_pointwise")):
        return f"torch {torch.__version__} has no oneDNN linear layers of 8 bits"
    if weight.shape not in _is_right:
        _is_right[weight.shape] = _computes_exact_sums(weight)
    return "" if _is_right[weight.shape] else f"the layer of shape {tuple(weight.shape)} gives wrong results on this CPU"


def _computes_exact_sums(weight: Tensor) -> bool:
    """Compare the layer with the same quantized numbers, multiplied and summed in float64."""
    x = torch.linspace(-1.0, 1.0, 5 * weight.shape[1]).view(5, -1)
    x[0] = 1.0  # the largest inputs: a CPU that adds two products in 16 bits fails on them
    (rows, row_scale), (columns, column_scale) = quantize_rows(x), quantize_rows(weight)
    exact = (rows.double() @ columns.double().T) * row_scale * column_scale.T
    layer, tolerance = Int8Linear(weight, None), _TOLERANCE * float(exact.abs().max())
    return all(torch.allclose(layer(x[:n]).double(), exact[:n], rtol=0.0, atol=tolerance) for n in (5, 1))
