"""Clients' connections with limits, so that no client holds descriptors, memory or requests by idling or flooding.

Owns the limits that uvicorn lacks: how long a request may take to arrive, how large its head may be, how long an answer may
wait for the client to read, and how many connections may be open.

    connected ──first byte──► head ──► body ──► answer ──► idle (uvicorn's keep-alive)
    └───── receive_timeout_s ────┘└ the same ┘ └ send_timeout_s without progress
    └──────── max_head_bytes ────┘
"""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import httptools
import msgspec
import uvicorn
from litestar.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from core.wire.messages import ErrorInfo
from router.http.client_table import ClientTable
from router.http.direct_write import offer_writer
from router.http.errors import error_body

CutReason = Literal["address", "head", "idle", "limit", "pipeline", "receive", "send"]
MAX_HEADERS = 256
MAX_PIPELINED = 32  # requests of one connection that wait until an earlier one is answered
ACCEPT_BATCH = 128  # connections that one callback of the event loop may accept
_SLICE_BYTES = 16 << 10  # parsed between two checks of the limits
_LINGER_S = 2.0  # how long a refused client may still send before the connection is aborted


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """Limits per connection, per address and in total. Times in seconds."""

    max_connections: int
    receive_timeout_s: float  # for the head of a request, and again for its body
    send_timeout_s: float  # without progress of the client's reading
    idle_timeout_s: float = 75.0  # between an answer and the next request
    max_head_bytes: int = 64 << 10  # of a request's head; also between two pieces of a body, because of trailers
    max_connections_per_address: int = 0  # 0 = no limit
    proxies: tuple[str, ...] = ()  # exempt from the limit per address


