"""The operations between the linears by compiled C, on the CPU; float32 and bfloat16, computed in float32 and rounded once.

Owns: the call of ``core/model/_layer_ops.c``, which is built when kvferry is installed if there is a C compiler, and the split
of a large step over torch's number of threads. The functions check nothing: ``fills_vectors`` says which sizes they are for.

torch does the same in several operations, each of which costs more than its arithmetic while a step has few rows. So the calls
here are bare: a structure for the arguments, or a check of each tensor, would take as long as torch's operations do.
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

LANES = 16  # of the C code: sizes are multiples
_ELEMENTS_PER_THREAD = 1 << 15  # handing work to another thread takes as long as computing some 10,000
GATES = {"silu": 0, "gelu": 1}  # ``enum gate`` of the C code
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS: dict[str, list[Any]] = {  # of each function, before the first row and the one after the last
    "kvferry_add_and_normalize": [_POINTER] * 4 + [_SIZE] * 3 + [ctypes.c_double],
    "kvferry_gate_and_multiply": [_POINTER] * 2 + [_SIZE] * 3,
    "kvferry_rotate": [_POINTER] * 3 + [_SIZE] * 4,
}


class LayerKernels:
    """The functions of the library. All tensors are on the CPU. Raises: ImportError where it was not built."""

    def __init__(self) -> None:
        library = built_library()
        if library is None:
            raise ImportError("core/model/_layer_ops.c was not built")
        self._add_and_normalize, self._gate_and_multiply, self._rotate = (getattr(library, name) for name in _ARGUMENTS)
        self._threads = KernelThreads("layers")

    def add_and_normalize(self, hidden: Tensor, update: Tensor, weight: Tensor, floor: float, dtype: torch.dtype) -> Tensor:
        """Add ``update`` to ``hidden`` ``[T, hidden_size]`` in place; return the sum, divided by its norm, in ``dtype``.

            output = hidden * weight / sqrt(|hidden|^2 + floor)

        ``hidden`` and ``weight`` ``[hidden_size]`` are float32, all tensors contiguous.
        """
        num_rows, size = hidden.shape
        output = torch.empty((num_rows, size), dtype=dtype)
        problem = (
            *(hidden.data_ptr(), update.data_ptr(), weight.data_ptr(), output.data_ptr()),
            *(size, update.dtype is torch.bfloat16, dtype is torch.bfloat16, floor),
        )
        if num_rows * size < 2 * _ELEMENTS_PER_THREAD:
            self._add_and_normalize(*problem, 0, num_rows)
        else:
            self._split(self._add_and_normalize, problem, num_rows, size)
        return output

    def gate_and_multiply(self, gate_up: Tensor, gate: str) -> Tensor:
        """Return ``gate(left) * right`` ``[T, I]`` of ``gate_up`` ``[T, 2 * I]``, contiguous.

        ``gate`` is ``silu``, or ``gelu`` by its tanh approximation.
        """
        num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        output = torch.empty((num_rows, size), dtype=gate_up.dtype)
        problem = gate_up.data_ptr(), output.data_ptr(), size, GATES[gate], gate_up.dtype is torch.bfloat16
        if num_rows * size < 2 * _ELEMENTS_PER_THREAD:
            self._gate_and_multiply(*problem, 0, num_rows)
        else:
            self._split(self._gate_and_multiply, problem, num_rows, size)
        return output

    def rotate_(self, heads: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate ``heads`` ``[T, num_heads, head_dim]`` in place, by ``RotaryEmbedding.angles`` of the same dtype.

        The heads of a token lie one after another; tokens may be further apart.
        """
        num_rows, num_heads, head_dim = heads.shape
        problem = (
            *(heads.data_ptr(), cos.data_ptr(), sin.data_ptr()),
            *(num_heads, head_dim, heads.stride(0), heads.dtype is torch.bfloat16),
        )
        if num_rows * num_heads * head_dim < 2 * _ELEMENTS_PER_THREAD:
            self._rotate(*problem, 0, num_rows)
        else:
            self._split(self._rotate, problem, num_rows, num_heads * head_dim)

    def _split(self, function: Callable[..., None], problem: tuple[object, ...], num_rows: int, size: int) -> None:
        """Cut the rows into parts, at most one for each of torch's threads."""
        num_parts = min(torch.get_num_threads(), num_rows * size // _ELEMENTS_PER_THREAD)
        borders = [num_rows * part // num_parts for part in range(num_parts + 1)]
        self._threads.run(function, [(*problem, *part) for part in pairwise(borders)])


def fills_vectors(*sizes: int) -> bool:
    """Return True if the kernels take rows, and halves of heads, of these numbers of elements."""
    return all(size % LANES == 0 for size in sizes)


@cache
def built_library() -> ctypes.CDLL | None:
    """Return the library, None if it was not built here or is not for this machine."""
    library = load_library(ctypes.CDLL, "_layer_ops", __package__, *_ARGUMENTS)
    for name, arguments in _ARGUMENTS.items() if library is not None else ():
        function = getattr(library, name)
        function.restype, function.argtypes = None, [*arguments, _SIZE, _SIZE]
    return library
