"""A store and its clients as real processes: kills, freezes and restarts on both sides."""

import json
import signal
import subprocess
import sys
import time
import urllib.request

import pytest
import zmq

from core.errors import StaleBlock
from kvstore.messages import Corrupt, ReleaseBlocks, encode_to_store
from kvstore.testing.blocks import BLOCK_BYTES, make_block
from kvstore.testing.store_suite import NUM_SLOTS, copy_of, get, lookup, put, read, wait_for

pytestmark = pytest.mark.slow

DEADLINE_S = 30.0

CLIENT = """
import sys, time
from core.clock import SystemClock
from core.ids import RandomIds
from kvstore.client import StoreClient, own_process
from kvstore.client_actions import ClientOptions
from kvstore.testing.blocks import BLOCK_BYTES, make_block
from kvstore.testing.store_suite import get, put
ids = RandomIds()
options = ClientOptions(f"child-{ids.bits(64):x}", BLOCK_BYTES, process=own_process())
store = StoreClient(sys.argv[1], options, SystemClock(), ids)
assert store.wait_until_connected(30) and store.is_local
blocks = [make_block(int(sys.argv[2]) + index) for index in range(4)]
put(store, blocks)
ticket = get(store, [block.key for block in blocks])
assert ticket.num_prefix_blocks == 4
print("pinned", flush=True)
time.sleep(600)
"""


def eventually(condition, what):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.fixture
def server(store_process):
    server = store_process()
    yield server
    server.close()


@pytest.fixture
def holder(shared_server):
    """A client process that has pinned four blocks."""
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT, shared_server.address, "0"], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout.readline() == "pinned\n"
        yield child
        child.kill()


def metric(server, name):
    with urllib.request.urlopen(f"{server.addresses['ops_address']}/metrics", timeout=10) as reply:
        lines = reply.read().decode().splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"kvferry_kvstore_{name}"))


def test_a_killed_client_s_pins_end_at_once(shared_server, holder):
    server, silent = shared_server, metric(shared_server, "silent_clients_total")
    assert metric(server, "pinned_slots") == 4
    holder.kill()
    eventually(lambda: metric(server, "pinned_slots") == 0, "pins of a dead client stay")
    assert metric(server, "clients") == 0
    assert metric(server, "silent_clients_total") == silent  # noticed by its death


def test_a_frozen_client_loses_its_pins_and_finds_out(shared_server, holder, client_of):
    server, silent = shared_server, metric(shared_server, "silent_clients_total")
    holder.send_signal(signal.SIGSTOP)
    eventually(lambda: metric(server, "pinned_slots") == 0, "pins of a frozen client stay")
    assert metric(server, "silent_clients_total") == silent + 1
    with client_of(server.address) as store:
        put(store, [make_block(100 + index) for index in range(NUM_SLOTS)])
    holder.send_signal(signal.SIGCONT)
    eventually(lambda: metric(server, "clients") == 1, "the thawed client does not come back")


def test_a_reader_that_lost_its_pins_notices_a_reused_slot(store_process, client_of):
    server = store_process(eviction="lru")
    blocks = [make_block(index) for index in range(4)]
    with client_of(server.address) as reader, client_of(server.address) as writer:
        put(reader, blocks)
        ticket = get(reader, [block.key for block in blocks])
        reader._machine.calls._pinned.clear()
        reader._machine.calls._send(ReleaseBlocks(numbers=(ticket.number,)))  # as if the store had taken the pins away
        reader._carry_out()
        for start in range(1000, 1000 + 4 * NUM_SLOTS, 16):
            put(writer, [make_block(start + index) for index in range(16)])
        assert not any(block.is_current() for block in ticket.blocks)
        with pytest.raises(StaleBlock):
            copy_of(reader, ticket.blocks[0])
        assert reader.statistics().rejected == {"stale": 1}
    server.close()


