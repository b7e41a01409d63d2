"""The threads and sockets around the two machines: which clients are accepted, what is refused, and the end of a thread."""

import contextlib
import errno
import gc
import json
import logging
import os
import subprocess
import threading
import time
from pathlib import Path

import pytest
import zmq

from core.clock import SystemClock
from core.config_workers import KVStoreSection
from core.errors import ConfigError, PeerUnreachable
from core.ids import RandomIds
from core.wire.curve import derive_keys, new_cluster_key
from core.wire.sockets import split_tcp
from core.wire.version import encode_refusal
from kvferry.store_role import store_routes
from kvstore.build import machine_options, make_tiers
from kvstore.client import StoreClient, connect_store, own_process, process_start_ticks
from kvstore.client_actions import ClientOptions
from kvstore.messages import (
    WIRE_VERSION,
    StoreGoodbye,
    StoreHeartbeat,
    UnknownClient,
    Welcome,
    decode_to_client,
    decode_to_store,
    encode_to_client,
    encode_to_store,
)
from kvstore.server import StoreServer
from kvstore.testing.blocks import BLOCK_BYTES, make_block
from kvstore.testing.in_memory import DictTier
from kvstore.testing.store_suite import NUM_SLOTS, put, read
from tests.support.tcp_proxy import TcpProxy

DEADLINE_S = 30.0


def eventually(condition, what):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


@contextlib.contextmanager
def serving(keys=None, on_death=None, **settings):
    ids = RandomIds()
    config = KVStoreSection(**{"memory_bytes": (NUM_SLOTS + 2) * BLOCK_BYTES, **settings})
    deaths = []
    server = StoreServer(machine_options(config, ids), make_tiers(config, ids), SystemClock(), on_death or deaths.append, keys)
    try:
        yield server, server.start("tcp://127.0.0.1:0")
    finally:
        server.stop()
    assert deaths == []


@contextlib.contextmanager
def client_at(address, keys=None, block_bytes=BLOCK_BYTES, request_timeout_s=0.5):
    config = KVStoreSection(address=address, heartbeat_interval_s=0.05, request_timeout_s=request_timeout_s)
    client = connect_store(config, "test", block_bytes, SystemClock(), RandomIds(), keys)
    try:
        yield client
    finally:
        client.close()


@pytest.mark.slow
def test_only_holders_of_the_key_get_in():
    keys, others = (derive_keys(new_cluster_key(RandomIds())) for _ in range(2))
    block = make_block(1)
    with serving(keys) as (server, address), client_at(address, keys) as member:
        assert member.wait_until_connected(DEADLINE_S)
        assert put(member, [block]).stored == [True]
        assert read(member, [block.key]) == [bytes(block.content)]
        with client_at(address, others) as other_key, client_at(address) as anonymous:
            assert not other_key.wait_until_connected(0.5)
            assert not anonymous.is_connected
            assert server.machine.num_clients == 1


@pytest.mark.parametrize("age", ["old", "new"])
def test_store_may_hold_either_key_while_it_changes(age, monkeypatch):
    ends, taken = [], StoreClient._take_link_event
    monkeypatch.setattr(StoreClient, "_take_link_event", lambda self, it: ends.append(int(it["event"])) or taken(self, it))
    keys = {name: derive_keys(new_cluster_key(RandomIds())) for name in ("old", "new")}
    ring = keys["old"].with_others([keys["new"]])
    block = make_block(1)
    with serving(keys[age]) as (_, address), client_at(address, ring) as member:
        assert member.wait_until_connected(DEADLINE_S)
        assert put(member, [block]).stored == [True]
        eventually(lambda: ends.count(zmq.EVENT_DISCONNECTED) >= 3, "the other key was never tried")
        assert member.is_connected
        assert read(member, [block.key]) == [bytes(block.content)]


