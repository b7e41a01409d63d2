"""A store's socket is sent nonsense: it does not end, keep or answer anything that it should not, and serves on."""

from __future__ import annotations

import random
import urllib.request

import psutil
import pytest
import zmq

from kvstore import messages as m
from kvstore.key import PACKED_KEY_BYTES
from kvstore.testing.blocks import BLOCK_BYTES, make_block
from kvstore.testing.store_suite import put, read

NUM_MESSAGES = 10_000
NUM_CONNECTIONS = 50
MAX_MORE_BYTES = 64 << 20
KEYS = bytes(2 * PACKED_KEY_BYTES)
SEALS = bytes(128)
GOOD = [
    m.Hello(client_id="fuzz", session=5, block_bytes=BLOCK_BYTES),
    m.Attach(nonce=bytes(32), pid=1, start_ticks=1),
    m.Lookup(number=1, keys=KEYS),
    m.Get(number=2, keys=KEYS),
    m.ReleaseBlocks(numbers=(2,)),
    m.Reserve(number=3, keys=KEYS, sizes=(64, 64)),
    m.Commit(number=3, seals=SEALS),
    m.Put(number=4, keys=KEYS, seals=SEALS),
    m.Corrupt(keys=KEYS, code="digest"),
    m.StoreHeartbeat(last=4, held=(2,)),
    m.StoreGoodbye(),
]


def spoil(frame: bytes, rng: random.Random) -> bytes:
    """Return a frame that differs from a good one somewhere, or, now and then, the good one."""
    spoiled = bytearray(frame)
    for _ in range(rng.randrange(4)):
        where = rng.randrange(len(spoiled) + 1)
        match rng.randrange(3):
            case 0 if where < len(spoiled):
                spoiled[where] ^= 1 << rng.randrange(8)
            case 1:
                del spoiled[where : where + rng.randint(1, 16)]
            case _:
                spoiled[where:where] = rng.randbytes(rng.randint(1, 16))
    return bytes(spoiled)


@pytest.fixture
def server(store_process):
    running = store_process(client_timeout_s=5.0)
    yield running
    assert running.close() == 0


@pytest.mark.slow
def test_ten_thousand_malformed_messages_change_nothing(server, client_of):
    process = psutil.Process(server.process.pid)
    with client_of(server.address) as client:
        block = make_block(1, BLOCK_BYTES)
        put(client, [block])
        num_fds, num_bytes = process.num_fds(), process.memory_info().rss
        send_nonsense(server.address)
        assert read(client, [block.key]) == [bytes(block.content)]
        put(client, [make_block(2, BLOCK_BYTES)])
    with urllib.request.urlopen(f"{server.addresses['ops_address']}/health", timeout=10) as reply:
        assert reply.status == 200
    assert process.is_running()
    assert process.num_fds() <= num_fds + NUM_CONNECTIONS
    assert process.memory_info().rss < num_bytes + MAX_MORE_BYTES


def send_nonsense(address: str) -> None:
    rng = random.Random(9)
    frames = [m.encode_to_store(message) for message in GOOD]
    with zmq.Context() as context:
        for _ in range(NUM_CONNECTIONS):
            socket = context.socket(zmq.DEALER)
            socket.connect(address)
            for _ in range(NUM_MESSAGES // NUM_CONNECTIONS):
                blocks = [rng.randbytes(rng.choice((0, 1, 64, BLOCK_BYTES))) for _ in range(rng.choice((0, 0, 1, 2)))]
                socket.send_multipart([spoil(rng.choice(frames), rng), *blocks])
            assert socket.poll(20_000)  # it has read some of it, and said so
            socket.close(linger=2000)
