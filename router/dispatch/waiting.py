"""Requests that wait for a worker: for room, for a worker that has stalled, or for the successor of one that was lost.

Owns the order, first come first served, and for how long. ``router.dispatch.dispatcher`` tries them again and ends those that
waited in vain.
"""

from __future__ import annotations

from core.errors import NoWorker, RequestError
from core.wire.messages import Role
from router.dispatch.request_state import Flow
from router.dispatch.restarts import Restarts

_ROLES_THAT_GO_ON: tuple[Role, ...] = ("decode", "aggregated")


class Waiting:
    """The requests that wait; times are seconds of the router's clock."""

    def __init__(self, restarts: Restarts) -> None:
        self._restarts = restarts
        self._flows: dict[str, Flow] = {}

    def __len__(self) -> int:
        return len(self._flows)

    def flows(self) -> list[Flow]:
        """Return those that wait, the one that began first first."""
        return list(self._flows.values())

    def leave(self, flow: Flow) -> None:
        """It waits no more, if it has."""
        self._flows.pop(flow.request_id, None)

    def stay(self, flow: Flow, error: RequestError, now: float, *, is_only_busy: bool) -> NoWorker | None:
        """Keep a request that nobody can take now, for the reason ``error``; return why it ends if that takes too long.

        Those that are there and ``is_only_busy`` are waited for until its deadline; a successor as long as one may come.
        """
        if flow.request_id not in self._flows:
            self._flows[flow.request_id] = flow
            flow.waits_since = now
        if is_only_busy:
            flow.waits_since = now
        patience_s = self._restarts.patience_s(_ROLES_THAT_GO_ON)
        if now < flow.waits_since + patience_s:
            return None
        why = flow.setback.message if flow.setback else error.message
        return NoWorker(
            f"{why}; nobody could go on with the request for {patience_s:g} s",
            retry_after_s=self._restarts.retry_after_s(now),
        )

    def pardon(self, lateness_s: float) -> None:
        """The router stood still for so long: that was no waiting."""
        for flow in self._flows.values():
            flow.waits_since += lateness_s