def test_a_damaged_frame_costs_the_link_and_the_client_makes_another(monkeypatch):
    """libzmq connects no more after one."""
    keys = derive_keys(new_cluster_key(RandomIds()))
    block = make_block(1)
    made = StoreClient._connect

    def connect(client):
        with client._lock:
            client._machine.on_link_up(client._clock.now())
            client._machine.take_actions()  # the greeting: the dead socket took it, as it may be writable for a moment
        return made(client)

    with (
        serving(keys) as (_, address),
        TcpProxy(split_tcp(address)) as proxy,
        client_at("tcp://{}:{}".format(*proxy.address), keys, request_timeout_s=10 * DEADLINE_S) as client,
    ):
        assert client.wait_until_connected(DEADLINE_S)
        first = client._socket
        monkeypatch.setattr(StoreClient, "_connect", connect)
        proxy.damage_answers()
        eventually(lambda: client._socket is not first, "the client kept the dead socket")
        assert client.wait_until_connected(DEADLINE_S)
        assert put(client, [block]).stored == [True]
        assert read(client, [block.key]) == [bytes(block.content)]


@pytest.mark.slow
def test_blocks_that_do_not_fit_are_refused_and_the_reason_is_reported_once(caplog):
    with serving() as (_, address), client_at(address) as fitting:
        assert fitting.wait_until_connected(DEADLINE_S)
        with caplog.at_level(logging.WARNING), client_at(address, block_bytes=2 * BLOCK_BYTES) as large:
            eventually(lambda: "event=kvstore_refused" in caplog.text, "nobody is told")
            assert not large.wait_until_connected(0.3)
        assert caplog.text.count("kvstore_refused") == 1
        assert caplog.text.count("event=kvstore_client_refused code=layout") == 1


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"memory_bytes": BLOCK_BYTES}, "kvstore.memory_bytes"),
        ({"disk_bytes": BLOCK_BYTES // 2, "disk_segment_bytes": BLOCK_BYTES // 4}, "kvstore.disk_bytes"),
    ],
)
def test_store_without_room_for_one_block_says_so_in_its_own_log_and_is_not_ready(settings, setting, caplog, tmp_path):
    """It learns the size of a block from its first client, and looks healthy until then."""
    settings |= {"disk_path": str(tmp_path)} if "disk_bytes" in settings else {}
    with serving(**settings) as (server, address), client_at(address):
        routes = store_routes(server)
        eventually(lambda: "event=kvstore_client_refused" in caplog.text, "nobody is told")
        (line,) = [record.getMessage() for record in caplog.records if "kvstore_client_refused" in record.getMessage()]
        assert setting in line
        assert "does not hold one block" in line
        health, ready = (routes["GET", path]() for path in ("/health", "/ready"))
        assert (health.status, ready.status) == (200, 503)
        assert json.loads(ready.body)["reason"].startswith(f"{setting} = ")


def test_frames_of_another_version_are_refused_once_and_logged_once(caplog):
    with serving() as (server, address), zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(address)
        frame = encode_to_store(StoreGoodbye(), WIRE_VERSION + 1)
        for _ in range(300):
            stranger.send(frame)
        eventually(lambda: server.machine.counts["bad_frames"] == 300, "they did not arrive")
        stranger.send(encode_to_store(StoreHeartbeat(last=0)))
        assert stranger.poll(1000 * DEADLINE_S)
        assert stranger.recv() == encode_refusal(WIRE_VERSION, WIRE_VERSION + 1)
        assert stranger.poll(1000 * DEADLINE_S)
        assert isinstance(decode_to_client(stranger.recv()), UnknownClient)
        stranger.linger = 0
    assert caplog.text.count("other_wire_version") == 1


