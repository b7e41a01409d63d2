"""The handoffs of requests that no decode worker has read yet: introduction of both workers, lease renewal and release.

A handoff is KV that a prefill worker keeps under a lease. While a prefill worker computes its first prompt for a decode
worker, the router tells the latter where the former is, so that their handshake is over when the handoff comes. It renews the
lease until every choice has a token of the decode leg, and releases the handoff when no worker will read it.
"""

from __future__ import annotations

from collections.abc import Iterable

from core.errors import fallback_reason
from core.wire.early import MeetProducer
from core.wire.kv import KVHandoff
from core.wire.messages import Release, Renew
from router.dispatch.members import GenerationWorker, WorkerKey
from router.dispatch.membership import Membership
from router.dispatch.policy import why_not_read
from router.dispatch.request_state import RequestPhase, RequestState, SendToWorker


class Handoffs:
    """Introduces, renews and releases for all requests. Times are seconds of the router's clock."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._introduced: set[tuple[WorkerKey, WorkerKey]] = set()  # prefill and decode worker

    def introduce(self, request: RequestState) -> list[SendToWorker]:
        """Return the introduction of the prefill worker to the decode worker of a new attempt, once per pair."""
        prefill, decode = self._membership.get(request.attempt.prefill), self._membership.get(request.attempt.decode)
        if prefill is None or decode is None or (prefill.key, decode.key) in self._introduced:
            return []
        facts = prefill.facts
        if not facts.control_address or not decode.facts.meets_producers or why_not_read(prefill, decode) is not None:
            return []
        self._introduced.add((prefill.key, decode.key))
        producer = MeetProducer(engine_id=facts.engine_id, incarnation=facts.incarnation, control_address=facts.control_address)
        return [SendToWorker(decode.key, producer)]

    def forget(self, worker: WorkerKey) -> None:
        """Forget the introductions of a worker that has left."""
        self._introduced = {pair for pair in self._introduced if worker not in pair}

    def begin(self, request: RequestState, now: float) -> None:
        """Move a request to the handoff phase and schedule the first renewal; does nothing in that phase."""
        if request.phase is not RequestPhase.HANDOFF and request.handoff is not None:
            request.renew_at = now + _renew_interval_s(request.handoff)
        request.phase = RequestPhase.HANDOFF

    def renewals(self, requests: Iterable[RequestState], now: float) -> list[SendToWorker]:
        """Return the renewals that are due, one message per prefill worker."""
        due: dict[WorkerKey, list[str]] = {}
        for request in requests:
            prefill, handoff = request.attempt.prefill, request.handoff
            if request.phase is RequestPhase.HANDOFF and handoff and prefill and now >= request.renew_at:
                due.setdefault(prefill, []).append(handoff.transfer_id)
                request.renew_at = now + _renew_interval_s(handoff)
        return [SendToWorker(worker, Renew(transfer_ids=tuple(ids))) for worker, ids in due.items()]

    def keep_or_release(self, request: RequestState, decode: GenerationWorker) -> list[SendToWorker]:
        """Release the handoff of a request if the chosen decode worker cannot read it."""
        if request.handoff is None:
            return []
        problem = why_not_read(self._membership.get(request.attempt.prefill), decode)
        if problem is None:
            return []
        releases = release(request.attempt.prefill, request.handoff)
        request.handoff = None
        request.fallback_reason = fallback_reason(problem.code)
        return releases


def release(prefill: WorkerKey | None, handoff: KVHandoff | None) -> list[SendToWorker]:
    """Return the release of a handoff, if there is one."""
    return [SendToWorker(prefill, Release(transfer_ids=(handoff.transfer_id,)))] if prefill and handoff else []


def _renew_interval_s(handoff: KVHandoff) -> float:
    return handoff.lease_ms / 3000  # a third of the lease, so two renewals may be lost
