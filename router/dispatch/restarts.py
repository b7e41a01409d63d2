"""Estimates when a missing role returns, from earlier start times and from how long the role has been missing.

The estimate bounds how long requests wait for a successor, and sets the ``Retry-After`` of refused ones. Callers pass the time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

from core.wire.messages import Role
from router.dispatch.members import GenerationWorker

_REGISTER_S = 5.0  # in which live workers register with a router that has just started
_UNKNOWN_START_S = 20.0  # for a role of which no worker has registered yet
_START_FACTOR = 2.0  # a start under load takes longer than the last one
_NOTICE_S = 10.0  # until a death is detected and a supervisor starts the successor
_LATE_FACTOR = 1.5  # a role that is overdue is expected at this multiple of its absence so far
_MAX_LEARNED_S = 600.0  # a longer absence was intended
_NUM_REMEMBERED = 4  # starts per role, so that later fast starts replace a slow one
_PATIENCE_FACTOR = 3.0  # a request waits for a supervised worker for this multiple of the expected time


class Restarts:
    """Restart times by role. ``worker_wait_s`` is how long requests wait for a worker that has no known supervisor."""

    def __init__(self, worker_wait_s: float) -> None:
        self._worker_wait_s = worker_wait_s
        self._starts: dict[Role, deque[float]] = {}  # expected restart times, seconds, from the latest starts
        self._is_supervised: dict[Role, bool] = {}
        self._missing_since: dict[Role, float] = {}
        self._first_look: float | None = None
        # By engine_id, oldest first: who has left, and until when requests wait for a successor.
        self._left: dict[str, tuple[GenerationWorker, float]] = {}

    def on_joined(self, worker: GenerationWorker, now: float) -> None:
        """Learn the restart time of a role from the worker's start time and from how long the role was missing."""
        role, facts = worker.role, worker.facts
        self._left.pop(facts.engine_id, None)
        self._is_supervised[role] = facts.is_supervised
        start_s = facts.start_ms / 1e3 if facts.start_ms else _UNKNOWN_START_S
        absent_s = now - self._missing_since.get(role, now)
        learned_s = absent_s if absent_s <= _MAX_LEARNED_S else 0.0
        starts = self._starts.setdefault(role, deque(maxlen=_NUM_REMEMBERED))
        starts.append(max(_START_FACTOR * start_s + _NOTICE_S, learned_s))

    def on_left(self, worker: GenerationWorker, now: float) -> None:
        """Remember a worker that has left, since its successor may be like it."""
        self._left.pop(worker.key.engine_id, None)
        self._left[worker.key.engine_id] = (worker, now + self.patience_s((worker.role,)))
        while self._left and now >= next(iter(self._left.values()))[1]:
            del self._left[next(iter(self._left))]

    def absent(self, now: float) -> list[GenerationWorker]:
        """Return the workers that have left, and for whose successors requests would still wait."""
        return [worker for worker, until in self._left.values() if now < until]

    def look(self, workers: Iterable[GenerationWorker], now: float) -> None:
        """Record which of the known roles are missing, that is, have no worker that takes requests."""
        if self._first_look is None:
            self._first_look = now
        there = {worker.role for worker in workers if not worker.is_closed}
        for role in self._starts:
            if role in there:
                self._missing_since.pop(role, None)
            else:
                self._missing_since.setdefault(role, now)

    def patience_s(self, roles: Sequence[Role]) -> float:
        """Return how many seconds a request waits for a worker of one of these roles."""
        supervised = [max(self._starts[role]) for role in roles if self._is_supervised.get(role)]
        return max([self._worker_wait_s, *(_PATIENCE_FACTOR * restart_s for restart_s in supervised)])

    def retry_after_s(self, now: float) -> int:
        """Return in how many whole seconds the missing roles will probably offer a route again, at least 1."""
        known, ways = self._starts.keys(), list[float]()
        if "aggregated" in known:
            ways.append(self._remaining_s("aggregated", now))
        if "prefill" in known:
            ways.append(self._remaining_s("decode", now))  # a decode worker can also serve alone
        elif "decode" in known or not ways:
            ways.append(max(self._remaining_s("prefill", now), self._remaining_s("decode", now)))
        return max(1, math.ceil(min(ways)))

    def _remaining_s(self, role: Role, now: float) -> float:
        """Return the seconds until a worker of the role is available; the estimate grows if the role is overdue."""
        if role in self._starts:
            since, expected_s = self._missing_since.get(role), max(self._starts[role])
            return _remaining_s(expected_s, now - since) if since is not None else 0.0
        age_s = now - (now if self._first_look is None else self._first_look)
        if age_s < _REGISTER_S:
            return _REGISTER_S - age_s
        return _remaining_s(_START_FACTOR * _UNKNOWN_START_S + _NOTICE_S, age_s)


def _remaining_s(expected_s: float, absent_s: float) -> float:
    return max(expected_s, _LATE_FACTOR * absent_s) - absent_s
