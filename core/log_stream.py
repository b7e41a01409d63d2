"""The stream of a process's log lines: a reader that stops reading, as a paused pager does, does not stop the process.

Owns writing without waiting, and the count of what is lost. Knows nothing of lines' contents: ``core.log`` makes them.

    line ──▶ written at once
       └───▶ kept, while there is no room ──▶ written by a thread, as it is read
                └───▶ lost and counted, beyond ``MAX_KEPT_LINES``

There is no lock: a finalizer or a signal handler that logs may run in the middle of a line, on the thread that writes it.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Protocol, TextIO

MAX_KEPT_LINES = 1000
_FINISH_POLL_S = 0.005

Write = Callable[[bytes], int]  # writes a part, at least a byte; BlockingIOError = no room


class LogSink(Protocol):
    """Where lines go: a text file, or a ``LogStream``."""

    def write(self, text: str, /) -> int:
        """Write a whole line."""

    def flush(self) -> None:
        """Leave nothing in a buffer that waits for more."""


class LogStream:
    """Writes lines to ``fd`` by ``write``, which never waits. ``report`` makes the line that says how many were lost.

    One thread at a time, as handlers of a log see to. The line of ``report`` is where the lost ones would have been.
    Raises: RuntimeError if no thread can be started.
    """

    def __init__(self, fd: int, write: Write, report: Callable[[int], str]) -> None:
        self._fd = fd
        self._write = write
        self._report = report
        self._kept: SimpleQueue[bytes] = SimpleQueue()
        self._num_kept = self._num_written = 0  # each counted by one thread; equal = all that was kept is written
        self._lost: deque[None] = deque()  # an entry for each line since the last report
        threading.Thread(target=self._drain, name="kvferry-log", daemon=True).start()

    def write(self, text: str, /) -> int:
        """Write a line, keep it, or lose it. Raises: OSError as ``write`` does, for example without a reader."""
        data = text.encode(errors="backslashreplace")
        if self._lost or self._kept.qsize() >= MAX_KEPT_LINES:
            self._lose()
        elif self._num_kept != self._num_written:
            self._keep(data)
        elif rest := self._write_now(data):
            self._keep(rest)
        return len(text)

    def flush(self) -> None:
        """Do nothing: what is kept is written as soon as there is room."""

    def finish(self, patience_s: float) -> None:
        """Wait for a reader of what is kept, before the process ends."""
        deadline = time.monotonic() + patience_s
        while (self._num_kept != self._num_written or self._lost) and time.monotonic() < deadline:
            time.sleep(_FINISH_POLL_S)

    def _keep(self, data: bytes) -> None:
        self._num_kept += 1
        self._kept.put(data)

    def _lose(self) -> None:
        self._lost.append(None)
        if self._kept.qsize() <= MAX_KEPT_LINES:
            self._keep(b"")  # the thread may have looked for lost ones before

    def _write_now(self, data: bytes) -> bytes:
        """Write what fits now; return the rest."""
        while data:
            try:
                data = data[self._write(data) :]
            except BlockingIOError:
                break
        return data

    def _drain(self) -> None:
        while True:
            self._write_patiently(self._kept.get())
            while self._kept.empty() and (num_lost := len(self._lost)):
                self._write_patiently(self._report(num_lost).encode())
                for _ in range(num_lost):
                    self._lost.popleft()
            self._num_written += 1

    def _write_patiently(self, data: bytes) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        with contextlib.suppress(OSError):  # the next line raises it where it is logged
            while data := self._write_now(data):
                poll.poll()


def open_log_stream(stream: TextIO, report: Callable[[int], str]) -> LogSink:
    """Return a ``LogStream`` to a pipe, terminal or socket; ``stream`` itself if it is another file: that needs no reader."""
    try:
        fd = stream.fileno()
        mode = os.fstat(fd).st_mode
        if stat.S_ISSOCK(mode):
            connection = socket.socket(fileno=os.dup(fd))
            return LogStream(fd, lambda data: connection.send(data, socket.MSG_DONTWAIT), report)
        if stat.S_ISFIFO(mode) or os.isatty(fd):
            return LogStream(fd, _without_waiting(fd), report)
    except (OSError, ValueError, RuntimeError):  # closed, without a number, or there can be no thread
        pass
    return stream


def _without_waiting(fd: int) -> Write:
    """Return what writes to a pipe or terminal without waiting."""
    try:
        # Opened again: the flag belongs to what was opened, which other processes share.
        return partial(os.write, os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:  # another user's, as after sudo
        return partial(_write_if_room, fd)


def _write_if_room(fd: int, data: bytes) -> int:
    """Write as much as there is room for where poll says so; only another process, writing in between, could make it wait."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    if not poll.poll(0):
        raise BlockingIOError
    return os.write(fd, data[: select.PIPE_BUF])
