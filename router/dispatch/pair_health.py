"""Which pairs of workers fail to hand over, again and again: learned from what decode workers report.

A network may let a prefill worker be reached by the router and not by one decode worker; then every handoff of the pair waits
for its deadline. Owns a penalty per pair: two failures make it bad, penalties decay, so that the pair is tried again later, and
a handoff that is loaded clears it. Times come in; knows nothing of requests.
"""

from __future__ import annotations

import math

from core.errors import PeerUnreachable, TransferTimeout, fallback_reason
from core.wire.messages import TransferUsage
from router.dispatch.members import WorkerKey
from router.dispatch.request_state import RequestState

Pair = tuple[WorkerKey, WorkerKey]  # prefill, decode

_UNREACHABLE = frozenset({fallback_reason(TransferTimeout.code), fallback_reason(PeerUnreachable.code)})
_BAD_FROM = 1.5  # two failures within a half-life, or a failed probe
_MAX_PENALTY = 6.0
_HALF_LIFE_S = 60.0


class PairHealth:
    """The penalties of all pairs of live workers."""

    def __init__(self) -> None:
        self._penalties: dict[Pair, tuple[float, float]] = {}  # (penalty, when)

    def learn(self, request: RequestState, cost: TransferUsage | None, now: float) -> None:
        """Learn from the first report of a leg that was handed over."""
        if cost is None or not request.is_leg_handed_over or request.judged_attempt == request.num_attempts:
            return
        if request.prefill is not None and request.decode is not None:
            request.judged_attempt = request.num_attempts
            self.note((request.prefill, request.decode), cost.fallback_reason, now)

    def note(self, pair: Pair, reason: str, now: float) -> None:
        """Learn how a handoff ended: ``reason`` is why blocks were not loaded, empty if they were."""
        if reason in _UNREACHABLE:
            self._penalties[pair] = (min(_MAX_PENALTY, self._penalty(pair, now) + 1.0), now)
        elif not reason:
            self._penalties.pop(pair, None)

    def bad(self, now: float) -> frozenset[Pair]:
        """Return the pairs to avoid while there are others."""
        if not self._penalties:
            return frozenset()
        return frozenset(pair for pair in self._penalties if self._penalty(pair, now) >= _BAD_FROM)

    def forget(self, worker: WorkerKey) -> None:
        """A worker has left; its successor is another peer."""
        for pair in [pair for pair in self._penalties if worker in pair]:
            del self._penalties[pair]

    def _penalty(self, pair: Pair, now: float) -> float:
        penalty, at = self._penalties.get(pair, (0.0, now))
        return penalty * math.exp2((at - now) / _HALF_LIFE_S)
