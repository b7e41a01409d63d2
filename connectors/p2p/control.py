"""Drivers of the KV control plane: ZeroMQ sockets in asyncio.

The producer binds one ROUTER; the consumer opens one DEALER per address. They move frames to and from the state machines and
know nothing of what a message means. A malformed frame is answered by ``ControlError``, never by an exception; one of another
wire version by the refusal that every version reads, and not each time (``core.wire.version``). An error of ours costs its
message or its peer; if a task ends nevertheless, ``on_death`` is called, because a worker without its control plane must
not look alive. One DEALER is one connection: when it is lost or refused, ``on_disconnected`` is called and the socket is
closed, so that a connection never silently moves to the next process at the same address.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import zmq
from zmq.utils.monitor import parse_monitor_message

from core.errors import ConnectorUnavailable, KVFerryError, ProtocolError, VersionMismatch
from core.log import event
from core.rate_limit import LimitedLog
from core.wire.codec import MAX_CONTROL_FRAME_BYTES, decode_control_frame, encode_control_message
from core.wire.connections import LOST_EVENTS, is_refusal, monitor_of
from core.wire.curve import ClusterKeys
from core.wire.key_rotation import next_keys
from core.wire.kv import ControlError, ControlMessage, refusal_of
from core.wire.sockets import (
    AsyncContext,
    AsyncSocket,
    SocketOptions,
    bind,
    dealer_socket,
    never_reconnect,
    router_socket,
    warn_if_exposed,
)
from core.wire.version import VersionRefuser

CONNECT_TIMEOUT_S = 10.0  # longer than ZeroMQ's own, which does not begin before a name has resolved
MAX_QUEUED_MESSAGES = 4096  # per peer; a peer that takes none is found by its deadline, not by our memory

_log = logging.getLogger(__name__)


def _options(keys: ClusterKeys | None) -> SocketOptions:
    return SocketOptions(max_message_bytes=MAX_CONTROL_FRAME_BYTES, high_water_mark=MAX_QUEUED_MESSAGES, keys=keys)


class ControlServer:
    """The producer's end. ``answer`` turns a message into its reply, or None if it has none; it must not block.

    ``take`` gets each message first, with the identity of its sender, and returns True if it will be answered by ``send``.
    ``on_death`` is called in the event loop if serving ends by a bug of ours.
    """

    def __init__(
        self,
        context: AsyncContext,
        answer: Callable[[ControlMessage], ControlMessage | None],
        on_death: Callable[[BaseException], None],
        keys: ClusterKeys | None = None,
        take: Callable[[bytes, ControlMessage], bool] | None = None,
    ) -> None:
        self._keys = keys
        self._take = take
        self._socket: AsyncSocket = router_socket(context, _options(keys))
        self._answer = answer
        self._on_death = on_death
        self._refuser = VersionRefuser()
        self._limited_log = LimitedLog(_log, time.monotonic)  # for what consumers can cause as often as they like
        self._task: asyncio.Task[None] | None = None
        self.num_bad_frames = 0
        self.num_dropped = 0

    def start(self, address: str) -> str:
        """Bind, serve from now on, and return the actual address.

        Raises:
            ConfigError: the address cannot be bound.
        """
        actual = bind(self._socket, address)
        if self._keys is None:
            warn_if_exposed("worker.control_address", actual)
        self._task = asyncio.create_task(self._serve(), name="kv-control-server")
        self._task.add_done_callback(self._on_task_end)
        return actual

    async def stop(self) -> None:
        """Serve no more and close the socket."""
        task, self._task = self._task, None
        await _end(task)
        self._socket.close(linger=0)

    def send(self, identity: bytes, message: ControlMessage) -> None:
        """Send a message to a consumer that has asked; dropped and counted if it is gone or takes nothing."""
        error: BaseException | None
        try:
            frames = [identity, encode_control_message(message)]
            sent = cast("asyncio.Future[object]", self._socket.send_multipart(frames, zmq.NOBLOCK))
            error = sent.exception() if sent.done() else None
        except (zmq.ZMQError, KVFerryError) as failure:
            error = failure
        if error is not None:
            self.num_dropped += 1
            _log.debug(event("kv_control_reply_dropped", error=error))

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if task is self._task:  # not cancelled by ``stop``
            self._on_death(_death_of(task))

    async def _serve(self) -> None:
        while True:
            identity, *frames = await self._socket.recv_multipart()
            try:
                reply = self._reply_to(identity, frames)
                if reply is not None:
                    await self._socket.send_multipart([identity, reply], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                # The consumer is gone or takes nothing: its loads end by their own deadlines.
                self.num_dropped += 1
                _log.debug(event("kv_control_reply_dropped", error=error))

    def _reply_to(self, identity: bytes, frames: list[bytes]) -> bytes | None:
        message: ControlMessage | None = None
        try:
            if len(frames) != 1:
                raise ProtocolError(f"a control message is one frame, not {len(frames)}")
            message = decode_control_frame(frames[0])
            if self._take is not None and self._take(identity, message):
                return None
            reply = self._answer(message)
            return None if reply is None else encode_control_message(reply)
        except VersionMismatch as error:
            self.num_bad_frames += 1
            self._limited_log.warning("other_wire_version", key=error.theirs, ours=error.ours, theirs=error.theirs)
            return self._refuser.answer(identity, error, time.monotonic())
        except KVFerryError as error:
            self.num_bad_frames += 1
            return encode_control_message(refusal_of(message, error.code, error.message[:1000]))
        except Exception:  # a transfer boundary: one message must not end the service of all consumers
            self._limited_log.exception("kv_control_answer_failed")
            reason = "the message could not be handled"
            return encode_control_message(refusal_of(message, KVFerryError.code, reason))


class _Link:
    """One connection of a consumer, with the keys it was opened with.

    While the peer may hold another key, ``unconfirmed`` keeps the sent messages, to repeat them with that key.
    """

    def __init__(self, socket: AsyncSocket, keys: ClusterKeys | None) -> None:
        self.socket = socket
        self.keys = keys
        self.unconfirmed: list[bytes] | None = [] if next_keys(keys) is not None else None
        self.monitor: AsyncSocket = monitor_of(socket, LOST_EVENTS | zmq.EVENT_CONNECTED)
        self.tasks: list[asyncio.Task[None]] = []

    def close(self) -> None:
        """End the tasks and close the sockets. Events stop first: ZeroMQ's thread blocks on an event without a reader."""
        for task in self.tasks:
            task.cancel()
        self.socket.monitor(None, 0)
        self.monitor.close(linger=0)  # the event loop holds it, so garbage collection would not
        self.socket.close(linger=0)


