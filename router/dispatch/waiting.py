"""Requests that wait for a worker: for room, for the end of a stall, or for the successor of a lost worker.

Owns their order and the longest wait. Those that have begun come first, then those of smaller ``priority``, then those of
tenants with fewer open requests, then the oldest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from core.errors import NoWorker, Overloaded, RequestError
from core.wire.messages import Role
from router.dispatch.members import GenerationWorker
from router.dispatch.request_state import RequestState
from router.dispatch.restarts import Restarts
from router.dispatch.shares import TenantShares

PASS_S = 2.0  # so long a held request lets others pass that need less room, or the room of other workers
_ROLES_THAT_GO_ON: tuple[Role, ...] = ("decode", "aggregated")


class Waiting:
    """The waiting requests. Times are seconds of the router's clock."""

    def __init__(self, restarts: Restarts, shares: TenantShares) -> None:
        self._restarts = restarts
        self._shares = shares
        self._requests: dict[str, RequestState] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def check_turn(self, workers: Iterable[GenerationWorker], now: float) -> None:
        """Raise Overloaded if a new request may not go to these workers: one that is held for long waits for their room."""
        due = [request for request in self._requests.values() if _is_due(request, now)]
        if any(not worker.has_room(request.submission.n) for request in due for worker in workers):
            raise Overloaded("requests with other API keys wait for room: try again later")

    def turns(self, now: float) -> Iterator[RequestState]:
        """Yield the waiting requests that may look for a worker now, the next one first; each looks before the next is drawn.

        Of those that are held, one without room keeps back all that need as much of it, and after a while all others.
        """
        most = math.inf  # choices of a held request that may still find room
        for request in sorted(self._requests.values(), key=self._order):
            if request.is_held and request.submission.n > most:
                continue
            yield request
            if request.is_held and request.error is None:
                most = 0 if _is_due(request, now) else min(most, request.submission.n - 1)

    def _order(self, request: RequestState) -> tuple[bool, int, int]:
        wanted = request.submission
        return not request.has_begun, wanted.priority, self._shares.num_open(wanted.tenant)

    def remove(self, request: RequestState) -> None:
        """Remove a request; does nothing if it does not wait."""
        self._requests.pop(request.request_id, None)

    def keep(self, request: RequestState, error: RequestError, now: float, *, is_only_busy: bool) -> NoWorker | None:
        """Keep a request that no worker can take now because of ``error``; return an error if it has waited too long.

        If suitable workers are members but busy (``is_only_busy``), it waits until its deadline. Otherwise it waits for a
        successor, for the time that a restart may take.
        """
        if request.request_id not in self._requests:
            self._requests[request.request_id] = request
            request.waits_since = now
        if is_only_busy:
            request.waits_since = now
        patience_s = self._restarts.patience_s(_ROLES_THAT_GO_ON)
        if now < request.waits_since + patience_s:
            return None
        why = request.attempt.previous_error.message if request.attempt.previous_error else error.message
        return NoWorker(
            f"{why}; no worker could continue the request for {patience_s:g} s",
            retry_after_s=self._restarts.retry_after_s(now),
        )

    def exclude_pause(self, lateness_s: float, now: float) -> None:
        """Exclude a pause of the router of this many seconds that ends now from the waits."""
        for request in self._requests.values():
            request.waits_since = min(now, request.waits_since + lateness_s)


def _is_due(request: RequestState, now: float) -> bool:
    """Return True if a request is held for so long that the room it needs is kept for it."""
    return request.is_held and now >= request.arrival + PASS_S