@pytest.mark.slow
def test_a_client_backs_off_from_a_store_of_another_version_until_it_is_understood(caplog):
    caplog.set_level(logging.INFO)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as store:
        store.linger = 0
        port = store.bind_to_random_port("tcp://127.0.0.1")
        with client_at(f"tcp://127.0.0.1:{port}") as client:
            for number in range(3):
                assert store.poll(1000 * DEADLINE_S)
                identity, frame = store.recv_multipart()
                if number < 2:
                    store.send_multipart([identity, encode_refusal(2, WIRE_VERSION)])
            hello = decode_to_store(frame)
            welcome = Welcome(session=hello.session, incarnation=1, slot_bytes=BLOCK_BYTES)
            store.send_multipart([identity, encode_to_client(welcome)])
            assert client.wait_until_connected(DEADLINE_S)
            eventually(lambda: "kvstore_understood" in caplog.text, "nobody is told")
    assert caplog.text.count("other_wire_version") == 1


def test_an_arena_that_cannot_be_mapped_means_frames(monkeypatch):
    def refuse(*_):
        raise PeerUnreachable("not here")

    monkeypatch.setattr("kvstore.client.map_arena", refuse)
    block = make_block(1)
    with serving() as (_, address), client_at(address) as client:
        assert client.wait_until_connected(DEADLINE_S)
        assert not client.is_local
        put(client, [block])
        assert read(client, [block.key]) == [bytes(block.content)]


def test_memory_of_a_lost_store_is_unmapped_so_that_the_next_one_has_room():
    gc.collect()  # arenas of other tests
    with contextlib.ExitStack() as store:
        server, address = store.enter_context(serving())
        with client_at(address) as client:
            assert client.wait_until_connected(DEADLINE_S)
            num_mapped = num_mapped_arenas()
            store.close()
            eventually(lambda: num_mapped_arenas() == num_mapped - 1, "the client keeps it")
        assert server.machine.memory is not None  # its own mapping stays


def num_mapped_arenas():
    return Path("/proc/self/maps").read_text().count("memfd:kvferry-arena")


def test_a_process_that_is_another_one_by_now_does_not_count_as_alive():
    pid, start_ticks = own_process()
    options = ClientOptions("impostor", BLOCK_BYTES, process=(pid, start_ticks + 1))
    with serving() as (server, address):
        client = StoreClient(address, options, SystemClock(), RandomIds())
        eventually(lambda: server.machine.memory is not None and server.machine.num_clients == 0, "it counts as alive")
        client.close()


def test_a_process_that_ends_while_it_begins_to_be_watched_does_not_count_as_alive(monkeypatch, caplog):
    monkeypatch.setattr("kvstore.server.process_start_ticks", lambda _: None)  # its parent has reaped it
    with subprocess.Popen(["true"]) as process, serving() as (server, address):
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        client = StoreClient(address, ClientOptions("c", BLOCK_BYTES, process=(process.pid, 1)), SystemClock(), RandomIds())
        eventually(lambda: server.machine.memory is not None and server.machine.num_clients == 0, "it counts as alive")
        client.close()
    assert "kvstore_cannot_watch" not in caplog.text


@pytest.mark.parametrize("missing", ["pidfd", "start time"])
def test_a_client_that_cannot_be_watched_is_served_by_frames(missing, monkeypatch, caplog):
    def refuse(*_):
        raise PermissionError(1, "not permitted")

    blocks = [make_block(number) for number in range(3)]
    if missing == "pidfd":
        monkeypatch.setattr("kvstore.server.os.pidfd_open", refuse)
    else:
        monkeypatch.setattr("kvstore.server.process_start_ticks", lambda _: None)
    with serving() as (server, address), client_at(address) as client:
        assert client.wait_until_connected(DEADLINE_S)
        assert not client.is_local
        for block in blocks:
            assert put(client, [block]).stored == [True]
            assert read(client, [block.key]) == [bytes(block.content)]
        assert (server.machine.num_clients, server.machine.num_local_clients) == (1, 0)
        assert client.statistics().timeouts == 0
    assert caplog.text.count("kvstore_cannot_watch") == 1


