"""Limits the open requests per API key, so that one client cannot use up the router's limit of requests.

The middleware counts by the key as sent. The application refuses wrong keys, and their counts end with the request.
"""

from __future__ import annotations

from litestar.enums import ScopeType
from litestar.types import ASGIApp, HTTPReceiveMessage, Receive, Scope, Send, WebSocketReceiveMessage

from core.errors import Overloaded
from core.wire.messages import ErrorInfo
from router.http.api_keys import key_of
from router.http.errors import RequestFailure


class KeyLimit:
    """Forwards requests while fewer than ``max_requests`` of their key are open; refuses others with ``Retry-After``."""

    def __init__(self, app: ASGIApp, max_requests: int) -> None:
        self._app = app
        self._max_requests = max_requests
        self._num_open: dict[bytes, int] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Only POST requests count, so probes and status are never refused."""
        if scope["type"] != ScopeType.HTTP or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        authorization, x_api_key = (_header(scope, name) for name in (b"authorization", b"x-api-key"))
        key = key_of(scope["path"], authorization, x_api_key)
        is_refused = self._num_open.get(key, 0) >= self._max_requests

        async def receive_or_refuse() -> HTTPReceiveMessage | WebSocketReceiveMessage:
            if is_refused:
                raise RequestFailure(self._refusal())
            return await receive()

        self._num_open[key] = self._num_open.get(key, 0) + 1
        try:
            await self._app(scope, receive_or_refuse, send)
        finally:
            self._num_open[key] -= 1
            if not self._num_open[key]:
                del self._num_open[key]

    def _refusal(self) -> ErrorInfo:
        message = f"{self._max_requests} requests with this API key are open, which is its limit: try again later"
        return ErrorInfo(code=Overloaded.code, message=message, http_status=429, retryable=True)


def _header(scope: Scope, wanted: bytes) -> bytes:
    return next((value for name, value in scope["headers"] if name == wanted), b"")
