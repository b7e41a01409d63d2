"""The socket that clients connect to. A module of its own, which those can import who only try whether it can be bound."""

from __future__ import annotations

import errno
import os
import socket
from typing import Any

BACKLOG = 2048  # connections that the kernel queues until they are accepted

_NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # after which asyncio tries again a second later


class ListeningSocket(socket.socket):
    """A listening socket that says once that no descriptor is left, and then that nobody waits.

    asyncio accepts several connections in a row, also after that failure: each further one would be logged, and plan one more
    series of tries.
    """

    _has_failed = False

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection.

        Raises:
            OSError: as ``socket.accept``; BlockingIOError in place of what the call before has raised for want of descriptors.
        """
        if self._has_failed:
            self._has_failed = False
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        try:
            return super().accept()
        except OSError as error:
            self._has_failed = error.errno in _NO_RESOURCES
            raise


def create_listener(host: str, port: int, *, is_shared: bool = False) -> ListeningSocket:
    """Return a socket that listens; ``""`` and ``*`` are all IPv4 addresses, and of a name the IPv4 address is taken.

    A shared port takes sockets of other processes.

    Raises:
        OSError: the address is in use, or not of this machine.
        TypeError, ValueError: the host is no possible name.
    """
    name = "" if host == "*" else host
    family = socket.AF_INET6 if ":" in name else socket.AF_INET
    listening = socket.create_server((name, port), family=family, backlog=BACKLOG, reuse_port=is_shared)
    return ListeningSocket(fileno=listening.detach())
