"""The transfer executor with peers whose blocks have another size: staged, digested, converted, and never too late."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest

from connectors.p2p.actions import (
    CancelRead,
    ClosePeer,
    OpenPeer,
    PeerFailed,
    PeerOpened,
    PostRead,
    PostSealRead,
    ReadEnded,
    TokenCopy,
    TransferEvent,
)
from connectors.p2p.transfer.executor import TransferExecutor
from connectors.p2p.transfer.staging import StagingArea
from connectors.p2p.transport.interface import PeerId, RowRegion
from connectors.testing.inproc_transport import InprocFabric, InprocTransport
from connectors.testing.transport_owner import HostRows, row_content
from core.digest import BlockDigester
from core.errors import LayoutMismatch, PeerUnreachable
from core.kv.pool_region import KVPoolRegion
from core.kv.seals import SEAL_BYTES, ExpectedSeal, SealTable, decode_seal, each_by_itself, map_seal_memory, num_landing_rows
from core.testing.hash_model import SLOT_BYTES, hash_model_layout
from core.wire.kv import KVLayoutInfo

PEER = PeerId("tcp://10.0.0.1:5600", 1)
NUM_ROWS, THEIR_SIZE, OUR_SIZE = 16, 16, 32
THEIR_BYTES, OUR_BYTES = THEIR_SIZE * SLOT_BYTES, OUR_SIZE * SLOT_BYTES
THEIR_LAYOUT = hash_model_layout(THEIR_SIZE)
PAIR = (TokenCopy(3, 0, 5, 0, THEIR_SIZE), TokenCopy(9, 0, 5, THEIR_SIZE, THEIR_SIZE))  # blocks 3 and 9 become our block 5


def seal_table(incarnation: int, block_size: int) -> SealTable:
    memory = map_seal_memory(NUM_ROWS, num_landing=num_landing_rows(block_size))
    return SealTable(memory, incarnation, layout_version=5)


class World:
    """An owner with short blocks, a reader with long ones, whose slots lie side by side."""

    def __init__(self, late_bytes: bool, num_staged: int) -> None:
        self.fabric = InprocFabric()
        self.theirs, self.ours = HostRows(NUM_ROWS, THEIR_BYTES), HostRows(NUM_ROWS, OUR_BYTES)
        self.staged_rows = HostRows(num_staged, THEIR_BYTES)
        self.theirs.fill(1)
        self.their_seals, our_seals = seal_table(1, THEIR_SIZE), seal_table(2, OUR_SIZE)
        self.owner = InprocTransport(self.fabric)
        self.owner.register([self.theirs.region, RowRegion.of_seals(self.their_seals)])
        layout = hash_model_layout(OUR_SIZE)
        pool = KVPoolRegion(0, NUM_ROWS, OUR_BYTES, layout, buffer=self.ours.region.buffer)
        self.staging = StagingArea(pool, self.staged_rows.region.cut(1))
        self.transport = InprocTransport(self.fabric, late_bytes)
        self.transport.register([self.ours.region, RowRegion.of_seals(our_seals)], self.staging.region)
        self.events: list[ReadEnded | PeerFailed] = []
        self.times: list[float] = []
        self.num_looks = 0
        self.executor = TransferExecutor(
            {"inproc": self.transport}, our_seals, each_by_itself(self.no_digest), self.report, self.now, self.staging
        )
        self.executor.execute(OpenPeer(PEER, "inproc", self.owner.describe(), NUM_ROWS, THEIR_LAYOUT))

    def now(self) -> float:
        """Each look at the clock is a second after the one before."""
        self.num_looks += 1
        return float(self.num_looks)

    def report(self, event: TransferEvent, at: float) -> None:
        if not isinstance(event, PeerOpened):
            self.events.append(event)
            self.times.append(at)

    def no_digest(self, block_id: int) -> int:
        raise AssertionError(f"block {block_id} holds what was converted: its digest says nothing")

    def add_peer(self, layout: KVLayoutInfo = THEIR_LAYOUT) -> PeerId:
        """Open a second owner of the same memory, which is not frozen with the first."""
        peer, owner = PeerId("tcp://10.0.0.2:5600", 3), InprocTransport(self.fabric)
        owner.register([self.theirs.region, RowRegion.of_seals(self.their_seals)])
        self.executor.execute(OpenPeer(peer, "inproc", owner.describe(), NUM_ROWS, layout))
        return peer

    def read(
        self, read_id: int, copies: tuple[TokenCopy, ...] = PAIR, *, wants_digests: bool = False, peer: PeerId = PEER
    ) -> None:
        remote = tuple(dict.fromkeys(copy.remote_row for copy in copies))
        local = tuple(dict.fromkeys(copy.local_row for copy in copies))
        self.executor.execute(PostRead(read_id, peer, remote, local, copies, wants_digests))

    def poll(self) -> dict[int, type | None]:
        """Poll until nothing comes any more; return the errors of the reads that ended since."""
        while self.executor.poll():
            pass
        found = {event.read_id: type(event.error) if event.error else None for event in self.events}
        self.events.clear()
        return found

    def holds_pair(self, local: int = 5) -> bool:
        wanted = np.concatenate([row_content(1, 3, THEIR_BYTES), row_content(1, 9, THEIR_BYTES)])
        return np.array_equal(self.ours.rows[local], wanted)

    def freeze(self, is_frozen: bool = True) -> None:
        self.fabric.set_frozen(self.owner.number, is_frozen)

    def close(self) -> None:
        self.executor.close()
        self.owner.close()
        for memory in (self.theirs, self.ours, self.staged_rows):
            memory.close()


@pytest.fixture
def make_world() -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def make(late_bytes: bool = False, num_staged: int = 4) -> World:
        worlds.append(World(late_bytes, num_staged))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


def test_blocks_are_converted_before_the_read_is_reported(make_world):
    world = make_world()
    world.read(1)
    assert world.poll() == {1: None}
    assert world.holds_pair()
    assert world.staging.num_taken_bytes == 0


def test_blocks_of_another_shape_are_never_read_into_ours_as_they_are(make_world):
    world = make_world()
    before = world.ours.rows.copy()
    world.executor.execute(PostRead(1, PEER, (3,), (5,)))
    assert world.poll() == {1: LayoutMismatch}
    assert np.array_equal(world.ours.rows, before)


def test_blocks_that_cannot_be_converted_end_their_read_and_free_its_rows(make_world):
    world = make_world()
    before = world.ours.rows.copy()
    world.read(1, peer=world.add_peer(msgspec.structs.replace(THEIR_LAYOUT, num_kv_heads=2)))
    world.read(2, (TokenCopy(3, 0, 6, 0, THEIR_SIZE),))
    assert world.poll() == {1: LayoutMismatch, 2: None}
    assert np.array_equal(world.ours.rows[5], before[5])
    assert world.staging.num_taken_bytes == 0


def test_conversion_comes_before_the_time_of_the_end(make_world, monkeypatch):
    """It is no verification."""
    world = make_world()
    looks, convert = [], StagingArea.convert
    monkeypatch.setattr(StagingArea, "convert", lambda *what: looks.append(world.num_looks) or convert(*what))
    world.read(1)
    world.poll()
    assert world.times[0] > looks[0]


def test_digests_are_taken_of_the_owners_blocks(make_world):
    world = make_world()
    world.read(1, wants_digests=True)
    while world.executor.poll():
        pass
    digester = BlockDigester(THEIR_BYTES)
    assert world.events[0].digests == tuple(digester.digest(row_content(1, row, THEIR_BYTES)) for row in (3, 9))


def test_seals_of_several_blocks_land_beside_the_one_they_became(make_world):
    world = make_world()
    for row in (3, 9):
        world.their_seals.seal(row, ExpectedSeal(row, 0, bytes([row]) * 16, THEIR_SIZE))
    world.executor.execute(PostSealRead(1, PEER, (3, 9), (5,), wants_digests=False))
    while world.executor.poll():
        pass
    seals = world.events[0].seals
    assert [decode_seal(seals[:SEAL_BYTES]).generation, decode_seal(seals[SEAL_BYTES:]).generation] == [3, 9]


def test_read_that_has_no_room_reports_it_at_once_and_is_not_posted(make_world):
    world = make_world(num_staged=2)
    world.freeze()
    world.read(1)
    world.read(2)
    assert world.events == [ReadEnded(2, has_no_room=True)]
    world.events.clear()
    world.freeze(False)
    assert world.poll() == {1: None}
    world.read(3)
    assert world.poll() == {3: None}
    assert world.holds_pair()


def test_peers_share_staging_rows_and_a_frozen_peer_blocks_no_other(make_world):
    world = make_world(num_staged=7)
    other = world.add_peer()
    world.freeze()
    for read_id in (1, 2):
        world.read(read_id)
    assert world.events == [ReadEnded(2, has_no_room=True)]
    world.events.clear()
    world.read(3, peer=other)
    assert world.poll() == {3: None}
    world.executor.execute(ClosePeer(PEER))
    world.read(4, peer=other)
    assert world.poll() == {1: PeerUnreachable, 4: None}
    assert world.staging.num_taken_bytes == 0


def test_peer_whose_read_leaves_half_to_others_gets_another(make_world):
    world = make_world(num_staged=8)
    world.freeze()
    for read_id in (1, 2, 3):
        world.read(read_id)
    assert world.events == [ReadEnded(3, has_no_room=True)]


def test_read_that_never_has_room_reports_it(make_world):
    world = make_world(num_staged=1)
    world.read(1)
    assert world.poll() == {1: LayoutMismatch}


def test_late_bytes_of_a_cancelled_read_reach_no_block_and_hold_their_rows(make_world):
    world = make_world(late_bytes=True)
    before = world.ours.rows.copy()
    world.freeze()
    world.read(1)
    world.executor.execute(CancelRead(1))
    assert world.poll() == {}
    assert world.staging.num_taken_bytes == 2 * THEIR_BYTES
    world.freeze(False)
    assert world.poll() == {1: None}
    assert np.array_equal(world.ours.rows, before)
    assert world.staging.num_taken_bytes == 0
