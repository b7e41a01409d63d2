"""A Triton kernel that copies scattered rows between two pools in memory of a device.

Owns the kernel and its launch. Does not know whose the memory is; it may be that of another process, mapped here. Triton comes
with torch's builds for CUDA; elsewhere importing this file fails.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048  # words that a program copies; with so many warps the fastest of those tried on an H200
_NUM_WARPS = 8


@triton.jit
def _copy_rows(target, source, target_rows, source_rows, words, BLOCK: tl.constexpr):  # fmt: skip
    """Copy BLOCK words of one row. target, source: [_, words]; target_rows, source_rows: int64 [num_rows]."""
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source_row, target_row = tl.load(source_rows + row), tl.load(target_rows + row)
    is_column = columns < words
    read = tl.load(source + source_row * words + columns, mask=is_column)
    tl.store(target + target_row * words + columns, read, mask=is_column)


def copy_rows(target: Tensor, source: Tensor, target_rows: Tensor, source_rows: Tensor) -> None:
    """Copy ``source[source_rows[i]]`` to ``target[target_rows[i]]``, on the current stream.

    source, target: ``[_, words]`` of one dtype, contiguous; the rows int64 ``[num_rows]``, at most 65,535.
    """
    words = source.shape[1]
    grid = (triton.cdiv(words, _BLOCK), len(source_rows))
    _copy_rows[grid](target, source, target_rows, source_rows, words, BLOCK=_BLOCK, num_warps=_NUM_WARPS)
