"""A client of a store in another process: one thread between the client's state machine and a ZeroMQ socket.

It owns the socket, the thread, the mapping of the store's arena, and the copies into it. Callers only change the state, under
its lock, and wake the thread. A broken connection is detected at once, a hanging store by its silence (``ClientState``).
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from core.clock import Clock
from core.config_workers import KVStoreSection
from core.errors import ConfigError, KVFerryError, ProtocolError, VersionMismatch
from core.ids import IdSource, new_hex_id
from core.log import event
from core.rate_limit import LimitedLog
from core.wire.connections import ANNOUNCED_WITHIN_S, ClientConnections, monitor_of
from core.wire.contexts import started_context
from core.wire.curve import ClusterKeys
from core.wire.key_rotation import connect_with_each_key
from core.wire.sockets import SocketOptions, dealer_socket
from kvstore.arena import ArenaView, map_arena
from kvstore.client_actions import ClientAction, ClientOptions, CopyIn, MapArena, SendToStore
from kvstore.client_base import StoreClientBase
from kvstore.client_state import ClientState
from kvstore.messages import MAX_BLOCK_BYTES, AttachRefused, Parcel, ToStore, decode_to_client, encode_to_store
from kvstore.wakeup import Wakeup

MAX_QUEUED_MESSAGES = 1024
MAX_MESSAGES_PER_TURN = 64

_log = logging.getLogger(__name__)


class StoreClient(StoreClientBase):
    """A client of the store at an address. While the store is not running, every call is a miss."""

    def __init__(
        self, address: str, options: ClientOptions, clock: Clock, ids: IdSource, keys: ClusterKeys | None = None
    ) -> None:
        super().__init__(ClientState(options, ids), clock)
        self._address = address
        self._wakeup = Wakeup()
        self._is_closing = False
        self._last_arena: ArenaView | None = None  # until the link is lost, so that it is mapped once
        self._limited_log = LimitedLog(_log, clock.now)
        self._last_refusal = ""  # logged once
        self._context: zmq.Context[zmq.Socket[bytes]] = started_context(zmq.Context)
        self._limits = SocketOptions(max_message_bytes=MAX_BLOCK_BYTES, high_water_mark=MAX_QUEUED_MESSAGES, keys=keys)
        self._connections = ClientConnections()
        try:
            self._socket, self._monitor = self._connect()
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"kvstore.address = {address!r} is unusable: {error}", param="kvstore.address") from None
        self._thread = threading.Thread(target=self._run, name="kvstore-client", daemon=True)
        self._thread.start()

    def wait_until_connected(self, timeout_s: float) -> bool:
        """Wait for the store, for tools and tests."""
        with self._progress:
            return self._progress.wait_for(lambda: self.is_connected, timeout_s)

    def close(self) -> None:
        """See ``BlockStore``."""
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
            self._wakeup.set()
        self._thread.join()
        with self._progress:
            self._machine.say_goodbye()
            self._progress.notify_all()
            self._follow_all()
            self._wakeup.close()
        self._close_connection()
        self._context.term()

    def _carry_out(self) -> None:
        self._wakeup.set()

    def _connect(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """Return a socket that connects to the store, and its monitor. Raises: zmq.ZMQError."""
        with ExitStack() as made:
            socket = dealer_socket(self._context, self._limits)
            made.callback(socket.close, linger=0)
            monitor = monitor_of(socket, ClientConnections.EVENTS)
            made.callback(monitor.close, linger=0)
            made.callback(socket.monitor, None, 0)
            connect_with_each_key(socket, self._address, self._limits.keys)
            made.pop_all()
        return socket, monitor

    def _connect_again(self) -> None:
        """Replace a socket that connects no more, as after a damaged frame. Without a file descriptor it is tried again."""
        try:
            socket, monitor = self._connect()
        except zmq.ZMQError as error:
            self._limited_log.warning("kvstore_not_reconnected", address=self._address, error=error)
            return
        self._close_connection()
        self._socket, self._monitor, self._connections = socket, monitor, ClientConnections()
        self._lose_link()  # a greeting may have gone into the old socket

    def _run(self) -> None:
        while not self._is_closing:
            poller = zmq.Poller()
            for pollable in (self._wakeup.fd, self._monitor):
                poller.register(pollable, zmq.POLLIN)
            wants_out = zmq.POLLOUT if self._machine.waits_for_link else 0
            poller.register(self._socket, zmq.POLLIN | wants_out)
            with self._lock:
                timeout_s = max(0.0, self._machine.next_timer() - self._clock.now())
            if self._connections.may_have_given_up:
                timeout_s = min(timeout_s, ANNOUNCED_WITHIN_S)
            ready = dict(poller.poll(math.ceil(1000 * timeout_s)))
            self._wakeup.clear()
            try:
                self._turn(ready)
            except Exception:  # a transfer boundary: the messages of this store make no sense
                _log.exception(event("kvstore_client_failed", address=self._address))
                self._lose_link()

    def _turn(self, ready: dict[object, int]) -> None:
        now = self._clock.now()
        if self._monitor in ready:
            self._take_link_event(recv_monitor_message(self._monitor))
        if self._connections.has_given_up(now):
            self._connect_again()
        if ready.get(self._socket, 0) & zmq.POLLOUT:
            with self._lock:
                self._machine.on_link_up(now)
        if ready.get(self._socket, 0) & zmq.POLLIN:
            for _ in range(MAX_MESSAGES_PER_TURN):
                if not self._receive():
                    break
        with self._progress:
            self._machine.on_timer(now)
            self._progress.notify_all()
        self._follow_all()

    def _take_link_event(self, found: Mapping[str, Any]) -> None:
        """Note an event of the connections; with the end of the good one the link is lost."""
        was_good = self._connections.is_good
        self._connections.note(found)
        if was_good and not self._connections.is_good:
            self._lose_link()

    def _receive(self) -> bool:
        try:
            frame, *blocks = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        try:
            message = decode_to_client(frame)
        except VersionMismatch as error:
            self._on_other_version(error)
            return True
        except ProtocolError as error:
            self._limited_log.warning("kvstore_bad_frame", address=self._address, error=error.message)
            return True
        if isinstance(message, AttachRefused) and message.message != self._last_refusal:
            self._last_refusal = message.message
            self._limited_log.warning("kvstore_refused", address=self._address, code=message.code, reason=message.message)
        with self._progress:
            was_other_version = self._machine.is_other_version
            self._machine.on_parcel(message, blocks, self._clock.now())
            self._progress.notify_all()
        if was_other_version:
            _log.info(event("kvstore_understood", address=self._address))
        return True

    def _on_other_version(self, error: VersionMismatch) -> None:
        """Back off, without an answer; log it once, and once more when the store can be understood again."""
        with self._progress:
            is_news = self._machine.on_other_version(self._clock.now())
            self._progress.notify_all()
        if is_news:
            name = "other_wire_version"
            self._limited_log.warning(name, address=self._address, ours=error.ours, theirs=error.theirs)

    def _follow_all(self) -> None:
        while True:
            with self._lock:
                actions = self._machine.take_actions()
            if not actions:
                return
            for action in actions:
                self._follow(action)

    def _follow(self, action: ClientAction) -> None:
        match action:
            case SendToStore():
                self._send(action.parcel)
            case MapArena():
                arena = self._map(action)
                with self._progress:
                    self._machine.on_mapped(arena)
                    self._progress.notify_all()
            case CopyIn():
                self._copy(action)

    def _send(self, parcel: Parcel[ToStore]) -> None:
        try:
            self._socket.send_multipart([encode_to_store(parcel.message), *parcel.blocks], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            _log.debug(event("kvstore_send_failed", address=self._address, error=error))
            self._lose_link()

    def _map(self, action: MapArena) -> ArenaView | None:
        if self._last_arena is not None and self._last_arena.incarnation == action.incarnation:
            return self._last_arena
        try:
            self._last_arena = map_arena(action.file, action.incarnation)
        except KVFerryError as error:
            _log.info(event("kvstore_arena_not_shared", address=self._address, reason=error.message))
            self._last_arena = None
        return self._last_arena

    def _copy(self, action: CopyIn) -> None:
        """Copy blocks to their slots. Only this thread ends a put, so the caller's sources stay valid during the copy."""
        with self._lock:
            if not self._machine.calls.is_open(action.number):
                return
        for source, target in action.copies:
            np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))
        with self._lock:
            self._machine.calls.on_copied(action.number, self._clock.now())

    def _lose_link(self) -> None:
        """Forget the store, and unmap its arena: the store has probably died, and the next one needs the memory."""
        self._last_arena = None
        with self._progress:
            self._machine.on_link_lost(self._clock.now())
            self._progress.notify_all()

    def _close_connection(self) -> None:
        """Events stop first: ZeroMQ's thread blocks on an event without a reader."""
        self._socket.monitor(None, 0)
        self._monitor.close(linger=0)
        self._socket.close(linger=200)  # for the goodbye


def connect_store(
    config: KVStoreSection, client_name: str, block_bytes: int, clock: Clock, ids: IdSource, keys: ClusterKeys | None = None
) -> StoreClient:
    """Return a client of the server at ``config.address``, which need not run yet; ``keys`` encrypt the connection."""
    options = ClientOptions(
        client_id=new_hex_id(ids, f"{client_name[:400]}-"),
        block_bytes=block_bytes,
        request_timeout_s=config.request_timeout_s,
        heartbeat_interval_s=config.heartbeat_interval_s,
        process=own_process(),
    )
    return StoreClient(config.address, options, clock, ids, keys)


def own_process() -> tuple[int, int] | None:
    """Return the unique name of this process: its number and start time; None without ``/proc``."""
    pid = os.getpid()
    start_ticks = process_start_ticks(pid)
    return None if start_ticks is None else (pid, start_ticks)


def process_start_ticks(pid: int) -> int | None:
    """Return field 22 of ``/proc/<pid>/stat``; None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])  # the name before may hold blanks and brackets
