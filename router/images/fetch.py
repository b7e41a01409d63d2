"""Fetches images from http(s) URLs, within limits of host, time and size.

Owns connections to other hosts; ``router.images.hosts`` decides which hosts are allowed. Each connection goes to an address
that was checked, and the name is not resolved a second time. Each redirect is checked like the first URL.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any

import httpx

from core.errors import InvalidRequest
from router.images.hosts import DEFAULT_PORTS, Address, HostRules, as_address
from router.images.turns import FetchTurns
from router.threads import submit_job

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_HEADERS = {"accept": "image/*", "accept-encoding": "identity", "user-agent": "kvferry"}

_MAX_PORT = 65535
_MIN_CONNECT_S = 1.0  # for an address, and again for its TLS handshake: far more than a round trip
_RESOLVER_THREADS = 16  # slow names delay only other names, and only if there are so many

Resolve = Callable[[str, int], Awaitable[list[Address]]]
_Found = list[tuple[Any, ...]]  # as ``socket.getaddrinfo`` returns it


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchLimits:
    """Limits per image; ``max_fetches`` holds for all clients together.

    Three quarters of them may be for one host: the name and port of the first URL, wherever redirects lead. Another name of the
    same machine is another host. ``timeout_s`` bounds the wait for a turn, and again everything from then on up to the last
    byte.
    """

    max_bytes: int
    max_redirects: int
    timeout_s: float
    max_fetches: int


class ImageFetcher:
    """Fetches for one event loop."""

    def __init__(self, rules: HostRules, limits: FetchLimits, resolve: Resolve | None = None) -> None:
        self._rules = rules
        self._limits = limits
        self._resolver = Resolver()
        self._resolve = resolve or self._resolver.resolve
        self._turns = FetchTurns(limits.max_fetches, limits.timeout_s)
        self._client: httpx.AsyncClient | None = None

    async def fetch(self, url: str) -> bytes:
        """Return the content of a URL.

        Raises:
            InvalidRequest: it may not be fetched, or could not be fetched within the limits; says why.
            Overloaded: its turn did not come in time, or no thread can be started to resolve its host's name.
        """
        parsed = _parse(url)
        try:
            async with self._turns.take(parsed.netloc.decode("ascii")), asyncio.timeout(self._limits.timeout_s):
                return await self._follow(parsed)
        except TimeoutError:
            raise InvalidRequest(f"its host took longer than {self._limits.timeout_s:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:  # the last: no name that can be resolved
            raise InvalidRequest(f"it could not be fetched: {type(error).__name__}") from None

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        self._resolver.close()
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _follow(self, url: httpx.URL) -> bytes:
        for _ in range(self._limits.max_redirects + 1):
            found = await self._get(url)
            if isinstance(found, bytes):
                return found
            url = found
        raise InvalidRequest(f"its host redirects more than {self._limits.max_redirects} times")

    async def _get(self, url: httpx.URL) -> bytes | httpx.URL:
        """Return the body of a URL, or the target of its redirect."""
        response = await self._ask(url)
        try:
            if response.status_code in _REDIRECTS and "location" in response.headers:
                return _parse(str(url.join(response.headers["location"])))
            if response.status_code != httpx.codes.OK:
                raise InvalidRequest(f"its host answers with status {response.status_code}")
            return await self._read(response)
        finally:
            await response.aclose()

    async def _ask(self, url: httpx.URL) -> httpx.Response:
        """Send the request to the first allowed address to which a connection can be made. The caller closes the response."""
        addresses = await self._allowed_addresses(url)
        timeout_s = self._limits.timeout_s
        connect_s = max(_MIN_CONNECT_S, timeout_s / len(addresses))  # a silent address leaves time for the next
        timeout = httpx.Timeout(timeout_s, connect=connect_s)
        *others, last = (
            self._open_client().build_request(
                "GET",
                url.copy_with(host=str(address)),
                headers={**_HEADERS, "host": url.netloc.decode("ascii")},
                timeout=timeout,
                extensions={"sni_hostname": _host_of(url)},  # the certificate is verified against the name
            )
            for address in addresses
        )
        for request in others:
            with suppress(httpx.ConnectError, httpx.ConnectTimeout):
                return await self._open_client().send(request, stream=True)
        return await self._open_client().send(last, stream=True)

    async def _read(self, response: httpx.Response) -> bytes:
        """Return the body. Compressed bodies were not requested and are refused, because they may expand beyond the limit."""
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise InvalidRequest("its host sends it compressed")
        body = bytearray()
        async for piece in response.aiter_raw():
            body += piece
            if len(body) > self._limits.max_bytes:
                raise InvalidRequest(f"it has more than {self._limits.max_bytes} bytes")
        return bytes(body)

    async def _allowed_addresses(self, url: httpx.URL) -> list[Address]:
        """Return the allowed addresses of the URL's host, at least one."""
        host, port = _host_of(url), url.port or DEFAULT_PORTS[url.scheme]
        if not self._rules.allows_host(url.scheme, host, port):
            raise InvalidRequest(f"images are not fetched from {url.netloc.decode('ascii')}, see router.images.allowed_hosts")
        spelled = as_address(host)
        addresses = [spelled] if spelled is not None else await self._resolve(host, port)
        allowed = [address for address in addresses if self._rules.allows_address(address)]
        if not allowed:
            raise InvalidRequest(f"{host} has no address that images are fetched from")
        return allowed

    def _open_client(self) -> httpx.AsyncClient:
        """Return a client without proxies, because a proxy would resolve names itself.

        Connections are not reused: another name at the same address would be accepted by the first name's certificate. Cookies
        are not kept: one client's image would set them for the images of all others at the same address.
        """
        if self._client is None:
            self._client = httpx.AsyncClient(
                trust_env=False,
                timeout=self._limits.timeout_s,
                limits=httpx.Limits(max_keepalive_connections=0),
                cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
            )
        return self._client


