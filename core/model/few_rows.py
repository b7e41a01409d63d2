"""Up to ``MAX_ROWS`` rows times a packed weight by compiled C, bit for bit what oneDNN computes whatever other rows there are.

Owns the call of ``core/model/_few_rows.c``, which is built when kvferry is installed if there is a C compiler. On one thread
oneDNN's kernels take longer, since they do not read the weight as fast as memory gives it (``python benchmarks/model.py --only
linear``). With two threads this won nothing: it is used on one only.

Where a weight element lies and in which order oneDNN adds is nowhere promised. So it is tried: the order on sums that nearly
cancel, where any other order shows in the result, in bfloat16 too; then each layer on a few rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from core.compiled import load_library

MAX_ROWS = 32  # MOST_ROWS of the C code
_TILE, _LANES = 64, 16
_BLOCKS = (512, 1024)  # columns of a weight whose products oneDNN adds from zero: it takes 1,024 if there are more columns
_PROBE_ROWS = (1, 7, MAX_ROWS)
_PROBE_FEATURES = 256
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64

Pack = Callable[[Tensor], tuple[Callable[[Tensor], Tensor], Tensor | None]]


class FewRows:
    """The product with one weight ``[out_features, in_features]``.

    ``memory`` is the weight in oneDNN's layout ``AB16b64a`` or ``AB16b64a2b``, flat, and ``bias`` ``[out_features]`` has its
    dtype; both must live as long as this is used. ``block`` is one of ``_BLOCKS``.

    Raises: ImportError, ValueError if the memory has another size than this layout.
    """

    def __init__(self, memory: Tensor, shape: torch.Size, bias: Tensor | None, block: int) -> None:
        library = built_library()
        if library is None:
            raise ImportError("core/model/_few_rows.c was not built")
        if not is_tiled(memory, shape):
            raise ValueError(
                f"a weight of {tuple(shape)} has {memory.numel()} elements in memory: not in tiles of {_TILE} rows"
            )
        self._multiply = library.kvferry_multiply_few_rows
        self.dtype, self._out_features, self._columns = memory.dtype, shape[0], shape[1:]
        self._weight, self._bias = memory.data_ptr(), None if bias is None else bias.data_ptr()
        per_step = 4 // memory.element_size()  # a step takes 4 bytes of an input
        is_bfloat16 = memory.dtype is torch.bfloat16
        num_tiles = -(-shape[0] // _TILE)
        self._problem = shape[1] // per_step, block // per_step, shape[0], is_bfloat16, 0, num_tiles

    @property
    def arguments(self) -> tuple[int, int | None, int, int, int, int]:
        """What the C code is told of the weight: addresses of it and of its bias, steps, steps of a block, outputs, tiles."""
        num_steps, block, out_features, _, _, num_tiles = self._problem
        return self._weight, self._bias, num_steps, block, out_features, num_tiles

    def takes(self, x: Tensor) -> bool:
        """Return True if this may be called with ``x``."""
        return x.dtype is self.dtype and x.shape[1:] == self._columns and x.shape[0] <= MAX_ROWS and x.is_cpu

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``x W^T + b`` ``[T, out_features]`` of ``x`` ``[T, in_features]``, for which ``takes`` was True."""
        x = x.contiguous()
        num_rows = x.shape[0]
        output = x.new_empty((num_rows, self._out_features))
        self._multiply(x.data_ptr(), self._weight, self._bias, output.data_ptr(), num_rows, *self._problem)
        return output


def is_tiled(memory: Tensor, shape: torch.Size) -> bool:
    """Return True if flat ``memory`` has the size of a weight of this shape in tiles of 64 rows, the last one filled up.

    ``shape``: ``[out_features, in_features]``.
    """
    return memory.numel() == -(-shape[0] // _TILE) * _TILE * shape[1]


def why_not_at_all(shape: torch.Size, dtype: torch.dtype) -> str:
    """Return why no layer of this shape is computed here by ``FewRows``; empty if one may be."""
    library = built_library()
    if library is None:
        return "not built"
    if not library.kvferry_has_few_rows(dtype is torch.bfloat16):
        return "the CPU has no AVX-512 for this type"
    if torch.get_num_threads() != 1:
        return "torch has several threads"
    return "sizes do not fill vectors" if shape[0] % _LANES or shape[1] % (2 * _LANES) else ""


def block_of(shape: torch.Size, dtype: torch.dtype, pack: Pack) -> int | None:
    """Return the block by which ``FewRows`` agrees bit by bit with layers of so many columns, None if it does by none.

    ``shape`` is one for which ``why_not_at_all`` says nothing; ``pack`` returns the layer of a weight, and the weight as it
    lies in memory if that is known.
    """
    num_rows, num_columns = min(shape[0], _PROBE_FEATURES), shape[1]
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(num_columns, generator=generator)  # else halves that are whole blocks would cancel in any order
    half = torch.randn(num_rows, num_columns // 2, generator=generator)
    weight = torch.cat([half, -half], 1)[:, order].to(dtype)
    layer, memory = pack(weight)
    if memory is None or not is_tiled(memory, weight.shape):
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
    library = load_library(ctypes.CDLL, "_few_rows", __package__, "kvferry_multiply_few_rows", "kvferry_has_few_rows")
    if library is not None:
        function = library.kvferry_multiply_few_rows
        function.restype, function.argtypes = None, [*[_POINTER] * 4, *[_SIZE] * 7]
    return library