def test_the_start_of_a_process_is_read_from_the_system():
    assert process_start_ticks(own_process()[0]) == own_process()[1] > 0
    assert process_start_ticks(2**22 + 5) is None


def test_an_address_in_use_is_refused(tmp_path):
    with serving() as (_, address):
        config = KVStoreSection(disk_path=str(tmp_path))
        ids = RandomIds()
        second = StoreServer(machine_options(config, ids), make_tiers(config, ids), SystemClock(), pytest.fail)
        with pytest.raises(ConfigError, match="cannot bind"):
            second.start(address)
        second.stop()
    for tier in make_tiers(config, ids):  # the folder was released
        tier.close()


def test_an_address_that_is_none_is_refused():
    with pytest.raises(ConfigError, match=r"kvstore\.address"):
        connect_store(KVStoreSection(address="nonsense"), "test", BLOCK_BYTES, SystemClock(), RandomIds())


def test_a_fault_of_ours_ends_the_server_visibly(monkeypatch):
    deaths, died = [], threading.Event()

    def on_death(error):
        deaths.append(error)
        died.set()

    with serving(on_death=on_death) as (server, _):
        assert server.is_serving
        monkeypatch.setattr(server.machine, "on_timer", lambda now: 1 / 0)
        assert died.wait(DEADLINE_S)
        eventually(lambda: not server.is_serving, "it still looks alive")
    assert isinstance(deaths[0], ZeroDivisionError)


class HangingTier(DictTier):
    """Takes no block until it is ``released``."""

    def __init__(self):
        super().__init__()
        self.released, self.is_closed = threading.Event(), False

    def save(self, key, seal, block):
        self.released.wait()
        return super().save(key, seal, block)

    def close(self):
        self.is_closed = True


def test_a_server_stops_although_a_tier_hangs_and_says_so(monkeypatch, caplog):
    monkeypatch.setattr("kvstore.server.STOP_TIMEOUT_S", 0.1)
    tier, block = HangingTier(), make_block(1)
    options = machine_options(KVStoreSection(memory_bytes=(NUM_SLOTS + 2) * BLOCK_BYTES), RandomIds())
    server = StoreServer(options, [tier], SystemClock(), pytest.fail)
    stopping = threading.Thread(target=server.stop, args=(0.1,), daemon=True)
    with client_at(server.start("tcp://127.0.0.1:0")) as client:
        assert client.wait_until_connected(DEADLINE_S)
        put(client, [block])
        stopping.start()
        stopping.join(DEADLINE_S)
    assert not stopping.is_alive()
    assert "event=kvstore_unsaved blocks=1" in caplog.text
    assert "event=kvstore_tier_hangs tier=dict" in caplog.text
    assert not tier.is_closed
    tier.released.set()
    eventually(lambda: tier.values, "what the tier wrote is gone")
    assert bytes(tier.values[block.key.pack()][1]) == bytes(block.content)


def test_no_thread_or_descriptor_is_left():
    with serving() as (_, address), client_at(address) as client:
        client.wait_until_connected(DEADLINE_S)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("kvstore")]


def test_a_client_without_a_descriptor_for_another_socket_tries_again(monkeypatch, caplog):
    keys = derive_keys(new_cluster_key(RandomIds()))
    made = StoreClient._connect
    failures = [zmq.ZMQError(errno.EMFILE), None]

    def connect(client):
        if failure := failures.pop(0):
            raise failure
        return made(client)

    with (
        serving(keys) as (_, address),
        TcpProxy(split_tcp(address)) as proxy,
        client_at("tcp://{}:{}".format(*proxy.address), keys) as client,
    ):
        assert client.wait_until_connected(DEADLINE_S)
        monkeypatch.setattr(StoreClient, "_connect", connect)
        proxy.damage_answers()
        eventually(lambda: not failures, "it was not tried again")
        assert client.wait_until_connected(DEADLINE_S)
    assert "event=kvstore_not_reconnected" in caplog.text
