"""``kvferry router`` with several processes: real ones, started, killed and drained."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from core.config import load_config
from core.errors import StartFailed
from kvferry.processes import ChildSpec
from kvferry.router_group import RouterGroup

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.usefixtures("no_child_left")]

DEADLINE_S = 60.0
SETTINGS = ("router.processes=2", "router.port=0", "router.worker_address=tcp://127.0.0.1:0")


def until(read):
    """Return the first value of ``read()`` that is not empty."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if found := read():
            return found
        time.sleep(0.1)
    raise TimeoutError


@pytest.fixture
def group(tmp_path):
    """A group of two routers: its process, and a function that returns the lines of its log with an event."""
    log = tmp_path / "log"
    command = [sys.executable, "-P", "-m", "kvferry", "router"]
    for setting in SETTINGS:
        command += ["--set", setting]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)

    def lines(name):
        return [line for line in log.read_text().splitlines() if f"event={name}" in line]

    yield process, lines
    process.kill()
    process.wait()


def field(line, name):
    return line.partition(f" {name}=")[2].split()[0]


def ops_addresses(lines):
    """Return the operations addresses of the routers, in their order."""
    (line,) = lines("routers_started")
    return field(line, "ops_address").split(",")


def test_routers_share_a_port_and_one_that_dies_is_replaced(group):
    process, lines = group
    until(lambda: lines("routers_started"))
    ports = {field(line, "http") for line in lines("router_started")}
    assert len(ports) == 1
    assert len({field(line, "workers") for line in lines("router_started")}) == 2
    (url,) = ports
    killed = int(field(lines("started")[1], "pid"))
    os.kill(killed, signal.SIGKILL)
    until(lambda: lines("died"))
    until(lambda: len(lines("router_started")) == 3)
    assert {field(line, "http") for line in lines("router_started")} == ports
    reports = [httpx.get(f"{each}/status.json", timeout=DEADLINE_S).json() for each in ops_addresses(lines)]
    assert [(report["process_number"], report["num_processes"]) for report in reports] == [(0, 2), (1, 2)]
    for _ in range(8):  # connections go to both
        assert httpx.get(f"{url}/health", timeout=DEADLINE_S).status_code == 200
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_S) == 0
    assert len(lines("router_stopped")) == 2
    assert Path(f"/proc/{killed}").exists() is False


def test_router_that_dies_while_the_others_start_fails_the_start(monkeypatch):
    group = RouterGroup(load_config(assignments=SETTINGS))
    read_addresses = group._addresses

    def read_and_kill(child, deadline):
        addresses = read_addresses(child, deadline)
        if child.spec.name != "router":
            os.kill(group.pids["router"], signal.SIGKILL)
            until(lambda: "router" not in group.pids)
        return addresses

    monkeypatch.setattr(group, "_addresses", read_and_kill)
    try:
        with pytest.raises(StartFailed, match="router did not start: it ended with signal SIGKILL"):
            group.start()
    finally:
        group.close()


def test_wait_ends_with_the_thread_that_keeps_the_processes(monkeypatch):
    def fail(group, child, lived_s):
        raise RuntimeError("a bug")

    monkeypatch.setattr(RouterGroup, "_on_exit", fail)
    group = RouterGroup(load_config(assignments=SETTINGS))
    group._keeper.start(ChildSpec("router", [sys.executable, "-c", "pass"], None))
    with pytest.raises(StartFailed, match="has died"):
        group.wait()
    group.close()
