"""The consumer's state machine: reads for which the staging area has no room."""

import pytest

from connectors.p2p.actions import CancelRead, ClosePeer, PostRead, QuarantineEnded
from connectors.p2p.transport.interface import PeerId
from core.errors import PeerUnreachable
from core.wire.kv import LeaseRenew

OTHER = "tcp://10.0.0.2:5600"


@pytest.fixture
def crowded(pull):
    """A load of another peer has the room, and ``r`` got no room."""
    pull.start("other", 1, transfer_id="u", address=OTHER, is_converted=True)
    pull.accept(address=OTHER)
    pull.grant(60_000, "u", address=OTHER)
    pull.start_reading(num_rows=4, is_converted=True)
    for read_id in pull.reads_of("r"):
        pull.refuse_read(read_id)
    return pull


def end_read_of_other(pull):
    (read_id,) = pull.reads_of("other")
    return pull.end_read(read_id)


def posted(actions):
    return [action.local_rows for action in actions if isinstance(action, PostRead)]


def test_load_that_has_no_room_asks_again_when_a_read_has_ended_and_then_continues(crowded):
    assert crowded.reads_of("r") == []
    assert posted(crowded.grant()) == [], "no read has ended"
    assert posted(end_read_of_other(crowded)) == [(1, 2)], "one, to see whether there is room"
    crowded.end_reads()
    assert crowded.failed == {}
    assert crowded.usable_rows("r") == {1, 2, 3, 4}


def test_load_that_has_no_room_again_waits_for_the_next_read_to_end(crowded):
    end_read_of_other(crowded)
    crowded.refuse_read(max(crowded.reads_of("r")))
    assert posted(end_read_of_other(crowded)) == [(3, 4)]


def test_eldest_load_gets_room_first(crowded):
    crowded.start("young", 1, is_converted=True)
    crowded.refuse_read(crowded.reads_of("young")[0])
    assert posted(end_read_of_other(crowded)) == [(1, 2), (5,)]


def test_lease_is_asked_again_when_there_is_room(crowded):
    crowded.clock.advance(61)
    asked = len(crowded.messages(LeaseRenew))
    assert posted(end_read_of_other(crowded)) == []
    assert len(crowded.messages(LeaseRenew)) == asked + 1
    assert posted(crowded.grant()) == [(1, 2), (3, 4)]


def test_lease_that_is_over_when_there_is_room_ends_the_load(crowded):
    crowded.grant(0)
    assert crowded.failed == {"r": "lease_expired"}


def test_peer_of_a_load_that_never_had_room_is_not_fenced(crowded, address):
    actions = crowded.tick(30)
    assert set(crowded.failed) == {"r", "other"}
    assert ClosePeer(PeerId(OTHER, 1)) in actions
    assert ClosePeer(PeerId(address, 1)) not in actions
    assert crowded.open_peers == {PeerId(address, 1)}


def test_peer_has_all_its_time_from_when_there_was_room(crowded, address):
    crowded.tick(25)
    crowded.grant()
    end_read_of_other(crowded)
    crowded.tick(5)
    assert crowded.failed["r"] == "deadline"
    assert PeerId(address, 1) in crowded.open_peers
    crowded.tick(24)
    assert PeerId(address, 1) in crowded.open_peers
    assert ClosePeer(PeerId(address, 1)) in crowded.tick(1)


def test_peer_that_does_not_deliver_what_had_room_is_frozen_although_more_had_none(pull, address):
    pull.start_reading(num_rows=4, is_converted=True)
    pull.refuse_read(max(pull.open_reads))
    assert ClosePeer(PeerId(address, 1)) in pull.tick(30)


def test_aborted_load_is_out_of_quarantine_when_its_read_had_no_room(pull):
    pull.start_reading(num_rows=2, is_converted=True)
    (read_id,) = pull.open_reads
    assert CancelRead(read_id) in pull.abort()
    assert pull.refuse_read(read_id) == [QuarantineEnded((0, 1))]


def test_read_of_a_peer_that_is_lost_meanwhile_wants_no_room(crowded, address):
    crowded.disconnect(address)
    assert crowded.failed == {"r": PeerUnreachable.code}
    assert posted(end_read_of_other(crowded)) == []
