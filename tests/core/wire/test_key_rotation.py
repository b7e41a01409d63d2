"""While the cluster key changes, members with either key talk; the procedure never parts a client from a server."""

import asyncio
import errno

import pytest
import zmq
import zmq.asyncio

from connectors.p2p.control import ControlClients, ControlServer
from core.config_router import SecuritySection
from core.errors import ConfigError
from core.wire.key_rotation import connect_with_each_key, keys_of, next_keys
from core.wire.kv import ControlError
from core.wire.sockets import AsyncContext, SocketOptions, bind, dealer_socket, router_socket
from core.worker.router_sockets import RouterSockets

OLD = "the old key of the cluster which is long enough"
NEW = "the new key of the cluster as long as the other"
WAIT_MS = 5000
# The keys of every process in each stage of a rollout, in order; during one, processes of two neighbouring stages are members.
STAGES = [(OLD, ""), (OLD, NEW), (NEW, OLD), (NEW, "")]


def keys(cluster_key, others=""):
    return keys_of(SecuritySection(cluster_key=cluster_key, other_cluster_keys=others))


def pairs_of_a_rollout():
    """Server and client of the same stage, or of two stages between which a rollout is under way."""
    numbers = range(len(STAGES))
    return [(STAGES[a], STAGES[b]) for a in numbers for b in numbers if abs(a - b) <= 1]


@pytest.fixture
def context():
    with zmq.Context() as context:
        yield context
        context.destroy(linger=0)


@pytest.fixture
def async_context():
    context = AsyncContext()
    yield context
    context.destroy(linger=0)


def exchange(context, server_keys, client_keys, wait_ms=WAIT_MS):
    """Send a message from a client to a server; return whether it arrived."""
    server = router_socket(context, SocketOptions(max_message_bytes=1000, keys=server_keys))
    client = dealer_socket(context, SocketOptions(max_message_bytes=1000, keys=client_keys))
    connect_with_each_key(client, bind(server, "tcp://127.0.0.1:0"), client_keys)
    if not client.poll(wait_ms, zmq.POLLOUT):
        return False
    client.send(b"hello")
    return bool(server.poll(wait_ms))


@pytest.mark.parametrize(("server", "client"), pairs_of_a_rollout())
def test_no_stage_parts_a_client_from_a_server(context, server, client):
    assert exchange(context, keys(*server), keys(*client))


@pytest.mark.slow
def test_old_key_is_refused_after_the_last_stage(context):
    assert not exchange(context, keys(*STAGES[-1]), keys(*STAGES[0]), wait_ms=300)


def test_client_follows_a_server_that_restarts_with_the_other_key(context):
    ring = keys(OLD, NEW)
    client = dealer_socket(context, SocketOptions(max_message_bytes=1000, keys=ring))
    server = router_socket(context, SocketOptions(max_message_bytes=1000, keys=keys(OLD)))
    address = bind(server, "tcp://127.0.0.1:0")
    connect_with_each_key(client, address, ring)
    for successor in (keys(NEW), keys(OLD)):
        assert _some_message_arrives(client, server)
        server.close(linger=0)
        server = router_socket(context, SocketOptions(max_message_bytes=1000, keys=successor))
        _bind_again(server, address)
    assert _some_message_arrives(client, server)


def _some_message_arrives(client, server):
    """Return True once one does: those sent before the loss of the old connection is known are lost with it."""
    for _ in range(100):
        if client.poll(WAIT_MS, zmq.POLLOUT):
            client.send(b"one")
        if server.poll(WAIT_MS / 100):
            return True
    return False


def _bind_again(server, address):
    for _ in range(100):
        try:
            bind(server, address)
            return
        except ConfigError:  # ZeroMQ's thread has not released the port yet
            server.poll(20)
    raise AssertionError(f"{address} stayed in use")


