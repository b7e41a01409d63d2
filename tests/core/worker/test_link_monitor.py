"""A worker's link to a router knows why it is not connected, over real sockets."""

from __future__ import annotations

import socket

import pytest
import zmq

from core.ids import RandomIds
from core.wire.curve import derive_keys, new_cluster_key
from core.wire.key_rotation import connect_with_each_key
from core.wire.sockets import AsyncContext, SocketOptions, bind, dealer_socket, router_socket
from core.worker.link_monitor import AWAY, SILENT, LinkMonitor
from tests.support.polling import until

KEYS = {name: derive_keys(new_cluster_key(RandomIds())) for name in ("ours", "theirs")} | {"none": None}
KEYS["both"] = KEYS["ours"].with_others([KEYS["theirs"]])


@pytest.fixture
def context():
    context = AsyncContext()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def serve(context):
    def serve(key, address="tcp://127.0.0.1:0"):
        router = router_socket(context, SocketOptions(max_message_bytes=1000, keys=KEYS[key]))
        return router, bind(router, address)

    return serve


@pytest.fixture
def connect(context):
    made = []

    def connect(key, address):
        dealer = dealer_socket(context, SocketOptions(max_message_bytes=1000, keys=KEYS[key]))
        made.append((LinkMonitor(dealer, has_key=KEYS[key] is not None), dealer))
        connect_with_each_key(dealer, address, KEYS[key])
        return made[-1][0]

    yield connect
    for monitor, dealer in made:
        monitor.close()
        dealer.close(linger=0)
        monitor.close()  # also after its socket


@pytest.mark.parametrize(
    ("router_key", "worker_key", "reason"),
    [
        ("theirs", "ours", "another cluster key"),
        ("theirs", "none", "it has a cluster key, and this worker has none"),
        ("none", "ours", "it has no cluster key, and this worker has one"),
    ],
)
async def test_key_that_does_not_fit_is_the_reason(serve, connect, router_key, worker_key, reason):
    router, address = serve(router_key)
    monitor = connect(worker_key, address)
    await until(lambda: reason in monitor.why_unusable())
    assert not router.closed


@pytest.mark.parametrize("worker_key", ["theirs", "both"])
async def test_connection_with_a_right_key_has_no_reason_until_it_is_lost(serve, connect, worker_key):
    router, address = serve("theirs")
    monitor = connect(worker_key, address)
    await until(lambda: not monitor.why_unusable())
    router.close(linger=0)
    await until(lambda: monitor.why_unusable() == AWAY)
    router, _ = serve("theirs", address)
    await until(lambda: not monitor.why_unusable())
    assert not router.closed


async def test_refused_key_of_several_does_not_hide_the_connection(serve, connect, context):
    router, address = serve("theirs")
    monitor = connect("both", address)
    refusals, note = [], monitor._note
    monitor._note = lambda found: refusals.append(int(found["event"]) == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL) or note(found)
    await until(lambda: not monitor.why_unusable())
    for _ in range(3):
        refusals.clear()
        await until(lambda: monitor.note_events() or any(refusals))
        assert not monitor.why_unusable()
    assert not router.closed


async def test_router_that_goes_away_is_no_longer_one_with_another_key(serve, connect):
    router, address = serve("theirs")
    monitor = connect("ours", address)
    await until(lambda: "another cluster key" in monitor.why_unusable())
    router.close(linger=0)
    await until(lambda: monitor.why_unusable() == AWAY)


async def test_router_that_listens_and_says_nothing_is_not_away(connect):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        monitor = connect("none", f"tcp://127.0.0.1:{listening.getsockname()[1]}")
        await until(lambda: monitor.why_unusable() == SILENT)
