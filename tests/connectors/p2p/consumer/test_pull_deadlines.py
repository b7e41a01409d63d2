"""The consumer's state machine: deadlines, quarantine, and the fences that end reads which do not end."""

import pytest

from connectors.p2p.actions import CancelRead, ClosePeer, PeerFenced, PostRead, QuarantineEnded
from connectors.p2p.transport.interface import PeerId
from core.errors import PeerUnreachable, TransferError
from core.wire.kv import Handshake

# ---- deadlines


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
    assert not pull.quarantined


def test_request_that_has_less_time_than_a_transfer_gets_its_own_deadline(pull, address):
    pull.start(deadline=pull.now + 2.0)
    pull.accept()
    pull.grant()
    assert pull.protocol.next_timer() == pull.now + 2.0
    pull.tick(2.0)
    assert pull.failed == {"r": "deadline"}
    assert "in 2 s" in pull.ended["r"].error.message
    assert pull.open_peers, "a request in a hurry says nothing about its peer"
    assert ClosePeer(PeerId(address, 1)) in pull.tick(28.0)


def test_connection_that_breaks_after_the_end_of_its_load_is_closed(pull, address):
    pull.start(deadline=pull.now + 2.0)
    pull.accept()
    pull.grant()
    pull.tick(2.0)
    first = pull.endable[0]
    assert ClosePeer(PeerId(address, 1)) in pull.end_read(first, PeerUnreachable("the connection has failed"))
    pull.end_reads(PeerUnreachable("the peer was removed"))
    assert not pull.quarantined
    pull.start("b", transfer_id="u")
    pull.accept()
    pull.grant(60_000, "u")
    assert pull.reads_of("b"), "it is opened again"


def test_request_that_has_more_time_than_a_transfer_waits_no_longer_than_that(pull):
    pull.start(deadline=pull.now + 500.0)
    pull.accept()
    pull.grant()
    pull.tick(30.0)
    assert pull.failed == {"r": "deadline"}


@pytest.mark.parametrize("left_s", [0.0, -3.0])
def test_request_without_time_fails_at_once_without_questions(pull, left_s):
    pull.start(deadline=pull.now + left_s)
    assert pull.failed == {"r": "deadline"}
    assert not pull.messages(Handshake)


def test_deadline_keeps_nothing_that_is_not_verified(pull):
    pull.start_reading(num_rows=4)
    pull.end_data_reads()
    pull.tick(30)
    assert (pull.failed, pull.usable_rows("r")) == ({"r": "deadline"}, set())
    assert pull.ended["r"].usage.transferred_bytes == 4 * 1024
    assert pull.quarantined == {0, 1, 2, 3}


# ---- fences


def test_frozen_peer_is_fenced_at_the_deadline_and_its_blocks_quarantined(pull, address):
    pull.start_reading()
    actions = pull.tick(30)
    assert pull.failed == {"r": "deadline"}
    assert ClosePeer(PeerId(address, 1)) in actions
    assert pull.protocol.counts.fenced_peers == 1
    assert pull.quarantined == {0, 1, 2}
    pull.tick(1000)
    assert pull.quarantined == {0, 1, 2}
    assert pull.actions(PeerFenced) == [PeerFenced(PeerId(address, 1), 3)], "told once"
    first, second, seals = sorted(pull.open_reads)
    assert pull.end_read(seals, TransferError("cancelled")) == []
    assert pull.end_read(first, PeerUnreachable("closed")) == [QuarantineEnded((0, 1))]
    assert pull.end_read(second, PeerUnreachable("closed")) == [QuarantineEnded((2,))]


def test_fence_of_a_lost_peer_is_reported_if_late_reads_of_aborted_loads_are_open(pull, address):
    pull.start_reading("a")
    pull.start("b", num_rows=2)
    pull.abort("a")
    actions = pull.disconnect()
    assert [action for action in actions if isinstance(action, PeerFenced)] == [PeerFenced(PeerId(address, 1), 3)]
    assert pull.failed == {"b": "peer_lost"}


def test_loss_of_a_peer_without_late_reads_is_no_fence_to_tell_of(pull):
    pull.start_reading()
    pull.disconnect()
    assert pull.failed == {"r": "peer_lost"}
    assert pull.actions(PeerFenced) == []


def test_peer_that_froze_right_after_the_handshake_is_frozen_too(pull, address):
    pull.start()
    pull.tick(2)
    pull.accept()
    pull.grant()
    assert ClosePeer(PeerId(address, 1)) in pull.tick(28)


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
    assert ClosePeer(PeerId(address, 1)) in pull.tick(1)


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
    pull.grant()
    pull.tick(100)
    assert pull.open_peers


