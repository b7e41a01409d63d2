"""What a test leaves in /dev/shm, where other tests make files at the same time that their libraries unlink soon."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path

_TIMEOUT_S = 30.0
_POLL_S = 0.02
_MAPPED = re.compile(r" /dev/shm/(\S+)$", re.MULTILINE)  # without those that are deleted


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


def mapped_by(pids: Iterable[int]) -> set[str]:
    """Return the names of what processes have mapped; those that have ended have nothing."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            found.update(_MAPPED.findall(Path(f"/proc/{pid}/maps").read_text()))
    return found


def remove(names: Iterable[str]) -> None:
    """Remove what processes that were killed have left."""
    for name in names:
        Path("/dev/shm", name).unlink(missing_ok=True)
