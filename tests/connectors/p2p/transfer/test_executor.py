"""The transfer executor on the in-process transport: peers, reads, cancelled reads and seals."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest

from connectors.p2p.actions import CancelRead, ClosePeer, OpenPeer, PeerFailed, PeerLost, PeerOpened, ReadEnded
from connectors.p2p.transfer.executor import TransferExecutor
from connectors.p2p.transport.interface import POOL_REGION, SEAL_REGION
from connectors.testing.inproc_transport import InprocTransport
from core.errors import KVFerryError, PeerUnreachable, ProtocolError, TransferError
from core.kv.seals import SEAL_BYTES, ExpectedSeal, decode_seal, each_by_itself
from tests.connectors.p2p.transfer.conftest import LAYOUT, NUM_ROWS, PEER, ROW_BYTES


def errors_of(events: list[ReadEnded | PeerFailed]) -> dict[int, type[KVFerryError] | None]:
    return {event.read_id: type(event.error) if event.error else None for event in events}


def test_read_brings_the_rows_and_is_reported_once(world):
    world.open()
    world.read(1, (3, 9), (0, 5))
    assert world.poll() == [ReadEnded(1)]
    assert world.has_row(0, 3)
    assert world.has_row(5, 9)
    assert not world.ours.rows[[1, 2, 3, 4]].any()
    assert world.poll() == []


def test_the_most_impatient_transport_tells_how_long_to_wait(world):
    other = InprocTransport(world.fabric)
    executor = TransferExecutor(
        {"inproc": world.transport, "other": other}, world.our_seals, each_by_itself(world.digest), world.report, world.now
    )
    waits = {world.transport: None, other: None}
    for transport in waits:
        transport.max_wait_s = partial(waits.get, transport)
    assert executor.max_wait_s() is None
    waits[other] = 5.0
    assert executor.max_wait_s() == 5.0
    waits[world.transport] = 0.5
    assert executor.max_wait_s() == 0.5
    other.close()


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
    assert event.how_to_open.peer == PEER
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
    assert (event.how_to_open.peer, type(event.error)) == (PEER, ProtocolError)
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
    *ended, lost = world.poll()
    assert errors_of(ended) == {1: PeerUnreachable, 2: PeerUnreachable}
    assert isinstance(lost, PeerLost)


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


# ---- peers that are lost ---------------------------------------------------------------------------------------------------


def open_numbered(world, number):
    how = OpenPeer(PEER, "inproc", world.metadata, NUM_ROWS, LAYOUT, number=number)
    world.executor.execute(how)
    return how


def test_peer_that_is_lost_while_idle_is_reported_once_with_its_opening(world):
    how = open_numbered(world, 5)
    assert world.poll() == []
    world.fabric.kill(world.owner.number)
    (lost,) = world.poll()
    assert (type(lost), lost.how_to_open) == (PeerLost, how)
    assert isinstance(lost.error, PeerUnreachable)
    assert "inproc" in lost.error.message
    assert world.poll() == []


def test_reads_of_a_lost_peer_are_reported_before_it(world):
    world.open()
    world.freeze()
    world.read(1, (3,), (0,))
    world.read_seals(2, (3,), (0,), after=(1,))
    assert world.poll() == []
    world.fabric.kill(world.owner.number)
    first, second, lost = world.poll()
    assert [first.read_id, second.read_id, type(lost)] == [1, 2, PeerLost]
    assert {type(read.error) for read in (first, second)} == {PeerUnreachable}


def test_loss_of_a_closed_peer_is_not_reported(world):
    world.open()
    world.executor.execute(ClosePeer(PEER))
    world.fabric.kill(world.owner.number)
    assert world.poll() == []


def test_transport_that_fails_to_close_keeps_no_other_from_it(world):
    closed = []

    def fail():
        raise RuntimeError("the device is lost")

    transports = {name: SimpleNamespace(name=name, close=partial(closed.append, name)) for name in ("first", "failing", "last")}
    transports["failing"].close = fail
    executor = TransferExecutor(transports, world.our_seals, lambda block_ids: [], lambda *event: None, lambda: 0.0)
    with pytest.raises(RuntimeError, match="the device is lost"):
        executor.close()
    assert sorted(closed) == ["first", "last"]
