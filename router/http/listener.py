"""The socket that clients connect to. A module of its own, which those can import who only try whether it can be bound."""

from __future__ import annotations

import socket

BACKLOG = 2048  # connections that the kernel queues until they are accepted


def create_listener(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """Return a socket that listens; ``""`` and ``*`` are all IPv4 addresses, and of a name the IPv4 address is taken.

    A shared port takes sockets of other processes.

    Raises:
        OSError: the address is in use, or not of this machine.
        TypeError, ValueError: the host is no possible name.
    """
    name = "" if host == "*" else host
    family = socket.AF_INET6 if ":" in name else socket.AF_INET
    return socket.create_server((name, port), family=family, backlog=BACKLOG, reuse_port=is_shared)
