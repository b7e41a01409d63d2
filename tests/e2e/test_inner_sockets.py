"""A local cluster without a configured key: an unauthenticated process on the machine gets nothing from its inner sockets."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from kvferry import LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

LISTENING = "0A"  # include/net/tcp_states.h
STRANGER = """
import sys
import zmq
from zmq.utils.monitor import recv_monitor_message
from core.wire import codec
from core.wire.kv import Handshake, KVLayoutInfo
from core.wire.messages import Register
from core.wire.sockets import SocketOptions, dealer_socket
from kvstore.messages import Hello, encode_to_store

layout = KVLayoutInfo(
    dtype="float32", order="HND", block_size=16, num_layers=1, num_kv_heads=1, head_dim=8, block_bytes=1024
)
register = Register(
    engine_id="stranger", incarnation=1, role="aggregated", model=sys.argv[1], model_fingerprint=b"x", layout=layout,
    max_model_len=4096, max_num_seqs=8, num_blocks=64,
)
handshake = Handshake(
    engine_id="stranger", incarnation=1, model_fingerprint=b"x", layout=layout, transports=("tcp",), host_id="h"
)
frames = [
    codec.encode_worker_message(register),
    codec.encode_control_message(handshake),
    encode_to_store(Hello(client_id="stranger", session=1, block_bytes=1024)),
]
with zmq.Context() as context:
    for port in map(int, sys.argv[2:]):
        stranger = dealer_socket(context, SocketOptions(max_message_bytes=1 << 24))
        stranger.immediate = 0
        monitor = stranger.get_monitor_socket()
        stranger.connect(f"tcp://127.0.0.1:{port}")
        for frame in frames:
            stranger.send(frame, zmq.NOBLOCK)
        happened = []
        while monitor.poll(5000 if zmq.EVENT_DISCONNECTED not in happened else 0):
            happened.append(recv_monitor_message(monitor)["event"])
        outcome = "in" if zmq.EVENT_HANDSHAKE_SUCCEEDED in happened else "out"
        outcome = "answered" if stranger.poll(0) else outcome
        print(port, outcome if zmq.EVENT_CONNECTED in happened else "unreachable")
        stranger.disable_monitor()
        monitor.close(linger=0)
        stranger.close(linger=0)
"""


def listening_ports(pid: int) -> set[int]:
    """Return the TCP ports that a process listens on."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry))
        inodes |= {found.group(1)} if found else set()
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == LISTENING and row[9] in inodes}


def http_ports(cluster: LocalCluster) -> set[int]:
    """Return the ports that are for clients and operators."""
    addresses = [cluster.base_url, *(worker.ops_address for worker in cluster.workers)]
    store = cluster._live("kvstore").addresses.result()["ops_address"]
    return {int(address.rpartition(":")[2]) for address in [*addresses, store]}


def test_an_unauthenticated_process_gets_into_no_inner_socket(start_cluster, tiny_model):
    cluster = start_cluster(*tiny_model, "connector.transports=[tcp]", "local.kvstore=true")
    ports = {name: listening_ports(pid) - http_ports(cluster) for name, pid in cluster.pids.items()}
    assert (len(ports["router"]), len(ports["prefill-0"]), len(ports["kvstore"])) == (1, 2, 1), ports
    inner = sorted(set().union(*ports.values()))
    models = httpx.get(f"{cluster.base_url}/v1/models").json()["data"]
    command = [sys.executable, "-c", STRANGER, models[0]["id"], *map(str, inner)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout.split()
    assert dict(zip(found[::2], found[1::2], strict=True)) == {str(port): "out" for port in inner}
    workers = httpx.get(f"{cluster.base_url}/status.json").json()["workers"]
    assert sorted(worker["engine_id"] for worker in workers) == ["decode-0", "prefill-0"]
    body = {"model": models[0]["id"], "prompt": "a b c " * 40, "max_tokens": 2}
    usage = httpx.post(f"{cluster.base_url}/v1/completions", json=body, timeout=60).json()["usage"]
    assert usage["kv_transfer"]["transport"] == "tcp"
