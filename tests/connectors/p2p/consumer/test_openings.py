"""Openings of a peer: one that fails or breaks says nothing about the next one of the same peer."""

import pytest

from connectors.p2p.actions import ClosePeer, OpenPeer
from core.errors import PeerUnreachable
from core.wire.kv import Handshake


def reopen(pull):
    """Open a peer, lose its control connection, and open it again for another load; return the first opening."""
    pull.start("a")
    pull.accept()
    pull.disconnect()
    pull.start("b", transfer_id="u")
    pull.accept()
    first, second = pull.actions(OpenPeer)
    assert first.peer == second.peer
    return first


@pytest.mark.parametrize("end", ["fail_to_open", "lose_peer"])
def test_end_of_an_earlier_opening_does_not_end_the_present_one(pull, end):
    first = reopen(pull)
    assert getattr(pull, end)(first) == []
    assert pull.open_peers == {first.peer}
    pull.grant(60_000, "u")
    pull.end_reads()
    assert pull.failed == {"a": "peer_lost"}
    assert pull.protocol.peers.offered_to(first.peer) == ("shm", "tcp")


@pytest.mark.parametrize("end", ["fail_to_open", "lose_peer"])
def test_end_of_an_opening_that_was_closed_opens_nothing(pull, end):
    pull.start("a")
    pull.accept()
    pull.disconnect()
    assert getattr(pull, end)() == []
    assert pull.open_peers == set()


def test_connection_that_breaks_while_idle_costs_the_next_load_a_handshake_only(pull):
    pull.start_reading("a")
    pull.end_reads()
    (opened,) = pull.actions(OpenPeer)
    assert pull.lose_peer() == [ClosePeer(opened.peer)]
    pull.start("b")
    assert len(pull.messages(Handshake)) == 2
    pull.accept()
    pull.end_reads()
    assert pull.usable_rows("b") == {3, 4, 5}
    assert pull.failed == {}


def test_load_that_waits_for_its_lease_connects_again_when_the_connection_breaks(pull):
    pull.start()
    pull.accept()
    pull.lose_peer()
    assert len(pull.messages(Handshake)) == 2
    pull.grant()
    assert not pull.open_reads
    pull.accept()
    pull.end_reads()
    assert pull.usable_rows("r") == {0, 1, 2}


def test_reads_posted_to_a_connection_that_was_breaking_are_posted_again(pull):
    pull.start_reading("a")
    pull.end_reads()
    pull.start("b")
    pull.lose_peer()
    pull.accept()
    for read_id in pull.reads_of("b"):
        pull.end_read(read_id, PeerUnreachable("the data connection was lost"))
    pull.end_reads()
    assert pull.usable_rows("b") == {3, 4, 5}
    assert pull.failed == {}


def test_load_that_has_got_something_keeps_it_when_the_connection_breaks(pull):
    pull.start_reading(num_rows=8)
    for _ in range(2):
        pull.end_read(pull.data_reads()[0])
    pull.lose_peer()
    assert pull.failed == {"r": "peer_lost"}


def test_connections_that_break_again_and_again_open_the_breaker(pull):
    pull.start()
    for _ in range(3):
        assert pull.failed == {}
        pull.accept()
        pull.lose_peer()
    assert pull.messages(Handshake)[-1].transports == ("shm",), "the other one"


def test_load_from_the_successor_outlives_both_connections_of_the_dead_process(pull, address):
    pull.start_reading("a")
    pull.end_reads()
    pull.start("b", transfer_id="u", incarnation=2)
    pull.lose_peer()
    pull.disconnect()
    assert pull.failed == {}
    pull.accept(incarnation=2)
    pull.grant(60_000, "u", incarnation=2)
    pull.end_reads()
    assert pull.usable_rows("b") == {3, 4, 5}
    pull.start("c", transfer_id="v", incarnation=3)
    pull.disconnect()
    pull.disconnect()
    assert pull.failed == {"c": "peer_lost"}, "once"
