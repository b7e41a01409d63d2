"""Wraps the HTTP application: request ids, names of ignored fields, HEAD, response counts, and ends of connections.

Owns the headers ``X-Request-Id``, ``X-KVFerry-Ignored-Fields`` and ``Connection``, and the labels of ``kvferry_http_requests``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from litestar.enums import ScopeType
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from core.ids import IdSource, RandomIds, new_hex_id
from router.metrics import RouterMetrics
from router.openai.unknown_fields import ignored_header

_ACCEPTABLE_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_SEND_KEY = "kvferry_send"
_STATE_KEY = "kvferry_client_id"
_IGNORED_KEY = "kvferry_ignored_fields"


class RequestIdMiddleware:
    """Wraps the application: accepts or makes a request id, returns it in a header, and counts the response.

    While ``is_closing()``, answers end their connections. A client that kept one would send its next request, and the retries
    of it, to a router that refuses them.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: RouterMetrics,
        paths: frozenset[str],
        ids: IdSource | None = None,
        is_closing: Callable[[], bool] = lambda: False,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._paths = paths
        self._is_closing = is_closing
        self._ids = ids or RandomIds()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != ScopeType.HTTP:
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        request_id = given if _ACCEPTABLE_ID.fullmatch(given) else new_hex_id(self._ids, "req-").encode()
        state: dict[str, Any] = scope.setdefault("state", {})
        state[_SEND_KEY] = send
        state[_STATE_KEY] = (request_id.decode(), request_id is given)
        path = scope["path"] if scope["path"] in self._paths else "other"
        has_body = False

        async def receive_body() -> Any:  # noqa: ANN401 - any message of the server
            nonlocal has_body
            message = await receive()
            has_body = has_body or not message.get("more_body", False)
            return message

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = [(b"x-request-id", request_id)]
                if ignored := state.get(_IGNORED_KEY):
                    more.append((b"x-kvferry-ignored-fields", ignored_header(ignored).encode()))
                    self._metrics.count_ignored_fields(len(ignored))
                if has_body and self._is_closing():  # an end in the midst of a body could cost the client its answer
                    more.append((b"connection", b"close"))
                message["headers"] = [*message["headers"], *more]
                self._metrics.count_http(path, message["status"])
            await send(message)

        if scope["method"] == "HEAD":  # answered as GET; the server leaves the body out
            scope = {**scope, "method": "GET"}
        try:
            await self._app(scope, receive_body, send_with_id)
        finally:
            state.clear()  # it refers to the request, which else would stay until a collection of garbage finds the ring


def plain_send(scope: Scope, send: Send) -> Send:
    """Return the server's own ``send``, for what follows the start of an answer: all that stands between looks at the start."""
    own: Send = scope["state"].get(_SEND_KEY, send)
    return own


def client_id(scope: Scope, named_in_body: str | None = None) -> str:
    """Return the client's id of the request: that of its header, else of its body, else the generated one."""
    known, is_given = scope["state"][_STATE_KEY]
    return named_in_body if named_in_body and not is_given else str(known)


def report_ignored(scope: Scope, paths: Sequence[str]) -> None:
    """Have the answer name fields of the request's body that were ignored."""
    scope["state"][_IGNORED_KEY] = paths
