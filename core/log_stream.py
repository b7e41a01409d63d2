"""The stream of a process's log lines: a reader that stops reading, as a paused pager does, does not stop the process.

Owns writing without waiting, and the count of what is lost. Knows nothing of lines' contents: ``core.log`` makes them.
"""

from __future__ import annotations

import os
import select
import socket
import stat
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol, TextIO

PATIENCE_S = 0.25  # a busy reader gets so long to make room; one that has used it up gets none until it reads again


class LogSink(Protocol):
    """Where lines go: a text file, or a ``LogStream``."""

    def write(self, text: str, /) -> int:
        """Write a whole line."""

    def flush(self) -> None:
        """Leave nothing in a buffer."""


class LogStream:
    """Writes lines to ``fd`` by ``write``, which may take a part of them, or raise BlockingIOError, but never waits.

    A line for which there is no room in time is lost as a whole and counted in ``num_lost``; of one that has begun, the rest
    is written before the next line. ``is_stuck`` is True from then on until something is read. The caller sees to it that one
    thread writes at a time.
    """

    def __init__(self, fd: int, write: Callable[[bytes], int]) -> None:
        self.num_lost = 0
        self.is_stuck = False
        self._write = write
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self._rest = b""  # of a line that has begun

    def write(self, text: str, /) -> int:
        """Write a line, or lose it. Raises: OSError as ``write`` does, for example without a reader."""
        data = text.encode(errors="backslashreplace")
        self._rest = self._write_all(self._rest)
        left = data if self._rest else self._write_all(data)
        if left == data:
            self.num_lost += 1
        else:
            self._rest = left
        return len(text)

    def flush(self) -> None:
        """Do nothing: there is no buffer."""

    def _write_all(self, data: bytes) -> bytes:
        """Return what could not be written in time."""
        deadline = time.monotonic() + (0.0 if self.is_stuck else PATIENCE_S)
        while data:
            try:
                num_bytes = self._write(data)
            except BlockingIOError:
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not self._poll.poll(left_s * 1e3):
                    self.is_stuck = True
                    return data
            else:
                self.is_stuck = False
                data = data[num_bytes:]
        return data


def open_log_stream(stream: TextIO) -> LogSink:
    """Return a ``LogStream`` to a pipe, terminal or socket; ``stream`` itself if it is another file: that needs no reader."""
    try:
        fd = stream.fileno()
        mode = os.fstat(fd).st_mode
        if stat.S_ISSOCK(mode):
            connection = socket.socket(fileno=os.dup(fd))
            return LogStream(fd, lambda data: connection.send(data, socket.MSG_DONTWAIT))
        if stat.S_ISFIFO(mode) or os.isatty(fd):
            # Opened again: the flag belongs to what was opened, which other processes share.
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            own = os.open(f"/proc/self/fd/{fd}", flags)
            return LogStream(own, partial(os.write, own))
    except (OSError, ValueError):  # closed, without a number, or not to be opened again
        pass
    return stream
