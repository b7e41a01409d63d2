"""Memory that this process has freed goes back to the system."""

from __future__ import annotations

import ctypes


def return_freed_memory() -> None:
    """Return what the C library keeps for later allocations; nothing happens if it is not glibc.

    Loading a model frees as much as its largest layers take, some 100 MB of a small one, which would stay resident. Takes
    milliseconds, so call it where nothing waits. Source: ``malloc_trim(3)``.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