class ControlClients:
    """The consumer's ends, one per address, opened by the first message.

    ``on_message`` and ``on_disconnected`` get the address; both are called in the event loop and must not block. A link that is
    lost is closed before ``on_disconnected`` is called; the next message opens another. A peer whose message makes
    ``on_message`` raise is lost too. ``on_death`` is called if a link's task ends by a bug of ours.
    """

    def __init__(
        self,
        context: AsyncContext,
        on_message: Callable[[str, ControlMessage], None],
        on_disconnected: Callable[[str], None],
        on_death: Callable[[BaseException], None],
        keys: ClusterKeys | None = None,
    ) -> None:
        self._context = context
        self._options = _options(keys)
        self._on_message = on_message
        self._on_disconnected = on_disconnected
        self._on_death = on_death
        self._links: dict[str, _Link] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._limited_log = LimitedLog(_log, time.monotonic)
        self.num_bad_frames = 0
        self.num_dropped = 0

    def send(self, address: str, message: ControlMessage) -> BaseException | None:
        """Queue a message. One that cannot be is dropped and counted, and the reason returned: deadlines cover losses."""
        try:
            link = self._links.get(address) or self._open(address, self._options)
            frame = encode_control_message(message)
            error = _send(link, frame)
            if error is None and link.unconfirmed is not None:
                link.unconfirmed.append(frame)
        except (zmq.ZMQError, KVFerryError) as failure:
            error = failure
        if error is not None:
            self.num_dropped += 1
            kind = type(message).__name__
            self._limited_log.warning("kv_control_dropped", key=address, address=address, kind=kind, error=error)
        return error

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

    def _open(self, address: str, options: SocketOptions) -> _Link:
        socket = dealer_socket(self._context, options)
        never_reconnect(socket)
        socket.setsockopt(zmq.IMMEDIATE, 0)  # queue while connecting: the monitor reports a failed connection
        link = _Link(socket, options.keys)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            link.close()
            raise ConnectorUnavailable(f"control address {address!r} is unusable: {error}") from None
        link.tasks.append(asyncio.create_task(self._receive(address, link), name=f"kv-control {address}"))
        link.tasks.append(asyncio.create_task(self._watch(address, link), name=f"kv-control-monitor {address}"))
        for task in link.tasks:
            task.add_done_callback(lambda task: self._on_task_end(task, link))
        self._links[address] = link
        return link

    def _on_task_end(self, task: asyncio.Task[None], link: _Link) -> None:
        if link in self._links.values():  # not cancelled by ``close``
            self._on_death(_death_of(task))

    async def _receive(self, address: str, link: _Link) -> None:
        while True:
            frames = await link.socket.recv_multipart()
            link.unconfirmed = None
            try:
                if len(frames) != 1:
                    raise ProtocolError(f"a control message is one frame, not {len(frames)}")
                message = decode_control_frame(frames[0])
            except ProtocolError as error:
                self.num_bad_frames += 1
                message = ControlError(code=error.code, message=error.message[:1000])
            try:
                self._on_message(address, message)
            except Exception:  # a transfer boundary: what this peer says cannot be followed any more
                kind = type(message).__name__
                self._limited_log.exception("kv_control_message_failed", key=address, address=address, kind=kind)
                self._lose(address, link)
                return
            if self._links.get(address) is not link:  # closed meanwhile: its other messages are dropped
                return

    async def _watch(self, address: str, link: _Link) -> None:
        """Wait for the end of the connection. Frames that arrived before it are delivered first, or are ignored."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                news = parse_monitor_message(await link.monitor.recv_multipart())
        except TimeoutError:  # it has not resolved yet
            self._lose(address, link)
            return
        if news["event"] == zmq.EVENT_CONNECTED:
            news = parse_monitor_message(await link.monitor.recv_multipart())
        _log.debug(event("kv_control_lost", address=address, reason=news["event"]))
        if is_refusal(news) and link.unconfirmed is not None and self._links.get(address) is link:
            self._try_next_key(address, link, link.unconfirmed)
        else:
            self._lose(address, link)

    def _try_next_key(self, address: str, refused: _Link, unconfirmed: list[bytes]) -> None:
        """Open the link again with the peer's next possible key, and repeat what the refused key did not deliver.

        The peer is lost if that link cannot be opened, as for want of a file descriptor.
        """
        self.close(address)
        try:
            link = self._open(address, replace(self._options, keys=next_keys(refused.keys)))
        except (zmq.ZMQError, KVFerryError) as error:
            self.num_dropped += len(unconfirmed)
            self._limited_log.warning("kv_control_not_reopened", key=address, address=address, error=error)
            self._report_loss(address)
            return
        for frame in unconfirmed:
            self.num_dropped += _send(link, frame) is not None
        if link.unconfirmed is not None:
            link.unconfirmed += unconfirmed

    def _lose(self, address: str, link: _Link) -> None:
        if self._links.get(address) is link:
            self.close(address)
            self._report_loss(address)

    def _report_loss(self, address: str) -> None:
        try:
            self._on_disconnected(address)
        except Exception as error:  # loads may still wait for this peer
            _log.exception(event("kv_control_loss_failed", address=address))
            self._on_death(error)


def _send(link: _Link, frame: bytes) -> BaseException | None:
    """Queue a frame; return why this failed, if it did."""
    try:
        sent = cast("asyncio.Future[object]", link.socket.send(frame, zmq.NOBLOCK))
    except zmq.ZMQError as error:
        return error
    return sent.exception() if sent.done() else None  # a NOBLOCK send is done when it returns


def _death_of(task: asyncio.Task[None]) -> BaseException:
    """Return why a task ended that was not stopped. Closing a socket under its reader looks like a cancellation."""
    error = RuntimeError("cancelled by nobody") if task.cancelled() else task.exception() or RuntimeError("it returned")
    _log.error(event("kv_control_task_died", task=task.get_name(), error=repr(error)))
    return error


async def _end(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
