"""What is concluded from the events of ZeroMQ's monitors; and a damaged frame ends a connection, not the process."""

from __future__ import annotations

import re
import socket
import subprocess
from pathlib import Path

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from core.ids import RandomIds
from core.wire.connections import ANNOUNCED_WITHIN_S, LOST_EVENTS, ClientConnections, ServerConnections, monitor_of
from core.wire.curve import derive_keys, new_cluster_key
from core.wire.sockets import SocketOptions, bind, dealer_socket, router_socket, split_tcp
from tests.support.polling import wait_until
from tests.support.tcp_proxy import TcpProxy

ROOT = Path(__file__).parents[3]
KEYS, OTHER_KEYS = (derive_keys(new_cluster_key(RandomIds())) for _ in range(2))
ACCEPTED, SUCCEEDED, DISCONNECTED = zmq.EVENT_ACCEPTED, zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED


def note_all(handshakes, events, now=0.0):
    return [handshakes.note({"event": event, "value": descriptor}, now) for event, descriptor in events]


@pytest.mark.parametrize(
    ("events", "num_strangers"),
    [
        ([(ACCEPTED, 7), (DISCONNECTED, 7)], 1),
        ([(ACCEPTED, 7), (SUCCEEDED, 0), (DISCONNECTED, 7)], 0),
        ([(ACCEPTED, 7), (SUCCEEDED, 0), (ACCEPTED, 8), (DISCONNECTED, 8), (DISCONNECTED, 7)], 1),
        ([(ACCEPTED, 7), (ACCEPTED, 8), (DISCONNECTED, 7), (SUCCEEDED, 0), (DISCONNECTED, 8)], 1),
        ([(ACCEPTED, 7), (DISCONNECTED, 7), (ACCEPTED, 7), (SUCCEEDED, 0), (DISCONNECTED, 7)], 1),
        ([(ACCEPTED, 7), (ACCEPTED, 8), (SUCCEEDED, 0), (DISCONNECTED, 7), (DISCONNECTED, 8)], 1),  # whichever it was
        ([(DISCONNECTED, 7)], 0),  # accepted before anybody listened
    ],
)
def test_connections_that_end_without_a_handshake_are_counted(events, num_strangers):
    assert sum(note_all(ServerConnections(), events)) == num_strangers


def test_an_old_connection_is_no_stranger_while_a_new_one_has_no_handshake_yet():
    handshakes = ServerConnections()
    note_all(handshakes, [(ACCEPTED, 7), (SUCCEEDED, 0)])
    assert note_all(handshakes, [(ACCEPTED, 8), (DISCONNECTED, 7), (DISCONNECTED, 8)], now=61.0) == [False, False, True]


CONNECTED, CLOSED, RETRIED = zmq.EVENT_CONNECTED, zmq.EVENT_CLOSED, zmq.EVENT_CONNECT_RETRIED


def connections(*events):
    found = ClientConnections()
    for event, descriptor in events:
        found.note({"event": event, "value": descriptor})
    return found


@pytest.mark.parametrize(
    ("events", "is_good"),
    [
        ([(CONNECTED, 7)], False),
        ([(CONNECTED, 7), (SUCCEEDED, 0)], True),
        ([(CONNECTED, 7), (SUCCEEDED, 0), (DISCONNECTED, 7)], False),
        # of two keys the other one is refused, before or after, in whatever way
        ([(CONNECTED, 7), (CONNECTED, 8), (SUCCEEDED, 0), (DISCONNECTED, 8)], True),
        ([(CONNECTED, 7), (CONNECTED, 8), (DISCONNECTED, 8), (RETRIED, 0), (SUCCEEDED, 0)], True),
        ([(CONNECTED, 7), (SUCCEEDED, 0), (CONNECTED, 8), (DISCONNECTED, 8)], True),
        ([(CONNECTED, 7), (SUCCEEDED, 0), (CONNECTED, 8), (DISCONNECTED, 7)], False),
    ],
)
def test_a_connection_is_good_from_its_handshake_to_its_end(events, is_good):
    assert connections(*events).is_good is is_good


def test_the_end_of_a_connection_that_no_further_try_follows_was_the_last():
    found = connections((CONNECTED, 7), (SUCCEEDED, 0), (DISCONNECTED, 7))
    assert not found.has_given_up(10.0)
    assert not found.has_given_up(10.0 + ANNOUNCED_WITHIN_S / 2)
    assert found.has_given_up(10.0 + ANNOUNCED_WITHIN_S)


@pytest.mark.parametrize("end", [(DISCONNECTED, 7), (CLOSED, 7)])
def test_an_end_that_a_further_try_follows_was_not_the_last(end):
    found = connections(end)
    assert not found.has_given_up(10.0)
    found.note({"event": RETRIED, "value": 0})
    assert not found.has_given_up(20.0)
    found.note({"event": end[0], "value": end[1]})
    assert not found.has_given_up(30.0)  # a new one, that has just been seen


