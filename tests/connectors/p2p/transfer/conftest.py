"""An owner, a reader and the transfer executor between them, on the in-process transport."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from connectors.p2p.actions import OpenPeer, PeerFailed, PeerOpened, PostRead, PostSealRead, ReadEnded, TransferEvent
from connectors.p2p.transfer.executor import TransferExecutor
from connectors.p2p.transport.interface import PeerId, RowRegion
from connectors.testing.inproc_transport import InprocFabric, InprocTransport
from connectors.testing.transport_owner import HostRows, layout_of_rows, row_content
from core.kv.seals import SealTable, each_by_itself, map_seal_memory

PEER = PeerId("tcp://10.0.0.1:5600", 1)
NUM_ROWS, ROW_BYTES = 16, 64
LAYOUT = layout_of_rows(ROW_BYTES)
WAIT_S = 20.0


def seal_table(incarnation: int) -> SealTable:
    return SealTable(map_seal_memory(NUM_ROWS), incarnation, layout_version=5)


class World:
    """An owner, a reader and the executor between them."""

    def __init__(self, late_bytes: bool) -> None:
        self.fabric = InprocFabric()
        self.theirs, self.ours = HostRows(NUM_ROWS, ROW_BYTES), HostRows(NUM_ROWS, ROW_BYTES)
        self.their_seals, self.our_seals = seal_table(incarnation=1), seal_table(incarnation=2)
        self.digested: list[int] = []
        self.num_looks = 0
        self.times: dict[int, float] = {}  # of the reads' ends
        self.theirs.fill(1)
        self.owner = InprocTransport(self.fabric)
        self.owner.register([self.theirs.region, RowRegion.of_seals(self.their_seals)])
        self.metadata = self.owner.describe()
        self.transport = InprocTransport(self.fabric, late_bytes)
        self.transport.register([self.ours.region, RowRegion.of_seals(self.our_seals)])
        self.events: queue.SimpleQueue[ReadEnded | PeerFailed] = queue.SimpleQueue()
        self.executor = TransferExecutor(
            {"inproc": self.transport}, self.our_seals, each_by_itself(self.digest), self.report, self.now
        )
        self.opened: list[PeerOpened] = []

    def now(self) -> float:
        """Each look at the clock is a second after the one before."""
        self.num_looks += 1
        return float(self.num_looks)

    def report(self, event: TransferEvent, at: float) -> None:
        self.times[event.read_id if isinstance(event, ReadEnded) else -1] = at
        if isinstance(event, PeerOpened):
            self.opened.append(event)
        else:
            self.events.put(event)

    def open(self, metadata: bytes | None = None) -> None:
        self.executor.execute(OpenPeer(PEER, "inproc", self.metadata if metadata is None else metadata, NUM_ROWS, LAYOUT))

    def read(self, read_id: int, remote_rows: tuple[int, ...], local_rows: tuple[int, ...]) -> None:
        self.executor.execute(PostRead(read_id, PEER, remote_rows, local_rows))

    def read_seals(
        self,
        read_id: int,
        remote: tuple[int, ...],
        local: tuple[int, ...],
        wants_digests: bool = False,
        after: tuple[int, ...] = (),
    ) -> None:
        self.executor.execute(PostSealRead(read_id, PEER, remote, local, wants_digests, after))

    def digest(self, block_id: int) -> int:
        self.digested.append(block_id)
        return 100 + block_id

    def poll(self) -> list[ReadEnded | PeerFailed]:
        """Poll until nothing comes any more and return everything that was reported."""
        while self.executor.poll():
            pass
        found = []
        while not self.events.empty():
            found.append(self.events.get_nowait())
        return found

    def has_row(self, local: int, remote: int) -> bool:
        return np.array_equal(self.ours.rows[local], row_content(1, remote, ROW_BYTES))

    def freeze(self, is_frozen: bool = True) -> None:
        self.fabric.set_frozen(self.owner.number, is_frozen)

    def close(self) -> None:
        self.executor.close()
        self.owner.close()
        self.theirs.close()
        self.ours.close()


@pytest.fixture
def make_world() -> Iterator[Callable[[bool], World]]:
    worlds: list[World] = []

    def make(late_bytes: bool = False) -> World:
        worlds.append(World(late_bytes))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


@pytest.fixture
def world(make_world) -> World:
    return make_world()
