"""A real router whose log nobody reads any more, as of a paused pager."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time

import httpx
import pytest

from kvferry.cluster_plan import free_ports

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_child_left")]

DEADLINE_S = 60.0


def test_a_router_whose_log_nobody_reads_serves_and_keeps_the_lines():
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writer, b"x" * 4096)
    (port,) = free_ports(1)
    command = [sys.executable, "-P", "-m", "kvferry", "router", "--set", f"router.port={port}", "--set"]
    process = subprocess.Popen([*command, "router.worker_address=tcp://127.0.0.1:0"], stderr=writer)
    os.close(writer)
    try:
        wait_for_health(f"http://127.0.0.1:{port}/health")
        assert os.read(reader, 8192) == b"x" * 4096, "nothing else was in it"
        process.send_signal(signal.SIGTERM)
        with os.fdopen(reader) as log:
            lines = log.read()
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
        process.wait()
    assert "event=router_started" in lines
    assert "event=router_stopped" in lines


def wait_for_health(url: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            assert httpx.get(url, timeout=DEADLINE_S).status_code == 200
            return
        except httpx.ConnectError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
