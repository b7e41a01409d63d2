"""Nothing is left of a cluster, however it ends: no process, no shared memory, no socket file."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from core.config import dump_config
from kvferry import LocalCluster
from tests.support import shared_memory

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.usefixtures("no_child_left")]


def socket_files():
    """Return the sockets of ours that have a name in the file system."""
    sockets = {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()[1:] if len(line.split()) == 8}
    return {path for path in sockets if "kvferry" in path}


@pytest.fixture(params=["shm"])
def serving(request, cluster_config, tiny_model, tmp_path):
    """``kvferry serve`` over a transport in a process of its own; returns it, its children, and its address."""
    settings = tmp_path / "settings.json"
    overrides = (*tiny_model, f"connector.transports=[{request.param}]", "worker.drain_timeout_s=5")
    settings.write_text(dump_config(cluster_config(*overrides)))
    command = [sys.executable, "-P", "-m", "kvferry", "serve", "--config", str(settings)]
    with (tmp_path / "serve.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        line = next((line for line in process.stdout if line.startswith("serving")), "")
        assert line, (tmp_path / "serve.log").read_text()[-2000:]
        yield process, psutil.Process(process.pid).children(recursive=True), re.search(r"http://[\d.:]+", line)[0]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def assert_all_gone(children):
    gone, alive = psutil.wait_procs(children, timeout=20)
    for child in alive:
        child.kill()
    assert [child.pid for child in alive] == []
    assert len(gone) == 3


def ask(address):
    body = {"model": "smollm2-135m", "prompt": "One, two,", "max_tokens": 4}
    return httpx.post(f"{address}/v1/completions", json=body, timeout=120)


@pytest.mark.parametrize("serving", ["nixl"], indirect=True)  # the one with a library that has files of its own
def test_killed_serving_process_leaves_nothing_not_even_a_stopped_child(serving):
    process, children, address = serving
    before = shared_memory.files()
    assert ask(address).status_code == 200
    children[-1].suspend()
    process.kill()
    assert_all_gone(children)
    assert not shared_memory.left_since(before)
    assert not socket_files()
    with pytest.raises(httpx.TransportError):
        ask(address)


def test_serving_process_finishes_its_requests_on_sigterm(serving):
    process, children, address = serving
    body = {"model": "smollm2-135m", "prompt": "One, two,", "max_tokens": 40, "ignore_eos": True, "stream": True}
    num_tokens = 0
    with httpx.stream("POST", f"{address}/v1/completions", json=body | {"return_token_ids": True}, timeout=120) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            if num_tokens == 0:
                process.send_signal(signal.SIGTERM)
            num_tokens += sum(len(choice["token_ids"]) for choice in json.loads(line.removeprefix("data: "))["choices"])
    assert num_tokens == 40
    assert process.wait(timeout=30) == 0
    assert_all_gone(children)


@pytest.mark.full  # the clusters of ``faults`` are held to it each time
def test_nothing_is_left_after_a_cluster_is_stopped(cluster_config, tmp_path):
    before = shared_memory.files()
    cluster = LocalCluster(cluster_config("connector.transports=[shm]"), log_dir=tmp_path / "logs")
    with cluster:
        children = [psutil.Process(pid) for pid in cluster.pids.values()]
        ports = {connection.laddr.port for child in children for connection in child.net_connections(kind="inet")}
        assert ask(cluster.base_url).status_code == 200
    assert_all_gone(children)
    assert not shared_memory.left_since(before)
    assert not socket_files()
    listening = {connection.laddr.port for connection in psutil.net_connections(kind="inet") if connection.status == "LISTEN"}
    assert not listening & ports
