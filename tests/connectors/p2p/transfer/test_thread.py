"""The transfer executor on the in-process transport, and the thread that runs it."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator

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
    TransferEvent,
)
from connectors.p2p.transfer.executor import TransferExecutor
from connectors.p2p.transfer.thread import TransferThread
from connectors.p2p.transport.interface import POOL_REGION, SEAL_REGION, PeerId, RowRegion
from connectors.testing.inproc_transport import InprocFabric, InprocTransport
from connectors.testing.transport_owner import HostRows, layout_of_rows, row_content
from core.errors import KVFerryError, PeerUnreachable, ProtocolError, TransferError
from core.kv.seals import SEAL_BYTES, ExpectedSeal, SealTable, decode_seal, each_by_itself, map_seal_memory

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


def errors_of(events: list[ReadEnded | PeerFailed]) -> dict[int, type[KVFerryError] | None]:
    return {event.read_id: type(event.error) if event.error else None for event in events}


# ---- the executor


def test_read_brings_the_rows_and_is_reported_once(world):
    world.open()
    world.read(1, (3, 9), (0, 5))
    assert world.poll() == [ReadEnded(1)]
    assert world.has_row(0, 3)
    assert world.has_row(5, 9)
    assert not world.ours.rows[[1, 2, 3, 4]].any()
    assert world.poll() == []


def test_reads_are_told_apart(world):
    world.open()
    for read_id in (7, 3, 5):
        world.read(read_id, (read_id,), (read_id,))
    assert errors_of(world.poll()) == {7: None, 3: None, 5: None}
    assert all(world.has_row(row, row) for row in (3, 5, 7))


def test_seals_are_read_when_the_reads_before_them_have_ended(world):
    """A seal that the owner announces before the last block has arrived is not the seal that the reader then reads."""
    world.open()
    world.freeze()
    world.read(1, (3,), (0,))
    world.read(2, (9,), (5,))
    world.read_seals(3, (3, 9), (0, 5), after=(1, 2))
    assert world.poll() == []
    world.their_seals.seal(3, ExpectedSeal(7, 0, bytes(16), 32))
    world.freeze(False)
    *blocks, seals = world.poll()
    assert errors_of(blocks) == {1: None, 2: None}
    assert decode_seal(seals.seals[:SEAL_BYTES]).generation == 7


def test_seals_are_read_although_a_read_before_them_has_failed(world):
    world.open()
    world.freeze()
    world.read(1, (3,), (0,))
    world.read(2, (9,), (5,))
    world.read_seals(3, (3, 9), (0, 5), after=(1, 2))
    world.executor.execute(CancelRead(1))
    assert errors_of(world.poll()) == {1: TransferError}
    world.freeze(False)
    assert errors_of(world.poll()) == {2: None, 3: None}


def test_seals_are_read_at_once_if_all_before_them_has_ended(world):
    world.open()
    world.read(1, (3,), (0,))
    world.poll()
    world.read_seals(2, (3,), (0,), after=(1,))
    assert errors_of(world.poll()) == {2: None}


def test_seals_are_asked_for_with_their_blocks_if_reads_are_answered_in_order(world):
    world.transport.reads_in_order = True
    posted, post_read = [], world.transport.post_read
    world.transport.post_read = lambda peer, region, *rows: posted.append(region) or post_read(peer, region, *rows)
    world.open()
    world.freeze()
    world.read(1, (3,), (0,))
    world.read_seals(2, (3,), (0,), after=(1,))
    assert posted == [POOL_REGION, SEAL_REGION]
    world.their_seals.seal(3, ExpectedSeal(7, 0, bytes(16), 32))
    world.freeze(False)
    blocks, seals = world.poll()
    assert errors_of([blocks, seals]) == {1: None, 2: None}
    assert decode_seal(seals.seals).generation == 7


def test_seals_that_come_before_their_blocks_prove_nothing(world):
    """No transport that keeps its word brings them."""
    world.transport.reads_in_order = True
    poll = world.transport.poll
    world.transport.poll = lambda: poll()[::-1]
    world.open()
    world.read(1, (3,), (0,))
    world.read_seals(2, (3,), (0,), after=(1,))
    seals, blocks = world.poll()
    assert errors_of([seals, blocks]) == {2: ProtocolError, 1: None}
    assert seals.seals == b""


def test_seals_that_are_near_are_looked_at_before_their_blocks_are_reported(world):
    """The receiver of the report takes the processor."""
    world.open()
    world.read(1, (3,), (0,))
    world.read_seals(2, (3,), (0,), after=(1,))
    assert world.executor.poll()
    assert world.events.qsize() == 2
    assert world.times[1] < world.times[2], "when they ended, not when it was told"


def test_no_seals_are_forgotten_whose_blocks_come_with_those_of_another_load(world):
    world.open()
    for read_id, row in ((1, 3), (3, 4)):
        world.read(read_id, (row,), (row,))
        world.read_seals(read_id + 1, (row,), (row,), after=(read_id,))
    poll, come, sizes = world.transport.poll, [], iter([1])

    def one_and_then_all():
        come.extend(poll())
        size = next(sizes, len(come))
        found, come[:] = come[:size], come[size:]
        return found

    world.transport.poll = one_and_then_all
    assert errors_of(world.poll()) == dict.fromkeys((1, 2, 3, 4))


def test_time_of_a_seal_read_is_that_of_its_digests(world):
    world.open()
    world.read(1, (3,), (0,))
    world.read_seals(2, (3,), (0,), wants_digests=True, after=(1,))
    world.poll()
    assert world.digested == [0]
    assert world.times[2] == world.num_looks, "the last look at the clock"


@pytest.mark.parametrize("late_bytes", [False, True])
def test_cancelled_read_of_seals_that_waits_ends_at_once_and_is_not_begun(make_world, late_bytes):
    world = make_world(late_bytes)
    world.open()
    world.freeze()
    world.read(1, (3,), (0,))
    world.read_seals(2, (3,), (0,), after=(1,))
    world.executor.execute(CancelRead(2))
    assert errors_of(world.poll()) == {2: TransferError}
    world.freeze(False)
    assert errors_of(world.poll()) == {1: None}


def test_reads_of_seals_that_wait_end_with_their_peer(world):
    world.open()
    world.freeze()
    world.read(1, (3,), (0,))
    world.read_seals(2, (3,), (0,), after=(1,))
    world.executor.execute(ClosePeer(PEER))
    assert errors_of(world.poll()) == {1: PeerUnreachable, 2: PeerUnreachable}


def test_peer_that_cannot_be_opened_is_reported(world):
    world.open(b"\xc1 garbage")
    (event,) = world.poll()
    assert isinstance(event, PeerFailed)
    assert event.peer == PEER
    assert isinstance(event.error, ProtocolError)
    world.read(1, (0,), (0,))
    assert errors_of(world.poll()) == {1: PeerUnreachable}


def test_peer_that_could_be_opened_is_reported_and_one_that_could_not_is_not(world):
    world.open(b"garbage")
    assert world.opened == []
    assert [type(event) for event in world.poll()] == [PeerFailed]
    world.executor.execute(OpenPeer(PEER, "inproc", world.metadata, NUM_ROWS, LAYOUT, "shm: it is another process"))
    assert world.opened == [PeerOpened(PEER, "inproc", "shm: it is another process")]
    assert world.poll() == []


def test_peer_whose_metadata_breaks_the_transport_is_reported_and_the_next_opened(world, monkeypatch, caplog):
    add_peer = world.transport.add_peer

    def add_and_break(peer, metadata):
        add_peer(peer, metadata)
        raise OverflowError("Python int too large to convert to C int")

    monkeypatch.setattr(world.transport, "add_peer", add_and_break)
    world.open()
    (event,) = world.poll()
    assert (event.peer, type(event.error)) == (PEER, ProtocolError)
    assert "too large" in event.error.message
    assert "kv_peer_not_opened" in caplog.text
    with pytest.raises(PeerUnreachable):
        world.transport.post_read(PEER, 0, [0], [0])
    monkeypatch.undo()
    world.open()
    world.read(1, (0,), (0,))
    assert world.poll() == [ReadEnded(1)]


@pytest.mark.parametrize("shape", [(1, ROW_BYTES), (NUM_ROWS + 1, ROW_BYTES), (NUM_ROWS, ROW_BYTES // 2)])
def test_mismatch_of_metadata_and_handshake_is_refused_with_both_values(world, monkeypatch, shape):
    monkeypatch.setattr(world.transport, "pool_shape", lambda peer: shape)
    world.open()
    (event,) = world.poll()
    assert isinstance(event.error, ProtocolError)
    assert event.error.message.endswith(f"describes {shape[0]} rows of {shape[1]} bytes, and its pool has 16 rows of 64 bytes")
    with pytest.raises(PeerUnreachable):
        world.transport.post_read(PEER, 0, [0], [0])


def test_owner_that_is_gone_cannot_be_opened(world):
    world.fabric.kill(world.owner.number)
    world.open()
    (event,) = world.poll()
    assert isinstance(event.error, PeerUnreachable)


def test_read_of_a_peer_that_is_not_open_ends_at_once(world):
    world.read(1, (0,), (0,))
    assert errors_of(world.poll()) == {1: PeerUnreachable}


@pytest.mark.parametrize(("remote_rows", "local_rows"), [((NUM_ROWS,), (0,)), ((0,), (NUM_ROWS,)), ((0, 1), (2, 2)), ((), ())])
def test_malformed_read_ends_with_an_error_and_writes_nothing(world, remote_rows, local_rows):
    world.open()
    world.read(1, remote_rows, local_rows)
    assert errors_of(world.poll()) == {1: ProtocolError}
    assert not world.ours.rows.any()


def test_owner_that_dies_ends_its_reads(world):
    world.open()
    world.freeze()
    world.read(1, (0,), (0,))
    world.read(2, (1,), (1,))
    assert world.poll() == []
    world.fabric.kill(world.owner.number)
    assert errors_of(world.poll()) == {1: PeerUnreachable, 2: PeerUnreachable}


def test_closed_peer_ends_its_reads_and_takes_no_more(world):
    world.open()
    world.freeze()
    world.read(1, (0,), (0,))
    world.executor.execute(ClosePeer(PEER))
    assert errors_of(world.poll()) == {1: PeerUnreachable}
    world.read(2, (0,), (0,))
    assert errors_of(world.poll()) == {2: PeerUnreachable}
    world.freeze(False)
    assert world.poll() == []
    assert not world.ours.rows.any()


def test_closed_peer_can_be_opened_again(world):
    world.open()
    world.executor.execute(ClosePeer(PEER))
    world.executor.execute(ClosePeer(PEER))
    assert not world.executor._pools, "peers come and go: nothing is kept of one that is closed"
    world.open()
    world.read(1, (4,), (4,))
    assert world.poll() == [ReadEnded(1)]
    assert world.has_row(4, 4)


def test_cancelled_read_ends_with_an_error(world):
    world.open()
    world.freeze()
    world.read(1, (0,), (0,))
    world.read(2, (1,), (1,))
    world.executor.execute(CancelRead(1))
    (event,) = world.poll()
    assert event.read_id == 1
    assert event.error is not None
    world.freeze(False)
    assert world.poll() == [ReadEnded(2)]
    assert not world.ours.rows[0].any()


def test_cancel_of_an_unknown_or_ended_read_is_ignored(world, monkeypatch):
    cancelled: list[int] = []
    monkeypatch.setattr(world.transport, "cancel", cancelled.append)
    world.executor.execute(CancelRead(99))
    world.open()
    world.read(1, (0,), (0,))
    assert world.poll() == [ReadEnded(1)]
    world.executor.execute(CancelRead(1))
    assert cancelled == []  # nothing is remembered of reads that have ended
    assert world.poll() == []


def test_cancelled_read_whose_bytes_may_come_late_stays_open_until_the_fence(make_world):
    world = make_world(True)
    world.open()
    world.freeze()
    world.read(1, (0,), (0,))
    world.executor.execute(CancelRead(1))
    assert world.poll() == []
    world.executor.execute(ClosePeer(PEER))
    assert errors_of(world.poll()) == {1: PeerUnreachable}
    world.freeze(False)
    world.poll()
    assert not world.ours.rows.any()


# ---- seals


def test_seals_land_beside_the_table_and_come_with_the_event(world):
    world.open()
    for block_id in (3, 9):
        world.their_seals.seal(block_id, ExpectedSeal(block_id, 0, bytes(16), 32))
    world.our_seals.seal(3, ExpectedSeal(77, 0, bytes(16), 32))
    world.read_seals(1, (3, 9), (3, 5))
    assert world.poll() == [ReadEnded(1, seals=world.their_seals.rows([3, 9]))]
    assert world.our_seals.sealed_generation(3) == 77
    assert world.digested == []
    assert not world.ours.rows.any()


def test_digests_of_the_local_blocks_are_computed_when_the_seals_have_come(world):
    world.open()
    world.freeze()
    world.read_seals(1, (3, 9), (0, 5), wants_digests=True)
    assert world.poll() == []
    assert world.digested == []
    world.freeze(False)
    (event,) = world.poll()
    assert event.digests == (100, 105)


def test_seal_that_landed_earlier_cannot_pass_for_one_that_comes_now(world, monkeypatch):
    world.open()
    world.their_seals.seal(3, ExpectedSeal(8, 0, bytes(16), 32))
    world.read_seals(1, (3,), (0,))
    (first,) = world.poll()
    monkeypatch.setattr(world.transport, "_copy", lambda read, source: None)  # ends well and brings nothing
    world.read_seals(2, (3,), (0,))
    (second,) = world.poll()
    assert decode_seal(first.seals) is not None
    assert decode_seal(second.seals) is None


def test_failed_seal_read_brings_no_seals(world):
    world.open()
    world.freeze()
    world.read_seals(1, (3,), (0,), wants_digests=True)
    world.executor.execute(CancelRead(1))
    (event,) = world.poll()
    assert event.error is not None
    assert (event.seals, event.digests, world.digested) == (b"", (), [])


def test_executor_waits_as_long_as_its_most_impatient_transport(world):
    assert world.executor.max_wait_s() is None
    world.open()
    world.freeze()
    world.read(1, (0,), (0,))
    assert world.executor.max_wait_s() == 0.001
    world.freeze(False)
    world.poll()
    assert world.executor.max_wait_s() is None


# ---- the thread


@pytest.fixture
def run_thread() -> Iterator[Callable[[World], TransferThread]]:
    threads: list[TransferThread] = []

    def run(world: World) -> TransferThread:
        threads.append(TransferThread(world.executor, lambda error: None))
        threads[-1].start()
        return threads[-1]

    yield run
    for thread in threads:
        thread.stop()


def test_thread_carries_out_what_is_submitted(world, run_thread):
    thread = run_thread(world)
    thread.submit(OpenPeer(PEER, "inproc", world.metadata, NUM_ROWS, LAYOUT))
    for read_id in range(8):
        thread.submit(PostRead(read_id, PEER, (read_id,), (read_id,)))
    events = [world.events.get(timeout=WAIT_S) for _ in range(8)]
    assert [event.read_id for event in events] == list(range(8))
    assert all(world.has_row(row, row) for row in range(8))


def test_thread_keeps_looking_after_a_read_that_nothing_announces(world, run_thread):
    thread = run_thread(world)
    world.freeze()
    thread.submit(OpenPeer(PEER, "inproc", world.metadata, NUM_ROWS, LAYOUT))
    thread.submit(PostRead(1, PEER, (2,), (2,)))
    thread.submit(PostRead(2, PEER, (99,), (0,)))
    assert world.events.get(timeout=WAIT_S).read_id == 2  # the first is posted by now, and frozen
    world.freeze(False)
    assert world.events.get(timeout=WAIT_S) == ReadEnded(1)


def test_bug_in_the_thread_is_reported_and_fences_everything(world):
    deaths: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    thread = TransferThread(world.executor, deaths.put)
    thread.start()
    world.freeze()
    thread.submit(OpenPeer(PEER, "inproc", world.metadata, NUM_ROWS, LAYOUT))
    thread.submit(PostRead(1, PEER, (2,), (2,)))
    thread.submit(OpenPeer(PEER, "a transport that does not exist", b"", NUM_ROWS, LAYOUT))
    assert isinstance(deaths.get(timeout=WAIT_S), KeyError)
    thread.stop()
    world.freeze(False)
    world.poll()
    assert not world.ours.rows.any()


def test_stop_closes_the_transports(world):
    deaths: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    thread = TransferThread(world.executor, deaths.put)
    thread.start()
    world.freeze()
    thread.submit(OpenPeer(PEER, "inproc", world.metadata, NUM_ROWS, LAYOUT))
    thread.submit(PostRead(1, PEER, (2,), (2,)))
    thread.stop()
    world.freeze(False)
    world.poll()
    assert not world.ours.rows.any()
    assert deaths.empty()


def test_thread_that_never_started_can_be_stopped(world):
    thread = TransferThread(world.executor, lambda error: None)
    thread.stop()
