"""The transfer thread: the only thread that touches transports while a worker serves.

``TransferExecutor`` carries out commands on transports and turns what they report into events; it has no thread of its own, so
that the simulation can drive it. ``TransferThread`` runs one: it sleeps until a command or a socket wakes it, and polls with
a back-off only while a transport has reads in flight that no socket announces.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

import zmq

from connectors.p2p.actions import (
    CancelRead,
    ClosePeer,
    OpenPeer,
    PeerFailed,
    PostRead,
    ReadEnded,
    TransferCommand,
    TransferEvent,
)
from core.errors import KVFerryError, PeerUnreachable
from core.log import event
from core.transport import PeerId, Transport

KV_POOL_REGION = 0

_log = logging.getLogger(__name__)


class TransferExecutor:
    """Runs commands on transports, one at a time. ``report`` receives every event; it must not block."""

    def __init__(self, transports: Mapping[str, Transport], report: Callable[[TransferEvent], None]) -> None:
        self._transports = dict(transports)
        self._report = report
        self._peers: dict[PeerId, Transport] = {}
        self._handles: dict[int, tuple[Transport, int]] = {}  # read id → where it runs
        self._read_ids: dict[tuple[str, int], int] = {}  # transport and handle → read id

    def execute(self, command: TransferCommand) -> None:
        """Carry out one command. Failures become events."""
        match command:
            case OpenPeer():
                self._open(command)
            case ClosePeer():
                transport = self._peers.pop(command.peer, None)
                if transport is not None:
                    transport.remove_peer(command.peer)
            case PostRead():
                self._post(command)
            case CancelRead():
                found = self._handles.get(command.read_id)
                if found is not None:
                    found[0].cancel(found[1])

    def poll(self) -> bool:
        """Let every transport progress and report the reads that ended; True if any did."""
        has_ended = False
        for transport in self._transports.values():
            for result in transport.poll():
                has_ended = True
                read_id = self._read_ids.pop((transport.name, result.handle))
                del self._handles[read_id]
                self._report(ReadEnded(read_id, result.error))
        return has_ended

    def pollables(self) -> list[zmq.Socket[bytes] | int]:
        """Return what ``poll`` should be called for."""
        return [pollable for transport in self._transports.values() for pollable in transport.pollables()]

    def max_wait_s(self) -> float | None:
        """Return how long ``poll`` may be left alone, None = for ever."""
        waits = [wait for transport in self._transports.values() if (wait := transport.max_wait_s()) is not None]
        return min(waits, default=None)

    def close(self) -> None:
        """Fence all peers and close all transports."""
        for transport in self._transports.values():
            transport.close()
        self._peers.clear()

    def _open(self, command: OpenPeer) -> None:
        transport = self._transports[command.transport]
        try:
            transport.add_peer(command.peer, command.metadata)
        except KVFerryError as error:
            self._report(PeerFailed(command.peer, error))
            return
        self._peers[command.peer] = transport

    def _post(self, command: PostRead) -> None:
        transport = self._peers.get(command.peer)
        if transport is None:
            error = PeerUnreachable(f"{command.peer.address} is not open")
            self._report(ReadEnded(command.read_id, error))
            return
        try:
            handle = transport.post_read(command.peer, KV_POOL_REGION, command.remote_rows, command.local_rows)
        except KVFerryError as error:
            self._report(ReadEnded(command.read_id, error))
            return
        self._handles[command.read_id] = (transport, handle)
        self._read_ids[transport.name, handle] = command.read_id


class TransferThread:
    """Owns an executor and runs it in a thread. ``on_death`` is called from the thread if it ends by a bug of ours."""

    def __init__(self, executor: TransferExecutor, on_death: Callable[[BaseException], None]) -> None:
        self._executor = executor
        self._on_death = on_death
        self._commands: deque[TransferCommand] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)

    def start(self) -> None:
        """Start the thread. The transports belong to it from now on."""
        self._thread.start()

    def submit(self, command: TransferCommand) -> None:
        """Queue a command. The reads in flight bound the queue. Any thread."""
        self._commands.append(command)
        os.eventfd_write(self._wake_fd, 1)

    def stop(self) -> None:
        """End the thread and close the transports. Blocks until they are closed; call it once."""
        self._is_stopping = True
        os.eventfd_write(self._wake_fd, 1)
        if self._thread.ident is not None:
            self._thread.join()
        else:
            self._executor.close()
        os.close(self._wake_fd)

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._turn()
        except Exception as error:
            _log.exception(event("transfer_thread_died", error=error))
            self._on_death(error)
        finally:
            self._executor.close()

    def _turn(self) -> None:
        while self._commands:
            self._executor.execute(self._commands.popleft())
        if not self._executor.poll() and not self._commands:
            self._wait(self._executor.max_wait_s())

    def _wait(self, max_wait_s: float | None) -> None:
        """Sleep until a command, a socket or the time. ZeroMQ's poll counts in ms, so shorter waits sleep after a look."""
        is_short = max_wait_s is not None and 0 < max_wait_s < 0.001
        timeout_ms = -1 if max_wait_s is None else 0 if is_short else int(1000 * max_wait_s)
        sources = [(self._wake_fd, zmq.POLLIN), *((pollable, zmq.POLLIN) for pollable in self._executor.pollables())]
        ready = zmq.zmq_poll(sources, timeout_ms)
        if is_short and not ready and max_wait_s is not None:
            time.sleep(max_wait_s)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
