"""A process whose table of descriptors is full says so once, and serves whoever waits when there is room again."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import urllib.request

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_child_left")]

WAIT_S = 60
ROLES = {
    "kvstore": (("--address", "tcp://127.0.0.1:0", "--set", "kvstore.memory_bytes=16MiB"), "kvstore_serving", "ops_address"),
    "router": (("--port", "0", "--set", "router.worker_address=tcp://127.0.0.1:0"), "router_started", "http"),
    "decode": (("--set", "cache.memory_bytes=64MiB", "--set", "worker.pin_cpus=false"), "ops_port_open", "address"),
}


class Running:
    """A process of a role, with what it has written."""

    def __init__(self, role, folder):
        words, self.event, self.field = ROLES[role]
        self._log = folder / "log"
        with self._log.open("wb") as log:
            command = [sys.executable, "-P", "-m", "kvferry", role, *words]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    @property
    def log(self):
        return self._log.read_text()

    @property
    def url(self):
        line = next((line for line in self.log.splitlines() if f"event={self.event}" in line), "")
        return line.partition(f" {self.field}=")[2].partition(" ")[0]

    def allow(self, num_descriptors):
        """Set the soft limit of the process."""
        _, hard = resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE, (num_descriptors, hard))


@pytest.fixture
def run(tmp_path):
    started = []

    def run(role):
        started.append(Running(role, tmp_path))
        return started[-1]

    yield run
    for running in started:
        running.process.kill()
        running.process.wait()


def get(url):
    with urllib.request.urlopen(f"{url}/health", timeout=WAIT_S) as answer:
        return answer.status


@pytest.mark.parametrize("role", ["kvstore", "router"])
def test_full_table_is_one_line_and_the_connection_that_waits_is_served(run, eventually, role):
    running = run(role)
    eventually(lambda: running.url)
    assert get(running.url) == 200
    running.allow(3)  # which are taken from the start
    asking = subprocess.Popen(
        [sys.executable, "-c", "import sys, urllib.request as r; r.urlopen(sys.argv[1])", f"{running.url}/health"]
    )
    try:
        eventually(lambda: "event=no_descriptors" in running.log or "Too many open files" in running.log)
        assert asking.poll() is None
        running.allow(1024)
        assert asking.wait(WAIT_S) == 0
    finally:
        asking.kill()
        asking.wait()
    assert get(running.url) == 200
    assert running.log.count("event=no_descriptors") == 1
    assert "Traceback" not in running.log
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(WAIT_S) == 0


@pytest.mark.parametrize("role", ["kvstore", "decode"])
def test_process_raises_its_limit_of_descriptors(run, eventually, role):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4096 + 256 if before[1] == resource.RLIM_INFINITY else min(before[1], 4096 + 256)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        running = run(role)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    eventually(lambda: running.url)
    assert resource.prlimit(running.process.pid, resource.RLIMIT_NOFILE)[0] == wanted
