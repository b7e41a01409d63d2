"""Every socket of a cluster is sent nonsense: nothing crashes, nothing leaks, and the next answer is the one before."""

from __future__ import annotations

import contextlib
import json
import random
import socket
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest
import zmq

from connectors.p2p.transport.tcp_server import FORMAT_VERSION, ChunkRequest
from core.errors import ProtocolError
from core.wire.codec import decode_worker_frame
from core.wire.sockets import SocketOptions, dealer_socket

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_FRAMES = 10_000
NUM_CONNECTIONS = 300
FRAMES_PER_CONNECTION = 100
MAX_MORE_BYTES = 128 << 20
MAX_MORE_FDS = 16
# Refused for two reasons even if nothing else is spoiled, so that reading is what is tested, and not generating.
BODY = {
    "model": "smollm2-135m",
    "prompt": "One, two,",
    "max_tokens": 1,
    "temperature": -1,
    "n": 1,
    "stop": ["x"],
    "stream": False,
}
BODIES = [
    json.dumps(BODY).encode(),
    json.dumps(
        {"model": "smollm2-135m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": -1, "temperature": -1}
    ).encode(),
]
HEADS = [
    b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5\r\n\r\n{}",
    b"\xff" + bytes(8) + b"\x7f\x03",
]


@pytest.fixture
def served(secured, serve, eventually):
    """A client of the cluster, whose answer, processes and resources must be the same after the test."""
    attacked = secured.cluster
    with serve("fuzz", attacked) as client:
        before, processes = ask(client), [psutil.Process(pid) for pid in attacked.pids.values()]
        usage = {process.pid: (process.num_fds(), process.memory_info().rss) for process in processes}
        yield client
        assert ask(client) == before
        assert httpx.get(f"{attacked.base_url}/health").status_code == 200
        for worker in attacked.workers:
            assert httpx.get(f"{worker.ops_address}/health").status_code == 200
        assert sorted(attacked.pids.values()) == sorted(usage), "a process was replaced"
        eventually(lambda: not client.held(), "release of all blocks")
        for process in processes:
            num_fds, num_bytes = usage[process.pid]
            eventually(lambda p=process, n=num_fds: p.num_fds() <= n + MAX_MORE_FDS, "the end of connections")
            assert process.memory_info().rss < num_bytes + MAX_MORE_BYTES


def ask(client):
    return client.complete("A ferry is a boat that", max_tokens=8)["choices"][0]["token_ids"]


def spoil(content: bytes, rng: random.Random) -> bytes:
    """Return bytes that differ from what was sent somewhere."""
    spoiled = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        where = rng.randrange(len(spoiled) + 1)
        match rng.randrange(4):
            case 0 if where < len(spoiled):
                spoiled[where] ^= 1 << rng.randrange(8)
            case 1:
                del spoiled[where : where + rng.randint(1, 16)]
            case 2:
                spoiled[where:where] = rng.randbytes(rng.randint(1, 16))
            case _:
                spoiled[where:where] = spoiled[: rng.randint(0, 64)]
    return bytes(spoiled)


def nonsense_frames(rng: random.Random) -> list[bytes]:
    """Return frames of every plane with something wrong; those that a router would take for a worker's are left out."""
    golden = json.loads((Path(__file__).parents[1] / "core/wire/golden_frames.json").read_text())
    request = ChunkRequest(version=FORMAT_VERSION, token=1, chunk_id=1, region=0, rows=(0, 1, 2))
    good = [bytes.fromhex(frame) for plane in golden.values() for frame in plane.values()]
    good += [msgspec.msgpack.encode(request), b""]
    frames: list[bytes] = []
    while len(frames) < NUM_FRAMES:
        frame = spoil(rng.choice(good), rng)
        with contextlib.suppress(ProtocolError):
            decode_worker_frame(frame)
            continue
        frames.append(frame)
    return frames


def listening(cluster) -> list[int]:
    """Return the ports on which the processes of a cluster listen."""
    connections = [connection for pid in cluster.pids.values() for connection in psutil.Process(pid).net_connections("tcp")]
    return sorted(connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN)


def test_malformed_frames_on_every_port(secured, served):
    rng = random.Random(6)
    ports = listening(secured.cluster)
    assert len(ports) == 10  # router: clients, workers; two of prefill: control, data, operations; two of decode: operations
    frames = nonsense_frames(rng)
    with zmq.Context() as context:
        while frames:
            keys = rng.choice((secured.keys, secured.keys, secured.keys, None))  # a broken member, or an unauthenticated peer
            sender = dealer_socket(context, SocketOptions(max_message_bytes=1 << 26, keys=keys))
            sender.setsockopt(zmq.IMMEDIATE, 0)
            sender.connect(f"tcp://127.0.0.1:{rng.choice(ports)}")
            with contextlib.suppress(zmq.Again):  # a port that has hung up for good would be waited for without an end
                for _ in range(min(FRAMES_PER_CONNECTION, len(frames))):
                    parts = [frames.pop() for _ in range(min(rng.choice((1, 1, 1, 2, 5)), len(frames)))]
                    if parts:
                        sender.send_multipart(parts, zmq.DONTWAIT)
            sender.poll(20)
            sender.close(linger=200)


def test_bytes_that_are_no_protocol_on_every_port(secured, served):
    rng = random.Random(7)
    for port in listening(secured.cluster):
        for _ in range(NUM_CONNECTIONS):
            with socket.create_connection(("127.0.0.1", port), timeout=10) as stranger, contextlib.suppress(OSError):
                stranger.sendall(spoil(rng.choice(HEADS), rng))


@pytest.mark.parametrize("num_bodies", [1_000, pytest.param(10_000, marks=pytest.mark.full)])
def test_malformed_bodies(served, num_bodies):
    rng = random.Random(8)
    for _ in range(num_bodies):
        which = rng.randrange(len(BODIES))
        path = ("/v1/completions", "/v1/chat/completions")[which]
        answer = served.client.post(path, content=spoil(BODIES[which], rng), headers={"content-type": "application/json"})
        assert answer.status_code in (200, 400, 404, 429), answer.text
