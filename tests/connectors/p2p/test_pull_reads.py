"""The consumer's state machine: reads, deadlines, fences and aborts."""

import pytest

from connectors.p2p.actions import CancelRead, ClosePeer, LoadEnded, PostRead
from core.errors import PeerUnreachable, TransferError
from core.transport import PeerId
from core.wire.kv import Handshake


def test_load_is_cut_into_bounded_reads_in_order(make_pull):
    pull = make_pull(rows_per_read=2, max_reads_in_flight=3)
    pull.start_reading(num_rows=5)
    assert [read.local_rows for read in pull.actions(PostRead)] == [(0, 1), (2, 3), (4,)]
    assert [read.remote_rows for read in pull.actions(PostRead)] == [(500, 501), (502, 503), (504,)]


def test_reads_in_flight_are_bounded_per_load(pull):
    pull.start_reading(num_rows=9)
    assert len(pull.open_reads) == 2
    while pull.open_reads:
        assert len(pull.open_reads) <= 2
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
    for read_id in sorted(pull.open_reads, reverse=True):
        assert "r" not in pull.ended
        pull.end_read(read_id)
    assert pull.ended["r"].usage is not None


def test_loads_complete_in_the_order_of_their_last_reads(pull):
    for name in "abc":
        pull.start(name, 1)
    pull.accept()
    pull.grant()
    for name in "cab":
        pull.end_read(pull.reads_of(name)[0])
    assert [ended.request_id for ended in pull.actions(LoadEnded)] == ["c", "a", "b"]


def test_failed_read_fails_the_load_once_and_ends_it_with_the_last_one(make_pull):
    pull = make_pull(max_reads_in_flight=3)
    pull.start_reading(num_rows=9)
    first, second, third = sorted(pull.open_reads)
    actions = pull.end_read(second, TransferError("a read failed"))
    assert actions[1:] == [CancelRead(first), CancelRead(third)]
    assert pull.failed == {"r": "transfer_error"}
    pull.end_read(first, TransferError("cancelled"))
    assert "r" not in pull.ended
    pull.end_read(third)
    assert pull.ended["r"].usage is None
    assert len(pull.actions(PostRead)) == 3


def test_failed_read_leaves_the_peer_and_its_other_loads_alone(pull):
    pull.start_reading("a", 1)
    pull.start("b", 1)
    pull.end_read(pull.reads_of("a")[0], TransferError("one bad read"))
    assert pull.open_peers
    pull.end_reads()
    assert pull.ended["b"].usage is not None


def test_read_that_finds_the_peer_gone_fences_it(pull, address):
    pull.start_reading("a", 1)
    pull.start("b", 1)
    actions = pull.end_read(pull.reads_of("a")[0], PeerUnreachable("connection reset"))
    assert ClosePeer(PeerId(address, 1)) in actions
    assert pull.failed == {"a": "peer_lost", "b": "peer_lost"}
    assert list(pull.ended) == ["a"]
    pull.end_reads(PeerUnreachable("closed"))
    assert list(pull.ended) == ["a", "b"]


def test_row_that_the_peer_does_not_have_is_not_read(pull):
    pull.start(num_rows=2)
    pull.accept(num_blocks=501)  # the hand-over names 500 and 501
    pull.grant()
    assert pull.failed == {"r": "protocol_error"}
    assert not pull.actions(PostRead)


def test_second_report_of_a_read_is_ignored(pull):
    pull.start_reading(num_rows=4)
    first = min(pull.open_reads)
    pull.end_read(first)
    assert pull.end_read(first) == []
    assert pull.end_read(999) == []
    assert "r" not in pull.ended


# ---- deadlines and fences


@pytest.mark.parametrize("is_shaken", [False, True])
def test_load_that_cannot_start_ends_at_its_deadline(make_pull, is_shaken):
    pull = make_pull(handshake_timeout_s=60.0)
    pull.start()
    if is_shaken:
        pull.accept()
    pull.tick(29.5)
    assert pull.failed == {}
    pull.tick(0.5)
    assert pull.failed == {"r": "deadline"}
    assert "r" in pull.ended


def test_frozen_peer_is_fenced_at_the_deadline_and_the_load_ends_when_it_is_quiet(pull, address):
    pull.start_reading()
    actions = pull.tick(30)
    assert pull.failed == {"r": "deadline"}
    assert ClosePeer(PeerId(address, 1)) in actions
    assert pull.protocol.counts.fenced_peers == 1
    assert "r" not in pull.ended
    pull.tick(1000)
    assert "r" not in pull.ended
    pull.end_reads(PeerUnreachable("closed"))
    assert "r" in pull.ended


