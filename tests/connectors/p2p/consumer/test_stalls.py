"""Which peers have stalled: no byte of their reads, though they answer."""

import math

import pytest

from connectors.p2p.actions import PeerProgress
from connectors.p2p.consumer.stalls import StallWatch
from connectors.p2p.transport.interface import PeerId

PEER = PeerId("tcp://10.0.0.1:5600", 1)


@pytest.fixture
def stalls():
    return StallWatch(stall_s=4.0)


def look(stalls, now, *, has_advanced=False, heard_at=None):
    assert stalls.due(now) == [PEER]
    assert stalls.due(now) == [], "asked once"
    return stalls.on_progress(PeerProgress(PEER, has_advanced), now if heard_at is None else heard_at, now)


def test_peer_without_reads_is_not_looked_at(stalls):
    stalls.watch([PEER], 0.0)
    stalls.watch([], 1.0)
    assert stalls.next_timer() == math.inf


def test_peer_has_stalled_after_two_looks_that_found_nothing(stalls):
    stalls.watch([PEER], 0.0)
    assert stalls.next_timer() == 2.0
    assert not look(stalls, 2.0)
    assert stalls.next_timer() == 4.0
    assert look(stalls, 4.0)


def test_one_late_look_is_not_enough(stalls):
    stalls.watch([PEER], 0.0)
    assert not look(stalls, 60.0), "this worker stood still, not its peer"


def test_bytes_between_two_looks_start_the_time_again(stalls):
    stalls.watch([PEER], 0.0)
    assert not look(stalls, 2.0)
    assert not look(stalls, 4.0, has_advanced=True)
    assert not look(stalls, 6.0)
    assert look(stalls, 8.0)


def test_end_of_a_read_starts_the_time_again(stalls):
    stalls.watch([PEER], 0.0)
    assert not look(stalls, 2.0)
    stalls.begin_again(PEER, 3.0)
    stalls.watch([PEER], 3.0)
    assert stalls.next_timer() == 5.0
    assert not look(stalls, 5.0)


def test_answer_that_a_read_has_overtaken_counts_for_nothing(stalls):
    stalls.watch([PEER], 0.0)
    assert stalls.due(2.0) == [PEER]
    stalls.begin_again(PEER, 2.0)
    assert not stalls.on_progress(PeerProgress(PEER, has_advanced=False), 2.0, 2.0)
    assert not look(stalls, 4.0)


def test_peer_that_does_not_answer_has_not_stalled(stalls):
    stalls.watch([PEER], 0.0)
    assert not look(stalls, 2.0, heard_at=0.0)
    assert not look(stalls, 4.0, heard_at=0.0)
    assert look(stalls, 6.0, heard_at=5.0)


def test_transport_that_cannot_tell_is_not_asked_again(stalls):
    stalls.watch([PEER], 0.0)
    assert not look(stalls, 2.0, has_advanced=None)
    stalls.watch([PEER], 3.0)
    assert stalls.next_timer() == math.inf
    stalls.forget(PEER)
    stalls.watch([PEER], 3.0)
    assert stalls.next_timer() == 5.0, "it may be open by another one now"


def test_new_reads_after_a_pause_have_their_whole_time(stalls):
    stalls.watch([PEER], 0.0)
    assert not look(stalls, 2.0)
    stalls.watch([], 2.5)
    stalls.watch([PEER], 100.0)
    assert not look(stalls, 102.0)