@pytest.mark.parametrize("shares_memory", [True, pytest.param(False, marks=pytest.mark.full)], ids=["arena", "frames"])
def test_a_killed_store_is_a_miss_and_its_successor_is_used(server, client_of, shares_memory):
    blocks = [make_block(index) for index in range(3)]
    keys = [block.key for block in blocks]
    with client_of(server.address, shares_memory=shares_memory) as store:
        put(store, blocks)
        held = get(store, keys)
        server.kill()
        assert list(lookup(store, keys).hits) == [False] * 3
        eventually(lambda: not store.is_connected, "the death of the store goes unnoticed")
        assert get(store, keys).blocks == [None] * 3
        assert put(store, blocks).stored == [False] * 3
        assert copy_of(store, held.blocks[0]) == bytes(blocks[0].content)  # the memory is still there
        server.start()
        eventually(lambda: store.is_connected, "the new store is not found")
        assert store.statistics().restarts_noticed == 1
        assert list(lookup(store, keys).hits) == [False] * 3
        store.release(held)
        put(store, blocks)
        assert read(store, keys) == [bytes(block.content) for block in blocks]


def test_a_frozen_store_is_a_miss_within_the_time_limit(server, client_of):
    block = make_block(1)
    with client_of(server.address, request_timeout_s=0.3) as store:
        put(store, [block])
        server.freeze()
        ticket = store.lookup([block.key])
        wait_for(ticket)
        assert (ticket.failure, list(ticket.hits)) == ("deadline", [False])
        eventually(lambda: not store.is_connected, "the silence of the store goes unnoticed")
        assert store.lookup([block.key]).is_done  # costs nothing any more
        server.signal(signal.SIGCONT)
        eventually(lambda: store.is_connected, "the thawed store is not found again")
        assert read(store, [block.key]) in ([bytes(block.content)], [None])
        put(store, [block])
        assert read(store, [block.key]) == [bytes(block.content)]


def test_disk_brings_back_what_a_killed_store_had(store_process, client_of, tmp_path):
    server = store_process(disk_path=tmp_path, disk_bytes=64 << 20)
    blocks = [make_block(index) for index in range(8)]
    with client_of(server.address) as store:
        put(store, blocks)
        eventually(lambda: metric(server, "tier_saved_blocks_total") == 8, "blocks do not reach the disk")
        server.kill()
        server.start()
        eventually(lambda: store.is_connected, "the new store is not found")
        assert list(lookup(store, [block.key for block in blocks]).hits) == [True] * 8
        assert read(store, [block.key for block in blocks]) == [bytes(block.content) for block in blocks]
    assert server.close() == 0


def test_write_back_hands_everything_down_at_a_graceful_end(store_process, client_of, tmp_path):
    server = store_process(disk_path=tmp_path, write_policy="back")
    blocks = [make_block(index) for index in range(8)]
    with client_of(server.address) as store:
        put(store, blocks)
        assert metric(server, "dirty_blocks") == 8
    assert server.close() == 0
    server.start()
    with client_of(server.address) as store:
        assert read(store, [block.key for block in blocks]) == [bytes(block.content) for block in blocks]
    assert server.close() == 0


def test_one_client_s_blocks_are_another_client_s_hits(shared_server, client_of):
    server, block = shared_server, make_block(1)
    with client_of(server.address) as near, client_of(server.address, shares_memory=False) as far:
        put(far, [block])
        assert read(near, [block.key]) == [bytes(block.content)]


def test_health_reports_clients(shared_server, client_of):
    url = f"{shared_server.addresses['ops_address']}/health"
    with client_of(shared_server.address), urllib.request.urlopen(url, timeout=10) as reply:
        assert json.load(reply) == {"is_serving": True, "clients": 1}


def test_frames_that_are_nonsense_are_answered_and_counted(shared_server, client_of):
    server = shared_server
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(server.address)
    valid = encode_to_store(Corrupt(keys=b"", code="digest"))
    for frames in ([b"nonsense"], [b""], [valid[:-1]], [valid + b"more", b"x" * 100], [valid]):
        socket.send_multipart(frames)
        assert socket.poll(10_000)
        socket.recv_multipart()
    socket.close(linger=0)
    context.term()
    assert metric(server, "bad_frames_total") >= 3
    with client_of(server.address) as store:
        block = make_block(1, BLOCK_BYTES)
        put(store, [block])
        assert read(store, [block.key]) == [bytes(block.content)]
