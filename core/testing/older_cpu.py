"""Runs compiled kernels as an older CPU would, where the machine's own CPU is not older still."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

KINDS = ("any", "x86-64-v3", "x86-64-v4", "x86-64-v4 with bfloat16")  # ``enum kind`` of core/_kinds_of_cpu.h
OLDER = KINDS[:-1]


@contextmanager
def computing_as_on(library: ctypes.CDLL | None, kind: str) -> Iterator[None]:
    """Let a library of ``core.compiled`` choose among its kernels as on a CPU of this kind."""
    assert library is not None
    library.kvferry_compute_as_on(KINDS.index(kind))
    try:
        yield
    finally:
        library.kvferry_compute_as_on(len(KINDS) - 1)
