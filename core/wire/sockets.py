"""ZeroMQ sockets, for asyncio or for a thread, with the options that every plane needs, and name resolution.

Owns socket options and addresses. Knows nothing of messages, retries or membership: callers react when a peer is slow,
silent or gone. Heartbeats here are ZeroMQ's own, which detect a dead TCP connection; the planes' own heartbeats detect that
a process no longer answers.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from dataclasses import dataclass
from typing import Any, TypeVar

import zmq
import zmq.asyncio

from core.errors import ConfigError, PeerUnreachable
from core.log import event
from core.wire.curve import ClusterKeys, secure_client, secure_server

AsyncSocket = zmq.asyncio.Socket
AsyncContext = zmq.asyncio.Context
AnySocket = TypeVar("AnySocket", bound="zmq.Socket[Any]")

# How long a socket that sends messages of several frames may take to close. With 0, libzmq aborts the process if a
# connection breaks in the midst of such a message while the socket closes (errno_assert in session_base_t::clean_pipes).
CLOSE_LINGER_MS = 200

# From 12 to 25 days, in ms, with the random part that libzmq adds: as long as is possible without an overflow.
_NEVER_MS = 2**30

MAX_PORT_DIGITS = 5  # ``int`` raises ValueError for thousands of digits

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SocketOptions:
    """Options of a socket towards its peers; times in milliseconds.

    ``high_water_mark`` messages are queued per peer before sending fails. ``max_message_bytes`` is the size at which ZeroMQ
    drops the connection of a peer, before the message is in memory; pass the cap of the plane.
    """

    max_message_bytes: int
    high_water_mark: int = 10_000
    heartbeat_interval_ms: int = 1_000
    heartbeat_timeout_ms: int = 5_000
    reconnect_ms: int = 50
    reconnect_max_ms: int = 2_000
    connect_timeout_ms: int = 5_000
    keys: ClusterKeys | None = None  # of the cluster; ROUTER sockets bind with them, DEALER sockets connect


def router_socket(context: zmq.Context[AnySocket], options: SocketOptions) -> AnySocket:
    """Return a ROUTER socket that raises on sending to a peer that is gone, instead of dropping silently."""
    found = context.socket(zmq.ROUTER)
    _apply(found, options)
    found.setsockopt(zmq.ROUTER_MANDATORY, 1)
    secure_server(found, options.keys)
    return found


def dealer_socket(context: zmq.Context[AnySocket], options: SocketOptions) -> AnySocket:
    """Return a DEALER socket that queues only for live connections, so that a dead peer's queue does not fill."""
    found = context.socket(zmq.DEALER)
    _apply(found, options)
    found.setsockopt(zmq.IMMEDIATE, 1)
    secure_client(found, options.keys)
    found.setsockopt(zmq.IPV6, 1)
    return found


def never_reconnect(connecting: zmq.Socket[Any]) -> None:
    """Let a socket make one connection; whoever owns it closes it once its monitor has reported the end of that.

    libzmq's own word for this, an interval of -1, ends a lost connection's endpoint. With ``IPV6`` that lists the machine's
    network interfaces, and aborts the process if it has no descriptor for this (ip_resolver.cpp).
    """
    connecting.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
    connecting.setsockopt(zmq.RECONNECT_IVL_MAX, 0)  # else it caps the interval, in libzmq from 4.3.5 on


def bind(bound: zmq.Socket[Any], address: str) -> str:
    """Bind and return the actual address, with the port that ``:0`` was given. ``*`` is every IPv4 and IPv6 address.

    Raises:
        ConfigError: the address is malformed, in use, or not of this machine.
    """
    bound.setsockopt(zmq.IPV6, int(binds_ipv6(address)))
    try:
        bound.bind(address)
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot bind {address}: {zmq.strerror(error.errno or 0)}", param="address") from None
    endpoint: bytes = bound.getsockopt(zmq.LAST_ENDPOINT)  # type: ignore[assignment]
    return endpoint.rstrip(b"\0").decode()


