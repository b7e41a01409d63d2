"""When the router itself stood still: what happened to others meanwhile lies unread, and proves nothing.

Owns the gaps between ticks. Knows nothing of workers; ``router.dispatch.membership`` judges nobody while this is unsettled.
"""

from __future__ import annotations

_LEAST_PAUSE_S = 1.0  # a shorter gap breaks no connection
_MAX_SETTLES = 3  # times ``settle_s`` without judging anyone; a router that pauses on and on must judge all the same


class OwnPauses:
    """Notices gaps. ``interval_s`` between two ticks is none; after a longer pause everything settles for ``settle_s``.

    Pauses that follow one another prolong this, up to a limit. In it a gap counts as one interval at most: what a long pause
    breaks is not mended before the router goes on.
    """

    def __init__(self, interval_s: float, settle_s: float) -> None:
        self._interval_s = interval_s
        self._pause_s = max(interval_s, _LEAST_PAUSE_S)
        self._settle_s = settle_s
        self.lateness_s = 0.0  # for how long the router stood still before the last tick
        self._last_tick: float | None = None
        self._settles_at = 0.0
        self._unsettled_s = 0.0  # since it last was settled

    def on_tick(self, now: float) -> float:
        """Return for how long the router stood still before this tick, 0 if it did not."""
        gap_s = 0.0 if self._last_tick is None else now - self._last_tick
        self._last_tick = now
        self.lateness_s = max(0.0, gap_s - self._interval_s)
        has_paused = gap_s > self._pause_s
        is_settled = not has_paused and now >= self._settles_at
        self._unsettled_s = 0.0 if is_settled else self._unsettled_s + min(gap_s, self._interval_s)
        if has_paused:
            self._settles_at = now + self._settle_s
        return self.lateness_s

    def is_settling(self, now: float) -> bool:
        """True if the router has stood still until a moment ago, the tick that tells of it included or not."""
        has_missed_ticks = self._last_tick is not None and now - self._last_tick > self._pause_s
        return (has_missed_ticks or now < self._settles_at) and self._unsettled_s < _MAX_SETTLES * self._settle_s
