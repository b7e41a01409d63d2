"""The consumer's state machine: how a load is cut into reads, what failing reads cost, and aborts."""

import msgspec
import pytest

from connectors.p2p.actions import CancelRead, ClosePeer, PostRead, PostSealRead, QuarantineEnded
from connectors.p2p.transport.interface import PeerId
from connectors.reports import ALL_BLOCKS, LoadEnded
from core.errors import PeerUnreachable, TransferError


def test_load_is_cut_into_bounded_reads_in_order(make_pull):
    pull = make_pull(rows_per_read=2, max_reads_in_flight=3)
    pull.start_reading(num_rows=5)
    assert [read.local_rows for read in pull.actions(PostRead)] == [(0, 1), (2, 3), (4,)]
    assert [read.remote_rows for read in pull.actions(PostRead)] == [(500, 501), (502, 503), (504,)]


def test_transport_has_its_own_bound_of_a_read(make_pull, layout):
    pull = make_pull(rows_per_read=2, max_read_bytes_by={"tcp": 4 * layout.block_bytes}, max_reads_in_flight=3)
    pull.start_reading(num_rows=5)
    assert [read.local_rows for read in pull.actions(PostRead)] == [(0, 1, 2, 3), (4,)]


def test_load_that_goes_over_to_another_transport_is_cut_for_that(make_pull, layout):
    pull = make_pull(rows_per_read=2, max_read_bytes_by={"shm": 4 * layout.block_bytes}, max_reads_in_flight=3)
    pull.hold()
    pull.grant()
    pull.start(num_rows=5)
    opened, *posted = pull.accept(transport="shm")
    assert [read.local_rows for read in posted] == [(0, 1, 2, 3), (4,), (0, 1, 2, 3, 4)], "blocks, blocks, seals"
    pull.fail_to_open(opened)
    pull.accept(transport="tcp")
    ended = [pull.end_read(read.read_id, PeerUnreachable("not open")) for read in posted]
    assert [read.local_rows for read in ended[-1]] == [(0, 1), (2, 3), (4,), (0, 1, 2, 3, 4)]
    pull.end_reads()
    assert pull.usable_rows("r") == set(range(5))


def test_blocks_that_are_converted_are_read_by_as_few_as_the_staging_area_holds(make_pull, layout):
    pull = make_pull(rows_per_read=2, max_read_bytes_by={"tcp": 4 * layout.block_bytes}, max_reads_in_flight=3)
    pull.start_reading(num_rows=4, is_converted=True)
    assert [read.remote_rows for read in pull.actions(PostRead)] == [(500, 501), (502, 503)]


def test_reads_in_flight_are_bounded_per_load(pull):
    pull.start_reading(num_rows=9)
    assert len(pull.data_reads()) == 2
    while pull.open_reads:
        assert len(pull.data_reads()) <= 2
        assert "r" not in pull.ended
        pull.end_read(min(pull.open_reads))
    assert len(pull.actions(PostRead)) == 5
    assert pull.ended["r"].usage.transferred_bytes == 9 * 1024


def test_row_larger_than_a_read_is_still_read(make_pull):
    pull = make_pull(rows_per_read=0)
    pull.start_reading(num_rows=2)
    assert [read.local_rows for read in pull.actions(PostRead)] == [(0,), (1,)]


def test_reads_may_end_in_any_order(make_pull):
    pull = make_pull(max_reads_in_flight=4)
    pull.start_reading(num_rows=8)
    for read_id in sorted(pull.data_reads(), reverse=True):
        pull.end_read(read_id)
    pull.end_reads()
    assert pull.usable_rows("r") == set(range(8))


def test_all_seals_are_read_at_once_after_the_last_byte(pull):
    pull.start_reading(num_rows=9)
    for _ in range(3):
        assert not pull.actions(PostSealRead)
        pull.end_read(min(pull.open_reads))
    (read,) = pull.actions(PostSealRead)
    assert (read.remote_rows, read.local_rows) == (tuple(range(500, 509)), tuple(range(9)))
    assert read.after == tuple(pull.data_reads())
    assert not read.wants_digests


