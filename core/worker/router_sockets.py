"""A worker's sockets to its routers: one DEALER per machine that a router address stands for.

Owns sockets, their reading tasks, and following the name service as routers come and go. Knows nothing of messages:
``core.worker.process`` gets frames and link names, and sends frames. A link is named by its resolved address. A handler that
raises costs its frame; a task that ends costs the worker, because a worker that cannot hear must not look alive.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol

import zmq

from core.errors import PeerUnreachable
from core.log import event
from core.rate_limit import LimitedLog
from core.wire.codec import MAX_ROUTER_FRAME_BYTES
from core.wire.contexts import started_context
from core.wire.curve import ClusterKeys
from core.wire.key_rotation import connect_with_each_key
from core.wire.sockets import AsyncContext, AsyncSocket, SocketOptions, dealer_socket, resolve
from core.worker.link_monitor import LinkMonitor

logger = logging.getLogger(__name__)

RESOLVE_INTERVAL_S = 10.0
RESOLVE_RETRY_S = 1.0
_FRAMES_PER_TURN = 64  # after so many frames in a row, the other tasks get their turn


class LinkEvents(Protocol):
    """Receives the events of the links, in the event loop."""

    def on_connect(self, link: str) -> None:
        """A socket to this address exists from now on."""

    def on_disconnect(self, link: str) -> None:
        """The name service no longer knows the address; the socket is closed."""

    def on_frame(self, link: str, frames: list[bytes]) -> None:
        """The router has sent a message."""

    def on_links_death(self, error: BaseException) -> None:
        """A task that keeps the links has ended by a bug of ours; from now on the worker is deaf."""


class RouterSockets:
    """Connects to every address of every name in ``addresses``, as long as the name service knows it."""

    def __init__(
        self,
        addresses: Sequence[str],
        events: LinkEvents,
        resolve: Callable[[str], Awaitable[list[str]]] = resolve,
        interval_s: float = RESOLVE_INTERVAL_S,
        keys: ClusterKeys | None = None,
    ) -> None:
        self._addresses = tuple(addresses)
        self._events = events
        self._resolve = resolve
        self._interval_s = interval_s
        self._limited_log = LimitedLog(logger, time.monotonic)
        self._options = SocketOptions(max_message_bytes=MAX_ROUTER_FRAME_BYTES, keys=keys)
        self._context = started_context(AsyncContext)
        self._sockets: dict[str, AsyncSocket] = {}
        self._monitors: dict[str, LinkMonitor] = {}
        self._readers: dict[str, asyncio.Task[None]] = {}
        self._resolver: asyncio.Task[None] | None = None
        self._unresolved: set[str] = set()
        self._has_broken = asyncio.Event()
        self._changing = asyncio.Lock()  # held by the task that adds or removes links
        self._mender: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to connect."""
        self._resolver = self._keep(self._follow_names())
        self._mender = self._keep(self._mend_links())

    def send(self, link: str, frame: bytes) -> bool:
        """Queue a frame without waiting; returns False if there is no connection or its queue is full."""
        socket = self._sockets.get(link)
        if socket is None:
            return False
        result = socket.send(frame, flags=zmq.DONTWAIT)
        return not (isinstance(result, asyncio.Future) and result.done() and result.exception() is not None)

    def note_events(self) -> None:
        """Read what ZeroMQ tells of the links, and have those made anew that have broken for good; call it now and then."""
        if [link for link, monitor in self._monitors.items() if monitor.has_broken()]:  # asks each
            self._has_broken.set()

    def why_unusable(self) -> dict[str, str]:
        """Return why names and links lead to no router, as far as is known; of a link that is connected the reason is empty."""
        reasons = dict.fromkeys(sorted(self._unresolved), "its name does not resolve")
        return reasons | {link: monitor.why_unusable() for link, monitor in sorted(self._monitors.items())}

    async def close(self, linger_s: float) -> None:
        """Close all sockets; frames that are queued may take ``linger_s`` to leave. Idempotent."""
        tasks = [*self._readers.values(), *(task for task in (self._resolver, self._mender) if task is not None)]
        self._readers, self._resolver, self._mender = {}, None, None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for link, socket in self._sockets.items():
            self._monitors.pop(link).close()
            socket.close(linger=int(linger_s * 1e3))
        self._sockets = {}
        await asyncio.to_thread(self._context.term)

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a task that must not end by itself."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._on_task_end)
        return task

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if task not in (self._resolver, self._mender, *self._readers.values()):
            return  # the task was dropped before it was cancelled
        # A socket that is closed under its reader looks like a cancellation.
        error = RuntimeError("cancelled by nobody") if task.cancelled() else task.exception() or RuntimeError("it returned")
        logger.error(event("router_link_task_died", error=repr(error)))
        self._events.on_links_death(error)

    async def _follow_names(self) -> None:
        while True:
            found = await self._resolve_all()
            async with self._changing:
                await self._follow(found)
            is_early = self._unresolved or found - self._sockets.keys()
            await asyncio.sleep(min(RESOLVE_RETRY_S, self._interval_s) if is_early else self._interval_s)

    async def _follow(self, found: set[str]) -> None:
        """Have a link to each address that was found, and to no other."""
        for link in [link for link, monitor in self._monitors.items() if monitor.has_given_up()]:
            await self._replace(link)  # since the router may have another key by now
        for link in sorted(found - self._sockets.keys()):
            if (made := self._make(link)) is not None:
                self._connect(link, *made)
        if not self._unresolved:  # a name service that is down proves nothing about the routers
            for link in sorted(self._sockets.keys() - found):
                await self._disconnect(link)

    async def _mend_links(self) -> None:
        """Make links anew that have broken for good, whatever the name service says or waits for."""
        while True:
            await self._has_broken.wait()
            self._has_broken.clear()
            async with self._changing:
                for link in [link for link, monitor in self._monitors.items() if monitor.has_broken()]:
                    await self._replace(link)
            await asyncio.sleep(min(RESOLVE_RETRY_S, self._interval_s))

    async def _resolve_all(self) -> set[str]:
        found: set[str] = set()
        for address in self._addresses:
            try:
                found.update(await self._resolve(address))
                self._unresolved.discard(address)
            except PeerUnreachable as error:
                if address not in self._unresolved:
                    logger.warning(event("router_unresolved", address=address, error=error.message))
                self._unresolved.add(address)
        return found

    async def _replace(self, link: str) -> None:
        """Make a link anew, unless it cannot be made now."""
        made = self._make(link)
        if made is None:
            return
        try:
            await self._disconnect(link)
        except asyncio.CancelledError:
            _discard(*made)
            raise
        self._connect(link, *made)

    def _make(self, link: str) -> tuple[AsyncSocket, LinkMonitor] | None:
        """Return a socket that connects to a router, and its monitor; None if there is no file descriptor for it."""
        socket = monitor = None
        try:
            socket = dealer_socket(self._context, self._options)
            monitor = LinkMonitor(socket, has_key=self._options.keys is not None)
            connect_with_each_key(socket, link, self._options.keys)
        except zmq.ZMQError as error:
            self._limited_log.warning("router_link_not_made", key=link, router=link, error=error)
            _discard(socket, monitor)
            return None
        return socket, monitor

    def _connect(self, link: str, socket: AsyncSocket, monitor: LinkMonitor) -> None:
        self._sockets[link], self._monitors[link] = socket, monitor
        self._readers[link] = self._keep(self._read(link, socket))
        self._events.on_connect(link)

    async def _disconnect(self, link: str) -> None:
        reader = self._readers.pop(link)
        reader.cancel()
        await asyncio.wait([reader])  # a cancellation of our own comes through
        self._monitors.pop(link).close()
        self._sockets.pop(link).close(linger=0)
        self._events.on_disconnect(link)

    async def _read(self, link: str, socket: AsyncSocket) -> None:
        num_frames = 0
        while True:
            frames = await socket.recv_multipart()
            try:
                self._events.on_frame(link, frames)
            except Exception:  # a request boundary: one message must not make the worker deaf
                self._limited_log.exception("router_frame_failed", key=link, router=link)
            num_frames += 1
            if num_frames % _FRAMES_PER_TURN == 0:
                await asyncio.sleep(0)


def _discard(socket: AsyncSocket | None, monitor: LinkMonitor | None) -> None:
    if monitor is not None:
        monitor.close()
    if socket is not None:
        socket.close(linger=0)
