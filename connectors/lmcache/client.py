"""The connection to the server, over ZeroMQ, and the client of its admin port.

Every session of the node has a connection of its own, which is closed when it is lost. So no request for one server process
reaches the next process at the same address. Moves frames without interpreting their arguments.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from http.client import HTTPException
from typing import Any
from urllib.request import urlopen

import msgspec
import zmq

from connectors.lmcache.actions import ServerFacts
from connectors.lmcache.wire import MAX_MESSAGE_BYTES, decode_reply
from core.errors import ConnectorUnavailable, PeerUnreachable, ProtocolError
from core.log import event
from core.rate_limit import LimitedLog
from core.wire.sockets import LOST_EVENTS, AsyncContext, AsyncSocket, SocketOptions, dealer_socket

_MAX_ANSWER_BYTES = 1 << 20
_OPTIONS = SocketOptions(max_message_bytes=MAX_MESSAGE_BYTES, high_water_mark=4096)

_log = logging.getLogger(__name__)


class LMCacheClient:
    """One connection, used in the event loop only. Create it inside the event loop.

    Calls ``on_reply`` with number and result, ``on_lost`` when the connection is lost, and ``on_death`` if one of its tasks
    raises.

    Raises:
        ConnectorUnavailable: the address is unusable.
    """

    def __init__(
        self,
        context: AsyncContext,
        address: str,
        on_reply: Callable[[int, object], None],
        on_lost: Callable[[], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        self._on_reply = on_reply
        self._on_lost = on_lost
        self._on_death = on_death
        self._is_closed = False
        self._socket: AsyncSocket = dealer_socket(context, _OPTIONS)
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self._socket.setsockopt(zmq.IMMEDIATE, 0)  # queue while connecting
        self._monitor: AsyncSocket = self._socket.get_monitor_socket(LOST_EVENTS)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self._close_sockets()
            raise ConnectorUnavailable(f"connector.lmcache.server_address = {address!r} is unusable: {error}") from None
        self._limited_log = LimitedLog(_log, time.monotonic)
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]
        for task in self._tasks:
            task.add_done_callback(self._on_task_end)

    def send(self, frames: list[bytes]) -> None:
        """Queue a request. A request that cannot be queued is dropped and ends at its deadline."""
        try:
            sent = self._socket.send_multipart(frames, zmq.NOBLOCK)
            error = sent.exception() if isinstance(sent, asyncio.Future) and sent.done() else None
        except zmq.ZMQError as failure:
            error = failure
        if error is not None:
            self._limited_log.warning("lmcache_request_dropped", error=error)

    def close(self) -> None:
        """Close the connection at once. The ZeroMQ context terminates only after this. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        self._close_sockets()

    async def join(self) -> None:
        """Return when the tasks of a closed connection have ended."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _close_sockets(self) -> None:
        self._socket.monitor(None, 0)  # first: ZeroMQ's thread blocks on an event that is never read
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    async def _receive(self) -> None:
        while not self._is_closed:  # handling a reply may close it
            frames = await self._socket.recv_multipart()
            try:
                uid, result = decode_reply(frames)
            except ProtocolError as error:
                _log.warning(event("lmcache_bad_reply", error=error.message))
                self._on_lost()
                return
            self._on_reply(uid, result)

    async def _watch(self) -> None:
        await self._monitor.recv_multipart()
        self._on_lost()

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
    with urlopen(url, timeout=timeout_s) as response:
        return msgspec.json.decode(response.read(_MAX_ANSWER_BYTES))
