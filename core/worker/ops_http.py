"""A worker's operations port: a small HTTP/1.1 server on asyncio for probes, metrics, drain and roles.

Owns reading a request line within limits and writing one answer; every connection serves one request. Knows nothing of what the
answers mean: the shell (``core.worker.process``) passes a function per method and path. It imports no web framework, so that a
worker starts fast and stays idle without requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import parse_qsl

from core.errors import ConfigError
from core.log import event
from core.wire.sockets import is_loopback

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 16 << 10
MAX_CONNECTIONS = 256  # at a time; more are closed at once
REQUEST_TIMEOUT_S = 5.0
_BACKLOG = 100  # connections that the kernel queues until they are accepted


@dataclass(frozen=True, slots=True)
class OpsResponse:
    """One answer."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of_json(cls, status: int, content: object) -> OpsResponse:
        """Return an answer with a JSON body."""
        return cls(status, json.dumps(content).encode(), "application/json")


Routes = Mapping[tuple[str, str], Callable[[], OpsResponse]]
Query = Mapping[str, str]
QueryRoutes = Mapping[tuple[str, str], Callable[[Query], OpsResponse]]


class OpsServer:
    """Serves ``routes``, keyed by (method, path), and ``query_routes``, which read the query. GET routes answer HEAD too.

    Other routes change the worker, and the port has no authentication: they are for callers whose host ``is_trusted``, by
    default this machine (in a pod: its own containers), and refuse requests of web pages. ``setting`` is the port's name in
    errors.
    """

    def __init__(
        self,
        routes: Routes,
        is_trusted: Callable[[str], bool] = is_loopback,
        setting: str = "worker.ops_port",
        query_routes: QueryRoutes | None = None,
    ) -> None:
        self._routes: QueryRoutes = {**{key: _without_query(answer) for key, answer in routes.items()}, **(query_routes or {})}
        self._is_trusted = is_trusted
        self._setting = setting
        self._num_connections = 0
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> str:
        """Listen and return the base address ``http://host:port``; port 0 takes a free one.

        Raises:
            ConfigError: the address is in use or not of this machine.
        """
        try:
            # One connection is accepted at a time: where there is no descriptor left, asyncio tries as often as this says, logs
            # each failure, and plans as many further tries.
            self._server = await asyncio.start_server(self._serve, host, port, limit=MAX_HEAD_BYTES, backlog=1)
        except OSError as error:
            raise ConfigError(
                f"{self._setting} = {port}: cannot listen on {host}:{port}: {error.strerror or error}; stop what listens "
                "there, or choose another port; 0 is any free one",
                param=self._setting,
            ) from None
        for listening in self._server.sockets:
            with listening.dup() as same:
                same.listen(_BACKLOG)  # asyncio has set the queue to what it accepts at a time
        bound = self._server.sockets[0].getsockname()[1]
        return f"http://[{host}]:{bound}" if ":" in host else f"http://{host}:{bound}"

    async def stop(self) -> None:
        """Stop listening; an answer being written is cut off at the request timeout at the latest."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_connections += 1
        try:
            if self._num_connections <= MAX_CONNECTIONS:
                await self._serve_one(reader, writer)
        finally:
            self._num_connections -= 1
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                peer = writer.get_extra_info("peername")
                method, response = await self._answer(reader, str(peer[0]) if peer else "")
                writer.write(_encode(response, is_head=method == "HEAD"))
                await writer.drain()

    async def _answer(self, reader: asyncio.StreamReader, caller: str) -> tuple[str, OpsResponse]:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return "", OpsResponse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, b"the head of the request is too large\n")
        except asyncio.IncompleteReadError:
            return "", OpsResponse(HTTPStatus.BAD_REQUEST, b"malformed request\n")
        request_line, *fields = head.split(b"\r\n")
        parts = request_line.split(b" ")
        if len(parts) != 3 or not parts[2].startswith(b"HTTP/1."):
            return "", OpsResponse(HTTPStatus.BAD_REQUEST, b"malformed request\n")
        method = parts[0].decode("latin-1")
        path, _, query = parts[1].decode("latin-1").partition("?")
        if method not in ("GET", "HEAD") and any(field.lower().startswith(b"origin:") for field in fields):
            # Browsers add it to every request of a page; an open page must not be able to drain a worker.
            return method, OpsResponse(HTTPStatus.FORBIDDEN, b"not for web pages\n")
        if method not in ("GET", "HEAD") and not self._is_trusted(caller):
            return method, OpsResponse(HTTPStatus.FORBIDDEN, b"only from the worker's own host or pod\n")
        return method, self._respond(method, path, dict(parse_qsl(query, keep_blank_values=True)))

    def _respond(self, method: str, path: str, query: Query) -> OpsResponse:
        handler = self._routes.get(("GET" if method == "HEAD" else method, path))
        if handler is not None:
            try:
                return handler(query)
            except Exception:  # a request boundary: a broken probe must not end the worker
                logger.exception(event("ops_handler_failed", path=path))
                return OpsResponse(HTTPStatus.INTERNAL_SERVER_ERROR, b"internal error\n")
        allowed = {known_method for known_method, known in self._routes if known == path}
        status = HTTPStatus.METHOD_NOT_ALLOWED if allowed else HTTPStatus.NOT_FOUND
        allowed |= {"HEAD"} if "GET" in allowed else set()
        headers = (("allow", ", ".join(sorted(allowed))),) if allowed else ()
        return OpsResponse(status, f"{status.phrase}\n".encode(), headers=headers)


def _without_query(answer: Callable[[], OpsResponse]) -> Callable[[Query], OpsResponse]:
    return lambda query: answer()


def _encode(response: OpsResponse, *, is_head: bool) -> bytes:
    more = "".join(f"{name}: {value}\r\n" for name, value in response.headers)
    head = (
        f"HTTP/1.1 {response.status} {HTTPStatus(response.status).phrase}\r\n"
        f"Content-Type: {response.content_type}\r\n"
        f"Content-Length: {len(response.body)}\r\n"
        f"{more}Connection: close\r\n\r\n"
    )
    return head.encode() + (b"" if is_head else response.body)
