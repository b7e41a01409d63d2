"""One bound over the bodies of all requests: what clients have sent and not been answered for.

Owns the count of bytes. Sits between ``router.edge`` and the application; knows nothing of routes. The bound of a single body
(``router.max_body_bytes``) is the application's.
"""

from __future__ import annotations

from litestar.enums import ScopeType
from litestar.types import ASGIApp, HTTPReceiveMessage, Receive, Scope, Send, WebSocketReceiveMessage

from core.errors import Overloaded
from core.wire.messages import ErrorInfo
from router.http_errors import RequestFailure


class UploadLimit:
    """Passes bodies on until all of them together hold more than ``max_bytes``; who sends more is asked to come back.

    A body counts from its first piece to the end of the answer: so long the application keeps it.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self.num_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != ScopeType.HTTP:
            await self._app(scope, receive, send)
            return
        num_held = 0

        async def receive_counted() -> HTTPReceiveMessage | WebSocketReceiveMessage:
            nonlocal num_held
            message = await receive()
            num_new = len(message["body"]) if message["type"] == "http.request" else 0
            if num_new and self.num_bytes + num_new > self._max_bytes:
                raise RequestFailure(self._refusal())
            self.num_bytes += num_new
            num_held += num_new
            return message

        try:
            await self._app(scope, receive_counted, send)
        finally:
            self.num_bytes -= num_held

    def _refusal(self) -> ErrorInfo:
        message = f"the router holds {self.num_bytes} bytes of request bodies, its limit is {self._max_bytes}: try again later"
        return ErrorInfo(code=Overloaded.code, message=message, http_status=503, retryable=True)