def test_one_connection_of_several_may_have_been_given_up():
    found = connections((DISCONNECTED, 7))
    for now in range(3):  # the others are refused again and again
        found.note({"event": DISCONNECTED, "value": 8})
        found.note({"event": RETRIED, "value": 0})
        has_given_up = found.has_given_up(float(now))
    assert has_given_up


def test_a_good_connection_whose_end_was_hidden_is_given_up_when_it_stays_away():
    found = connections((CONNECTED, 7), (SUCCEEDED, 0), (DISCONNECTED, 7), (RETRIED, 0))
    assert not any(found.has_given_up(now) for now in (10.0, 19.0))
    assert found.has_given_up(20.0)
    never_good = connections((CONNECTED, 7), (DISCONNECTED, 7), (RETRIED, 0))
    assert not any(never_good.has_given_up(now) for now in (10.0, 20.0))


def test_nothing_is_given_up_while_a_connection_is_good():
    found = connections((CONNECTED, 7), (SUCCEEDED, 0), (CONNECTED, 8), (DISCONNECTED, 8))
    assert not any(found.has_given_up(now) for now in (10.0, 20.0))


@pytest.fixture
def context():
    with zmq.Context() as context:
        yield context
        context.destroy(linger=0)


@pytest.mark.parametrize("keys", [OTHER_KEYS, None], ids=["another key", "no key"])
def test_a_stranger_is_noticed_by_a_real_server_and_a_member_is_none(context, keys):
    server = router_socket(context, SocketOptions(max_message_bytes=1000, keys=KEYS))
    monitor, handshakes, found = monitor_of(server, ServerConnections.EVENTS), ServerConnections(), []
    address = bind(server, "tcp://127.0.0.1:0")

    def look():
        while monitor.poll(0):
            message = recv_monitor_message(monitor)
            found.append((int(message["event"]), handshakes.note(message, 0.0)))
        return found

    member = dealer_socket(context, SocketOptions(max_message_bytes=1000, keys=KEYS))
    member.connect(address)
    wait_until(lambda: (SUCCEEDED, False) in look())
    stranger = dealer_socket(context, SocketOptions(max_message_bytes=1000, keys=keys))
    stranger.connect(address)
    wait_until(lambda: (DISCONNECTED, True) in look())
    stranger.close(linger=0)
    member.close(linger=0)
    wait_until(lambda: (DISCONNECTED, False) in look())
    server.monitor(None, 0)
    monitor.close(linger=0)


def test_events_that_nobody_reads_stop_no_socket(context):
    """ZeroMQ's own queue holds 2,000; then its thread waits, and closing waits for it."""
    server = router_socket(context, SocketOptions(max_message_bytes=1000))
    monitor = monitor_of(server, ServerConnections.EVENTS)
    host, port = split_tcp(bind(server, "tcp://127.0.0.1:0"))
    for _ in range(1200):
        socket.create_connection((host, port)).close()
    client = dealer_socket(context, SocketOptions(max_message_bytes=1000))
    client.connect(f"tcp://{host}:{port}")
    client.send(b"hello")
    assert server.poll(10_000)
    for closed in (server, client):
        closed.monitor(None, 0)
        closed.close(linger=0)
    monitor.close(linger=0)


def test_a_damaged_frame_ends_the_connection_at_once(context):
    server = router_socket(context, SocketOptions(max_message_bytes=1000, keys=KEYS))
    server_monitor = monitor_of(server, ServerConnections.EVENTS)
    with TcpProxy(split_tcp(bind(server, "tcp://127.0.0.1:0"))) as proxy:
        client = dealer_socket(context, SocketOptions(max_message_bytes=1000, keys=KEYS))
        client_monitor = monitor_of(client, LOST_EVENTS)
        client.connect("tcp://{}:{}".format(*proxy.address))
        client.send(b"first")
        assert server.poll(10_000)
        server.recv_multipart()
        proxy.damage_requests()
        client.send(b"second")
        for monitor in (server_monitor, client_monitor):
            wait_until(lambda monitor=monitor: recv_monitor_message(monitor)["event"] == DISCONNECTED)
            monitor.close(linger=0)
        assert not server.poll(0)
        for closed in (client, server):
            closed.monitor(None, 0)
            closed.close(linger=0)


def test_no_monitor_asks_for_the_event_by_which_libzmq_loses_its_errno():
    asks = re.compile(r"zmq\.EVENT_HANDSHAKE_FAILED_PROTOCOL|zmq\.EVENT_ALL|get_monitor_socket\(\)")
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    without_heartbeats = "kvferry/doctor_peers.py"
    shipped = [name for name in listed if not name.startswith(("tests/", "benchmarks/", without_heartbeats))]
    assert len(shipped) > 300
    assert [name for name in shipped if asks.search((ROOT / name).read_text())] == []
