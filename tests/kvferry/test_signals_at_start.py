"""A process that gets a signal to leave at any moment of its start exits with code 0 and leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support import shared_memory

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_child_left")]

ROLES = {
    "router": ("--port", "0", "--set", "router.worker_address=tcp://127.0.0.1:0"),
    "prefill": ("--control-address", "tcp://127.0.0.1:0", "--ops-port", "0"),
    "decode": ("--ops-port", "0"),
    "kvstore": ("--address", "tcp://127.0.0.1:0", "--ops-port", "0"),
    "serve": ("--port", "0", "--aggregated"),
}
LAST_LINES = {
    "router": "event=router_started",
    "prefill": "event=engine_thread",
    "decode": "event=engine_thread",
    "kvstore": "event=kvstore_serving",
    "serve": "event=engine_thread",
}
SMALL = ("--set", f"cache.memory_bytes={64 << 20}", "--set", f"kvstore.memory_bytes={16 << 20}")
SETTINGS = (*SMALL, "--set", "worker.cpu_threads=1", "--set", "worker.pin_cpus=false")


class Starting:
    """A process of a role, and what it has written."""

    def __init__(self, role, folder):
        self.role = role
        self._log = folder / "process.log"
        command = [sys.executable, "-P", "-m", "kvferry", role, *ROLES[role], *SETTINGS]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    @property
    def log(self):
        return self._log.read_text()

    @property
    def handles_signals(self):
        """True once the interpreter has run our first lines; before, the kernel's default holds."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        caught = int(status.partition("SigCgt:")[2].split()[0], 16)
        return bool(caught >> (signal.SIGTERM - 1) & 1)

    @property
    def cpu_s(self):
        """The processor time used so far: how far the start has come, however busy the machine is."""
        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system


@pytest.fixture
def start(tmp_path):
    processes = []

    def start(role):
        starting = Starting(role, tmp_path)
        processes.append(starting.process)
        return starting

    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may ignore it
    before = shared_memory.files()
    yield start
    signal.signal(signal.SIGHUP, hangup)
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not shared_memory.left_since(before)


def has_come(starting, cpu_s):
    """Return what is true once the start has used so much processor time, or is over: no two take the same."""
    return lambda: starting.handles_signals and (starting.cpu_s >= cpu_s or LAST_LINES[starting.role] in starting.log)


def assert_leaves(starting, number=signal.SIGTERM):
    starting.process.send_signal(number)
    assert starting.process.wait(timeout=60) == 0, starting.log
    assert "terminate called" not in starting.log
    assert "Traceback" not in starting.log


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_process_leaves_from_its_first_lines_on(start, eventually, role, number):
    starting = start(role)
    eventually(lambda: starting.handles_signals)
    assert_leaves(starting, number)


@pytest.mark.parametrize("role", ["prefill", pytest.param("decode", marks=pytest.mark.full)])
def test_worker_leaves_while_its_model_loads(start, eventually, role):
    starting = start(role)
    eventually(lambda: "event=attention_backend" in starting.log)
    assert_leaves(starting)


@pytest.mark.full
@pytest.mark.parametrize("role", ROLES)
def test_process_leaves_at_any_moment_of_its_start(start, eventually, role):
    whole = start(role)
    eventually(lambda: LAST_LINES[role] in whole.log)
    total_s = whole.cpu_s
    assert_leaves(whole)
    for part in range(1, 20):
        starting = start(role)
        eventually(has_come(starting, total_s * part / 20))
        assert_leaves(starting)
