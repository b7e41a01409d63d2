"""Pairs of prefill and decode worker whose handoffs keep failing, learned from the reports of decode workers.

The router may reach a prefill worker that one decode worker cannot reach; every handoff of such a pair waits for its deadline.
Owns a penalty per pair. Two failures make a pair bad. Penalties decay, so the pair is used again later, and a handoff that
loads clears the penalty. Callers pass the time.
"""

from __future__ import annotations

import math

from core.errors import PeerUnreachable, TransferTimeout, fallback_reason
from core.wire.messages import TransferUsage
from router.dispatch.members import WorkerKey
from router.dispatch.request_state import RequestState

Pair = tuple[WorkerKey, WorkerKey]  # prefill, decode

_UNREACHABLE = frozenset({fallback_reason(TransferTimeout.code), fallback_reason(PeerUnreachable.code)})
_BAD_FROM = 1.5  # two failures within a half-life, or one soon after the pair is tried again
_MAX_PENALTY = 6.0
_LEAST = 0.1  # what is less counts no more
_HALF_LIFE_S = 60.0


class PairHealth:
    """The penalties of all pairs. Its length is how many count."""

    def __init__(self) -> None:
        self._penalties: dict[Pair, tuple[float, float]] = {}  # (penalty, when)

    def __len__(self) -> int:
        return len(self._penalties)

    def learn(self, request: RequestState, cost: TransferUsage | None, now: float) -> None:
        """Learn from the first report of an attempt with a handoff."""
        attempt = request.attempt
        if cost is None or not attempt.has_handoff or attempt.is_judged:
            return
        if attempt.prefill is not None and attempt.decode is not None:
            attempt.is_judged = True
            self.note((attempt.prefill, attempt.decode), cost.fallback_reason, now)

    def note(self, pair: Pair, reason: str, now: float) -> None:
        """Record how a handoff ended: ``reason`` is why blocks were not loaded, empty if they were."""
        if reason in _UNREACHABLE:
            self._penalties[pair] = (min(_MAX_PENALTY, self._penalty(pair, now) + 1.0), now)
        elif not reason:
            self._penalties.pop(pair, None)

    def bad(self, now: float) -> frozenset[Pair]:
        """Return the pairs to avoid while others are available.

        Penalties that count no more are forgotten: a decode worker may blame a prefill worker that has left.
        """
        if not self._penalties:
            return frozenset()
        penalties = {pair: self._penalty(pair, now) for pair in self._penalties}
        self._penalties = {pair: self._penalties[pair] for pair in penalties if penalties[pair] >= _LEAST}
        return frozenset(pair for pair in penalties if penalties[pair] >= _BAD_FROM)

    def forget(self, worker: WorkerKey) -> None:
        """Forget the pairs of a worker that has left; the process that replaces it starts without penalties."""
        for pair in [pair for pair in self._penalties if worker in pair]:
            del self._penalties[pair]

    def _penalty(self, pair: Pair, now: float) -> float:
        penalty, at = self._penalties.get(pair, (0.0, now))
        return penalty * math.exp2((at - now) / _HALF_LIFE_S)
