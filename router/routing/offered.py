"""How much work arrives per second, as an average that forgets. Callers pass the time, in seconds."""

from __future__ import annotations

import math

_MEMORY_S = 30.0


class OfferedLoad:
    """Seconds of work that arrive per second: how many workers it keeps busy."""

    def __init__(self) -> None:
        self._sum_s = 0.0
        self._at = 0.0

    def add(self, work_s: float, now: float) -> None:
        """Record work that has arrived; a negative amount takes back what goes elsewhere."""
        self._sum_s = max(0.0, self._decayed(now) + work_s)
        self._at = now

    def rate(self, now: float) -> float:
        """Return the recent average, over about the last half minute."""
        return self._decayed(now) / _MEMORY_S

    def _decayed(self, now: float) -> float:
        return self._sum_s * math.exp(min(0.0, self._at - now) / _MEMORY_S)
