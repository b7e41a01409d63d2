from __future__ import annotations

import asyncio
import socket

import pytest
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from core.errors import ConfigError, PeerUnreachable
from core.wire.connections import monitor_of
from core.wire.sockets import (
    SocketOptions,
    advertised_host,
    bind,
    dealer_socket,
    join_tcp,
    never_reconnect,
    resolve,
    router_socket,
    split_tcp,
    warn_if_exposed,
)

DEADLINE_S = 10
DAY_MS = 24 * 3600 * 1000


@pytest.fixture
def zmq_context():
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


async def test_dealer_and_router_exchange_messages(zmq_context):
    options = SocketOptions(max_message_bytes=1000)
    server = router_socket(zmq_context, options)
    client = dealer_socket(zmq_context, options)
    client.connect(bind(server, "tcp://127.0.0.1:0"))
    async with asyncio.timeout(DEADLINE_S):
        await client.send(b"hello")
        identity, payload = await server.recv_multipart()
        await server.send_multipart([identity, payload.upper()])
        assert await client.recv() == b"HELLO"


@pytest.mark.parametrize("is_refused", [True, False], ids=["refused", "lost"])
@pytest.mark.parametrize("is_plain", [True, False], ids=["plain", "with options"])
async def test_connection_that_has_ended_is_tried_again_after_days_at_the_earliest(zmq_context, is_refused, is_plain):
    options = SocketOptions(max_message_bytes=1000)
    server = router_socket(zmq_context, options)
    address = bind(server, "tcp://127.0.0.1:0")
    client = zmq_context.socket(zmq.DEALER) if is_plain else dealer_socket(zmq_context, options)
    never_reconnect(client)
    monitor = monitor_of(client, zmq.EVENT_CONNECT_RETRIED)
    if is_refused:
        server.close(linger=0)
    client.connect(address)
    async with asyncio.timeout(DEADLINE_S):
        if not is_refused:
            await client.send(b"hello")
            await server.recv_multipart()
            server.close(linger=0)
        interval_ms = parse_monitor_message(await monitor.recv_multipart())["value"]
    client.monitor(None, 0)
    assert 12 * DAY_MS < interval_ms < 2**31


async def test_a_router_on_every_address_is_reached_by_ipv4(zmq_context):
    options = SocketOptions(max_message_bytes=1000)
    server = router_socket(zmq_context, options)
    _, port = split_tcp(bind(server, "tcp://*:0"))
    client = dealer_socket(zmq_context, options)
    client.connect(join_tcp("127.0.0.1", port))
    async with asyncio.timeout(DEADLINE_S):
        await client.send(b"hello")
        assert (await server.recv_multipart())[1] == b"hello"


@pytest.mark.parametrize(("bound", "host"), [("tcp://[::1]:0", "::1"), ("tcp://[::]:0", "::1"), ("tcp://[::]:0", "127.0.0.1")])
async def test_a_router_on_ipv6_is_reached(needs_ipv6, zmq_context, bound, host):
    options = SocketOptions(max_message_bytes=1000)
    server = router_socket(zmq_context, options)
    _, port = split_tcp(bind(server, bound))
    client = dealer_socket(zmq_context, options)
    client.connect(join_tcp(host, port))
    async with asyncio.timeout(DEADLINE_S):
        await client.send(b"hello")
        assert (await server.recv_multipart())[1] == b"hello"


async def test_an_oversized_message_never_arrives(zmq_context):
    server = router_socket(zmq_context, SocketOptions(max_message_bytes=100))
    address = bind(server, "tcp://127.0.0.1:0")
    client = dealer_socket(zmq_context, SocketOptions(max_message_bytes=100))
    client.connect(address)
    async with asyncio.timeout(DEADLINE_S):
        await client.send(bytes(101))
        while True:  # the connection is dropped and made again; what was sent before that is lost
            await client.send(b"small")
            if await server.poll(200):
                break
        assert (await server.recv_multipart())[1] == b"small"


