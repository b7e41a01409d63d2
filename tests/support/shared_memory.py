"""What a test leaves in /dev/shm, where other tests make files at the same time that their libraries unlink soon."""

from __future__ import annotations

import os
import time

_TIMEOUT_S = 30.0
_POLL_S = 0.02


def files() -> set[str]:
    """Return the names of what is there at the moment."""
    return set(os.listdir("/dev/shm"))


def left_since(before: set[str]) -> set[str]:
    """Return the names that are new and stay."""
    left = files() - before
    deadline = time.monotonic() + _TIMEOUT_S
    while left and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        left &= files()
    return left
