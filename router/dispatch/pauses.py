"""Pauses of the router process itself, found as gaps between ticks of its timer.

Messages of workers stay unread during a pause, so their silence proves nothing. ``router.dispatch.membership`` judges no worker
until the router has settled again.
"""

from __future__ import annotations

_LEAST_PAUSE_S = 1.0  # a shorter gap breaks no connection
_MAX_SETTLES = 3  # times ``settle_s`` without a judgement; a router that keeps pausing must still judge workers


class OwnPauses:
    """Detects pauses. A gap of ``interval_s`` between ticks is normal; after a pause the router settles for ``settle_s``.

    Further pauses prolong the settling, up to a limit. A gap counts as at most one interval towards this limit, because
    connections that a long pause broke are repaired only after the router runs again.
    """

    def __init__(self, interval_s: float, settle_s: float) -> None:
        self._interval_s = interval_s
        self._pause_s = max(interval_s, _LEAST_PAUSE_S)
        self._settle_s = settle_s
        self.lateness_s = 0.0  # how long the router paused before the last tick
        self._total_s = 0.0  # of all ``lateness_s``
        self._last_tick: float | None = None
        self._settles_at = 0.0
        self._unsettled_s = 0.0  # since it was last settled

    def on_tick(self, now: float) -> float:
        """Record a tick and return how many seconds the router paused before it, 0 if it did not."""
        gap_s = 0.0 if self._last_tick is None else now - self._last_tick
        self.lateness_s = self._lateness_s(now)
        self._total_s += self.lateness_s
        self._last_tick = now
        has_paused = gap_s > self._pause_s
        is_settled = not has_paused and now >= self._settles_at
        self._unsettled_s = 0.0 if is_settled else self._unsettled_s + min(gap_s, self._interval_s)
        if has_paused:
            self._settles_at = now + self._settle_s
        return self.lateness_s

    def paused_s(self, now: float) -> float:
        """Return how many seconds the router has paused so far, also if the next tick has not reported all of them yet."""
        return self._total_s + self._lateness_s(now)

    def is_settling(self, now: float) -> bool:
        """Return True shortly after a pause, also if the next tick has not reported it yet."""
        has_missed_ticks = self._last_tick is not None and now - self._last_tick > self._pause_s
        return (has_missed_ticks or now < self._settles_at) and self._unsettled_s < _MAX_SETTLES * self._settle_s

    def _lateness_s(self, now: float) -> float:
        return 0.0 if self._last_tick is None else max(0.0, now - self._last_tick - self._interval_s)