async def test_sending_to_a_peer_that_never_was_raises(zmq_context):
    server = router_socket(zmq_context, SocketOptions(max_message_bytes=100))
    bind(server, "tcp://127.0.0.1:0")
    with pytest.raises(zmq.ZMQError) as caught:
        await server.send_multipart([b"nobody", b"hello"])
    assert caught.value.errno == zmq.EHOSTUNREACH


async def test_binding_a_taken_port_names_the_address(zmq_context):
    options = SocketOptions(max_message_bytes=100)
    holder = router_socket(zmq_context, options)
    address = bind(holder, "tcp://127.0.0.1:0")
    with pytest.raises(ConfigError, match=address):
        bind(router_socket(zmq_context, options), address)


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 5570), ("::1", 1), ("router.kvferry.svc", 65535)])
def test_addresses_survive_joining_and_splitting(host, port):
    assert split_tcp(join_tcp(host, port)) == (host, port)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:5570",
        "tcp://127.0.0.1",
        "tcp://:5570",
        "tcp://h:",
        "tcp://h:70000",
        "tcp://::1:5",
        "udp://h:5",
        "tcp://h:\u0661",
        "tcp://h:" + 5000 * "9",
    ],
)
def test_malformed_addresses_are_named(address):
    with pytest.raises(ConfigError, match="is not of the form"):
        split_tcp(address)


@pytest.mark.parametrize(
    ("bound", "advertise", "told"), [("10.0.0.1", "", "10.0.0.1"), ("0.0.0.0", "pod-3", "pod-3"), ("eth0", "[::1]", "::1")]
)
def test_peers_are_told_the_advertised_host_or_the_bound_one(bound, advertise, told):
    assert advertised_host(bound, advertise) == told


@pytest.mark.parametrize(("bound", "advertise"), [("0.0.0.0", ""), ("::", ""), ("*", ""), ("10.0.0.1", "0.0.0.0")])
def test_peers_are_never_told_a_wildcard(bound, advertise):
    with pytest.raises(ConfigError, match=r"worker\.advertise_host: .* set it to") as caught:
        advertised_host(bound, advertise)
    assert caught.value.param == "worker.advertise_host"


@pytest.mark.parametrize(
    ("address", "is_warned"),
    [
        ("tcp://127.0.0.1:1", False),
        ("tcp://127.1.2.3:1", False),
        ("tcp://[::1]:1", False),
        ("tcp://localhost:1", False),
        ("tcp://0.0.0.0:1", True),
        ("tcp://*:1", True),
        ("tcp://[::]:1", True),
        ("tcp://10.0.0.1:1", True),
        ("tcp://router.example:1", True),
    ],
)
def test_sockets_that_other_machines_reach_are_warned_about(caplog, address, is_warned):
    warn_if_exposed("router.worker_address", address)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * is_warned
    assert all("setting=router.worker_address" in record.message and address in record.message for record in caplog.records)


async def test_a_name_resolves_to_all_its_addresses(monkeypatch):
    rows = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.2", 5570)),
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::1", 5570, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 5570)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 5570)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: rows)
    assert await resolve("tcp://routers:5570") == ["tcp://10.0.0.1:5570", "tcp://10.0.0.2:5570", "tcp://[fd00::1]:5570"]


async def test_literal_addresses_and_other_schemes_resolve_to_themselves():
    assert await resolve("tcp://127.0.0.1:5570") == ["tcp://127.0.0.1:5570"]
    assert await resolve("tcp://[::1]:5570") == ["tcp://[::1]:5570"]
    assert await resolve("inproc://x") == ["inproc://x"]


async def test_an_unknown_name_is_unreachable(monkeypatch):
    def refuse(*args, **kwargs):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    with pytest.raises(PeerUnreachable, match="nowhere"):
        await resolve("tcp://nowhere:5570")
