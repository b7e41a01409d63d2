"""An HTTP server before another one, that fails on command: it answers errors by itself, or passes answers on slowly.

For tests. One thread for each connection, and one request on each. Knows paths, and nothing of what is carried.
"""

from __future__ import annotations

import contextlib
import select
import socket
import socketserver
import threading
from types import TracebackType
from typing import Self, cast

_PIECE_BYTES = 64 << 10
_HEAD_END = b"\r\n\r\n"


class HttpRelay(socketserver.ThreadingTCPServer):
    """Passes requests on to ``target``. ``status``, if not 0, is the answer to requests whose path begins with ``path``.

    Answers of that path begin ``delay_s`` late, and so does each piece of them. A context manager.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, target: str, path: str) -> None:
        self.target, self.path = target, path
        self.status = 0
        self.delay_s = 0.0
        self.num_failed = 0
        self.is_over = threading.Event()
        super().__init__(("127.0.0.1", 0), _Connection)
        threading.Thread(target=self.serve_forever, args=(0.1,), name="http-relay", daemon=True).start()

    @property
    def base_url(self) -> str:
        """Of this server."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def heal(self) -> None:
        """Pass everything on again."""
        self.status, self.delay_s = 0, 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.is_over.set()
        self.shutdown()
        self.server_close()


class _Connection(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        relay, client = cast(HttpRelay, self.server), cast(socket.socket, self.request)
        with contextlib.suppress(OSError):
            request = self._read_request(client)
            if not request:
                return
            is_affected = request.split(b" ", 2)[1].startswith(relay.path.encode())
            if is_affected and relay.status:
                relay.num_failed += 1
                client.sendall(_error(relay.status))
                return
            host, _, port = relay.target.removeprefix("http://").partition(":")
            with socket.create_connection((host, int(port))) as server:
                server.sendall(request)
                self._pass_on(relay, server, client, is_affected=is_affected)

    def _read_request(self, client: socket.socket) -> bytes:
        """Return a request that asks for the end of the connection after its answer."""
        received = b""
        while _HEAD_END not in received:
            piece = client.recv(_PIECE_BYTES)
            if not piece:
                return b""
            received += piece
        head, _, body = received.partition(_HEAD_END)
        lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection:")]
        lengths = [line.partition(b":")[2] for line in lines if line.lower().startswith(b"content-length:")]
        while lengths and len(body) < int(lengths[0]):
            body += client.recv(_PIECE_BYTES)
        return b"\r\n".join([*lines, b"Connection: close"]) + _HEAD_END + body

    def _pass_on(self, relay: HttpRelay, server: socket.socket, client: socket.socket, *, is_affected: bool) -> None:
        while True:
            ready, _, _ = select.select([server, client], [], [])
            if client in ready:  # it has left: it sends nothing after its request
                return
            piece = server.recv(_PIECE_BYTES)
            if not piece or (is_affected and relay.is_over.wait(relay.delay_s)):
                return
            client.sendall(piece)


def _error(status: int) -> bytes:
    body = b'{"error": {"message": "by the relay", "code": %d}}' % status
    head = b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
    return head % (status, len(body)) + body
