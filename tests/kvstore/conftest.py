"""Stores of tests: in this process, and as a process of their own that can be killed, frozen and started again."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from core.clock import SystemClock
from core.config_workers import KVStoreSection
from core.ids import RandomIds
from kvstore.arena import arena_bytes
from kvstore.build import make_embedded_store
from kvstore.client import StoreClient, own_process
from kvstore.client_actions import ClientOptions
from kvstore.testing.blocks import BLOCK_BYTES
from kvstore.testing.store_suite import NUM_SLOTS

MEMORY_BYTES = arena_bytes(NUM_SLOTS, BLOCK_BYTES)


class StoreProcess:
    """``kvferry kvstore``, on the same port through all its restarts."""

    def __init__(self, **settings):
        self._settings = {"memory_bytes": MEMORY_BYTES, "block_bytes": BLOCK_BYTES, "client_timeout_s": 1.0, **settings}
        self._address = "tcp://127.0.0.1:0"
        self.start()

    def start(self):
        reading, writing = os.pipe()
        command = [sys.executable, "-m", "kvferry", "kvstore", "--address", self._address, "--ready-fd", str(writing)]
        for name, value in self._settings.items():
            command += ["--set", f"kvstore.{name}={value}"]
        self.process = subprocess.Popen(command, pass_fds=[writing])
        os.close(writing)
        with os.fdopen(reading) as pipe:
            self.addresses = json.loads(pipe.readline())
        self._address = self.addresses["store_address"]

    @property
    def address(self):
        return self._address

    def kill(self):
        self.process.kill()
        self.process.wait()

    def signal(self, number):
        self.process.send_signal(number)

    def freeze(self):
        self.process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 30
        while Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < deadline, "the process does not stop"
            time.sleep(0.005)

    def close(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        return self.process.wait(30)


@contextlib.contextmanager
def _client_of(address, *, shares_memory=True, **options):
    ids = RandomIds()
    process = own_process() if shares_memory else None
    name = f"test-{ids.bits(64):x}"
    client = StoreClient(address, ClientOptions(name, BLOCK_BYTES, process=process, **options), SystemClock(), ids)
    try:
        assert client.wait_until_connected(30)
        assert client.is_local == shares_memory
        yield client
    finally:
        client.close()


@contextlib.contextmanager
def _embedded_store(**settings):
    config = KVStoreSection(**{"memory_bytes": MEMORY_BYTES, **settings})
    store = make_embedded_store(config, BLOCK_BYTES, SystemClock(), RandomIds())
    try:
        yield store
    finally:
        store.close()


@pytest.fixture(scope="session")
def shared_server():
    server = StoreProcess()
    yield server
    assert server.close() == 0


@pytest.fixture(scope="session")
def client_of():
    return _client_of


@pytest.fixture(scope="session")
def embedded_store():
    return _embedded_store


@pytest.fixture(scope="session")
def store_process():
    return StoreProcess
