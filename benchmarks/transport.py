"""What a transport alone moves: blocks of a long prompt from one process to another, beside a plain copy of the same bytes.

    python benchmarks/transport.py [--transports shm nixl tcp] [--repeats 9] [--json FILE] [--markdown] [--quick]

The owner, a process of its own, holds the blocks of 2,048 tokens of SmolLM2-135M in float32: 32 blocks of 64 tokens, 2,949,120
bytes each. This process reads all of them in shuffled order, in reads of at most 16 MiB and 4 at a time, as the p2p connector
does, and waits as its transfer thread does. There are no engines, no handshakes and no leases: what those add is in the figures
of ``benchmarks/handoff.py``.

Every repeat copies as many bytes with numpy from one buffer to another (one thread, memory touched before) and then reads them
by each transport, so that all meet the same machine. Two rounds more come first and do not count; after each of them, every row
is compared with the owner's. Figures are medians (smallest..largest); ratios are medians of the ratios of single repeats.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from pathlib import Path

import numpy as np
import numpy.typing as npt
import zmq
from common import Machine, Outcome, Spread, Table, at_least, goal_notes, make_parser, publish
from transport_factories import make

from connectors.p2p.transport.interface import PeerId
from connectors.testing.transport_owner import HostRegions, ProcessOwner, row_content

NUM_BLOCKS, BLOCK_BYTES = 32, 2_949_120
QUICK_BLOCKS = 8
ROWS_PER_READ = (16 << 20) // BLOCK_BYTES
READS_IN_FLIGHT = 4
WARM_UPS = 2
GOALS = {"shm": 0.50, "nixl": 0.25}  # of the plain copy's rate
TRANSPORTS = ("shm", "nixl", "tcp")
PEER = PeerId("owner", 1)
SALT = 1
READ_TIMEOUT_S = 60.0
FACTORIES = Path(__file__).resolve().with_name("transport_factories.py")


class Link:
    """A transport, the rows it reads into, and the process that it reads from."""

    def __init__(self, name: str, num_blocks: int, resources: ExitStack) -> None:
        owner = ProcessOwner(f"{FACTORIES}:make_{name}", num_blocks, BLOCK_BYTES, SALT)
        resources.callback(owner.close)
        regions = HostRegions(num_blocks, BLOCK_BYTES)
        resources.callback(regions.close)
        self._memory = regions.pool
        self._transport = make(name)
        resources.callback(self._transport.close)
        self._transport.register(regions.regions)
        self._transport.add_peer(PEER, owner.metadata)

    def read_ms(self, remote_rows: Sequence[int], local_rows: Sequence[int]) -> float:
        """Read these rows and return the time until the last is here."""
        begin = time.perf_counter()
        cuts = range(0, len(remote_rows), ROWS_PER_READ)
        waiting = deque((remote_rows[cut : cut + ROWS_PER_READ], local_rows[cut : cut + ROWS_PER_READ]) for cut in cuts)
        num_open = 0
        while waiting or num_open:
            while waiting and num_open < READS_IN_FLIGHT:
                self._transport.post_read(PEER, 0, *waiting.popleft())
                num_open += 1
            num_open -= self._ended()
            if time.perf_counter() > begin + READ_TIMEOUT_S:
                raise TimeoutError(f"the {self._transport.name} transport did not end in {READ_TIMEOUT_S:g} s")
        return (time.perf_counter() - begin) * 1e3

    def check(self, remote_rows: Sequence[int], local_rows: Sequence[int]) -> None:
        """Compare every row with the owner's, and forget them all."""
        for remote, local in zip(remote_rows, local_rows, strict=True):
            if not np.array_equal(self._memory.rows[local], row_content(SALT, remote, BLOCK_BYTES)):
                raise RuntimeError(f"{self._transport.name}: row {local} is not the owner's row {remote}")
        self._memory.rows[:] = 0

    def _ended(self) -> int:
        """Wait as the transfer thread does, and return how many reads ended."""
        wait_s = self._transport.max_wait_s()
        is_short = wait_s is not None and wait_s < 0.001  # zmq counts in ms
        timeout_ms = 0 if is_short else 1000 if wait_s is None else int(1000 * wait_s)
        ready = zmq.zmq_poll([(pollable, zmq.POLLIN) for pollable in self._transport.pollables()], timeout_ms)
        if is_short and not ready and wait_s:
            time.sleep(wait_s)
        results = self._transport.poll()
        for result in results:
            if result.error is not None:
                raise result.error
        return len(results)


