"""Requests that wait for a worker: for room, for a worker that has stalled, or for the successor of one that was lost.

Owns the order, first come first served, and for how long. ``router.dispatch.dispatcher`` tries them again and ends those that
waited in vain.
"""

from __future__ import annotations

from core.errors import NoWorker, RequestError
from core.wire.messages import Role
from router.dispatch.request_state import RequestState
from router.dispatch.restarts import Restarts

_ROLES_THAT_GO_ON: tuple[Role, ...] = ("decode", "aggregated")


class Waiting:
    """The requests that wait; times are seconds of the router's clock."""

    def __init__(self, restarts: Restarts) -> None:
        self._restarts = restarts
        self._requests: dict[str, RequestState] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def requests(self) -> list[RequestState]:
        """Return those that wait, the one that began first first."""
        return list(self._requests.values())

    def leave(self, request: RequestState) -> None:
        """It waits no more, if it has."""
        self._requests.pop(request.request_id, None)

    def stay(self, request: RequestState, error: RequestError, now: float, *, is_only_busy: bool) -> NoWorker | None:
        """Keep a request that nobody can take now, for the reason ``error``; return why it ends if that takes too long.

        Those that are there and ``is_only_busy`` are waited for until its deadline; a successor as long as one may come.
        """
        if request.request_id not in self._requests:
            self._requests[request.request_id] = request
            request.waits_since = now
        if is_only_busy:
            request.waits_since = now
        patience_s = self._restarts.patience_s(_ROLES_THAT_GO_ON)
        if now < request.waits_since + patience_s:
            return None
        why = request.setback.message if request.setback else error.message
        return NoWorker(
            f"{why}; nobody could go on with the request for {patience_s:g} s",
            retry_after_s=self._restarts.retry_after_s(now),
        )

    def pardon(self, lateness_s: float) -> None:
        """The router stood still for so long: that was no waiting."""
        for request in self._requests.values():
            request.waits_since += lateness_s
