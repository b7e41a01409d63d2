"""Linear layers, packed for small batches if this build of torch can.

Beside ``core.model.int8_linear`` the only file that uses torch's private oneDNN ops. On CPU a weight is packed once and
serves every batch size: ``F.linear`` takes more than twice the time at most numbers of rows (``python benchmarks/model.py
--only linear``). fp32 is packed everywhere, bf16 where the CPU has the instructions: that takes half of the time of
fp32. All other layers use ``F.linear``. The ops are detected, then compared with ``F.linear`` at load, once for each
shape and dtype, by which oneDNN chooses a kernel.

A packed layer computes a row by the same operations in the same order whatever other rows there are, so a request's results do
not depend on the batch that it is in (``tests/core/model/test_linear.py``). For few rows ``core.model.few_rows`` does the same
faster, where it gives the same bits.
"""

from __future__ import annotations

import ctypes
import logging
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from core.cpu_features import has_bfloat16_instructions
from core.log import event
from core.model.few_rows import FewRows, block_of, is_tiled, why_not_at_all

_PACK_ROWS = 16  # the batch size passed to the packer; its layout is good for all sizes
_MIN_ROWS = 4  # below, oneDNN leaves its blocked kernel for a slower one: 4 rows take less time than 1
_TOLERANCE = 1e-4  # of fp32
_BFLOAT16_TOLERANCE = 2**-7  # relative to the largest result: either side rounds it by at most 2 ** -9

logger = logging.getLogger(__name__)

# (shape, dtype, without bias) → what the comparison has shown
_is_right: dict[tuple[torch.Size, torch.dtype, bool], bool] = {}
# (shape, dtype) → the block by which ``FewRows`` computes it, None if it does not
_blocks: dict[tuple[torch.Size, torch.dtype], int | None] = {}
_told: set[tuple[torch.Size, torch.dtype, str]] = set()  # why ``FewRows`` is not used


class Linear(Protocol):
    """``y = x W^T + b`` for ``x`` ``[T, in_features]``; returns a new ``[T, out_features]``."""

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        ...


class MakeLinear(Protocol):
    """Makes a layer of ``weight`` ``[out_features, in_features]`` and ``bias`` ``[out_features]``, which it need not keep."""

    def __call__(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Return the layer."""
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
    """A linear layer whose weight exists only in oneDNN's blocked layout; fp32 or bf16, CPU. Sums are fp32.

    Not thread-safe: it owns a scratch buffer.

    Raises: RuntimeError, AttributeError if this build of torch has no such ops.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._op = torch.ops.mkldnn._linear_pointwise.default
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
        self._bias = bias
        self._padded = weight.new_zeros(_MIN_ROWS, weight.shape[1])
        self._unpadded = [self._padded[:num_rows] for num_rows in range(_MIN_ROWS)]
        self.few_rows: FewRows | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        if self.few_rows is not None and self.few_rows.takes(x):
            return self.few_rows(x)
        num_rows = x.shape[0]
        if num_rows >= _MIN_ROWS:
            return self._apply(x)
        self._unpadded[num_rows].copy_(x)  # F.pad takes four operations for it, over 1 % of a step of one row
        return self._apply(self._padded)[:num_rows]

    def packed_memory(self) -> Tensor | None:
        """Return the blocked weight as it lies in memory, flat and in the weight's dtype, padding included; read it only.

        It is valid as long as the layer. None if this build of torch does not tell where it is.
        """
        if not (hasattr(torch.ops.mkldnn, "data_ptr") and hasattr(torch.ops.mkldnn, "_nbytes")):
            return None
        num_bytes: int = torch.ops.mkldnn._nbytes(self._packed)
        address: int = torch.ops.mkldnn.data_ptr(self._packed)
        return torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=self._padded.dtype)

    def _apply(self, x: Tensor) -> Tensor:
        result: Tensor = self._op(x, self._packed, self._bias, "none", [], "")
        return result


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Return the fastest correct layer; ``weight`` ``[out_features, in_features]``, ``bias`` ``[out_features]``.

    The caller may drop ``weight`` afterwards: a packed layer holds its own copy.
    """
    dense = DenseLinear(weight, bias)
    key = (weight.shape, weight.dtype, bias is None)
    if not can_pack(weight) or not _is_right.get(key, True):
        return dense
    try:
        packed = PackedLinear(weight, bias)
        problem = "" if key in _is_right or _agree_on_a_probe(packed, dense, weight) else "it differs from F.linear"
    except RuntimeError as error:
        problem = str(error).partition("\n")[0]  # such as: oneDNN may use fewer instructions than the CPU has
        if key in _is_right or "allocate memory" in problem:
            raise
    _is_right[key] = not problem
    if problem:
        logger.warning(event("packed_linear_rejected", shape=tuple(weight.shape), dtype=weight.dtype, reason=problem))
        return dense
    packed.few_rows = _few_rows_of(packed, weight, bias)
    return packed


def _few_rows_of(packed: PackedLinear, weight: Tensor, bias: Tensor | None) -> FewRows | None:
    """Return the same product for few rows, None if it is not known to give the same bits, which is logged once for a shape."""
    key = (weight.shape, weight.dtype)
    reason = why_not_at_all(*key)
    if not reason:
        if key not in _blocks:
            _blocks[key] = block_of(*key, _pack)
        block, memory = _blocks[key], packed.packed_memory()
        if block is not None and memory is not None and is_tiled(memory, weight.shape):
            few_rows = FewRows(memory, weight.shape, bias, block)
            if torch.equal(few_rows(_probe(weight)), packed(_probe(weight))):
                return few_rows
        reason = "oneDNN packs or adds otherwise"
    if (*key, reason) not in _told:
        logger.info(event("few_rows_off", shape=tuple(weight.shape), dtype=weight.dtype, reason=reason))
        _told.add((*key, reason))
    return None


def _pack(weight: Tensor) -> tuple[Linear, Tensor | None]:
    layer = PackedLinear(weight, None)
    return layer, layer.packed_memory()


def can_pack(weight: Tensor) -> bool:
    """Return True if ``weight`` can be packed: on a CPU that computes its dtype fast, with the private ops present.

    ``weight``: ``[out_features, in_features]``, of any dtype; only fp32 and bf16 are packed.
    """
    has_ops = hasattr(torch.ops.mkldnn, "_linear_pointwise") and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    is_fast = weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and has_bfloat16_instructions())
    return has_ops and is_fast and weight.device.type == "cpu"


def _agree_on_a_probe(packed: Linear, dense: Linear, weight: Tensor) -> bool:
    probe = _probe(weight)
    return all(_agree(packed(x), dense(x)) for x in (probe, probe[:1]))


def _probe(weight: Tensor) -> Tensor:
    return torch.linspace(-1.0, 1.0, 5 * weight.shape[1]).view(5, -1).to(weight.dtype)


def _agree(packed: Tensor, dense: Tensor) -> bool:
    if dense.dtype == torch.float32:
        return torch.allclose(packed, dense, rtol=_TOLERANCE, atol=_TOLERANCE)
    return torch.allclose(packed.float(), dense.float(), rtol=0.0, atol=_BFLOAT16_TOLERANCE * float(dense.abs().max()))
