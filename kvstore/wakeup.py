"""Wakes a thread that waits in a poll: a file descriptor that other threads make readable."""

from __future__ import annotations

import os


class Wakeup:
    """An eventfd. ``fd`` is readable from ``set`` until ``clear``."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closed = False

    def set(self) -> None:
        """Make it readable; from any thread, but not after ``close``."""
        if not self._is_closed:
            os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Make it unreadable."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Close the descriptor."""
        self._is_closed = True
        os.close(self.fd)
