"""Applies a grammar's mask to one request's logits: by compiled C on the CPU, by numpy where that was not built, or on the GPU.

``core/engine/_allowed_tokens.c`` is built when kvferry is installed, if there is a C compiler. It takes so little time that
the interpreter's lock is kept. Knows no grammar.
"""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.attention.torch_kernels import upload
from core.compiled import load_library, warn_unused

_BYTES_PER_PIECE = 3072


def keep_allowed(logits: Tensor, bits: npt.NDArray[np.uint8] | None) -> None:
    """Set to -inf, in place, the logits of tokens that are not allowed by ``bits``, eight a byte; all of them for None.

    ``logits`` ``[vocab_size]``, float32 and contiguous; ``bits`` has at least as many bits, from the lowest of each byte on.
    """
    if bits is None:
        logits.fill_(-torch.inf)
    elif logits.device.type != "cpu":
        forbidden = np.unpackbits(~bits, bitorder="little", count=logits.numel()).view(np.bool_)
        logits.masked_fill_(upload(forbidden, logits.device), -torch.inf)
    elif (library := compiled_library()) is not None:
        _apply_compiled(library, logits, bits)
    else:
        _apply_bounds(logits.numpy(), bits)


def _apply_compiled(library: ctypes.PyDLL, logits: Tensor, bits: npt.NDArray[np.uint8]) -> None:
    # The C code checks nothing: with less it would read or write any address.
    is_row = logits.is_contiguous() and logits.dtype is torch.float32
    assert is_row, "not a row of logits"
    assert 8 * bits.size >= logits.numel(), "a mask has a bit for each logit"
    library.kvferry_keep_allowed(logits.data_ptr(), bits.ctypes.data, logits.numel())


def _apply_bounds(logits: npt.NDArray[np.float32], bits: npt.NDArray[np.uint8]) -> None:
    """Do the same with numpy: each byte stands for eight upper bounds of logits.

    That takes the same time for any number of allowed tokens, and a third of that of a masked fill. It goes in pieces, whose
    bounds stay in the processor's cache.
    """
    for start in range(0, bits.size, _BYTES_PER_PIECE):
        piece = logits[8 * start : 8 * (start + _BYTES_PER_PIECE)]
        bounds = np.take(_BOUNDS_OF_BITS, bits[start : start + _BYTES_PER_PIECE], axis=0)
        np.minimum(piece, bounds.reshape(-1)[: piece.size], out=piece)


def _bounds_of_bits() -> npt.NDArray[np.float32]:
    """Return ``[256, 8]``: for each byte and each of its bits from the lowest on, inf if it is set, else -inf."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.where(bits, np.float32(np.inf), np.float32(-np.inf))


_BOUNDS_OF_BITS = _bounds_of_bits()


@cache
def compiled_library() -> ctypes.PyDLL | None:
    """Return the library built from ``core/engine/_allowed_tokens.c``; None if there is none, or none that is right here."""
    library = load_library(ctypes.PyDLL, "_allowed_tokens", __package__, "kvferry_keep_allowed")
    if library is None:
        return None
    library.kvferry_keep_allowed.restype = None
    library.kvferry_keep_allowed.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    if not _is_right(library):
        warn_unused("engine._allowed_tokens", "its results are wrong")
        return None
    return library


def _is_right(library: ctypes.PyDLL) -> bool:
    """Compare with numpy: a library that was not rebuilt after a change of its file may keep other tokens."""
    bits = np.arange(3, 256, 23, dtype=np.uint8)
    found = torch.linspace(-1, 1, 8 * bits.size - 3)
    expected = found.clone()
    _apply_compiled(library, found, bits)
    _apply_bounds(expected.numpy(), bits)
    return torch.equal(found, expected)
