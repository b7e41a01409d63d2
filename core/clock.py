"""Time as an injected dependency.

Everything that compares times takes a ``Clock``; the shipped fake (``core.testing``) lets tests and the simulation move it.
Times are monotonic seconds of this process and are never compared across processes.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of monotonic seconds."""

    def now(self) -> float:
        """Return monotonic seconds; only differences within one process mean anything."""
        ...


class SystemClock:
    """The process's monotonic clock."""

    now = staticmethod(time.monotonic)
