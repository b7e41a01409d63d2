"""At most one occurrence per interval and key, and log lines that are limited by it.

For events that a peer or a client can trigger at any rate: log lines and refusals. ``max_keys`` bounds the memory for any
keys. Knows nothing of the limited events. Times are seconds of one monotonic clock.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from core.log import Event, event

LOG_INTERVAL_S = 60.0
MAX_KEYS = 256


@dataclass(slots=True)
class _Window:
    ends_at: float
    num_suppressed: int = 0


class RateLimit:
    """Admits one occurrence per key in ``interval_s`` and counts those in between.

    With more than ``max_keys`` keys within one interval, further keys share one window: an attacker with invented keys gets
    neither more memory nor more admissions.
    """

    def __init__(self, interval_s: float, max_keys: int = MAX_KEYS) -> None:
        self._interval_s = interval_s
        self._max_keys = max_keys
        self._windows: OrderedDict[Hashable, _Window] = OrderedDict()  # by the start of the window
        self._shared: _Window | None = None  # of the keys for which there was no room

    @property
    def num_keys(self) -> int:
        """The number of remembered keys."""
        return len(self._windows)

    def admit(self, key: Hashable, now: float) -> int | None:
        """Return how many occurrences were suppressed since the last admission, None if this one is suppressed too."""
        window = self._windows.get(key)
        if window is not None:
            if now < window.ends_at:
                window.num_suppressed += 1
                return None
            del self._windows[key]
            self._windows[key] = _Window(now + self._interval_s)
            return window.num_suppressed
        self._forget_ended(now)
        if len(self._windows) < self._max_keys:
            self._windows[key] = _Window(now + self._interval_s)
            return 0
        return self._admit_shared(now)

    def _admit_shared(self, now: float) -> int | None:
        if self._shared is not None and now < self._shared.ends_at:
            self._shared.num_suppressed += 1
            return None
        num_suppressed = self._shared.num_suppressed if self._shared is not None else 0
        self._shared = _Window(now + self._interval_s)
        return num_suppressed

    def _forget_ended(self, now: float) -> None:
        """Drop windows that have ended, the oldest first."""
        while len(self._windows) >= self._max_keys:
            key, window = next(iter(self._windows.items()))
            if now < window.ends_at:
                return
            del self._windows[key]


class LimitedLog:
    """Writes at most one line per event name and key in an interval; the next one says how many were ``suppressed``."""

    def __init__(self, logger: logging.Logger, now: Callable[[], float], interval_s: float = LOG_INTERVAL_S) -> None:
        self._logger = logger
        self._now = now
        self._limit = RateLimit(interval_s)

    def warning(self, name: str, *, key: Hashable = None, **fields: object) -> None:
        """Write ``event=name`` with its fields. Each ``key``, such as one peer, has its own limit; it is not logged."""
        self._write(logging.WARNING, name, key, fields, has_traceback=False)

    def exception(self, name: str, *, key: Hashable = None, **fields: object) -> None:
        """Write an error with the traceback of the exception that is being handled."""
        self._write(logging.ERROR, name, key, fields, has_traceback=True)

    def _write(self, level: int, name: str, key: Hashable, fields: dict[str, object], *, has_traceback: bool) -> None:
        found = limited_event(self._limit, self._now(), name, key, **fields)
        if found is not None:
            self._logger.log(level, found, exc_info=has_traceback)


def limited_event(limit: RateLimit, now: float, name: str, key: Hashable, **fields: object) -> Event | None:
    """Return the event to log, with the number of those that were ``suppressed`` before it; None if it is one of them."""
    num_suppressed = limit.admit((name, key), now)
    if num_suppressed is None:
        return None
    return event(name, **fields, **({"suppressed": num_suppressed} if num_suppressed else {}))
