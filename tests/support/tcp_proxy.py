"""A TCP proxy that goes wrong on command: a network between two processes that goes silent, heals, or breaks. For tests.

Owns the connections that go through it. Knows nothing of what is carried. Tests put it between real processes by telling one of
them the proxy's address instead of the other's. All of it is done by one thread; each call returns once it holds.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

BUFFER_BYTES = 1 << 20  # what the kernel takes in of each direction while nothing passes, about
_PIECE_BYTES = 64 << 10
_CONNECT_TIMEOUT_S = 2.0
_CALL_TIMEOUT_S = 10.0
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER with no time: closing sends RST


@dataclass(slots=True, eq=False)
class _Way:
    """One direction of a connection."""

    source: socket.socket
    sink: socket.socket
    is_answer: bool  # from the target to the client
    pending: bytes = b""
    has_ended: bool = False  # the source has sent its last byte


class TcpProxy:
    """Listens at ``address`` and carries each connection to ``target``, until that is changed.

    While it is silent no byte and no end of a connection passes, in either direction. What is sent meanwhile waits in buffers,
    as it waits for retransmission where a network is cut, and arrives late when it heals. New connections are accepted by the
    kernel, and get no answer. Use it as a context manager, or call ``close``.
    """

    def __init__(self, target: tuple[str, int], listen_at: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self._target = target
        self._listener = socket.create_server(listen_at)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._ways: list[_Way] = []
        self._calls: deque[tuple[Callable[[], None], threading.Event]] = deque()
        self._wake_read, self._wake_write = os.pipe()
        self._bytes_left = math.inf  # of answers, until it is silent
        self._requests_pass = False  # even so
        self._damages: bool | None = None  # the next piece of answers (True) or requests (False)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=f"tcp-proxy {self.address[1]}", daemon=True)
        self._thread.start()

    @property
    def is_silent(self) -> bool:
        """True while no answer passes."""
        return self._bytes_left <= 0

    # ---- what can be done to it --------------------------------------------------------------------------------------

    def silence(self, num_bytes: int = 0) -> None:
        """Let nothing pass any more, once so many more bytes have gone from the target to its readers."""
        self._call(lambda: self._set_bytes_left(num_bytes))

    def silence_answers(self, num_bytes: int) -> None:
        """Let no byte pass any more from the target to its readers, once so many more have.

        Requests do, on connections that exist. One that they find broken is broken on both sides.
        """
        self._call(lambda: self._set_bytes_left(num_bytes, requests_pass=True))

    def heal(self) -> None:
        """Let everything pass again, first of all what was sent meanwhile."""
        self._call(lambda: self._set_bytes_left(math.inf))

    def damage_answers(self) -> None:
        """Flip a bit in the next piece that the target sends."""
        self._call(lambda: setattr(self, "_damages", True))

    def damage_requests(self) -> None:
        """Flip a bit in the next piece that is sent to the target."""
        self._call(lambda: setattr(self, "_damages", False))

    def reset(self) -> None:
        """Break all connections, on both sides at once; new ones are carried."""
        self._call(self._reset_all)

    def close(self) -> None:
        """Break all connections and carry no more. Idempotent."""
        if self._is_closed:
            return
        self._call(self._stop)
        self._thread.join(_CALL_TIMEOUT_S)
        self._listener.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _call(self, change: Callable[[], None]) -> None:
        """Have the thread do something, and wait until it has."""
        is_done = threading.Event()
        self._calls.append((change, is_done))
        os.write(self._wake_write, b"!")
        assert is_done.wait(_CALL_TIMEOUT_S), f"the proxy at port {self.address[1]} does not react"

    # ---- inside, by the thread alone ---------------------------------------------------------------------------------

    def _set_bytes_left(self, number: float, *, requests_pass: bool = False) -> None:
        self._bytes_left = number
        self._requests_pass = requests_pass

    def _reset_all(self) -> None:
        for way in list(self._ways):
            self._break(way)

    def _stop(self) -> None:
        self._reset_all()
        self._is_closed = True

    def _run(self) -> None:
        while not self._is_closed:
            wanted = self._wanted()
            poll = select.poll()
            for number, events in wanted.items():
                poll.register(number, events)
            ready = {number for number, _ in poll.poll()}
            if self._wake_read in ready:
                self._take_calls()
                continue  # what was wanted may not be so any more
            for way in list(self._ways):
                if self._passes(way) and way in self._ways:
                    self._serve(way, ready)
            if self._listener.fileno() in ready and not self.is_silent:
                self._accept()

    def _wanted(self) -> dict[int, int]:
        """Return what to wait for, by file descriptor. Where it is silent it does not even look at its connections."""
        wanted = {self._wake_read: select.POLLIN}
        if not self.is_silent:
            wanted[self._listener.fileno()] = select.POLLIN
        for way in filter(self._passes, self._ways):
            if way.pending:
                wanted[way.sink.fileno()] = wanted.get(way.sink.fileno(), 0) | select.POLLOUT
            elif not way.has_ended:
                wanted[way.source.fileno()] = wanted.get(way.source.fileno(), 0) | select.POLLIN
        return wanted

    def _passes(self, way: _Way) -> bool:
        return not self.is_silent or (self._requests_pass and not way.is_answer)

    def _take_calls(self) -> None:
        os.read(self._wake_read, 1)
        change, is_done = self._calls.popleft()
        change()
        is_done.set()

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        try:
            server = socket.create_connection(self._target, timeout=_CONNECT_TIMEOUT_S)
        except OSError:
            _close_with_reset(client)  # nearly what it would have met without the proxy
            return
        for end in (client, server):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        self._ways += [_Way(client, server, is_answer=False), _Way(server, client, is_answer=True)]

    def _serve(self, way: _Way, ready: set[int]) -> None:
        try:
            if not way.pending and not way.has_ended and way.source.fileno() in ready:
                way.pending = way.source.recv(_PIECE_BYTES)
                way.has_ended = not way.pending
                if way.pending and self._damages is way.is_answer:
                    way.pending, self._damages = _with_a_flipped_bit(way.pending), None
                if way.has_ended:
                    self._end(way)
            if way.pending:
                self._send(way)
        except BlockingIOError:
            pass  # later
        except OSError:
            self._break(way)

    def _send(self, way: _Way) -> None:
        if not way.is_answer:
            way.pending = way.pending[way.sink.send(way.pending) :]
            return
        piece = way.pending[: int(min(len(way.pending), self._bytes_left))]
        num_sent = way.sink.send(piece)
        way.pending = way.pending[num_sent:]
        self._bytes_left -= num_sent

    def _end(self, way: _Way) -> None:
        """Pass the end on; with the second one the connection is over."""
        way.sink.shutdown(socket.SHUT_WR)
        other = next(found for found in self._ways if found.source is way.sink)
        if other.has_ended:
            self._forget(way)
            way.source.close()
            way.sink.close()

    def _break(self, way: _Way) -> None:
        """End a connection by a reset on both sides."""
        if way in self._ways:
            self._forget(way)
            _close_with_reset(way.source)
            _close_with_reset(way.sink)

    def _forget(self, way: _Way) -> None:
        """Take out both directions of a connection."""
        self._ways = [found for found in self._ways if found.source not in (way.source, way.sink)]


def _with_a_flipped_bit(piece: bytes) -> bytes:
    return piece[:-1] + bytes([piece[-1] ^ 1])


def _close_with_reset(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    end.close()
