"""What a transport alone moves between two processes on one device: rows of the size of blocks, in several orders.

Without engines, leases and seals; what those add is in the figures of ``gpu_pair``. The rows' owner is a process of its own.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import torch
from gpu_ceilings import best_s, wait_for
from gpu_process import other_process, receive

from connectors.p2p.transport.factory import TransportSettings, create_transport
from connectors.p2p.transport.interface import PeerId, RowRegion, Transport
from connectors.p2p.transport.nixl import installed_module
from core.ids import RandomIds
from core.peer_memory import CudaPeerMemory

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
    """Rows on a device, and the transport of this name that has registered them."""

    def __init__(self, name: str, device: str, size: ReadSize) -> None:
        self.memory = torch.zeros(2 * size.num_rows, size.row_bytes, dtype=torch.uint8, device=device)
        region = RowRegion(
            self.memory.data_ptr(),
            2 * size.num_rows,
            size.row_bytes,
            device=str(self.memory.device),
            new_peer_memory=partial(CudaPeerMemory, self.memory) if self.memory.is_cuda else None,
        )
        settings = TransportSettings(ids=RandomIds(), engine_id="benchmark", bind_address="tcp://127.0.0.1:0")
        self.transport = create_transport(name, settings)
        self.transport.register([region])


def readers_here(device: str) -> tuple[str, ...]:
    """Return the transports that read device memory by themselves."""
    nixl = ("nixl",) if installed_module() else ()
    return nixl if device == "cpu" else ("shm", *nixl)


def own_rows(pipe: Connection, name: str, device: str, size: ReadSize) -> None:
    """Own rows that hold their own numbers, until the other end is closed."""
    rows = Rows(name, device, size)
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


def measure_reads(name: str, device: str, size: ReadSize) -> list[ReadTime]:
    """Read rows of another process in each order, by the transport of this name.

    Raises: RuntimeError if what has been read is not what was there.
    """
    with other_process(own_rows, name, device, size) as pipe:
        rows = Rows(name, device, size)
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


def _read(transport: Transport, remote: Sequence[int], local: Sequence[int]) -> tuple[float, float]:
    begin = time.perf_counter()
    transport.post_read(PEER, 0, remote, local)
    posted = time.perf_counter()
    while not (ended := transport.poll()):
        if time.perf_counter() > begin + TIMEOUT_S:
            raise RuntimeError(f"a read has not ended in {TIMEOUT_S:g} s")
    if ended[0].error is not None:
        raise ended[0].error
    return posted - begin, time.perf_counter() - begin
