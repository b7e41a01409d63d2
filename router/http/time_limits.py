"""How long requests may take, from the arrival of their bodies. Pauses of this router extend that, unless the client set it."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from router.dispatch.route_waits import Place
from router.dispatch.types import time_is_over
from router.dispatch.worker_gateway import WorkerGateway
from router.http.caller import Caller, unless_gone

T = TypeVar("T")


class TimeLimits:
    """The limits of all requests, in seconds of the router's clock: ``timeout_s`` of the body, ``most_s`` at most.

    A ``timeout_s`` that is not above 0 sets no limit here: the check of the body refuses it.
    """

    def __init__(self, gateway: WorkerGateway, most_s: float) -> None:
        self._gateway = gateway
        self._most_s = most_s

    async def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None, caller: Caller) -> T:
        """Return the result of what must be done before a request is submitted.

        Raises:
            Cancelled: the client has left.
            DeadlineExceeded: the time of the request is over.
        """
        try:
            return await unless_gone(caller.receive, work, lambda: self.deadline(timeout_s, caller) - self._gateway.now)
        except TimeoutError:
            limit_s = self.deadline(timeout_s, caller) - caller.arrival
            raise time_is_over(limit_s, is_own=self._is_set_by_client(timeout_s)) from None

    async def wait_for_change(self, timeout_s: float | None, caller: Caller, place: Place) -> float:
        """Wait as the gateway; return how much of the time is over then. Raises as ``run``."""
        await self.run(self._gateway.wait_for_change(place), timeout_s, caller)
        return self.spent_s(timeout_s, caller)

    def deadline(self, timeout_s: float | None, caller: Caller) -> float:
        """Return when the request ends, as far as is known now."""
        limit_s = self._most_s if timeout_s is None or timeout_s <= 0 else min(timeout_s, self._most_s)
        return caller.arrival + limit_s + self._extended_s(timeout_s, caller)

    def spent_s(self, timeout_s: float | None, caller: Caller) -> float:
        """Return how much of its time is over."""
        return self._gateway.now - caller.arrival - self._extended_s(timeout_s, caller)

    def _extended_s(self, timeout_s: float | None, caller: Caller) -> float:
        return 0.0 if self._is_set_by_client(timeout_s) else self._gateway.paused_s - caller.paused_s

    def _is_set_by_client(self, timeout_s: float | None) -> bool:
        return timeout_s is not None and 0 < timeout_s <= self._most_s
