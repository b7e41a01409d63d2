"""Copies of blocks in host memory, past the caches where this machine can: by compiled C, or by numpy.

``core/_stream_copy.c`` is built when kvferry is installed, if there is a C compiler; otherwise numpy copies, in up to twice the
time.
"""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np
import numpy.typing as npt

from core.compiled import load_library, warn_unused

Bytes = npt.NDArray[np.uint8]


def stream_copy(target: Bytes, source: Bytes) -> None:
    """Copy one array into another of as many bytes that does not overlap it, both contiguous. Any thread.

    The interpreter's lock is released meanwhile. All bytes are visible to other threads when this returns.
    Raises: ValueError for arrays of different sizes, or with gaps, or a target that is read-only.
    """
    if not target.flags.writeable:
        raise ValueError("the target is read-only")
    if target.nbytes != source.nbytes or not (target.flags.c_contiguous and source.flags.c_contiguous):
        raise ValueError(f"{source.nbytes} bytes cannot be copied into {target.nbytes} without a gap")
    library = compiled_library()
    if library is None:
        np.copyto(target, source.reshape(target.shape))
    else:
        library.kvferry_stream_copy(target.ctypes.data, source.ctypes.data, target.nbytes)


@cache
def compiled_library() -> ctypes.CDLL | None:
    """Return the library built from ``core/_stream_copy.c``; None if there is none, or none that copies right here."""
    library = load_library(ctypes.CDLL, "_stream_copy", __package__, "kvferry_stream_copy")
    if library is None:
        return None
    library.kvferry_stream_copy.restype = None
    library.kvferry_stream_copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    if not _is_right(library):
        warn_unused("_stream_copy", "its results are wrong")
        return None
    return library


def _is_right(library: ctypes.CDLL) -> bool:
    """Compare a copy that begins at an odd byte and ends in part of a line, with what lies before and after it."""
    source, target = np.arange(40_000, dtype=np.uint32).view(np.uint8), np.zeros(160_000, np.uint8)
    library.kvferry_stream_copy(target[3:].ctypes.data, source[2:].ctypes.data, 100_001)
    return bool((target[3:100_004] == source[2:100_003]).all()) and not target[:3].any() and not target[100_004:].any()
