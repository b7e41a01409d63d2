"""An engine's answer as the router's own: status, type and bytes, as they come."""

from __future__ import annotations

from contextlib import AsyncExitStack
from http import HTTPStatus

from litestar.types import Receive, Scope, Send

from core.errors import Cancelled
from core.wire.messages import ErrorInfo
from router.dispatch.engine_api import CallFailed, EngineAnswer
from router.http import sse
from router.http.caller import unless_gone
from router.http.errors import anthropic_error_body, error_body
from router.metrics import RouterMetrics
from router.rendered.bodies import MESSAGES
from router.rendered.renderer import refusal

_EVENT_END = b"\n\n"


class PassedOn:
    """ASGI application that sends an answer to a body for ``path``; it ends the call when the client has left."""

    def __init__(self, path: str, answer: EngineAnswer, stack: AsyncExitStack, metrics: RouterMetrics) -> None:
        self._path = path
        self._answer = answer
        self._stack = stack
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer to its end, or to its failure."""
        async with self._stack:
            try:
                failure = await unless_gone(receive, self._send_all(send))
            except Cancelled as gone:
                failure = gone.code
        if failure:
            self._metrics.count_failed(failure)
        else:
            self._metrics.count_passed_on()

    async def _send_all(self, send: Send) -> str:
        """Return the code of the error that the answer is, or has ended in; empty without one."""
        answer = self._answer
        failure = refusal(answer.status, b"").code if answer.status >= HTTPStatus.BAD_REQUEST else ""
        headers = [(b"content-type", answer.content_type.encode()), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        rest = b""
        try:
            async for piece in answer.pieces():
                whole, rest = _split(rest + piece) if self._is_stream else (piece, b"")
                if whole:
                    await send({"type": "http.response.body", "body": whole, "more_body": True})
        except CallFailed as failed:
            failure = failed.info.code
            rest = self._last_of(failed.info)  # instead of what has come of the next event
        await send({"type": "http.response.body", "body": rest, "more_body": False})
        return failure

    def _last_of(self, info: ErrorInfo) -> bytes:
        """Return the error as an event; the stream ends without an end mark, so that it does not look complete."""
        if not self._is_stream:
            return b""
        return sse.event(anthropic_error_body(info), "error") if self._path == MESSAGES else sse.event(error_body(info))

    @property
    def _is_stream(self) -> bool:
        return self._answer.content_type.startswith("text/event-stream")


def _split(data: bytes) -> tuple[bytes, bytes]:
    """Return the whole events, and the beginning of the next one."""
    end = data.rfind(_EVENT_END)
    return (data[: end + len(_EVENT_END)], data[end + len(_EVENT_END) :]) if end >= 0 else (b"", data)
