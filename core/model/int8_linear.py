"""Linear layers with 8-bit weights and inputs on CPU: a quarter of the bytes of float32, products of integers, exact sums.

    weight[n, k]  ~  weight_scale[n] * q[n, k]      a scale per output, q in -127..127; quantized once, at load
    x[t, k]       ~  row_scale[t] * p[t, k]         a scale per row, p in -127..127; quantized at each call, passed as p + 128
    y[t, n]       =  row_scale[t] * weight_scale[n] * sum_k q[n, k] p[t, k] + bias[n]

The sums are integers, so they have no rounding and no order. A scale per row, not one for the whole batch, keeps a request's
results independent of the batch that it is in, as those of ``PackedLinear`` are (``tests/core/model/test_int8_linear.py``).
Inputs are passed as unsigned numbers because CPUs multiply those by signed ones; for signed inputs and one row oneDNN takes a
kernel that is far slower.

With ``core.model.linear``, the owner of torch's private oneDNN ops; here they are compared with exact sums at load, once for
each shape.
"""

from __future__ import annotations

import torch
from torch import Tensor

from core.errors import ConfigError

_MAX = 127  # of either factor; -128 is not used, so that both signs have the same range
_ZERO = 128  # what is added to a factor to make it unsigned, by turning its highest bit
_PACK_ROWS = 16  # the batch size passed to the packer; its layout is good for all sizes
_ROWS_AT_ONCE = 1024  # of a weight: what quantization takes of memory beside the weight
_TOLERANCE = 1e-5  # relative to the largest result of a row: the sums are exact, their product with two scales is rounded

# (outputs, inputs) → why this machine cannot compute such a layer; empty if it can
_problems: dict[torch.Size, str] = {}


class Int8Linear:
    """A linear layer of quantized weights; ``x`` in any floating dtype, the result in that of ``x``. CPU.

    ``quantized``: int8 ``[out_features, in_features]``; ``scale``: float32 ``[out_features, 1]``; both may be dropped.

    Raises: RuntimeError, AttributeError if this build of torch has no such ops.
    """

    def __init__(self, quantized: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        self._op = torch.ops.onednn.qlinear_pointwise.default
        self._packed = torch.ops.onednn.qlinear_prepack.default(quantized, [_PACK_ROWS, quantized.shape[1]])
        self._scale = scale.flatten()
        self._zeros = torch.zeros(len(scale), dtype=torch.int32)  # of every scale
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer: ``x`` ``[T, in_features]``; returns a new ``[T, out_features]``."""
        rows, row_scale = quantize_rows(x)
        unsigned = rows.view(torch.uint8).bitwise_xor_(_ZERO)
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
    problem = _problem_with(weight)
    if problem:
        raise ConfigError(f"model.quantization = 'int8': {problem}; set it to 'none'", param="model.quantization")
    parts = [quantize_rows(rows) for rows in torch.split(weight, _ROWS_AT_ONCE)]
    quantized, scale = (torch.cat(each) for each in zip(*parts, strict=True))
    return Int8Linear(quantized, scale, bias)


def _problem_with(weight: Tensor) -> str:
    if weight.device.type != "cpu":
        return f"only a CPU computes it here, not {weight.device.type}"
    if weight.shape not in _problems:
        try:
            is_right = _computes_exact_sums(*weight.shape)
            _problems[weight.shape] = (
                "" if is_right else f"a layer of shape {tuple(weight.shape)} gives wrong results on this CPU"
            )
        except (RuntimeError, AttributeError) as error:
            reason = str(error).partition("\n")[0]
            _problems[weight.shape] = f"torch {torch.__version__} cannot compute it on this CPU ({reason})"
    return _problems[weight.shape]


def _computes_exact_sums(num_outputs: int, num_inputs: int) -> bool:
    """Compare a layer of made numbers with exact sums.

    The largest numbers in runs of one sign are the worst case of a CPU that adds two products in 16 bits; other numbers and a
    scale for each output show a wrong order.
    """
    columns = torch.arange(num_inputs)
    runs = (columns // 8 % 2 * 2 - 1) * _MAX
    kinds = torch.stack((runs, -runs, columns * 37 % 255 - _MAX)).to(torch.int8)
    kind_of_output = torch.arange(num_outputs) % len(kinds)
    scale = torch.linspace(0.5, 1.5, num_outputs)[:, None]
    layer = Int8Linear(kinds[kind_of_output], scale, None)
    x = torch.stack((torch.ones(num_inputs), runs.float(), *torch.linspace(-1.0, 1.0, 3 * num_inputs).view(3, -1)))
    rows, row_scale = quantize_rows(x)
    exact = (rows.double() @ kinds.double().T)[:, kind_of_output] * row_scale * scale.T
    largest = _TOLERANCE * exact.abs().amax(1, keepdim=True)
    return all(bool(((layer(x[:n]) - exact[:n]).abs() <= largest[:n]).all()) for n in (len(x), 2, 1))
