"""The log of a real process that nobody reads any more, as behind a paused pager, and its last lines."""

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


def test_a_bug_that_ends_a_process_is_a_line_of_its_log():
    script = (
        "import sys, kvferry.cli, kvferry.__main__; from core.log import configure_logging; configure_logging('INFO', 'p');"
        "sys.argv = ['kvferry', 'router']; kvferry.cli.main = lambda: 1 / 0; kvferry.__main__.main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 1
    first, *others = done.stderr.splitlines()
    assert "level=critical process=p logger=kvferry.__main__ event=process_bug" in first
    assert others[-1] == "  ZeroDivisionError: division by zero"
