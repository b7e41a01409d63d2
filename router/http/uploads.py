"""Limits the memory of all unanswered requests together: their bodies, and what was fetched for them.

Owns the count of bytes. The application limits single bodies (``router.max_body_bytes``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from litestar.enums import ScopeType
from litestar.types import ASGIApp, HTTPReceiveMessage, Receive, Scope, Send, WebSocketReceiveMessage

from core.errors import InvalidRequest, Overloaded
from core.wire.messages import ErrorInfo
from router.http.errors import RequestFailure

_STATE_KEY = "kvferry_hold"


class UploadLimit:
    """Forwards bodies while all of them together hold at most ``max_bytes``; refuses more with ``Retry-After``.

    A body counts from its first piece until the end of the answer, because the application keeps it so long. Bytes added by
    ``hold_of`` count until the end of the answer as well.
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

        def hold(num_new: int) -> None:
            nonlocal num_held
            if num_held + num_new > self._max_bytes:
                raise RequestFailure(self._refusal_of_one())
            if num_new and self.num_bytes + num_new > self._max_bytes:
                raise RequestFailure(self._refusal())
            self.num_bytes += num_new
            num_held += num_new

        async def receive_counted() -> HTTPReceiveMessage | WebSocketReceiveMessage:
            message = await receive()
            hold(len(message["body"]) if message["type"] == "http.request" else 0)
            return message

        state: dict[str, Any] = scope.setdefault("state", {})
        state[_STATE_KEY] = hold

        try:
            await self._app(scope, receive_counted, send)
        finally:
            self.num_bytes -= num_held

    def _refusal(self) -> ErrorInfo:
        held = f"{self.num_bytes} bytes of bodies, prompts, images and log-probabilities"
        message = f"the router holds {held}, its limit is {self._max_bytes}: try again later"
        return ErrorInfo(code=Overloaded.code, message=message, http_status=503, retryable=True)

    def _refusal_of_one(self) -> ErrorInfo:
        message = (
            f"the request needs more memory than router.max_upload_bytes = {self._max_bytes} for its body, prompts, images and "
            "the log-probabilities of an answer that is not streamed: ask for fewer of these"
        )
        return ErrorInfo.of(InvalidRequest(message))


def hold_of(scope: Scope) -> Callable[[int], None]:
    """Return a function that counts further bytes kept until the answer ends.

    It raises at the limit: a 400 if this request needs that much alone, else a 503.
    """
    hold: Callable[[int], None] = scope["state"][_STATE_KEY]
    return hold
