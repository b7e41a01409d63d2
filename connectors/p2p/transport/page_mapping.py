"""Puts the pages of mapped files into the page table, so that the first copy from them does not stop at every few pages.

Owns a thread for each mapping. It ends when all pages are mapped, or when the mapping is abandoned. On an idle core it stays
ahead of a copy that begins at the same time. On kernels before Linux 5.14 it does nothing: each copy finds its pages itself.
Source: madvise(2).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from functools import cache

MADV_POPULATE_READ = 22  # Linux 5.14; Python has no name for it
STEP_BYTES = 4 << 20  # some 0.3 ms, for which ``close`` may wait


class PageMapping(threading.Thread):
    """Maps the pages of ``spans``, (address, number of bytes) each, in their order. Nothing may unmap them before ``close``."""

    def __init__(self, spans: Sequence[tuple[int, int]]) -> None:
        super().__init__(name="kv-pages", daemon=True)
        self._spans = list(spans)
        self._is_given_up = threading.Event()

    def run(self) -> None:
        """Map one step after another."""
        for address, num_bytes in self._spans:
            for start in range(0, num_bytes, STEP_BYTES):
                if self._is_given_up.is_set() or not _populate(address + start, min(STEP_BYTES, num_bytes - start)):
                    return

    def close(self) -> None:
        """Give up the rest, and return when the memory may be unmapped. Idempotent."""
        self._is_given_up.set()
        if self.ident is not None:
            self.join()


def _populate(address: int, num_bytes: int) -> bool:
    """Call ``madvise`` without the interpreter's lock, which ``mmap.madvise`` keeps; return True if the pages are in."""
    result: int = _libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), MADV_POPULATE_READ)
    return result == 0


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
