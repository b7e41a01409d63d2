"""Linear layers, packed for small batches if this build of torch can.

The only file that uses torch's private oneDNN ops. On CPU in fp32 a weight is packed once and serves every batch size:
``F.linear`` packs it again at each call from 3 rows on, which takes about twice the time at 4 to 16 rows and an eighth more
at 1024 (``python benchmarks/model.py --only linear``). All other layers use ``F.linear``. The ops are detected, then compared
with ``F.linear`` at load, once for each shape, by which oneDNN chooses a kernel.
"""

from __future__ import annotations

import logging
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from core.log import event

_PACK_ROWS = 16  # the batch size passed to the packer; its layout is good for all sizes
_MIN_ROWS = 4  # below, oneDNN leaves its blocked kernel for a slower one: 4 rows take less time than 1
_TOLERANCE = 1e-4

logger = logging.getLogger(__name__)

_is_right: dict[tuple[torch.Size, bool], bool] = {}  # (shape, without bias) → what the comparison has shown


class Linear(Protocol):
    """``y = x W^T + b`` for ``x`` ``[T, in_features]``; returns a new ``[T, out_features]``."""

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        ...


class DenseLinear:
    """A linear layer on ``F.linear``: any dtype and device."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        return F.linear(x, self._weight, self._bias)


class PackedLinear:
    """A linear layer whose weight exists only in oneDNN's blocked layout; fp32, CPU. Not thread-safe: it owns a scratch buffer.

    Raises: RuntimeError, AttributeError if this build of torch has no such ops.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._op = torch.ops.mkldnn._linear_pointwise.default
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
        self._bias = bias
        self._few_rows = torch.zeros(_MIN_ROWS, weight.shape[1])

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        num_rows = x.shape[0]
        if num_rows >= _MIN_ROWS:
            return self._apply(x)
        self._few_rows[:num_rows] = x  # F.pad takes four operations for it, over 1 % of a step of one row
        return self._apply(self._few_rows)[:num_rows]

    def _apply(self, x: Tensor) -> Tensor:
        result: Tensor = self._op(x, self._packed, self._bias, "none", [], "")
        return result


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Return the fastest correct layer; ``weight`` ``[out_features, in_features]``, ``bias`` ``[out_features]``.

    The caller may drop ``weight`` afterwards: a packed layer holds its own copy.
    """
    dense = DenseLinear(weight, bias)
    if not can_pack(weight):
        return dense
    packed = PackedLinear(weight, bias)
    key = (weight.shape, bias is None)
    if key not in _is_right:
        probe = torch.linspace(-1.0, 1.0, 5 * weight.shape[1]).view(5, -1)
        _is_right[key] = all(_agree(packed(x), dense(x)) for x in (probe, probe[:1]))
        if not _is_right[key]:
            logger.warning(event("packed_linear_rejected", shape=tuple(weight.shape), reason="differs from F.linear"))
    return packed if _is_right[key] else dense


def can_pack(weight: Tensor) -> bool:
    """Return True if ``weight`` can be packed: fp32 on a CPU, with the private ops present."""
    has_ops = hasattr(torch.ops.mkldnn, "_linear_pointwise") and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    return has_ops and weight.dtype == torch.float32 and weight.device.type == "cpu"


def _agree(packed: Tensor, dense: Tensor) -> bool:
    return torch.allclose(packed, dense, rtol=_TOLERANCE, atol=_TOLERANCE)