def test_seals_of_blocks_that_are_converted_are_asked_for_when_the_last_byte_is_here(pull):
    """They may be read in vain, for want of room."""
    pull.start_reading(num_rows=4, is_converted=True)
    assert not pull.actions(PostSealRead)
    pull.end_data_reads()
    (read,) = pull.actions(PostSealRead)
    assert read.after == ()


def test_loads_complete_in_the_order_of_their_last_reads(pull):
    for name in "abc":
        pull.start(name, 1)
    pull.accept()
    pull.grant()
    for name in "cab":
        pull.end_read(pull.reads_of(name)[0])
        pull.end_read(pull.reads_of(name)[0])
    assert [ended.request_id for ended in pull.actions(LoadEnded)] == ["c", "a", "b"]


def test_row_that_the_peer_does_not_have_is_not_read(pull):
    pull.start(num_rows=2)
    pull.accept(num_blocks=501)  # the handoff names 500 and 501
    pull.grant()
    assert pull.failed == {"r": "protocol_error"}
    assert not pull.actions(PostRead)


@pytest.mark.parametrize("is_handoff_ours", [True, False])
def test_blocks_are_not_read_if_the_handoff_and_its_owner_disagree_about_them(pull, layout, is_handoff_ours):
    """Each by itself could be read here: what differs is the number of tokens in a block."""
    other = msgspec.structs.replace(layout, block_size=layout.block_size // 2, block_bytes=layout.block_bytes // 2)
    pull.start(num_rows=1, is_converted=not is_handoff_ours, layout=None if is_handoff_ours else other)
    pull.accept(layout=other if is_handoff_ours else layout)
    pull.grant()
    assert pull.failed == {"r": "layout"}
    assert not pull.open_reads


def test_blocks_of_another_size_are_read_if_handoff_and_owner_agree(pull, layout):
    other = msgspec.structs.replace(layout, block_size=layout.block_size // 2, block_bytes=layout.block_bytes // 2)
    pull.start(num_rows=1, is_converted=True, layout=other)
    pull.accept(layout=other)
    pull.grant()
    assert not pull.failed
    assert pull.data_reads()


def test_second_report_of_a_read_is_ignored(pull):
    pull.start_reading(num_rows=4)
    first = min(pull.open_reads)
    pull.end_read(first)
    assert pull.end_read(first) == []
    assert pull.end_read(999) == []
    assert "r" not in pull.ended


# ---- failing reads


def test_failed_read_costs_its_own_rows_and_the_rest_is_verified(pull):
    pull.start_reading(num_rows=6)
    pull.end_read(2, TransferError("a read failed"))
    assert "r" not in pull.ended
    seal_read = pull.end_data_reads()
    assert pull.open_reads[seal_read].local_rows == (0, 1, 4, 5)
    pull.end_read(seal_read)
    ended = pull.ended["r"]
    assert (ended.error.code, ended.invalid_block_ids) == ("transfer_error", (2, 3))
    assert (ended.usage.verified_blocks, ended.usage.transferred_tokens) == (4, 4 * 32)
    assert ended.usage.transferred_bytes == 4 * 1024


def test_seal_says_nothing_of_a_block_whose_read_has_failed_after_it_was_ordered(pull):
    pull.start_reading(num_rows=4)
    pull.end_read(max(pull.data_reads()), TransferError("a read failed"))
    seal_read = pull.end_data_reads()
    assert pull.open_reads[seal_read].local_rows == (0, 1, 2, 3)
    pull.end_read(seal_read)
    assert pull.usable_rows("r") == {0, 1}
    assert pull.ended["r"].error.code == "transfer_error"


def test_load_whose_reads_all_fail_does_not_wait_for_seals(pull):
    pull.start_reading(num_rows=4)
    seal_read = max(pull.open_reads)
    for read_id in pull.data_reads():
        pull.end_read(read_id, TransferError("no"))
    assert pull.actions(CancelRead) == [CancelRead(seal_read)]
    assert pull.failed == {"r": "transfer_error"}
    assert pull.quarantined == {0, 1, 2, 3}, "a seal may land beside them"
    pull.end_read(seal_read, TransferError("cancelled"))
    assert not pull.quarantined
    assert pull.ended["r"].invalid_block_ids is ALL_BLOCKS
    assert pull.ended["r"].usage.verified_blocks == 0


def test_seal_read_that_fails_proves_nothing(pull):
    pull.start_reading(num_rows=4)
    pull.end_read(pull.end_data_reads(), TransferError("no seals"))
    assert pull.failed == {"r": "transfer_error"}
    assert pull.usable_rows("r") == set()


def test_failed_read_leaves_the_peer_and_its_other_loads_alone(pull):
    pull.start_reading("a", 1)
    pull.start("b", 1)
    pull.end_read(pull.reads_of("a")[0], TransferError("one bad read"))
    assert pull.open_peers
    pull.end_reads()
    assert pull.usable_rows("b") == {1}


def test_read_that_finds_the_peer_gone_fences_it_and_fails_all_its_loads_at_once(pull, address):
    pull.start_reading("a", 1)
    pull.start("b", 1)
    actions = pull.end_read(pull.reads_of("a")[0], PeerUnreachable("connection reset"))
    assert ClosePeer(PeerId(address, 1)) in actions
    assert pull.failed == {"a": "peer_lost", "b": "peer_lost"}
    assert pull.quarantined == {0, 1}
    pull.end_reads(PeerUnreachable("closed"))
    assert not pull.quarantined


# ---- aborts


def test_abort_while_shaking_hands_ends_at_once(pull):
    pull.start()
    assert pull.abort() == [LoadEnded("r", None)]
    pull.accept()
    pull.grant()
    assert not pull.actions(PostRead)


def test_abort_while_the_lease_is_asked_for_ends_at_once(pull):
    pull.start()
    pull.accept()
    assert pull.abort() == [LoadEnded("r", None)]
    pull.grant()
    assert not pull.actions(PostRead)


def test_abort_while_reading_ends_at_once_and_quarantines_what_is_open(pull):
    pull.start_reading(num_rows=9)
    first, second = sorted(pull.open_reads)
    actions = pull.abort()
    assert actions == [
        CancelRead(first),
        CancelRead(second),
        LoadEnded("r", None, quarantined_block_ids=(0, 1, 2, 3)),
    ]
    pull.end_read(first)
    assert pull.quarantined == {2, 3}
    pull.end_read(second, TransferError("cancelled"))
    assert not pull.quarantined
    assert len(pull.actions(PostRead)) == 2


@pytest.fixture
def abandoned(pull):
    """Return an abandoned load: the read of its last blocks is open, the read of the seals is ordered."""
    pull.start_reading(num_rows=4)
    first, second, seals = pull.open_reads
    pull.end_read(first)
    assert pull.abort() == [CancelRead(second), CancelRead(seals), LoadEnded("r", None, quarantined_block_ids=(0, 1, 2, 3))]
    return pull, second, seals


def test_unstarted_seal_read_releases_all_blocks_not_being_read(abandoned):
    pull, second, seals = abandoned
    assert pull.end_read(seals, TransferError("cancelled")) == [QuarantineEnded((0, 1))]
    assert pull.end_read(second, TransferError("cancelled")) == [QuarantineEnded((2, 3))]


def test_seal_read_that_had_begun_keeps_the_blocks_of_the_reads_before_it(abandoned):
    """The last blocks had arrived, unknown to the consumer: seals may still land for all of them."""
    pull, second, seals = abandoned
    assert pull.end_read(second) == []
    assert pull.quarantined == {0, 1, 2, 3}
    assert pull.end_read(seals, TransferError("cancelled")) == [QuarantineEnded((0, 1, 2, 3))]


def test_abort_while_the_seals_are_read_quarantines_their_blocks(pull):
    """A seal that comes late lands with its block: the next owner of the block must not find it there."""
    pull.start_reading(num_rows=4)
    seal_read = pull.end_data_reads()
    pull.abort()
    assert pull.quarantined == {0, 1, 2, 3}
    pull.end_read(seal_read)
    assert not pull.quarantined


@pytest.mark.parametrize("request_id", ["never", "r"])
def test_abort_of_an_unknown_or_ended_load_is_ignored(pull, request_id):
    pull.start_reading(num_rows=1)
    pull.end_reads()
    assert pull.abort(request_id) == []


def test_abort_of_one_reader_leaves_the_other_alone(pull):
    pull.start_reading("a")
    pull.start("b")
    pull.abort("a")
    pull.end_reads()
    assert pull.usable_rows("b") == {3, 4, 5}
