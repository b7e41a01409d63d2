"""A consumer that meets a producer before its first load: the handshake is over early, and nothing depends on it."""

import pytest

from connectors.p2p.actions import CloseControl, MeetPeer, OpenPeer, SendControl
from connectors.p2p.transport.interface import PeerId
from core.errors import LayoutMismatch, VersionMismatch
from core.wire.kv import ControlError, Handshake, HandshakeRefused, LeaseRenew

HANDSHAKE_TIMEOUT_S = 5.0


@pytest.fixture
def pull(make_pull):
    """Return a consumer with a known patience."""
    return make_pull(handshake_timeout_s=HANDSHAKE_TIMEOUT_S)


@pytest.fixture
def meet(pull, address):
    """Return a function that lets the consumer meet an incarnation of the producer."""
    return lambda incarnation=1: pull.take(pull.protocol.meet(MeetPeer(PeerId(address, incarnation)), pull.now))


def handshakes(actions):
    return [action for action in actions if isinstance(action, SendControl) and isinstance(action.message, Handshake)]


def test_first_load_from_a_producer_that_was_met_shakes_no_hands(pull, meet):
    (asked,) = meet()
    assert isinstance(asked.message, Handshake)
    (opened,) = pull.accept()
    assert isinstance(opened, OpenPeer)
    (question,) = pull.start(num_rows=1)
    assert isinstance(question.message, LeaseRenew)
    pull.grant()
    pull.end_reads()
    assert pull.ended["r"].error is None
    assert pull.protocol.counts.handshakes == 1


def test_load_joins_the_handshake_of_the_meeting(pull, meet):
    meet()
    assert not handshakes(pull.start())
    pull.accept()
    pull.grant()
    pull.end_reads()
    assert pull.ended["r"].error is None


def test_who_is_met_twice_is_asked_once(pull, meet):
    meet()
    assert meet() == []
    pull.accept()
    assert meet() == []


def test_meeting_that_gets_no_answer_fails_nothing_and_the_load_asks_again(pull, meet):
    meet()
    actions = pull.tick(HANDSHAKE_TIMEOUT_S + 0.001)
    assert [type(action) for action in actions] == [CloseControl]
    assert pull.protocol.next_timer() is None, "nothing of the meeting is left"
    pull.start()
    assert pull.ended == {}
    pull.accept()
    pull.grant()
    pull.end_reads()
    assert pull.ended["r"].error is None


def test_load_that_comes_during_the_meeting_has_its_whole_time(pull, meet):
    meet()
    pull.clock.advance(HANDSHAKE_TIMEOUT_S - 0.001)
    pull.start()
    assert handshakes(pull.tick(0.002)), "asked again for the load"
    assert pull.ended == {}
    pull.accept()
    pull.grant()
    pull.end_reads()
    assert pull.ended["r"].error is None


def test_connection_lost_during_the_meeting_leaves_nothing(pull, meet):
    meet()
    pull.disconnect()
    assert pull.protocol.next_timer() is None
    assert handshakes(pull.start())


def test_refused_meeting_is_told_by_the_load(pull, meet):
    meet()
    refusal = HandshakeRefused(engine_id="prefill-0", incarnation=1, code=LayoutMismatch.code, message="16 here, 32 there")
    assert pull.receive(refusal) == []
    pull.start()
    pull.receive(refusal)
    assert pull.failed == {"r": "layout"}


def test_other_version_is_not_asked_again_by_a_meeting(pull, meet):
    meet()
    pull.receive(ControlError(code=VersionMismatch.code, message="wire version 3 here"))
    assert meet() == []


def test_meeting_of_a_process_that_was_replaced_opens_its_successor(pull, meet, address):
    meet(incarnation=1)
    (opened,) = pull.accept(incarnation=2)
    assert opened.peer == PeerId(address, 2)
    pull.start(incarnation=2)
    pull.grant(incarnation=2)
    pull.end_reads()
    assert pull.ended["r"].error is None


def test_load_of_another_incarnation_than_was_met_is_told_of_the_restart(pull, meet):
    meet(incarnation=1)
    pull.start(incarnation=1)
    pull.accept(incarnation=2)
    assert pull.failed == {"r": "stale"}


def test_peer_that_cannot_be_opened_after_a_meeting_is_tried_by_the_load(pull, meet):
    meet()
    pull.accept()
    pull.fail_to_open()
    assert pull.ended == {}
    assert handshakes(pull.start())
