"""A process that owns rows and serves them by a transport, for tests that kill, freeze or restart it.

Run as ``python -P -m connectors.testing.transport_owner FACTORY NUM_ROWS ROW_BYTES SALT [restless]``; FACTORY is
``/path/to/file.py:function`` and the function takes no argument and returns a transport. It owns two regions, as a worker
does: its rows and, for each of them, two short rows of the size of a seal. Prints its metadata as one line of
hex, then serves until its standard input ends. ``ProcessOwner`` is the parent's end.
"""

from __future__ import annotations

import importlib.util
import itertools
import mmap
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import IO

import numpy as np
import numpy.typing as npt
import zmq

from connectors.p2p.transport.interface import POOL_REGION, SEAL_REGION, RowRegion, Transport
from core.kv.seals import BROKEN, SEAL_BYTES
from core.memory_file import create_memory_file
from core.wire.kv import OPAQUE, KVLayoutInfo

START_TIMEOUT_S = 60.0
IDLE_CHECK_MS = 200  # how often a served process checks whether its transport needs polling
NUM_CONTENTS = 251  # a row of a restless owner is filled with its generation modulo this
REST_S = 0.01  # of a restless owner, between one row and the next


class HostRows:
    """Rows in an anonymous memory file. ``rows`` is [num_rows, row_bytes] uint8."""

    def __init__(self, num_rows: int, row_bytes: int) -> None:
        self.fd = create_memory_file("kvferry-test-rows", num_rows * row_bytes).fd
        self._memory = mmap.mmap(self.fd, num_rows * row_bytes)
        flat: npt.NDArray[np.uint8] = np.frombuffer(self._memory, dtype=np.uint8)
        self.rows = flat.reshape(num_rows, row_bytes)
        self.rows[:] = 0
        self.region = RowRegion(flat.ctypes.data, num_rows, row_bytes, memoryview(self._memory), self.fd)

    def fill(self, salt: int, region: int = POOL_REGION) -> None:
        """Give every row its content."""
        for row in range(len(self.rows)):
            self.rows[row] = row_content(salt, row, self.rows.shape[1], region)

    def close(self) -> None:
        """Close the file; the memory goes with the last reference."""
        os.close(self.fd)


class HostRegions:
    """Both regions of a worker: rows, and two short rows for each of them. ``regions`` is what a transport registers."""

    def __init__(self, num_rows: int, row_bytes: int) -> None:
        self.pool = HostRows(num_rows, row_bytes)
        self.seals = HostRows(2 * num_rows, SEAL_BYTES)
        self.regions = [self.pool.region, self.seals.region]

    def fill(self, salt: int) -> None:
        """Give every row of both its content."""
        self.pool.fill(salt, POOL_REGION)
        self.seals.fill(salt, SEAL_REGION)

    def close(self) -> None:
        """Close the files; the memory goes with the last reference."""
        self.pool.close()
        self.seals.close()


def layout_of_rows(row_bytes: int) -> KVLayoutInfo:
    """Return the layout of blocks of so many bytes, of which nothing else is known."""
    return KVLayoutInfo(
        dtype="uint8", order=OPAQUE, block_size=1, num_layers=1, num_kv_heads=1, head_dim=1, block_bytes=row_bytes
    )


def row_content(salt: int, row: int, row_bytes: int, region: int = POOL_REGION) -> npt.NDArray[np.uint8]:
    """Return the content of a row of an owner with this ``salt``."""
    return np.random.default_rng((salt, row, region)).integers(0, 256, row_bytes, np.uint8)


def generations_of(seals: HostRows) -> npt.NDArray[np.uint64]:
    """Return a view of the last word of every row, where a seal has its generation."""
    return seals.rows.view(np.uint64)[:, -1]


class ProcessOwner:
    """An owner in a child process. ``environment`` is the child's, None = the parent's own.

    A restless owner rewrites its rows all the time: see ``rewrite``.
    """

    def __init__(
        self,
        factory: str,
        num_rows: int,
        row_bytes: int,
        salt: int,
        environment: dict[str, str] | None = None,
        *,
        is_restless: bool = False,
    ) -> None:
        command = [
            sys.executable,
            "-P",
            "-m",
            "connectors.testing.transport_owner",
            factory,
            str(num_rows),
            str(row_bytes),
            str(salt),
            *(["restless"] if is_restless else []),
        ]
        # Unbuffered: a line that hides in a buffer would never wake the poll in ``_read_line``.
        self._process = subprocess.Popen(command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        assert self._process.stdout is not None
        line = _read_line(self._process.stdout)
        if not line:
            self.close()
            raise RuntimeError(f"the owner process ended with {self._process.returncode} before it served")
        self.metadata = bytes.fromhex(line)

    @property
    def pid(self) -> int:
        """Number of the child process."""
        return self._process.pid

    def kill(self) -> None:
        """Kill the process without warning and wait until it is gone."""
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        """Stop the process where it is."""
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let the process continue."""
        os.kill(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        """End and reap the process in any state."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


def _read_line(stream: IO[bytes]) -> str:
    """Read the line of metadata, skipping the output of libraries. Empty if the process ended or took too long."""
    poller = zmq.Poller()
    poller.register(stream.fileno(), zmq.POLLIN)
    while poller.poll(int(1000 * START_TIMEOUT_S)):
        line = stream.readline().decode()
        if not line:
            return ""
        if line.startswith("metadata "):
            return line.removeprefix("metadata ").strip()
    return ""


def load_factory(factory: str) -> Callable[[], Transport]:
    """Return the function of ``/path/to/file.py:function``."""
    path, _, name = factory.rpartition(":")
    spec = importlib.util.spec_from_file_location("kvferry_transport_factory", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[[], Transport] = getattr(module, name)
    return found


def serve(transport: Transport) -> None:
    """Serve until standard input ends."""
    stdin = sys.stdin.fileno()
    while True:
        transport.poll()
        wait_s = transport.max_wait_s()
        timeout_ms = IDLE_CHECK_MS if wait_s is None else int(1000 * wait_s)
        sources = [(stdin, zmq.POLLIN), *((pollable, zmq.POLLIN) for pollable in transport.pollables())]
        if any(source == stdin for source, _ in zmq.zmq_poll(sources, timeout_ms)):
            return


def rewrite(memory: HostRegions) -> None:
    """Rewrite random rows as an owner does: break the seal, write, seal. Never returns."""
    generations, dice = generations_of(memory.seals), random.Random(0)
    for generation in itertools.count(1):
        row = dice.randrange(len(memory.pool.rows))
        generations[row] = BROKEN
        memory.pool.rows[row] = generation % NUM_CONTENTS
        generations[row] = generation
        time.sleep(REST_S)


def main(arguments: list[str]) -> None:
    """Own and serve rows."""
    factory, num_rows, row_bytes, salt, *manner = arguments
    memory = HostRegions(int(num_rows), int(row_bytes))
    memory.fill(int(salt))
    transport = load_factory(factory)()
    transport.register(memory.regions)
    if manner == ["restless"]:
        generations_of(memory.seals)[:] = BROKEN
        threading.Thread(target=rewrite, args=(memory,), daemon=True).start()
    os.write(sys.stdout.fileno(), f"metadata {transport.describe().hex()}\n".encode())
    serve(transport)
    transport.close()


if __name__ == "__main__":
    main(sys.argv[1:])
