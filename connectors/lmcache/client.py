"""The connection to the server: requests with replies and deadlines over ZeroMQ, and the client of its admin port.

Every registration has a connection of its own, which is closed when it is lost. So no request for one server process reaches
the next process at the same address. The server has no error reply: a request that it fails to handle is never answered.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from http.client import HTTPException
from typing import Any
from urllib.request import ProxyHandler, build_opener

import msgspec
import zmq

from connectors.lmcache.messages import ServerFacts
from connectors.lmcache.wire import MAX_MESSAGE_BYTES, RequestType, decode_reply, encode_call
from core.errors import ConnectorUnavailable, PeerUnreachable, ProtocolError, TransferTimeout
from core.log import event
from core.rate_limit import LimitedLog
from core.wire.connections import LOST_EVENTS, monitor_of
from core.wire.sockets import AsyncContext, AsyncSocket, SocketOptions, dealer_socket, never_reconnect

_MAX_ANSWER_BYTES = 1 << 20
_MAX_ABANDONED = 4096  # requests whose replies are still expected though nobody waits for them any more
_OPTIONS = SocketOptions(max_message_bytes=MAX_MESSAGE_BYTES, high_water_mark=4096)

_log = logging.getLogger(__name__)


class Calls:
    """Requests that have no reply yet. ``send`` puts frames on the connection; ``counts`` gets late and missing replies.

    ``on_lost`` is called when the connection is lost. For one event loop.
    """

    def __init__(self, send: Callable[[list[bytes]], None], counts: Counter[str]) -> None:
        self.send = send
        self.counts = counts
        self.on_lost: Callable[[], None] = _do_nothing
        self.is_lost = False
        self._open: dict[int, asyncio.Future[object]] = {}
        self._abandoned: dict[int, asyncio.Future[object]] = {}  # out of time or cancelled; the server may be busy with them
        self._last_uid = 0

    async def call(self, timeout_s: float, operation: RequestType, *arguments: object) -> object:
        """Send a request and return its result.

        Raises:
            TransferTimeout: no reply came in time.
            PeerUnreachable: the connection was lost.
        """
        self._last_uid += 1
        uid = self._last_uid
        self.send(encode_call(uid, operation, *arguments))
        reply = self._open[uid] = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait([reply], timeout=timeout_s)  # unlike asyncio.timeout, keeps a reply that comes just in time
        finally:
            del self._open[uid]
            if reply.done():
                reply.exception()  # retrieved, in case this task was cancelled
            else:
                self._abandon(uid, reply)
        if not reply.done():
            self.counts["unanswered_requests"] += 1
            raise TransferTimeout(f"no reply from the LMCache server in {timeout_s:g} s")
        return reply.result()

    async def wait_for_replies(self) -> None:
        """Wait until the server has replied to everything that it was asked, or is lost."""
        replies = [*self._open.values(), *self._abandoned.values()]
        if replies:
            await asyncio.wait(replies)

    def on_reply(self, uid: int, result: object) -> None:
        """Take a reply in."""
        reply = self._open.get(uid)
        if reply is None:
            self.counts["late_replies"] += 1
            reply = self._abandoned.pop(uid, None)
        if reply is not None and not reply.done():
            reply.set_result(result)

    def lose(self) -> None:
        """Fail all requests: the connection is lost."""
        self.is_lost = True
        self.on_lost()
        for reply in self._open.values():
            if not reply.done():
                reply.set_exception(PeerUnreachable("the connection to the LMCache server is lost"))
        for reply in self._abandoned.values():
            reply.cancel()
        self._abandoned.clear()

    def _abandon(self, uid: int, reply: asyncio.Future[object]) -> None:
        """Keep a request that may still be answered. Some never are: only the latest are kept."""
        if self.is_lost:
            return
        self._abandoned[uid] = reply
        if len(self._abandoned) > _MAX_ABANDONED:
            self._abandoned.pop(next(iter(self._abandoned))).cancel()


class LMCacheClient:
    """One connection; its requests are in ``calls``. Create it inside the event loop, and use it there only.

    Calls ``on_death`` if one of its tasks raises.

    Raises:
        ConnectorUnavailable: the address is unusable.
    """

    def __init__(
        self, context: AsyncContext, address: str, counts: Counter[str], on_death: Callable[[BaseException], None]
    ) -> None:
        self.calls = Calls(self._send, counts)
        self._on_death = on_death
        self._is_closed = False
        self._socket: AsyncSocket = dealer_socket(context, _OPTIONS)
        never_reconnect(self._socket)
        self._socket.setsockopt(zmq.IMMEDIATE, 0)  # queue while connecting
        self._monitor: AsyncSocket = monitor_of(self._socket, LOST_EVENTS)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self._close_sockets()
            raise ConnectorUnavailable(f"connector.lmcache.server_address = {address!r} is unusable: {error}") from None
        self._limited_log = LimitedLog(_log, time.monotonic)
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]
        for task in self._tasks:
            task.add_done_callback(self._on_task_end)

    async def close(self) -> None:
        """Close the connection at once, and wait for the end of its tasks. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            for task in self._tasks:
                task.cancel()
            self._close_sockets()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _send(self, frames: list[bytes]) -> None:
        """Queue a request. A request that cannot be queued is dropped and ends at its deadline."""
        if self._is_closed:
            return
        try:
            sent = self._socket.send_multipart(frames, zmq.NOBLOCK)
            error = sent.exception() if isinstance(sent, asyncio.Future) and sent.done() else None
        except zmq.ZMQError as failure:
            error = failure
        if error is not None:
            self._limited_log.warning("lmcache_request_dropped", error=error)

    def _close_sockets(self) -> None:
        self._socket.monitor(None, 0)  # before the reading end is closed
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            try:
                uid, result = decode_reply(frames)
            except ProtocolError as error:
                _log.warning(event("lmcache_bad_reply", error=error.message))
                self.calls.lose()
                return
            self.calls.on_reply(uid, result)

    async def _watch(self) -> None:
        await self._monitor.recv_multipart()
        self.calls.lose()

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if not self._is_closed and not task.cancelled() and task.exception() is not None:
            self._on_death(task.exception() or RuntimeError("it returned"))


def fetch_facts(http_address: str, timeout_s: float) -> ServerFacts:
    """Read version and settings from the admin port. Blocks for at most twice ``timeout_s``.

    Raises:
        PeerUnreachable: there is no answer.
        ConnectorUnavailable: the answer is not that of a known LMCache server.
    """
    try:
        version = _get(f"{http_address}/lmc_version", timeout_s)
        mp = _get(f"{http_address}/config", timeout_s)["mp"]
        return ServerFacts(str(version), int(mp["chunk_size"]), bool(mp["separate_object_groups"]))
    except (OSError, HTTPException) as error:  # URLError and timeouts are OSErrors
        raise PeerUnreachable(f"no LMCache server answers at {http_address}: {error}") from None
    except (msgspec.DecodeError, ValueError, KeyError, TypeError) as error:
        raise ConnectorUnavailable(f"{http_address} answers, but not as an LMCache server that we know: {error!r}") from None


def _get(url: str, timeout_s: float) -> Any:  # noqa: ANN401 - any JSON
    with build_opener(ProxyHandler({})).open(url, timeout=timeout_s) as response:  # the server is on this machine: no proxy
        return msgspec.json.decode(response.read(_MAX_ANSWER_BYTES))


def _do_nothing() -> None:
    """Stand in until somebody wants to know."""
