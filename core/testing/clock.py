"""A clock that moves only by ``advance``. For tests and the simulation."""

from __future__ import annotations


class FakeClock:
    """A ``core.clock.Clock`` whose time is set by hand, in seconds."""

    def __init__(self, now: float = 1000.0) -> None:
        self._now = now

    def now(self) -> float:
        """Return the current time."""
        return self._now

    def advance(self, seconds: float) -> float:
        """Move forward and return the new time.

        Raises: ValueError for a negative step: time is monotonic.
        """
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot go back by {-seconds} s")
        self._now += seconds
        return self._now
