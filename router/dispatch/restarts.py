"""When a role that is missing will be there again: what workers took to start, and how long the role has been missing.

Owns the estimate by which requests wait for a successor, and by which clients are told when to come back. Times come in; knows
nothing of requests.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

from core.wire.messages import Role
from router.dispatch.members import Worker

_REGISTER_S = 5.0  # in which workers that live find a router that has just started
_UNKNOWN_START_S = 20.0  # of a worker of a role of which none has registered yet
_START_FACTOR = 2.0  # a start beside others under load takes longer than the one before
_NOTICE_S = 10.0  # until a death is noticed and a supervisor starts the successor
_LATE_FACTOR = 1.5  # one that takes longer than expected is expected after half as long again
_MAX_LEARNED_S = 600.0  # a longer absence was meant
_NUM_REMEMBERED = 4  # starts of a role: one that was slow is forgotten after some that were not
_PATIENCE_FACTOR = 3.0  # of the expected time, how long a request waits for a supervised worker


class Restarts:
    """Restart times by role. ``worker_wait_s`` is how long requests wait for a worker that nobody is known to bring back."""

    def __init__(self, worker_wait_s: float) -> None:
        self._worker_wait_s = worker_wait_s
        self._starts: dict[Role, deque[float]] = {}  # seconds that the last ones took
        self._is_supervised: dict[Role, bool] = {}
        self._missing_since: dict[Role, float] = {}
        self._first_look: float | None = None

    def on_joined(self, worker: Worker, now: float) -> None:
        """Learn how long a start takes, and from its absence how long a restart does."""
        role, facts = worker.role, worker.facts
        self._is_supervised[role] = facts.is_supervised
        start_s = facts.start_ms / 1e3 if facts.start_ms else _UNKNOWN_START_S
        absent_s = now - self._missing_since.get(role, now)
        learned_s = absent_s if absent_s <= _MAX_LEARNED_S else 0.0
        starts = self._starts.setdefault(role, deque(maxlen=_NUM_REMEMBERED))
        starts.append(max(_START_FACTOR * start_s + _NOTICE_S, learned_s))

    def look(self, workers: Iterable[Worker], now: float) -> None:
        """Note which of the known roles are missing: nobody of them takes requests."""
        if self._first_look is None:
            self._first_look = now
        there = {worker.role for worker in workers if not worker.is_closed}
        for role in self._starts:
            if role in there:
                self._missing_since.pop(role, None)
            else:
                self._missing_since.setdefault(role, now)

    def patience_s(self, roles: Sequence[Role]) -> float:
        """Return how long a request waits for a worker of one of these roles."""
        supervised = [max(self._starts[role]) for role in roles if self._is_supervised.get(role)]
        return max([self._worker_wait_s, *(_PATIENCE_FACTOR * restart_s for restart_s in supervised)])

    def retry_after_s(self, now: float) -> int:
        """Return in how many whole seconds the roles will be back without which a request finds no route."""
        known, ways = self._starts.keys(), list[float]()
        if "aggregated" in known:
            ways.append(self._remaining_s("aggregated", now))
        if "prefill" in known:
            ways.append(self._remaining_s("decode", now))  # a decode worker serves alone as well
        elif "decode" in known or not ways:
            ways.append(max(self._remaining_s("prefill", now), self._remaining_s("decode", now)))
        return max(1, math.ceil(min(ways)))

    def _remaining_s(self, role: Role, now: float) -> float:
        """Return how long until a worker of the role is there; the estimate grows once it is late."""
        if role in self._starts:
            since, expected_s = self._missing_since.get(role), max(self._starts[role])
            return _remaining_s(expected_s, now - since) if since is not None else 0.0
        age_s = now - (now if self._first_look is None else self._first_look)
        if age_s < _REGISTER_S:
            return _REGISTER_S - age_s
        return _remaining_s(_START_FACTOR * _UNKNOWN_START_S + _NOTICE_S, age_s)


def _remaining_s(expected_s: float, absent_s: float) -> float:
    return max(expected_s, _LATE_FACTOR * absent_s) - absent_s
