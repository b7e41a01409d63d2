"""Up to ``MAX_ROWS`` rows times a packed weight by compiled C, bit for bit what oneDNN computes for any number of rows.

Owns: the call of ``core/model/_few_rows.c``, which is built when kvferry is installed if there is a C compiler, and the split
of a large weight over torch's number of threads. oneDNN's kernels take 1.5 to 1.9 times as long for up to 6 rows, since they do
not read the weight as fast as memory gives it, and some 15 % longer for 16 (``python benchmarks/model.py --only linear``).

Where a weight element lies and in which order oneDNN adds is nowhere promised. So it is tried for each shape: on sums that
nearly cancel, so that any other order shows in the result, in bfloat16 too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from core.compiled import load_library
from core.kernel_threads import KernelThreads

MAX_ROWS = 32  # MOST_ROWS of the C code
_TILE, _LANES = 64, 16
_BLOCKS = (512, 1024)  # columns of a weight whose products oneDNN adds from zero: it takes 1,024 if there are more columns
_BYTES_PER_THREAD = 1 << 20  # handing work to another thread takes as long as reading a part of it
_PROBE_ROWS = (1, 7, MAX_ROWS)
_PROBE_FEATURES = 4096
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
_threads = KernelThreads("few-rows")

Pack = Callable[[Tensor], tuple[Callable[[Tensor], Tensor], Tensor | None]]


class FewRows:
    """The product with one weight ``[out_features, in_features]``; not thread-safe, as the layer is not.

    ``memory`` is the weight in oneDNN's layout ``AB16b64a`` or ``AB16b64a2b``, valid as long as this is used; ``bias``
    ``[out_features]`` has its dtype; ``block`` is one of ``_BLOCKS``.
    """

    def __init__(self, memory: Tensor, shape: torch.Size, bias: Tensor | None, block: int) -> None:
        library = built_library()
        if library is None:
            raise ImportError("core/model/_few_rows.c was not built")
        self._multiply = library.kvferry_multiply_few_rows
        self._kept = bias
        self._dtype, (self._out_features, self._in_features) = memory.dtype, shape
        self._weight, self._bias = memory.data_ptr(), None if bias is None else bias.data_ptr()
        per_step = 4 // memory.element_size()  # a step takes 4 bytes of an input
        is_bfloat16 = memory.dtype is torch.bfloat16
        self._problem = self._in_features // per_step, block // per_step, self._out_features, is_bfloat16
        self._num_tiles = -(-self._out_features // _TILE)
        self._most_parts = max(1, memory.numel() * memory.element_size() // _BYTES_PER_THREAD)

    def takes(self, x: Tensor) -> bool:
        """Return True if this may be called with ``x``."""
        return x.dtype is self._dtype and x.shape[0] <= MAX_ROWS and x.shape[1] == self._in_features

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``x W^T + b`` ``[T, out_features]`` of ``x`` ``[T, in_features]``, for which ``takes`` was True."""
        x = x.contiguous()
        num_rows = x.shape[0]
        output = x.new_empty((num_rows, self._out_features))
        problem = x.data_ptr(), self._weight, self._bias, output.data_ptr(), num_rows, *self._problem
        num_parts = min(torch.get_num_threads(), self._most_parts) if self._most_parts > 1 else 1
        if num_parts == 1:
            self._multiply(*problem, 0, self._num_tiles)
        else:
            borders = [self._num_tiles * part // num_parts for part in range(num_parts + 1)]
            _threads.run(self._multiply, [(*problem, *part) for part in pairwise(borders)])
        return output


def block_of(shape: torch.Size, dtype: torch.dtype, pack: Pack) -> int | None:
    """Return the block by which ``FewRows`` agrees with layers of this shape bit by bit, None if none does.

    ``pack`` returns the layer of a weight, and the weight as it lies in memory if that is known.
    """
    num_rows, num_columns = shape
    library = built_library()
    if library is None or num_rows % _LANES or num_columns % (2 * _LANES):
        return None
    if not library.kvferry_has_few_rows(dtype is torch.bfloat16):
        return None
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(num_columns, generator=generator)  # else halves that are whole blocks would cancel in any order
    half = torch.randn(min(num_rows, _PROBE_FEATURES), num_columns // 2, generator=generator)
    weight = torch.cat([half, -half], 1)[:, order].to(dtype)
    layer, memory = pack(weight)
    if memory is None or memory.numel() != -(-weight.shape[0] // _TILE) * _TILE * num_columns:
        return None
    x = torch.randn(MAX_ROWS + 1, num_columns // 2, generator=generator).repeat(1, 2)[:, order].to(dtype)
    expected = layer(x)
    for block in _BLOCKS:
        few = FewRows(memory, weight.shape, None, block)
        if all(torch.equal(few(x[:rows]), expected[:rows]) for rows in _PROBE_ROWS):
            return block
    return None


@cache
def built_library() -> ctypes.CDLL | None:
    """Return the library, None if it was not built here or is not for this machine."""
    name = "kvferry_multiply_few_rows"
    library = load_library(ctypes.CDLL, "_few_rows", __package__, name, "kvferry_has_few_rows")
    if library is not None:
        arguments: list[Any] = [*[_POINTER] * 4, *[_SIZE] * 7]
        library.kvferry_multiply_few_rows.restype, library.kvferry_multiply_few_rows.argtypes = None, arguments
    return library