def test_peer_that_serves_another_load_is_slow_not_frozen(pull):
    pull.start_reading("slow", 1)
    pull.start("fast", 1)
    pull.tick(1)
    for _ in range(2):
        pull.end_read(pull.reads_of("fast")[0])
    pull.tick(29)
    assert pull.failed == {"slow": "deadline"}
    assert pull.open_peers


def test_fence_at_a_deadline_sends_other_loads_to_the_next_transport(pull):
    pull.start_reading("a")
    pull.tick(10)
    pull.start("b")
    pull.tick(20)
    assert pull.failed == {"a": "deadline"}
    pull.end_reads(PeerUnreachable("closed"))
    assert not pull.quarantined
    pull.accept(transport="shm")
    pull.grant()
    pull.end_reads()
    assert pull.usable_rows("b") == {3, 4, 5}


def test_late_reads_that_end_in_time_keep_their_peer(pull):
    pull.start_reading(num_rows=4)
    pull.tick(10)
    pull.end_read(min(pull.open_reads))
    pull.grant()
    pull.tick(20)
    pull.end_reads()
    assert not pull.quarantined
    pull.release()
    pull.tick(100)
    assert pull.open_peers
    assert pull.protocol.counts.fenced_peers == 0


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
    assert not pull.quarantined


def test_peer_is_shaken_hands_with_again_after_a_fence(pull, address):
    pull.start_reading("a")
    pull.tick(30)
    pull.start("b")
    assert len(pull.messages(Handshake)) == 2
    pull.accept(transport="shm")
    pull.grant()
    assert pull.reads_of("b")
    for read_id in pull.reads_of("a"):
        pull.end_read(read_id, PeerUnreachable("closed"))
    assert "b" not in pull.failed
    assert pull.open_peers == {PeerId(address, 1)}


def test_peer_that_came_back_is_not_fenced_for_the_reads_of_its_lost_connection(pull, address):
    pull.start_reading("a")
    pull.abort("a")
    pull.disconnect()
    pull.start("b")
    pull.accept()
    assert pull.open_peers == {PeerId(address, 1)}
    pull.grant()
    while reads := pull.reads_of("b"):
        pull.end_read(reads[0])
    assert pull.usable_rows("b") == {3, 4, 5}
    pull.tick(40)
    assert pull.quarantined == {0, 1, 2}, "the end of these reads is on its way"
    assert pull.open_peers == {PeerId(address, 1)}
    assert pull.protocol.counts.fenced_peers == 0


def test_open_reads_are_cancelled_when_their_load_is_over(pull):
    pull.start_reading(num_rows=4)
    pull.end_read(1, PeerUnreachable("gone"))
    assert pull.actions(CancelRead) == [CancelRead(2), CancelRead(3)]


def test_quarantined_reads_that_end_badly_say_nothing_more(pull):
    pull.start_reading(num_rows=5)
    pull.abort()
    assert pull.end_read(1, TransferError("first")) == [QuarantineEnded((0, 1))]
    assert pull.open_peers
    assert pull.end_read(2, TransferError("second")) == [QuarantineEnded((2, 3))]
    assert pull.failed == {}


# ---- the cap


def test_peer_with_too_many_quarantined_blocks_gets_no_new_load_and_is_fenced(make_pull, address):
    pull = make_pull(max_quarantined_blocks=4)
    pull.start_reading("a", 4)
    pull.start("running", 1)
    pull.abort("a")
    assert pull.quarantined == {0, 1, 2, 3}
    assert pull.open_peers, "a load that runs may end"
    pull.tick(1.0)
    pull.start("new")
    assert pull.failed == {"new": "peer_lost"}
    assert "4 blocks are quarantined" in pull.ended["new"].error.message
    for _ in range(2):
        pull.end_read(pull.reads_of("running")[0])
    assert pull.usable_rows("running") == {4}
    assert pull.open_peers
    pull.tick(1.0)
    assert not pull.open_peers
    assert pull.protocol.counts.fenced_peers == 1


def test_peer_that_has_caught_up_is_loaded_from_again(make_pull):
    pull = make_pull(max_quarantined_blocks=4)
    pull.start_reading("a", 4)
    pull.start("running", 1)
    pull.abort("a")
    for read_id in pull.reads_of("a"):
        pull.end_read(read_id, TransferError("cancelled"))
    pull.start("new", 1)
    assert pull.failed == {}
    assert pull.reads_of("new")


