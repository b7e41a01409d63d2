"""The open requests of a router: how each begins to count, and how it ends.

Owns the requests by id. A request that ends gives back its names, its room and its place among those that wait; its workers get
aborts, and a handoff that may be unread is released.
"""

from __future__ import annotations

from core.errors import KVFerryError
from core.wire.messages import Abort, ErrorInfo
from router.dispatch.attempts import Attempts
from router.dispatch.early_pulls import EarlyPullRelay
from router.dispatch.encode_legs import EncodeLegs
from router.dispatch.handoffs import release
from router.dispatch.inflight import InflightCounts
from router.dispatch.members import WorkerKey
from router.dispatch.request_state import Deliver, DispatchAction, Ended, RequestState, SendToWorker
from router.dispatch.shares import TenantShares
from router.dispatch.types import Update
from router.dispatch.waiting import Waiting
from router.dispatch.worker_messages import name_form


class OpenRequests:
    """Opens and ends requests. Times are seconds of the router's clock."""

    def __init__(
        self,
        attempts: Attempts,
        waiting: Waiting,
        shares: TenantShares,
        inflight: InflightCounts,
        encode_legs: EncodeLegs,
        early_pulls: EarlyPullRelay,
    ) -> None:
        self.by_id: dict[str, RequestState] = {}
        self._attempts = attempts
        self._waiting = waiting
        self._shares = shares
        self._inflight = inflight
        self._encode_legs = encode_legs
        self._early_pulls = early_pulls

    def add(self, request: RequestState) -> None:
        """Open a request."""
        self.by_id[request.request_id] = request
        self._shares.add(request.submission.tenant)
        self._attempts.begin(request)

    def fail(self, request: RequestState, error: KVFerryError, now: float) -> list[DispatchAction]:
        """End a request with an error of this router."""
        return self.fail_with(request, ErrorInfo.of(error), now)

    def fail_with(
        self, request: RequestState, error: ErrorInfo, now: float, *, gone: WorkerKey | None = None, reason: str = ""
    ) -> list[DispatchAction]:
        """End a request with an error; ``gone`` no longer has it and gets no abort."""
        request.error = error
        stops = [action for action in self._stop_workers(request, reason or error.code) if action.worker != gone]
        update = Update(error=name_form(request.submission, error))
        return [*stops, Deliver(request.request_id, update), self.end(request, now)]

    def stop(self, request: RequestState, reason: str, now: float) -> list[DispatchAction]:
        """End a request that is finished, although its workers do not know it."""
        return [*self._stop_workers(request, reason), self.end(request, now)]

    def end(self, request: RequestState, now: float) -> Ended:
        """End a request that no worker has any more."""
        del self.by_id[request.request_id]
        self._shares.remove(request.submission.tenant)
        self._waiting.remove(request)
        self._attempts.end(request, now)
        self._inflight.free_all(request)
        return Ended(request, now)

    def _stop_workers(self, request: RequestState, reason: str) -> list[SendToWorker]:
        """Abort the request at its workers, and release a handoff that may be unread."""
        current = request.current
        aborts = [SendToWorker(current, Abort(request_ids=(request.wire_id,), reason=reason))] if current else []
        aborts += [*self._encode_legs.aborts(request, reason), *self._early_pulls.stop(request)]
        return [*aborts, *release(request.attempt.prefill, request.handoff)]
