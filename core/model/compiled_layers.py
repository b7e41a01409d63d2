"""The operations between the linears by compiled C, on the CPU; float32 and bfloat16, computed in float32 and rounded once.

Owns: the call of ``core/model/_layer_ops.c``, which is built when kvferry is installed if there is a C compiler, and the split
of a large step over torch's number of threads. The functions check no shapes: ``takes`` says what they are for.

torch does the same in several operations, each of which costs more than its arithmetic while a step has few rows.
"""

from __future__ import annotations

import ctypes
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from core.compiled import load_library
from core.kernel_threads import KernelThreads

LANES = 16  # of the C code: sizes are multiples
_ELEMENTS_PER_THREAD = 1 << 15  # handing work to another thread takes as long as computing some 10,000
_DTYPES = (torch.float32, torch.bfloat16)
_FUNCTIONS = ("kvferry_add_and_normalize", "kvferry_gate_and_multiply", "kvferry_rotate")
_GATES = {"silu": 0, "gelu": 1}  # ``enum gate`` of the C code
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64


class _Norm(ctypes.Structure):
    """``struct norm`` of the C code."""

    _fields_ = (
        *((name, _POINTER) for name in ("hidden", "update", "weight", "output")),
        *((name, _SIZE) for name in ("size", "is_update_bfloat16", "is_output_bfloat16")),
        ("floor", ctypes.c_double),
    )


class _Gating(ctypes.Structure):
    """``struct gating`` of the C code."""

    _fields_ = (("gate_up", _POINTER), ("output", _POINTER), ("size", _SIZE), ("gate", _SIZE), ("is_bfloat16", _SIZE))


class _Rotation(ctypes.Structure):
    """``struct rotation`` of the C code."""

    _fields_ = (
        *((name, _POINTER) for name in ("heads", "cos", "sin")),
        *((name, _SIZE) for name in ("num_heads", "head_dim", "token_stride", "is_bfloat16")),
    )


class LayerKernels:
    """The functions of the library. Raises: ImportError where it was not built."""

    def __init__(self) -> None:
        library = _library()
        if library is None:
            raise ImportError("core/model/_layer_ops.c was not built")
        self._add_and_normalize, self._gate_and_multiply, self._rotate = (getattr(library, name) for name in _FUNCTIONS)
        self._threads = KernelThreads("layers")

    def add_and_normalize(self, hidden: Tensor, update: Tensor, weight: Tensor, floor: float, dtype: torch.dtype) -> Tensor:
        """Add ``update`` to ``hidden`` ``[T, hidden_size]`` in place; return the sum, divided by its norm, in ``dtype``.

            output = hidden * weight / sqrt(|hidden|^2 + floor)

        ``hidden`` and ``weight`` ``[hidden_size]`` are float32, all tensors contiguous.
        """
        num_rows, size = hidden.shape
        output = torch.empty((num_rows, size), dtype=dtype)
        problem = _Norm(
            hidden.data_ptr(),
            update.data_ptr(),
            weight.data_ptr(),
            output.data_ptr(),
            size,
            update.dtype is torch.bfloat16,
            dtype is torch.bfloat16,
            floor,
        )
        self._run(self._add_and_normalize, problem, num_rows, size)
        return output

    def gate_and_multiply(self, gate_up: Tensor, gate: str) -> Tensor:
        """Return ``gate(left) * right`` ``[T, I]`` of ``gate_up`` ``[T, 2 * I]``, contiguous.

        ``gate`` is ``silu``, or ``gelu`` by its tanh approximation.
        """
        num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        output = torch.empty((num_rows, size), dtype=gate_up.dtype)
        problem = _Gating(gate_up.data_ptr(), output.data_ptr(), size, _GATES[gate], gate_up.dtype is torch.bfloat16)
        self._run(self._gate_and_multiply, problem, num_rows, size)
        return output

    def rotate_(self, heads: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate ``heads`` ``[T, num_heads, head_dim]`` in place, by ``RotaryEmbedding.angles``.

        The heads of a token lie one after another; tokens may be further apart.
        """
        num_rows, num_heads, head_dim = heads.shape
        problem = _Rotation(
            heads.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            num_heads,
            head_dim,
            heads.stride(0),
            heads.dtype is torch.bfloat16,
        )
        self._run(self._rotate, problem, num_rows, num_heads * head_dim)

    def _run(self, function: Any, problem: ctypes.Structure, num_rows: int, size: int) -> None:  # noqa: ANN401 - ctypes names no type for it
        """Cut the rows into parts, at most one for each of torch's threads."""
        num_parts = max(1, min(torch.get_num_threads(), num_rows * size // _ELEMENTS_PER_THREAD))
        address = ctypes.byref(problem)
        borders = [num_rows * part // num_parts for part in range(num_parts + 1)]
        self._threads.run(function, [(address, *part) for part in pairwise(borders)])


def is_built() -> bool:
    """Return True if the library was built here."""
    return _library() is not None


def takes(*tensors: Tensor, size: int) -> bool:
    """Return True if the kernels take tensors of these dtypes, on the CPU, whose rows are cut at ``size`` elements."""
    return size % LANES == 0 and all(tensor.dtype in _DTYPES and tensor.device.type == "cpu" for tensor in tensors)


@cache
def _library() -> ctypes.CDLL | None:
    library = load_library(ctypes.CDLL, "_layer_ops", __package__, *_FUNCTIONS)
    for name in _FUNCTIONS if library is not None else ():
        function = getattr(library, name)
        function.restype, function.argtypes = None, [_POINTER, _SIZE, _SIZE]
    return library
