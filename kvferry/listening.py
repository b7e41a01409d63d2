"""Whether the server of a setting could listen at its address: each is tried in the way in which that server binds it.

What is bound is closed at once. Only ZeroMQ knows network interfaces, and lets sockets of IPv6 take IPv4 as well; asyncio binds
all addresses of a name, the router's server one.
"""

from __future__ import annotations

import asyncio
import errno
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import zmq

from core.wire.contexts import started_context
from core.wire.sockets import binds_ipv6, join_tcp
from router.http.listener import create_listener

_OPS_SETTINGS = {"router.ops_port", "worker.ops_port", "kvstore.ops_port"}
_OF_HOST = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL, errno.ENODEV}


@dataclass(frozen=True, slots=True)
class BindFailure:
    """Why a server cannot listen at an address. ``is_of_host``: it could at no other port of this host either."""

    reason: str
    is_in_use: bool = False
    is_of_host: bool = False


def why_not_free(setting: str, host: str, port: int) -> BindFailure | None:
    """Try to listen at the address of a setting; return why that fails. Hosts of ZeroMQ's settings are without brackets."""
    try:
        _listen(setting, host, port)
    except OSError as error:
        number = error.errno or 0  # 0 is asyncio's own, and the resolver's are negative
        return BindFailure(
            os.strerror(number) if number > 0 else str(error.strerror or error),
            is_in_use=number == errno.EADDRINUSE,
            is_of_host=number <= 0 or number in _OF_HOST,
        )
    except (TypeError, ValueError):  # of the codec for names: an empty label, one that is too long, a zero byte
        return BindFailure("no possible name", is_of_host=True)
    return None


def _listen(setting: str, host: str, port: int) -> None:
    if setting == "router.port":
        create_listener(host, port).close()
    elif setting in _OPS_SETTINGS:
        with ThreadPoolExecutor(1) as thread:  # there may be an event loop in this one
            thread.submit(asyncio.run, _serve_once(host, port)).result()
    else:
        _bind_zeromq(join_tcp(host, port))


async def _serve_once(host: str, port: int) -> None:
    """Start and end a server as ``core.worker.ops_http`` does."""
    server = await asyncio.start_server(lambda _reader, writer: writer.close(), host, port)
    server.close()
    await server.wait_closed()


def _bind_zeromq(address: str) -> None:
    """Bind a socket as ``core.wire.sockets.bind`` does.

    Raises:
        OSError: the address is in use, or not of this machine.
    """
    context: zmq.Context[zmq.Socket[bytes]] = started_context(zmq.Context)
    with context, context.socket(zmq.ROUTER) as bound:
        # Close what connects meanwhile before any greeting, since no peer has this address: a peer whose handshake fails, for
        # want of the cluster's keys or of its type of socket, never connects again, not even to the server itself. IPv4 holds
        # for both families; after ``ipv6`` is set, the mask would contain all IPv4 addresses within IPv6.
        bound.setsockopt(zmq.TCP_ACCEPT_FILTER, b"255.255.255.255/32")
        bound.ipv6 = binds_ipv6(address)
        try:
            bound.bind(address)
        except zmq.ZMQError as error:
            raise OSError(error.errno, error.strerror) from None