def test_peer_whose_cancelled_reads_end_at_once_is_not_fenced_for_them(make_pull):
    pull = make_pull(max_quarantined_blocks=4)
    pull.start_reading("a", 4)
    pull.abort("a")
    pull.end_reads(TransferError("cancelled"))
    pull.release()
    assert pull.protocol.next_timer() == pull.now + 5.0, "the last renewal, and no fence"
    pull.tick(100)
    assert pull.open_peers


def test_load_of_a_bound_s_size_that_was_just_cancelled_refuses_no_other(make_pull):
    pull = make_pull(max_quarantined_blocks=4)
    pull.start_reading("a", 4)
    pull.abort("a")
    pull.start("b", 1)
    assert pull.reads_of("b")


def test_cap_is_each_peers_own(make_pull):
    pull = make_pull(max_quarantined_blocks=2)
    pull.start_reading("a", 2)
    pull.start("keeps it open", 1)
    pull.abort("a")
    other = "tcp://10.0.0.2:5600"
    pull.start("b", 2, "u", address=other)
    pull.accept(address=other)
    pull.grant(60_000, "u", address=other)
    assert pull.reads_of("b")


def test_fenced_reads_do_not_count_towards_the_cap(make_pull):
    pull = make_pull(max_quarantined_blocks=2)
    pull.start_reading("a", 2)
    pull.abort("a")
    pull.tick(1.0)
    assert not pull.open_peers
    pull.start("b", 2)
    pull.accept()
    pull.grant()
    assert len(pull.actions(PostRead)) == 2
    for read_id in pull.reads_of("a"):
        pull.end_read(read_id, PeerUnreachable("closed"))
    assert not pull.quarantined


def test_what_a_peer_still_reads_for_others_counts_once_it_has_reads_that_do_not_end(make_pull):
    pull = make_pull(max_quarantined_blocks=4)
    pull.start_reading("a", 2)
    pull.start("b", 2)
    pull.start("healthy", 1)
    assert pull.reads_of("healthy"), "a peer of which nothing is quarantined is not limited"
    pull.abort("a")
    assert len(pull.quarantined) == 2
    pull.start("soon after", 1)
    assert pull.reads_of("soon after"), "most cancelled reads end at once"
    pull.tick(1.0)
    pull.start("too much", 1)
    assert pull.failed == {"too much": "peer_lost"}
    pull.end_read(pull.reads_of("b")[0])  # its seals are read now
    pull.end_reads()
    pull.start("again", 1)
    assert pull.reads_of("again")


def test_total_of_all_peers_is_capped_and_those_that_fill_it_are_fenced_soon(make_pull):
    pull = make_pull(max_quarantined_blocks=3, max_quarantined_blocks_in_total=4)
    addresses = [f"tcp://10.0.0.{number}:5600" for number in (1, 2, 3)]
    for number, address in enumerate(addresses):
        pull.start(f"r{number}", 2, f"t{number}", address=address)
        pull.accept(address=address)
        pull.grant(60_000, f"t{number}", address=address)
    pull.abort("r0")
    for number in (0, 1):
        pull.start(f"keeps {number}", 1, f"t{number}", address=addresses[number])
    pull.abort("r1")
    pull.start("third", 1, "t2", address=addresses[2])
    assert pull.failed == {}, "most cancelled reads end at once"
    pull.tick(1.0)
    pull.start("fourth", 1, "t2", address=addresses[2])
    assert pull.failed == {"fourth": "peer_lost"}
    assert "4 in total" in pull.ended["fourth"].error.message
    for number in (0, 1):
        pull.abort(f"keeps {number}")
    pull.tick(1.0)
    assert pull.open_peers == {PeerId(addresses[2], 1)}
    pull.end_reads()
    pull.start("fifth", 1, "t2", address=addresses[2])
    assert pull.reads_of("fifth")


def test_blocks_whose_seals_are_ordered_count_even_if_they_have_arrived(make_pull):
    pull = make_pull(max_quarantined_blocks=4, rows_per_read=1)
    pull.start_reading("a", 1)
    pull.start("b", 3)
    pull.abort("a")
    assert len(pull.quarantined) == 1
    for _ in range(2):
        pull.end_read(pull.reads_of("b")[0])
    pull.tick(1.0)
    pull.start("too much", 1)
    assert pull.failed == {"too much": "peer_lost"}
    pull.abort("b")
    assert len(pull.quarantined) == 4
