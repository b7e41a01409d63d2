"""Counts the requests in flight, so that a router that drains waits for their last bytes."""

from __future__ import annotations

import asyncio

from litestar.enums import ScopeType
from litestar.types import ASGIApp, Receive, Scope, Send


class InFlight:
    """Wraps the application. A request is in flight from its head to the last byte of its answer.

    Only POST requests count: probes and metrics go on while the router drains.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.num_open = 0
        self._is_draining = False
        self._has_ended = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if self._is_draining or scope["type"] != ScopeType.HTTP or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        self.num_open += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self.num_open -= 1
            self._has_ended.set()

    async def drain(self) -> None:
        """Wait for the requests in flight. Those that come from now on are not waited for: they are refused."""
        self._is_draining = True
        while self.num_open:
            self._has_ended.clear()
            await self._has_ended.wait()