def warn_if_exposed(setting: str, address: str) -> None:
    """Warn if a socket without authentication is bound to an address that other machines can reach, set by ``setting``."""
    host, _ = split_tcp(address)
    if is_loopback(host):
        return
    _log.warning(
        event(
            "exposed_socket",
            setting=setting,
            address=address,
            reason="it has no authentication and no encryption: keep it on a private network (docs/architecture.md, Trust)",
        )
    )


def is_loopback(host: str) -> bool:
    """Return True if a host is reachable from this machine only; of names, only localhost is known to be."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def binds_ipv6(address: str) -> bool:
    """Return True if a socket to be bound there needs ``zmq.IPV6``; with it IPv4 is reported as ::ffff:127.0.0.1."""
    return "*" in address or "[" in address


def split_tcp(address: str) -> tuple[str, int]:
    """Return host and port of ``tcp://host:port`` or ``tcp://[v6]:port``.

    Raises:
        ConfigError: the address has another form.
    """
    scheme, _, rest = address.partition("://")
    host, colon, port = rest.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    is_port = port.isascii() and port.isdecimal() and len(port) <= MAX_PORT_DIGITS and int(port) <= 65535
    if scheme != "tcp" or not colon or not host or not is_port:
        raise ConfigError(f"address {address!r} is not of the form tcp://host:port (IPv6 in brackets)", param="address")
    return host, int(port)


def join_tcp(host: str, port: int) -> str:
    """Return ``tcp://host:port``, with brackets where the host is an IPv6 address."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def advertised_host(bound_host: str, advertise_host: str) -> str:
    """Return the host that peers connect to: ``advertise_host``, or the bound one where that is empty; without brackets.

    Raises:
        ConfigError: it is a wildcard, good to bind but not to connect to.
    """
    host = (advertise_host or bound_host).removeprefix("[").removesuffix("]")
    try:
        is_wildcard = host == "*" or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        is_wildcard = False  # a name
    if is_wildcard:
        raise ConfigError(
            f"worker.advertise_host: peers cannot connect to {host!r}, which stands for all addresses of a machine; "
            "set it to the host name or IP address at which decode workers reach this worker",
            param="worker.advertise_host",
        )
    return host


async def resolve(address: str, timeout_s: float = 5.0) -> list[str]:
    """Return the address of every machine that the host name stands for, sorted; addresses of other schemes than tcp unchanged.

    A headless Kubernetes service resolves to one address per router. IPv4 and IPv6 both count.

    Raises:
        ConfigError: the address is malformed.
        PeerUnreachable: the name does not resolve (yet), or not within ``timeout_s``.
    """
    if not address.startswith("tcp://"):
        return [address]
    host, port = split_tcp(address)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_s):
            rows = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError) as error:  # TimeoutError is an OSError
        raise PeerUnreachable(f"{host} does not resolve: {error or 'timed out'}") from None
    return sorted({join_tcp(str(row[4][0]), port) for row in rows})


def _apply(target: zmq.Socket[Any], options: SocketOptions) -> None:
    target.setsockopt(zmq.LINGER, 0)
    target.setsockopt(zmq.SNDHWM, options.high_water_mark)
    target.setsockopt(zmq.RCVHWM, options.high_water_mark)
    target.setsockopt(zmq.MAXMSGSIZE, options.max_message_bytes)
    target.setsockopt(zmq.HEARTBEAT_IVL, options.heartbeat_interval_ms)
    target.setsockopt(zmq.HEARTBEAT_TIMEOUT, options.heartbeat_timeout_ms)
    target.setsockopt(zmq.RECONNECT_IVL, options.reconnect_ms)
    target.setsockopt(zmq.RECONNECT_IVL_MAX, options.reconnect_max_ms)
    target.setsockopt(zmq.CONNECT_TIMEOUT, options.connect_timeout_ms)