@dataclass(slots=True, eq=False)
class _Lookup:
    """The look-up of one name: as a job of a thread, and as the event loop awaits it. ``num_waiting`` requests wait for it."""

    job: Future[_Found]
    found: asyncio.Future[_Found]
    num_waiting: int = 0


class Resolver:
    """Resolves names on its own threads, because the event loop's threads tokenize."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_RESOLVER_THREADS, "kvferry-resolve")  # started at the first name
        self._lookups: dict[tuple[str, int], _Lookup] = {}  # a slow name keeps one thread

    async def resolve(self, host: str, port: int) -> list[Address]:
        """Return the addresses of a name, in the system's order.

        Raises:
            OSError: it has none.
            UnicodeError: it cannot be one, such as with a label that is empty or too long.
            Overloaded: no thread can be started for it.
        """
        lookup = self._lookups.get((host, port)) or self._begin(host, port)
        lookup.num_waiting += 1
        try:
            found = await asyncio.shield(lookup.found)  # others may wait for it
        finally:
            lookup.num_waiting -= 1
            if not lookup.num_waiting and lookup.job.cancel():  # one that a thread has begun cannot be stopped
                self._forget(host, port, lookup)
        addresses = [as_address(str(entry[4][0]).partition("%")[0]) for entry in found]
        return [address for address in addresses if address is not None]

    def _begin(self, host: str, port: int) -> _Lookup:
        job: Future[_Found] = submit_job(self._threads, partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM))
        lookup = self._lookups[host, port] = _Lookup(job, asyncio.wrap_future(job))
        lookup.found.add_done_callback(lambda _: self._forget(host, port, lookup))
        return lookup

    def _forget(self, host: str, port: int, lookup: _Lookup) -> None:
        if self._lookups.get((host, port)) is lookup:
            del self._lookups[host, port]

    def close(self) -> None:
        """Stop the threads; a thread that waits for an answer stops after it. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _parse(text: str) -> httpx.URL:
    """Parse a URL. Raises InvalidRequest if it is not http(s), has no host or an impossible port."""
    try:
        url = httpx.URL(text)
    except (httpx.InvalidURL, ValueError):
        raise InvalidRequest("its URL cannot be understood") from None
    if url.scheme not in DEFAULT_PORTS or not url.raw_host:
        raise InvalidRequest("its URL is neither a data: nor an http(s) URL")
    if url.port is not None and not 1 <= url.port <= _MAX_PORT:  # httpx takes any number, and a socket refuses it
        raise InvalidRequest(f"its URL has a port that is not between 1 and {_MAX_PORT}")
    if url.userinfo:
        raise InvalidRequest("its URL holds a user or a password: leave them out")
    return url


def _host_of(url: httpx.URL) -> str:
    """Return the host in ASCII; ``url.host`` decodes names of other scripts, and raises for what only looks like one."""
    return url.raw_host.decode("ascii")