class HttpConfig(uvicorn.Config):
    """uvicorn's settings for the router. ``count_cut`` is called for every connection that a limit ends.

    With ``tls`` clients connect by TLS; the limits of a connection begin after its handshake.

    Raises:
        ConfigError: an entry of ``limits.proxies`` is not an address or network.
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: ClientLimits,
        count_cut: Callable[[CutReason], None],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(
            app,
            http=GuardedConnection,
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            backlog=ACCEPT_BATCH,
            timeout_keep_alive=math.ceil(limits.idle_timeout_s),
            timeout_graceful_shutdown=1,
            ssl_context_factory=(lambda config, default: tls) if tls is not None else None,
        )
        self.limits = limits
        self.count_cut = count_cut
        self.clients: ClientTable[GuardedConnection] = ClientTable(
            limits.max_connections, limits.max_connections_per_address, limits.proxies
        )


class _Refused(Exception):
    """A parsed request exceeds a limit. Parsing of the connection ends."""


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
        self._clients = config.clients
        self._count_cut = config.count_cut
        self._receiving: asyncio.TimerHandle | None = None
        self._sending: asyncio.TimerHandle | None = None
        self._is_in_request = False  # from the end of a head to the end of its body
        self._num_head_bytes = 0  # since the parser last reported a head or a piece of a body
        self._num_headers = 0
        self._served: RequestResponseCycle | None = None
        self._is_refused = False
        self._is_body_unread = False  # the client has been told that the connection ends without its body
        self._reason: CutReason | None = None  # why a parser callback refused the request
        self._wrong: ErrorInfo | None = None  # what a parser callback found wrong with it

    # ---- what the event loop tells -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection, unless its address has too many, or all are too many and none is idle."""
        super().connection_made(transport)
        is_within = self._clients.add(self, self.client[0] if self.client else "")
        if not is_within:
            self._cut("address")
            return
        self._expect_request()
        if self._clients.is_overfull:
            idle = self._clients.longest_idle()
            idle._cut("limit" if idle is self else "idle")

    def data_received(self, data: bytes) -> None:
        """Parse received bytes in slices. Any byte between requests is the start of a request."""
        if self._is_refused:
            return
        if self._receiving is None and not self._is_in_request:
            self._expect_request()
        view = memoryview(data)
        for start in range(0, len(data), _SLICE_BYTES):
            piece = view[start : start + _SLICE_BYTES]
            self._num_head_bytes += len(piece)
            self._parse(bytes(piece))
            if self._is_refused or self.transport.is_closing():
                return
            if self._num_head_bytes > self._limits.max_head_bytes:
                self._refuse_head(f"it has more than {self._limits.max_head_bytes} bytes")
                return

    def _parse(self, piece: bytes) -> None:
        """Feed the parser, which calls the ``on_`` methods. Unlike uvicorn's, this does not log clients' errors."""
        self._unset_keepalive_if_required()
        rest = piece
        while rest:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserError:
                self._refuse_unparsed()
                return
            except httptools.HttpParserUpgrade as stop:  # to an unsupported protocol: the bytes after it are the next request
                rest = rest[stop.args[0] :]

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers and the running request; with pipelining, uvicorn informs only the last request."""
        self._clients.remove(self)
        if self._served is not None and not self._served.response_complete:
            self._served.disconnected = True
            self._served.message_event.set()
        self._stop_receiving()
        self._stop_sending()
        super().connection_lost(exc)
        # A method of the transport, which is closed: asyncio keeps it there, in a ring that only a full collection frees.
        self.transport._read_ready_cb = None  # type: ignore[attr-defined]

    def pause_writing(self) -> None:
        """Start the timer of the client's reading."""
        super().pause_writing()
        self._stop_sending()
        self._sending = self.loop.call_later(self._limits.send_timeout_s, self._cut, "send")

    def resume_writing(self) -> None:
        """Stop the timer: the client has read."""
        self._stop_sending()
        super().resume_writing()

    # ---- parser callbacks --------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Start to count the headers of a request."""
        if len(self.pipeline) >= MAX_PIPELINED:
            self._reason = "pipeline"
            raise _Refused
        self._num_headers = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Accept a header, or a trailer after a body, unless there are too many."""
        self._num_headers += 1
        if self._num_headers > MAX_HEADERS:
            self._reason = "head"
            raise _Refused
        if name.lower() == b"transfer-encoding" and value.strip().lower() != b"chunked":
            message = (
                f"the Transfer-Encoding {value[:40].decode(errors='replace')!r} is not supported: send it as chunked, or not"
            )
            self._wrong = ErrorInfo(code="invalid_request", message=message, http_status=400)
            raise _Refused
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the timer of the body."""
        self._num_head_bytes = 0
        self._clients.mark_busy(self)
        self._expect_request()
        super().on_headers_complete()
        self._is_in_request = True

    def on_body(self, body: bytes) -> None:
        """Accept a piece of the body."""
        self._num_head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Stop the timer: the request is complete."""
        self._num_head_bytes = 0
        self._is_in_request = False
        self._stop_receiving()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Wait for the next request, or continue with a pipelined one, or end the connection if the body was left unread."""
        if self._is_body_unread and not self.transport.is_closing():
            self._clients.mark_idle(self)
            self.flow.resume_reading()
            self._linger()
            return
        if not self.pipeline:
            self._clients.mark_idle(self)
        super().on_response_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:  # noqa: ANN401 - as uvicorn has it
        self._served = cycle
        offer_writer(cycle)
        if cycle.waiting_for_100_continue:
            app = self._with_expectation(cycle, app)
        super()._start_asgi_task(cycle, app)

    def _with_expectation(self, cycle: RequestResponseCycle, app: ASGIApp) -> ASGIApp:
        """Return the application for a client that may wait for 100 before it sends its body.

        Answered without having been asked for it, the client may leave it out: what comes next could be body or request.
        """

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            async def send_knowingly(message: Message) -> None:
                if message["type"] == "http.response.start" and cycle.waiting_for_100_continue and cycle.more_body:
                    message["headers"] = [*message["headers"], (b"connection", b"close")]
                    await send(message)
                    self._is_body_unread = cycle.keep_alive = True  # closed later: a body on its way would cost the answer
                else:
                    await send(message)

            await app(scope, receive, send_knowingly)

        return serve

    # ---- deadlines ---------------------------------------------------------------------------------------------------

    def _expect_request(self) -> None:
        self._stop_receiving()
        self._receiving = self.loop.call_later(self._limits.receive_timeout_s, self._on_receive_timeout)

    def _on_receive_timeout(self) -> None:
        self._receiving = None
        if self._is_refused:
            self.transport.abort()
        elif self.flow.read_paused:  # paused by the router until an earlier request is served, which is not the client's fault
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

    # ---- refusals ----------------------------------------------------------------------------------------------------

    def _refuse_unparsed(self) -> None:
        """Refuse a request that the parser rejected: it is invalid HTTP or exceeds a limit."""
        if self._reason == "head":
            self._refuse_head(f"it has more than {MAX_HEADERS} fields")
        elif self._reason is not None:
            self._cut(self._reason)
        elif self._wrong is not None:
            self._refuse(self._wrong)
        else:
            what = "the body is no valid HTTP: a chunk is malformed" if self._is_in_request else "this is no valid HTTP request"
            self._refuse(ErrorInfo(code="invalid_request", message=what, http_status=400))

    def _refuse_head(self, why: str) -> None:
        self._count_cut("head")
        message = f"the head of the request is too large: {why}"
        self._refuse(ErrorInfo(code="head_too_large", message=message, http_status=431))

    def _refuse(self, info: ErrorInfo) -> None:
        """Send an error and accept nothing more. A request that already has its answer gets no other one."""
        self._is_refused = True
        self._stop_receiving()
        if self._is_in_request and self.cycle.response_complete:
            self._linger()
            return
        if self.cycle is not None and not self.cycle.response_complete:
            if not self._is_in_request or self._served is not self.cycle or self.cycle.response_started:
                self.transport.abort()  # an error would appear inside an earlier answer
                return
            self.cycle.disconnected = True  # the request whose body is wrong ends without an answer of its own
            self.cycle.message_event.set()
        self.transport.write(_response(info))
        self._linger()

    def _linger(self) -> None:
        """Accept nothing more. Further bytes are read for a while, or the client would lose the answer."""
        self._is_refused = True
        self._stop_receiving()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._receiving = self.loop.call_later(_LINGER_S, self._on_receive_timeout)

    def _cut(self, reason: CutReason) -> None:
        self._count_cut(reason)
        self._is_refused = True
        self._clients.remove(self)
        self.transport.abort()


def limit_unread_answers(listening: socket.socket, send_timeout_s: float) -> None:
    """Let the kernel end connections whose peer acknowledges nothing for this long, also those already closed here."""
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(1000 * send_timeout_s)))


def _too_slow(receive_timeout_s: float) -> bytes:
    message = f"the request's body did not arrive within {receive_timeout_s:g} s"
    return _response(ErrorInfo(code="request_timeout", message=message, http_status=408))


_REASON_PHRASES = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}


def _response(info: ErrorInfo) -> bytes:
    body = msgspec.json.encode(error_body(info))
    head = f"HTTP/1.1 {info.http_status} {_REASON_PHRASES[info.http_status]}\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body) + body