def test_each_message_arrives_once(context):
    ring = keys(OLD, NEW)
    server = router_socket(context, SocketOptions(max_message_bytes=1000, keys=keys(NEW)))
    client = dealer_socket(context, SocketOptions(max_message_bytes=1000, keys=ring))
    connect_with_each_key(client, bind(server, "tcp://127.0.0.1:0"), ring)
    assert client.poll(WAIT_MS, zmq.POLLOUT)
    for number in range(20):
        client.send(b"%d" % number)
    received = []
    while len(received) < 20 and server.poll(WAIT_MS):
        received.append(int(server.recv_multipart()[1]))
    assert received == list(range(20))


class Links:
    """Listens to ``RouterSockets``."""

    def __init__(self):
        self.died = None

    def on_connect(self, link):
        pass

    def on_disconnect(self, link):
        pass

    def on_frame(self, link, frames):
        pass

    def on_links_death(self, error):
        self.died = error


async def _until_sent(sockets, address):
    for _ in range(1000):
        if sockets.send(address, b"register"):
            return
        await asyncio.sleep(0.01)


async def test_worker_reaches_a_router_that_holds_another_key(async_context):
    router = router_socket(async_context, SocketOptions(max_message_bytes=1000, keys=keys(NEW)))
    address = bind(router, "tcp://127.0.0.1:0")
    sockets = RouterSockets([address], Links(), keys=keys(OLD, NEW))
    sockets.start()
    async with asyncio.timeout(10):
        await _until_sent(sockets, address)
        assert (await router.recv_multipart())[1] == b"register"
    await sockets.close(linger_s=0)
    router.close(linger=0)


@pytest.mark.parametrize(("server", "client"), pairs_of_a_rollout())
async def test_control_messages_reach_a_peer_of_either_key(async_context, server, client):
    answered, lost = asyncio.Queue(), []
    serving = ControlServer(async_context, lambda _: ControlError(code="stale", message="answer"), lost.append, keys(*server))
    address = serving.start("tcp://127.0.0.1:0")
    clients = ControlClients(async_context, lambda *told: answered.put_nowait(told), lost.append, lost.append, keys(*client))
    for _ in range(3):
        clients.send(address, ControlError(code="stale", message="question"))
    async with asyncio.timeout(10):
        for _ in range(3):
            assert (await answered.get())[1].message == "answer"
    assert (lost, clients.num_dropped) == ([], 0)
    await clients.stop()
    await serving.stop()


async def test_peer_of_a_foreign_key_is_lost(async_context):
    lost = asyncio.Queue()
    serving = ControlServer(async_context, lambda _: None, lost.put_nowait, keys("k" * 40))
    address = serving.start("tcp://127.0.0.1:0")
    clients = ControlClients(async_context, lambda *_: None, lost.put_nowait, lost.put_nowait, keys(OLD, NEW))
    clients.send(address, ControlError(code="stale", message="question"))
    async with asyncio.timeout(10):
        assert await lost.get() == address
    await clients.stop()
    await serving.stop()


async def test_peer_whose_other_key_finds_no_socket_is_lost(async_context, monkeypatch):
    lost, deaths = asyncio.Queue(), []
    serving = ControlServer(async_context, lambda _: None, deaths.append, keys(NEW))
    address = serving.start("tcp://127.0.0.1:0")
    clients = ControlClients(async_context, lambda *_: None, lost.put_nowait, deaths.append, keys(OLD, NEW))
    clients.send(address, ControlError(code="stale", message="question"))

    def open_nothing(*_):
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr(clients, "_open", open_nothing)
    async with asyncio.timeout(10):
        assert await lost.get() == address
    assert (clients.num_dropped, deaths) == (1, [])
    await clients.stop()
    await serving.stop()


def test_keys_to_try_are_each_named_once():
    ring = keys(OLD, f"{NEW}, {OLD},{NEW}")
    assert ring.server_public == keys(OLD).server_public
    assert [other.server_public for other in ring.others] == [keys(NEW).server_public]
    assert next_keys(next_keys(ring)) is None
    assert keys("") is None


@pytest.mark.parametrize(
    ("own", "others", "why"), [("", NEW, "set security.cluster_key too"), (OLD, "short", "other_cluster_keys")]
)
def test_keys_that_protect_nothing_are_refused(own, others, why):
    with pytest.raises(ConfigError, match=why):
        keys(own, others)
