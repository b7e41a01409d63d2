"""The stream of a process's log lines: a reader that stops reading, as a paused pager does, does not stop the process.

Owns writing without waiting, and the count of what is lost. Knows nothing of lines' contents: ``core.log`` makes them.

    line ──▶ written at once
       └───▶ kept, while there is no room ──▶ written by a thread, as it is read
                └───▶ lost and counted, beyond ``MAX_KEPT_BYTES``
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import stat
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol, TextIO

MAX_KEPT_BYTES = 256 << 10

Write = Callable[[bytes], int]  # writes a part, at least a byte; BlockingIOError = no room


class LogSink(Protocol):
    """Where lines go: a text file, or a ``LogStream``."""

    def write(self, text: str, /) -> int:
        """Write a whole line."""

    def flush(self) -> None:
        """Leave nothing in a buffer that waits for more."""


class LogStream:
    """Writes lines to ``fd`` by ``write``, which never waits. ``report`` makes the line that says how many were lost.

    Any thread. The line of ``report`` is where the lost ones would have been.
    """

    def __init__(self, fd: int, write: Write, report: Callable[[int], str]) -> None:
        self._fd = fd
        self._write = write
        self._report = report
        self._lock = threading.RLock()  # a signal handler that logs may come between two steps of a line
        self._kept = b""  # perhaps from within a line on
        self._num_lost = 0  # since the last line that is kept
        self._is_drained_by_thread = False

    def write(self, text: str, /) -> int:
        """Write a line, keep it, or lose it. Raises: OSError as ``write`` does, for example without a reader."""
        data = text.encode(errors="backslashreplace")
        with self._lock:
            if self._num_lost or len(self._kept) + len(data) > max(MAX_KEPT_BYTES, len(data)):
                self._num_lost += 1
            else:
                self._kept += data
            if not self._is_drained_by_thread and not self._write_kept():
                self._start_thread()
        return len(text)

    def flush(self) -> None:
        """Do nothing: what is kept is written as soon as there is room."""

    def finish(self, patience_s: float) -> None:
        """Wait for a reader of what is kept, before the process ends."""
        deadline = time.monotonic() + patience_s
        with contextlib.suppress(OSError):
            while not self._write_when_there_is_room(max(0.0, deadline - time.monotonic())):
                if time.monotonic() >= deadline:
                    return

    def _start_thread(self) -> None:
        with contextlib.suppress(RuntimeError):  # no thread can be started: the next line tries again
            threading.Thread(target=self._drain, name="kvferry-log", daemon=True).start()
            self._is_drained_by_thread = True

    def _drain(self) -> None:
        try:
            while not self._write_when_there_is_room():
                pass
        except OSError:  # the next line raises it where it is logged
            with self._lock:
                self._kept, self._is_drained_by_thread = b"", False

    def _write_when_there_is_room(self, timeout_s: float | None = None) -> bool:
        """Write what fits once there is room; return True if nothing is left."""
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        poll.poll(None if timeout_s is None else timeout_s * 1e3)
        with self._lock:
            is_done = self._write_kept()
            self._is_drained_by_thread &= not is_done
            return is_done

    def _write_kept(self) -> bool:
        """Write what fits now; return True if nothing is left. The lock is held."""
        while self._kept or self._num_lost:
            if not self._kept:
                self._kept, self._num_lost = self._report(self._num_lost).encode(), 0
            try:
                self._kept = self._kept[self._write(self._kept) :]
            except BlockingIOError:
                return False
        return True


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
    except (OSError, ValueError):  # closed, or without a number
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
