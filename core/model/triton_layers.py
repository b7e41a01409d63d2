"""Triton kernels for what stands between the linears: each is one pass where torch makes two or three.

Owns the kernels and their launch. Does not know: whether they are right on this machine; ``core.model.fused_layers`` compares
them. Sums are float32, and each result is rounded once. Triton comes with torch's builds for CUDA; elsewhere importing this
file fails.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_TILE = 1024  # elements of a row that a program takes


@triton.jit
def _add_and_normalize(hidden, update, weight, output, eps, WIDTH: tl.constexpr, PADDED: tl.constexpr):  # fmt: skip
    """Add ``update`` to ``hidden`` in place and normalize the sum; all [T, WIDTH] but weight [WIDTH]. One row a program."""
    columns = tl.arange(0, PADDED)
    places, is_column = tl.program_id(0).to(tl.int64) * WIDTH + columns, columns < WIDTH
    total = tl.load(hidden + places, mask=is_column, other=0.0) + tl.load(update + places, mask=is_column, other=0.0)
    tl.store(hidden + places, total, mask=is_column)
    exact = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(exact * exact, 0) / WIDTH + eps)
    normalized = exact * scale * tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    tl.store(output + places, normalized.to(output.dtype.element_ty), mask=is_column)


@triton.jit
def _silu_and_mul(gate_up, output, WIDTH: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """gate_up: [T, 2 * WIDTH], output: [T, WIDTH]."""
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_column = columns < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + columns, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + columns, mask=is_column, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(output + row * WIDTH + columns, result.to(output.dtype.element_ty), mask=is_column)


@triton.jit
def _rotate(
    heads, cosines, sines, row_stride, num_heads,
    HALF: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Rotate heads [T, num_heads, 2 * HALF] in place by cosines and signed sines [T, 2 * HALF]."""
    row = tl.program_id(0).to(tl.int64)
    numbers, columns = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, PADDED)
    is_element = (numbers < num_heads)[:, None] & (columns < HALF)[None, :]
    angles, is_angle = row * 2 * HALF + columns, columns < HALF
    low = heads + row * row_stride + numbers[:, None] * 2 * HALF + columns[None, :]
    first = tl.load(low, mask=is_element, other=0.0).to(tl.float32)
    second = tl.load(low + HALF, mask=is_element, other=0.0).to(tl.float32)
    cosine = tl.load(cosines + angles, mask=is_angle, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sines + angles, mask=is_angle, other=0.0).to(tl.float32)[None, :]
    far_cosine = tl.load(cosines + angles + HALF, mask=is_angle, other=0.0).to(tl.float32)[None, :]
    far_sine = tl.load(sines + angles + HALF, mask=is_angle, other=0.0).to(tl.float32)[None, :]
    tl.store(low, (first * cosine + second * sine).to(heads.dtype.element_ty), mask=is_element)
    tl.store(low + HALF, (second * far_cosine + first * far_sine).to(heads.dtype.element_ty), mask=is_element)


def add_and_normalize(hidden: Tensor, update: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add ``update`` to ``hidden``, both ``[T, hidden_size]``, in place; return the sum's RMS norm times ``weight``.

    ``weight``: ``[hidden_size]``. All are contiguous and of one dtype.
    """
    output = hidden.new_empty(hidden.shape)
    num_rows, width = hidden.shape
    if num_rows:
        padded = triton.next_power_of_2(width)
        num_warps = min(16, max(1, padded // 512))
        _add_and_normalize[(num_rows,)](
            hidden, update, weight, output, eps, WIDTH=width, PADDED=padded, num_warps=num_warps
        )  # fmt: skip
    return output


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` ``[T, I]`` of contiguous ``gate_up`` ``[T, 2 * I]``."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    output = gate_up.new_empty((num_rows, width))
    if num_rows:
        _silu_and_mul[num_rows, triton.cdiv(width, _TILE)](gate_up, output, WIDTH=width, TILE=_TILE)
    return output


def rotate_(heads: Tensor, cosines: Tensor, sines: Tensor) -> None:
    """Rotate ``heads`` ``[T, num_heads, head_dim]`` in place; the heads of a row lie one after another, rows may be strided.

    cosines, sines: contiguous ``[T, 1, head_dim]``, the sines with the sign of the halves convention.
    """
    num_rows, num_heads, head_dim = heads.shape
    if num_rows:
        half = head_dim // 2
        _rotate[num_rows, triton.cdiv(num_heads, 8)](
            heads, cosines, sines, heads.stride(0), num_heads, HALF=half, PADDED=triton.next_power_of_2(half), HEADS=8,
            num_warps=2,
        )  # fmt: skip