class PlainCopy:
    """Copies as many bytes between two buffers of memory that was touched before."""

    def __init__(self, num_bytes: int) -> None:
        self._source: npt.NDArray[np.uint8] = np.full(num_bytes, 1, np.uint8)
        self._target: npt.NDArray[np.uint8] = np.full(num_bytes, 2, np.uint8)

    def time_ms(self) -> float:
        begin = time.perf_counter()
        np.copyto(self._target, self._source)
        return (time.perf_counter() - begin) * 1e3


def measure(names: Sequence[str], num_blocks: int, repeats: int) -> dict[str, list[float]]:
    """Return ms of every repeat, for ``plain copy`` and each transport; they take turns."""
    random = np.random.default_rng(0)
    copy = PlainCopy(num_blocks * BLOCK_BYTES)
    times: dict[str, list[float]] = {name: [] for name in ("plain copy", *names)}
    with ExitStack() as resources:
        links = {name: Link(name, num_blocks, resources) for name in names}
        for turn in range(WARM_UPS + repeats):
            remote_rows, local_rows = (random.permutation(num_blocks).tolist() for _ in range(2))
            found = {"plain copy": copy.time_ms()}
            for name, link in links.items():
                found[name] = link.read_ms(remote_rows, local_rows)
            if turn < WARM_UPS:
                for link in links.values():
                    link.check(remote_rows, local_rows)
            else:
                for name, milliseconds in found.items():
                    times[name].append(milliseconds)
    return times


def make_outcome(times: Mapping[str, Sequence[float]], num_blocks: int) -> Outcome:
    num_bytes = num_blocks * BLOCK_BYTES
    rows = []
    for name, milliseconds in times.items():
        rates = [num_bytes / each / 1e6 for each in milliseconds]
        ratio = Spread.of_ratios(times["plain copy"], milliseconds).show(0, 100) + " %"
        goal = f"at least {100 * GOALS[name]:.0f} %" if name in GOALS else ""
        is_copy = name == "plain copy"
        rows.append((name, Spread.of(milliseconds).show(), Spread.of(rates).show(2), "" if is_copy else ratio, goal))
    columns = (f"{num_bytes / 1e6:.0f} MB in {num_blocks} blocks", "ms", "GB/s", "rate / plain copy", "goal")
    note = f"{num_bytes:,} bytes; {ROWS_PER_READ} blocks a read, {READS_IN_FLIGHT} reads at a time"
    goals = [
        at_least(f"{name}: rate / plain copy", Spread.of_ratios(times["plain copy"], milliseconds).median, GOALS[name], "ratio")
        for name, milliseconds in times.items()
        if name in GOALS
    ]
    figures = {"num_bytes": num_bytes, "ms": {name: list(values) for name, values in times.items()}}
    return Outcome([Table(columns, rows)], (*goal_notes(goals), note), figures, goals)


def main() -> None:
    parser = make_parser(__doc__, repeats=9, takes_model=False)
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=TRANSPORTS)
    arguments = parser.parse_args()
    machine = Machine.now()
    num_blocks, repeats = (QUICK_BLOCKS, 2) if arguments.quick else (NUM_BLOCKS, arguments.repeats)
    with redirect_stdout(sys.stderr):  # NIXL talks
        times = measure(arguments.transports, num_blocks, repeats)
    publish(make_outcome(times, num_blocks), machine, arguments)


if __name__ == "__main__":
    main()
