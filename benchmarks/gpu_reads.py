"""What NIXL alone moves between two processes on one device: rows of the size of blocks, in orders that cost it differently.

Without engines, leases and seals; what those add is in the figures of ``gpu_pair``. The rows' owner is a process of its own.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from gpu_ceilings import best_s, wait_for
from gpu_process import other_process, receive

from connectors.p2p.transport.interface import PeerId, RowRegion
from connectors.p2p.transport.nixl import NixlTransport
from core.ids import RandomIds

PEER = PeerId("tcp://127.0.0.1:1", 1)
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class ReadSize:
    """``num_rows`` are read at once, from a memory of twice as many rows."""

    num_rows: int
    row_bytes: int
    repeats: int


@dataclass(frozen=True, slots=True)
class ReadTime:
    """Milliseconds until the call that posts the read returns, and until it has ended."""

    order: str
    num_bytes: int
    posted_ms: float
    ended_ms: float
    copy_ms: float  # of as many bytes on the device


class Rows:
    """Rows on a device, and a transport that has registered them."""

    def __init__(self, device: str, size: ReadSize) -> None:
        self.memory = torch.zeros(2 * size.num_rows, size.row_bytes, dtype=torch.uint8, device=device)
        region = RowRegion(self.memory.data_ptr(), 2 * size.num_rows, size.row_bytes, device=str(self.memory.device))
        self.transport = NixlTransport(RandomIds(), "benchmark")
        self.transport.register([region])


def own_rows(pipe: Connection, device: str, size: ReadSize) -> None:
    """Own rows that hold their own numbers, until the other end is closed."""
    rows = Rows(device, size)
    rows.memory.copy_(contents(2 * size.num_rows, device)[:, None].expand_as(rows.memory))
    wait_for(device)
    pipe.send(rows.transport.describe())
    try:
        pipe.recv()
    except EOFError:
        rows.transport.close()


def contents(num_rows: int, device: str) -> torch.Tensor:
    """Return what every byte of each row of the owner is, none of them 0."""
    return (1 + torch.arange(num_rows, device=device) % 251).to(torch.uint8)


def orders_of(num_rows: int) -> dict[str, tuple[list[int], list[int]]]:
    """Return remote and local rows by the name of their order."""
    chosen = random.Random(1)
    ascending, every_second = list(range(num_rows)), list(range(0, 2 * num_rows, 2))
    scattered = [chosen.sample(every_second, num_rows) for _ in range(2)]
    return {
        "adjacent": (ascending, ascending),
        "adjacent, last first": (ascending[::-1], ascending[::-1]),
        "scattered": (scattered[0], scattered[1]),
        "one": ([0], [0]),
    }


def measure_reads(device: str, size: ReadSize) -> list[ReadTime]:
    """Read rows of another process in each order.

    Raises: RuntimeError if what has been read is not what was there.
    """
    with other_process(own_rows, device, size) as pipe:
        rows = Rows(device, size)
        try:
            rows.transport.add_peer(PEER, receive(pipe))
            return [_measure(rows, device, size, order, *both) for order, both in orders_of(size.num_rows).items()]
        finally:
            rows.transport.close()


def _measure(rows: Rows, device: str, size: ReadSize, order: str, remote: Sequence[int], local: Sequence[int]) -> ReadTime:
    rows.memory.zero_()
    wait_for(device)
    times = [_read(rows.transport, remote, local) for _ in range(size.repeats + 1)][1:]  # the first one maps the memory
    wait_for(device)
    if not torch.equal(rows.memory[list(local), -1], contents(2 * size.num_rows, device)[list(remote)]):
        raise RuntimeError(f"{order}: the rows are not those of the other process")
    num_bytes = len(remote) * size.row_bytes
    source, target = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    copy_s = best_s(lambda: target.copy_(source), device, size.repeats)
    posted, ended = (1e3 * statistics.median(each) for each in zip(*times, strict=True))
    return ReadTime(order, num_bytes, posted, ended, 1e3 * copy_s)


def _read(transport: NixlTransport, remote: Sequence[int], local: Sequence[int]) -> tuple[float, float]:
    begin = time.perf_counter()
    transport.post_read(PEER, 0, remote, local)
    posted = time.perf_counter()
    while not (ended := transport.poll()):
        if time.perf_counter() > begin + TIMEOUT_S:
            raise RuntimeError(f"a read has not ended in {TIMEOUT_S:g} s")
    if ended[0].error is not None:
        raise ended[0].error
    return posted - begin, time.perf_counter() - begin
