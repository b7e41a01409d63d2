"""Each address is tried as the server of its setting binds it."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest
import zmq

from core.errors import ConfigError
from core.wire.curve import derive_keys
from core.wire.sockets import SocketOptions, bind, dealer_socket, join_tcp, router_socket
from core.worker.ops_http import OpsServer
from kvferry.listening import why_not_free
from router.http.server import _listen

ROUTER, OPS, ZEROMQ = "router.port", "worker.ops_port", "worker.control_address"
HOSTS = (
    *("127.0.0.1", "0.0.0.0", "*", "localhost", "::1", "::", "::ffff:127.0.0.1"),
    *("lo", "203.0.113.1", "no-such-host.invalid", "a..b", "ü..b", "ü" * 60),
)
NO_HOSTS_OF_ZEROMQ = ("", "[::1]")
HOLDERS = ((), ("127.0.0.1",), ("0.0.0.0",), ("::1",), ("::",), ("127.0.0.1", "::1"))


@contextlib.contextmanager
def held(*hosts):
    """A port at which others listen at these hosts, with no more than IPv6 at those of IPv6; or else one that is free."""
    with contextlib.ExitStack() as stack:
        port = 0
        for host in hosts:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            port = stack.enter_context(socket.create_server((host, port), family=family)).getsockname()[1]
        yield port


@pytest.fixture
def resolve_as(monkeypatch):
    """Let Python's resolver know a name by addresses of this machine."""

    def know(name, *addresses):
        resolve = socket.getaddrinfo

        def getaddrinfo(host, *rest, **named):
            return [found for each in (addresses if host == name else (host,)) for found in resolve(each, *rest, **named)]

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

    return know


def listens(setting, host, port):
    """Return True if the server itself listens there."""

    async def serve():
        server = OpsServer({})
        await server.start(host, port)
        await server.stop()

    try:
        if setting == ROUTER:
            _listen(host, port).close()
        elif setting == OPS:
            asyncio.run(serve())
        else:
            with zmq.Context() as context, router_socket(context, SocketOptions(max_message_bytes=1)) as bound:
                bind(bound, join_tcp(host, port))
    except (ConfigError, TypeError, ValueError):
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("holders", HOLDERS, ids=" ".join)
@pytest.mark.parametrize("setting", [ROUTER, OPS, ZEROMQ])
def test_an_address_is_free_exactly_if_its_server_can_listen_there(setting, holders):
    for host in (*HOSTS, *(NO_HOSTS_OF_ZEROMQ if setting != ZEROMQ else ())):
        with held(*holders) as port:
            refusal = why_not_free(setting, host, port)
            assert (refusal is None) == listens(setting, host, port), (host, refusal)


@pytest.mark.parametrize("setting", [ROUTER, OPS, ZEROMQ])
def test_a_port_is_in_use_while_a_process_listens(setting):
    with held("127.0.0.1") as port:
        refusal = why_not_free(setting, "127.0.0.1", port)
        assert (refusal.reason, refusal.is_in_use, refusal.is_of_host) == ("Address already in use", True, False)
    assert why_not_free(setting, "127.0.0.1", port) is None


@pytest.mark.parametrize(
    ("setting", "host", "holder"),
    [
        (OPS, "both.example", "::1"),
        (OPS, "both.example", "127.0.0.1"),
        (ZEROMQ, "*", "::"),
        (ZEROMQ, "::", "0.0.0.0"),
        (ZEROMQ, "lo", "127.0.0.1"),
    ],
)
def test_every_address_that_a_server_takes_must_be_free(setting, host, holder, resolve_as):
    resolve_as("both.example", "127.0.0.1", "::1")
    with held(holder) as port:
        assert why_not_free(setting, host, port).is_in_use


@pytest.mark.parametrize(
    ("setting", "host"),
    [
        *((setting, host) for setting in (ROUTER, OPS, ZEROMQ) for host in ("no-such-host.invalid", "203.0.113.1", "ü..b")),
        *((setting, host) for setting in (ROUTER, OPS) for host in ("lo", "[::1]", "a\0b")),
    ],
)
def test_a_host_that_a_server_does_not_know_is_told_from_a_port(setting, host):
    refusal = why_not_free(setting, host, 0)
    assert (refusal.is_of_host, refusal.is_in_use) == (True, False)


def test_a_name_may_have_an_ipv6_address_alone_where_asyncio_listens(resolve_as):
    resolve_as("six.example", "::1")
    assert why_not_free(OPS, "six.example", 0) is None
    with held("::1") as port:
        assert why_not_free(OPS, "six.example", port).is_in_use


def dealer_and_router(context):
    """A peer of the cluster, with its server."""
    options = SocketOptions(max_message_bytes=1_000, reconnect_ms=10, reconnect_max_ms=10, keys=derive_keys("k" * 64))
    return dealer_socket(context, options), router_socket(context, options)


def subscriber_and_publisher(context):
    """A reader of KV events, with its server, both without keys."""
    reader, server = context.socket(zmq.SUB), context.socket(zmq.PUB)
    reader.linger = server.linger = 0
    reader.reconnect_ivl = 10
    reader.ipv6 = True
    reader.subscribe(b"")
    return reader, server


def has_met(peer, server):
    """Return True if a message arrives within 3 s: of a subscriber's server, or to another's."""
    sender, receiver = (server, peer) if peer.type == zmq.SUB else (peer, server)
    for _ in range(60):
        with contextlib.suppress(zmq.Again):  # of a dealer without a connection
            sender.send(b"message", zmq.DONTWAIT)
        if receiver.poll(50):
            return True
    return False


@pytest.mark.parametrize(("host", "peer_host"), [("127.0.0.1", "127.0.0.1"), ("*", "127.0.0.1"), ("*", "::1"), ("::1", "::1")])
@pytest.mark.parametrize(
    ("setting", "pair"),
    [("router.worker_address", dealer_and_router), ("worker.kv_events_address", subscriber_and_publisher)],
)
def test_a_peer_that_connects_meanwhile_comes_again(setting, pair, host, peer_host, monkeypatch):
    with held(peer_host) as port:
        pass
    listen, context = zmq.Socket.bind, zmq.Context()
    peer, server = pair(context)
    seen = peer.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)

    def bind_until_the_peer_is_gone(bound, address):
        listen(bound, address)
        assert seen.poll(5_000)

    with context, peer, server, seen:
        peer.connect(join_tcp(peer_host, port))
        with monkeypatch.context() as patched:
            patched.setattr(zmq.Socket, "bind", bind_until_the_peer_is_gone)
            assert why_not_free(setting, host, port) is None
        bind(server, join_tcp(host, port))
        assert has_met(peer, server)


async def test_an_address_can_be_tried_within_an_event_loop():
    assert why_not_free(OPS, "127.0.0.1", 0) is None
