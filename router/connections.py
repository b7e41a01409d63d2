"""Clients' connections with deadlines, so that none can hold a descriptor, memory or a request by doing nothing.

Owns what uvicorn leaves open: how long a request may take to arrive, how long an answer may wait for its reader, and how many
connections there may be. Knows nothing of routes. ``router.server`` gives ``HttpConfig`` to uvicorn.

    connected ──first byte──► head ──► body ──► answer ──► idle (uvicorn's keep-alive)
    └───── receive_timeout_s ────┘└ the same ┘ └ send_timeout_s without progress
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import uvicorn
from litestar.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from core.wire.messages import ErrorInfo
from router.http_errors import error_body

CutReason = Literal["limit", "receive", "send"]
_KEEP_ALIVE_S = 75


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """What one client, and all together, may hold. Times in seconds."""

    max_connections: int
    receive_timeout_s: float  # for the head of a request, and again for its body
    send_timeout_s: float  # for a reader that takes nothing


class HttpConfig(uvicorn.Config):
    """uvicorn's settings for the router. ``count_cut`` is told of every connection that is ended by a limit."""

    def __init__(self, app: ASGIApp, limits: ClientLimits, count_cut: Callable[[CutReason], None]) -> None:
        super().__init__(
            app,
            http=GuardedConnection,
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
        self.limits = limits
        self.count_cut = count_cut


class GuardedConnection(HttpToolsProtocol):
    """One connection of a client."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        assert isinstance(config, HttpConfig)
        self._limits = config.limits
        self._count_cut = config.count_cut
        self._receiving: asyncio.TimerHandle | None = None
        self._sending: asyncio.TimerHandle | None = None
        self._is_in_request = False  # from the end of a head to the end of its body

    # ---- what the event loop tells -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, unless there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            self._cut("limit")
            return
        self._expect_request()

    def data_received(self, data: bytes) -> None:
        """Parse what came. Whatever comes between requests is the start of one."""
        if self._receiving is None and not self._is_in_request:
            self._expect_request()
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all clocks."""
        self._stop_receiving()
        self._stop_sending()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Give the reader its time."""
        super().pause_writing()
        self._stop_sending()
        self._sending = self.loop.call_later(self._limits.send_timeout_s, self._cut, "send")

    def resume_writing(self) -> None:
        """The reader has made progress."""
        self._stop_sending()
        super().resume_writing()

    # ---- what the parser tells ---------------------------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        """Give the body its time."""
        self._is_in_request = True
        self._expect_request()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The request is here."""
        self._is_in_request = False
        self._stop_receiving()
        super().on_message_complete()

    # ---- deadlines ---------------------------------------------------------------------------------------------------

    def _expect_request(self) -> None:
        self._stop_receiving()
        self._receiving = self.loop.call_later(self._limits.receive_timeout_s, self._on_receive_timeout)

    def _on_receive_timeout(self) -> None:
        self._receiving = None
        if self.flow.read_paused:  # by us, until an earlier request is served: the client can do nothing about it
            self._expect_request()
        elif self._is_in_request and not self.cycle.response_started:
            self._count_cut("receive")
            self.transport.write(_too_slow(self._limits.receive_timeout_s))
            self.transport.close()
        else:
            self._cut("receive")

    def _stop_receiving(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None

    def _stop_sending(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None

    def _cut(self, reason: CutReason) -> None:
        self._count_cut(reason)
        self.transport.abort()


def limit_unread_answers(listening: socket.socket, send_timeout_s: float) -> None:
    """Have the kernel end connections whose peer takes nothing for so long, also those that are closed on our side."""
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(1000 * send_timeout_s)))


def _too_slow(receive_timeout_s: float) -> bytes:
    message = f"the request's body did not arrive within {receive_timeout_s:g} s"
    body = msgspec.json.encode(error_body(ErrorInfo(code="request_timeout", message=message, http_status=408)))
    head = f"HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + b"connection: close\r\n\r\n" + body
