"""Images behind http(s) URLs, fetched within limits of place, time and size.

Owns connections to other hosts. Knows nothing of messages or image formats (``router.images.reader``), and leaves which host
may be asked to ``router.images.hosts``. Each connection goes to the address that was checked, never to what a name resolves to
a second time; redirects are followed one by one, and checked like the first URL.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import httpx

from core.errors import InvalidRequest
from router.images.hosts import DEFAULT_PORTS, Address, HostRules, as_address

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_HEADERS = {"accept": "image/*", "accept-encoding": "identity", "user-agent": "kvferry"}

_RESOLVER_THREADS = 4  # names that take their time make each other wait, and nobody else

Resolve = Callable[[str, int], Awaitable[list[Address]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchLimits:
    """What one image may cost; ``timeout_s`` holds from the wish for it to its last byte, ``max_fetches`` for all clients."""

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
        self._places = asyncio.Semaphore(limits.max_fetches)
        self._client: httpx.AsyncClient | None = None

    async def fetch(self, url: str) -> bytes:
        """Return what lies behind a URL.

        Raises:
            InvalidRequest: it may not be fetched, or was not to be had within the limits; says why.
        """
        try:
            async with asyncio.timeout(self._limits.timeout_s), self._places:
                return await self._follow(_parse(url))
        except TimeoutError:
            raise InvalidRequest(f"its host took longer than {self._limits.timeout_s:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
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
        """Return the body behind a URL, or where it points to."""
        address = await self._choose_address(url)
        request = self._open_client().build_request(
            "GET",
            url.copy_with(host=str(address)),
            headers={**_HEADERS, "host": url.netloc.decode("ascii")},
            extensions={"sni_hostname": url.host},  # the certificate is held against the name
        )
        response = await self._open_client().send(request, stream=True)
        try:
            if response.status_code in _REDIRECTS and "location" in response.headers:
                return _parse(str(url.join(response.headers["location"])))
            if response.status_code != httpx.codes.OK:
                raise InvalidRequest(f"its host answers with status {response.status_code}")
            return await self._read(response)
        finally:
            await response.aclose()

    async def _read(self, response: httpx.Response) -> bytes:
        """Return the body as it is; one that is compressed was not asked for, and could be larger than it looks."""
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise InvalidRequest("its host sends it compressed")
        body = bytearray()
        async for piece in response.aiter_raw():
            body += piece
            if len(body) > self._limits.max_bytes:
                raise InvalidRequest(f"it has more than {self._limits.max_bytes} bytes")
        return bytes(body)

    async def _choose_address(self, url: httpx.URL) -> Address:
        """Return an address of the URL's host that may be connected to."""
        port = url.port or DEFAULT_PORTS[url.scheme]
        if not self._rules.allows_host(url.scheme, url.host, port):
            raise InvalidRequest(f"images are not fetched from {url.netloc.decode('ascii')}, see router.images.allowed_hosts")
        spelled = as_address(url.host)
        addresses = [spelled] if spelled is not None else await self._resolve(url.host, port)
        allowed = next((address for address in addresses if self._rules.allows_address(address)), None)
        if allowed is None:
            raise InvalidRequest(f"{url.host} has no address that images are fetched from")
        return allowed

    def _open_client(self) -> httpx.AsyncClient:
        """Return the client, without proxies, which would resolve names by themselves.

        No connection is used twice: it belongs to an address, and another name there would go by the first one's certificate.
        """
        if self._client is None:
            self._client = httpx.AsyncClient(
                trust_env=False, timeout=self._limits.timeout_s, limits=httpx.Limits(max_keepalive_connections=0)
            )
        return self._client


class Resolver:
    """Asks the system for addresses, on threads of its own: those of the event loop tokenize."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_RESOLVER_THREADS, "kvferry-resolve")  # they start with the first name

    async def resolve(self, host: str, port: int) -> list[Address]:
        """Return the addresses of a name, in the system's order. Raises OSError if it has none."""
        ask = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(self._threads, ask)
        addresses = [as_address(str(entry[4][0]).partition("%")[0]) for entry in found]
        return [address for address in addresses if address is not None]

    def close(self) -> None:
        """End the threads; one that waits for an answer ends with it. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _parse(text: str) -> httpx.URL:
    """Read a URL. Raises InvalidRequest if no host can be asked for it."""
    try:
        url = httpx.URL(text)
    except (httpx.InvalidURL, ValueError):
        raise InvalidRequest("its URL cannot be understood") from None
    if url.scheme not in DEFAULT_PORTS or not url.host:
        raise InvalidRequest("its URL is neither a data: nor an http(s) URL")
    if url.userinfo:
        raise InvalidRequest("its URL holds a user or a password: leave them out")
    return url
