"""One GET to a process of this machine with a bounded time, by the standard library: the supervisor loads no HTTP client."""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import time
from typing import Any, cast
from urllib.parse import urlsplit

_MAX_BODY_BYTES = 16 << 20  # /metrics of a router with many workers


class NoAnswer(OSError):
    """The address refuses connections, or did not answer in time."""


class _UntilDeadline(io.RawIOBase):
    """What a socket receives until a deadline: its own time limit is for each piece, and begins anew with the next."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock, self._received, self._deadline = sock, sock.makefile("rb", buffering=0), deadline

    def makefile(self, _mode: str) -> io.BufferedReader:
        """Return the file that ``HTTPResponse`` asks a socket for."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        """Return True: it is for reading."""
        return True

    def readinto(self, buffer: Any) -> int | None:  # noqa: ANN401 - as the stubs have it
        """Wait for the next piece, at most for the time that is left."""
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the answer is not whole in time")
        self._sock.settimeout(left_s)
        return self._received.readinto(buffer)

    def close(self) -> None:
        """Let go of the socket."""
        self._received.close()
        super().close()


def get(url: str, timeout_s: float) -> tuple[int, str]:
    """Return status and body, of which bytes that are not UTF-8 are replaced.

    A certificate is not checked: it names the host that clients know, not this machine.

    Raises:
        NoAnswer: it cannot be connected to, or has not answered in full within ``timeout_s``.
        OSError: the answer is not HTTP, for example a closed connection.
    """
    parts = urlsplit(url)
    deadline = time.monotonic() + timeout_s
    connection = _connection(parts.scheme, parts.hostname or "", parts.port, timeout_s)
    try:
        connection.request("GET", parts.path)
        received = _UntilDeadline(connection.sock, deadline)
        with http.client.HTTPResponse(cast("socket.socket", received), method="GET") as response:
            response.begin()
            return response.status, response.read(_MAX_BODY_BYTES).decode(errors="replace")
    except (TimeoutError, ConnectionRefusedError) as error:
        raise NoAnswer(f"{url}: {error!r}") from None
    except http.client.HTTPException as error:
        raise ConnectionError(f"{url}: {error!r}") from None
    finally:
        connection.close()


def _connection(scheme: str, host: str, port: int | None, timeout_s: float) -> http.client.HTTPConnection:
    if scheme != "https":
        return http.client.HTTPConnection(host, port, timeout=timeout_s)
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)