def test_slow_peer_gets_more_time_before_it_is_fenced(pull, address):
    pull.start_reading(num_rows=4)
    pull.tick(10)
    pull.end_read(min(pull.open_reads))
    pull.grant()
    pull.tick(20)
    assert pull.failed == {"r": "deadline"}
    assert pull.open_peers
    pull.tick(29)
    assert pull.open_peers
    actions = pull.tick(1)
    assert ClosePeer(PeerId(address, 1)) in actions


def test_peer_that_keeps_delivering_reads_of_a_long_load_is_slow_not_frozen(pull):
    """Each end posts the next read: progress is never later than the last posting."""
    pull.start_reading(num_rows=100)
    for _ in range(29):
        pull.tick(1)
        pull.grant()
        pull.end_read(min(pull.open_reads))
    pull.tick(1)
    assert pull.failed == {"r": "deadline"}
    assert pull.open_peers
    pull.end_reads(TransferError("cancelled"))
    assert "r" in pull.ended
    pull.grant()
    pull.tick(100)
    assert pull.open_peers


def test_peer_that_serves_another_load_is_slow_not_frozen(pull):
    pull.start_reading("slow", 1)
    pull.start("fast", 1)
    pull.tick(1)
    pull.end_read(pull.reads_of("fast")[0])
    pull.tick(29)
    assert pull.failed == {"slow": "deadline"}
    assert pull.open_peers


def test_fence_takes_the_other_loads_of_the_peer_along(pull):
    pull.start_reading("a")
    pull.tick(10)
    pull.start("b")
    pull.tick(20)
    assert pull.failed == {"a": "deadline", "b": "peer_lost"}
    pull.end_reads(PeerUnreachable("closed"))
    assert set(pull.ended) == {"a", "b"}


def test_slow_load_that_ends_in_time_keeps_its_peer(pull):
    pull.start_reading(num_rows=4)
    pull.tick(10)
    pull.end_read(min(pull.open_reads))
    pull.grant()
    pull.tick(20)
    pull.end_reads()
    assert pull.ended["r"].usage is None
    pull.release()
    pull.tick(100)
    assert pull.open_peers
    assert pull.protocol.counts.fenced_peers == 0


def test_peer_is_shaken_hands_with_again_after_a_fence(pull, address):
    pull.start_reading("a")
    pull.tick(30)
    pull.start("b")
    assert len(pull.messages(Handshake)) == 2
    pull.accept()
    pull.grant()
    assert pull.reads_of("b")
    for read_id in pull.reads_of("a"):
        pull.end_read(read_id, PeerUnreachable("closed"))
    assert "b" not in pull.failed
    assert pull.open_peers == {PeerId(address, 1)}


def test_cancelled_reads_that_end_badly_say_nothing_more(pull):
    pull.start_reading(num_rows=4)
    pull.end_read(min(pull.open_reads), TransferError("first"))
    pull.end_read(min(pull.open_reads), PeerUnreachable("second"))
    assert pull.failed == {"r": "transfer_error"}


# ---- aborts


def test_abort_while_shaking_hands_ends_at_once(pull):
    pull.start()
    assert pull.abort() == [LoadEnded("r")]
    pull.accept()
    pull.grant()
    assert not pull.actions(PostRead)


def test_abort_while_the_lease_is_asked_for_ends_at_once(pull):
    pull.start()
    pull.accept()
    assert pull.abort() == [LoadEnded("r")]
    pull.grant()
    assert not pull.actions(PostRead)


def test_abort_while_reading_ends_with_the_last_read(pull):
    pull.start_reading(num_rows=9)
    open_reads = sorted(pull.open_reads)
    assert pull.abort() == [CancelRead(read_id) for read_id in open_reads]
    pull.end_read(open_reads[0])
    assert "r" not in pull.ended
    pull.end_read(open_reads[1], TransferError("cancelled"))
    assert pull.ended["r"].usage is None
    assert pull.failed == {}


def test_aborted_load_that_stays_open_is_fenced_at_its_deadline(pull, address):
    pull.start_reading()
    pull.tick(10)
    pull.abort()
    pull.grant()
    pull.tick(19.5)
    assert pull.open_peers
    assert ClosePeer(PeerId(address, 1)) in pull.tick(0.5)
    assert pull.failed == {}
    pull.end_reads(PeerUnreachable("closed"))
    assert "r" in pull.ended


def test_abort_after_a_failure_says_nothing_twice(pull):
    pull.start_reading(num_rows=4)
    pull.end_read(min(pull.open_reads), TransferError("no"))
    assert pull.abort() == []
    pull.end_reads()
    assert pull.ended["r"].usage is None


def test_abort_of_an_unknown_or_ended_load_is_ignored(pull):
    assert pull.abort("never") == []
    pull.start_reading(num_rows=1)
    pull.end_reads()
    assert pull.abort() == []


def test_abort_of_one_reader_leaves_the_other_alone(pull):
    pull.start_reading("a")
    pull.start("b")
    pull.abort("a")
    pull.end_reads()
    assert pull.ended["b"].usage is not None
