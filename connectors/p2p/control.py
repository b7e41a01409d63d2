"""Carriers of the KV control plane: ZeroMQ sockets in asyncio.

The producer binds one ROUTER; the consumer opens one DEALER per address. They move frames to and from the state machines and
know nothing of what a message means. A malformed frame is answered by ``ControlError``, never by an exception. One DEALER is
one connection: when it is lost, or refused, its owner is told and the socket is closed, so that a connection never silently
goes over to the next process at the same address.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import cast

import zmq
from zmq.utils.monitor import parse_monitor_message

from core.errors import ConnectorUnavailable, KVFerryError, ProtocolError
from core.log import event
from core.wire.codec import MAX_CONTROL_FRAME_BYTES, decode_control_frame, encode_control_message
from core.wire.kv import ControlError, ControlMessage
from core.wire.sockets import AsyncContext, AsyncSocket, SocketOptions, bind, dealer_socket, router_socket

MAX_QUEUED_MESSAGES = 4096  # per peer; a peer that takes none is found by its deadline, not by our memory

_OPTIONS = SocketOptions(max_message_bytes=MAX_CONTROL_FRAME_BYTES, high_water_mark=MAX_QUEUED_MESSAGES)
_LOST_EVENTS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

_log = logging.getLogger(__name__)


class ControlServer:
    """The producer's end. ``answer`` turns a message into its reply, or None if it has none; it must not block."""

    def __init__(self, context: AsyncContext, answer: Callable[[ControlMessage], ControlMessage | None]) -> None:
        self._socket: AsyncSocket = router_socket(context, _OPTIONS)
        self._answer = answer
        self._task: asyncio.Task[None] | None = None
        self.num_bad_frames = 0

    def start(self, address: str) -> str:
        """Bind, serve from now on, and return the actual address.

        Raises:
            ConfigError: the address cannot be bound.
        """
        actual = bind(self._socket, address)
        self._task = asyncio.create_task(self._serve(), name="kv-control-server")
        return actual

    async def stop(self) -> None:
        """Serve no more and close the socket."""
        await _end(self._task)
        self._socket.close(linger=0)

    async def _serve(self) -> None:
        while True:
            identity, *frames = await self._socket.recv_multipart()
            try:
                reply = self._reply_to(frames)
                if reply is not None:
                    await self._socket.send_multipart([identity, reply], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                # The reader is gone or takes nothing: whatever it wanted ends by its own deadline.
                _log.debug(event("kv_control_reply_dropped", error=error))

    def _reply_to(self, frames: list[bytes]) -> bytes | None:
        try:
            if len(frames) != 1:
                raise ProtocolError(f"a control message is one frame, not {len(frames)}")
            reply = self._answer(decode_control_frame(frames[0]))
            return None if reply is None else encode_control_message(reply)
        except KVFerryError as error:
            self.num_bad_frames += 1
            return encode_control_message(ControlError(code=error.code, message=error.message[:1000]))


class _Link:
    """One connection of a consumer."""

    def __init__(self, socket: AsyncSocket) -> None:
        self.socket = socket
        self.monitor: AsyncSocket = socket.get_monitor_socket(_LOST_EVENTS)
        self.tasks: list[asyncio.Task[None]] = []

    def close(self) -> None:
        """End the tasks and close the socket."""
        for task in self.tasks:
            task.cancel()
        self.socket.disable_monitor()
        self.socket.close(linger=0)


class ControlClients:
    """The consumer's ends, one per address, opened by the first message.

    ``on_message`` and ``on_disconnected`` get the address; both are called in the event loop and must not block. A link that is
    lost is closed before ``on_disconnected`` is called; the next message opens another.
    """

    def __init__(
        self,
        context: AsyncContext,
        on_message: Callable[[str, ControlMessage], None],
        on_disconnected: Callable[[str], None],
    ) -> None:
        self._context = context
        self._on_message = on_message
        self._on_disconnected = on_disconnected
        self._links: dict[str, _Link] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self.num_bad_frames = 0
        self.num_dropped = 0

    def send(self, address: str, message: ControlMessage) -> None:
        """Queue a message. Where it cannot be queued it is dropped and counted: deadlines cover losses."""
        try:
            link = self._links.get(address) or self._open(address)
            sent = cast("asyncio.Future[object]", link.socket.send(encode_control_message(message), zmq.NOBLOCK))
            error = sent.exception() if sent.done() else None  # a NOBLOCK send is done when it returns
        except (zmq.ZMQError, KVFerryError) as failure:
            error = failure
        if error is not None:
            self.num_dropped += 1
            _log.warning(event("kv_control_dropped", address=address, kind=type(message).__name__, error=error))

    def close(self, address: str) -> None:
        """Close the link to an address; unknown ones are ignored."""
        link = self._links.pop(address, None)
        if link is not None:
            link.close()
            self._ending.update(link.tasks)
            for task in link.tasks:
                task.add_done_callback(self._ending.discard)

    async def stop(self) -> None:
        """Close all links."""
        for address in list(self._links):
            self.close(address)
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _open(self, address: str) -> _Link:
        socket = dealer_socket(self._context, _OPTIONS)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.setsockopt(zmq.IMMEDIATE, 0)  # queue while connecting: a failed connection is told by the monitor
        link = _Link(socket)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            link.close()
            raise ConnectorUnavailable(f"control address {address!r} is unusable: {error}") from None
        link.tasks.append(asyncio.create_task(self._receive(address, link), name=f"kv-control {address}"))
        link.tasks.append(asyncio.create_task(self._watch(address, link), name=f"kv-control-monitor {address}"))
        self._links[address] = link
        return link

    async def _receive(self, address: str, link: _Link) -> None:
        while True:
            frames = await link.socket.recv_multipart()
            try:
                if len(frames) != 1:
                    raise ProtocolError(f"a control message is one frame, not {len(frames)}")
                message = decode_control_frame(frames[0])
            except ProtocolError as error:
                self.num_bad_frames += 1
                message = ControlError(code=error.code, message=error.message[:1000])
            self._on_message(address, message)

    async def _watch(self, address: str, link: _Link) -> None:
        """Wait for the end of the connection. A frame that came before it has been delivered first, or does not count."""
        frames = await link.monitor.recv_multipart()
        _log.debug(event("kv_control_lost", address=address, reason=parse_monitor_message(frames)["event"]))
        if self._links.get(address) is link:
            self.close(address)
            self._on_disconnected(address)


async def _end(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
