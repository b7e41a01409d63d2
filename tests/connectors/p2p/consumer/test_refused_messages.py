"""The consumer's state machine: peers that do not understand a message, or speak another wire version."""

import pytest

from connectors.p2p.actions import CloseControl, SendControl
from connectors.reports import LoadEnded
from core.errors import VersionMismatch
from core.wire.kv import ControlError, Handshake, HandshakeRefused, LeaseRenew, PrefixQuestion, kind_of
from core.wire.version import MAX_RETRY_S, VersionRefuser


def test_peer_that_did_not_understand_the_handshake_fails_waiting_loads(pull):
    pull.start()
    pull.receive(ControlError(code="protocol_error", message="wire version 1 is not supported"))
    assert pull.failed == {"r": "protocol_error"}


@pytest.mark.parametrize(
    "message",
    [
        HandshakeRefused(engine_id="p", incarnation=1, code="made-up-17", message="x" * 5000),
        ControlError(code="made-up-17", message="x" * 5000),
    ],
)
def test_peer_cannot_invent_codes_or_speak_at_length(pull, message):
    pull.start()
    pull.receive(message)
    (failure,) = pull.actions(LoadEnded)
    assert (failure.error.code, len(failure.error.message)) == ("other", 500)


@pytest.mark.parametrize("other", [PrefixQuestion, LeaseRenew])
def test_peer_that_did_not_understand_another_message_fails_no_loads(pull, other):
    pull.start()
    pull.receive(ControlError(code="protocol_error", message="what?", kind=kind_of(other)))
    assert pull.failed == {}
    pull.accept()
    pull.grant()
    assert pull.reads_of("r")
    assert pull.protocol.counts.unexpected_messages == 1


def refuse_lease_question(pull, number=None):
    """Refuse a lease question, by default the last one."""
    if number is None:
        number = pull.messages(LeaseRenew)[-1].number
    reason = "the message could not be handled"
    return pull.receive(ControlError(code="other", message=reason, kind=kind_of(LeaseRenew), number=number))


def test_load_whose_lease_question_is_refused_asks_once_more_then_fails_at_once(pull):
    pull.start()
    pull.accept()
    num_questions = len(pull.messages(LeaseRenew))
    refuse_lease_question(pull)
    assert len(pull.messages(LeaseRenew)) == num_questions + 1
    assert pull.failed == {}
    refuse_lease_question(pull)
    assert pull.failed == {"r": "lease_expired"}
    assert len(pull.messages(LeaseRenew)) == num_questions + 1


def test_load_goes_on_if_the_second_lease_question_is_answered(pull):
    pull.start()
    pull.accept()
    refuse_lease_question(pull)
    pull.grant()
    assert pull.reads_of("r")
    pull.tick(5.0)
    refuse_lease_question(pull)
    pull.end_reads()
    assert pull.ended["r"].error is None


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_each_of_two_refused_questions_counts_for_its_own_lease_alone(pull, order):
    pull.start("a", transfer_id="t")
    pull.start("b", transfer_id="u")
    pull.accept()
    for number in order:
        refuse_lease_question(pull, number)
    assert pull.failed == {}
    assert [question.transfer_ids for question in pull.messages(LeaseRenew)[2:]] == [("t", "u")[n - 1 : n] for n in order]
    first, second = (("a", "b")[n - 1] for n in order)
    refuse_lease_question(pull, 3)
    assert pull.failed == {first: "lease_expired"}
    refuse_lease_question(pull, 4)
    assert pull.failed == {first: "lease_expired", second: "lease_expired"}


def test_refused_question_about_a_released_lease_counts_for_no_other(pull):
    pull.hold("t")
    pull.release("t")
    pull.start("b", transfer_id="u")
    pull.accept()
    refuse_lease_question(pull, 1)
    assert len(pull.messages(LeaseRenew)) == 2, "nothing is asked again"
    refuse_lease_question(pull, 2)
    assert pull.failed == {}
    pull.grant(60_000, "u", number=3)
    assert pull.reads_of("b")


def test_refused_question_of_an_earlier_hold_does_not_count_for_the_present_one(pull):
    pull.hold()
    pull.release()
    pull.start()
    pull.accept()
    refuse_lease_question(pull, 1)
    refuse_lease_question(pull, 2)
    assert pull.failed == {}


@pytest.mark.parametrize("number", [0, 99])
def test_refusal_of_a_question_that_was_not_asked_counts_for_no_lease(pull, number):
    pull.start()
    pull.accept()
    for _ in range(2):
        refuse_lease_question(pull, number)
    assert pull.failed == {}
    assert len(pull.messages(LeaseRenew)) == 1


def test_refused_lease_questions_do_not_end_a_lease_that_is_known_to_last(pull):
    pull.start_reading(num_rows=12)
    for _ in range(2):
        pull.tick(5.0)
        refuse_lease_question(pull)
    pull.end_reads()
    assert pull.ended["r"].error is None


# ---- another wire version


def refuse_version(pull):
    return pull.receive(ControlError(code="version_mismatch", message="the peer refuses ours and speaks wire version 2"))


def test_a_peer_of_another_version_is_asked_less_and_less_often(pull):
    for second in range(600):
        num_asked = len(pull.messages(Handshake))
        pull.start(f"r{second}", transfer_id=f"t{second}")
        if len(pull.messages(Handshake)) > num_asked:
            refuse_version(pull)
        assert pull.failed[f"r{second}"] == "version_mismatch"
        pull.tick(1.0)
    assert 20 < len(pull.messages(Handshake)) < 6 + 600 / MAX_RETRY_S + 2


def test_the_next_incarnation_of_a_peer_of_another_version_is_asked_at_once(pull):
    for _ in range(3):
        pull.start(f"a{pull.now}")
        refuse_version(pull)
        pull.tick(MAX_RETRY_S)
    num_asked = len(pull.messages(Handshake))
    pull.start("b", transfer_id="u", incarnation=2)
    assert len(pull.messages(Handshake)) == num_asked + 1
    pull.accept(incarnation=2)
    assert "b" not in pull.failed


class OtherVersion:
    """A worker of another version: what it refuses comes back at once, and at most once per connection and interval."""

    def __init__(self, pull) -> None:
        self.pull = pull
        self.refuser = VersionRefuser()
        self.num_connections = 1

    def take(self, actions) -> None:
        for action in actions:
            if isinstance(action, CloseControl):
                self.num_connections += 1
            elif isinstance(action, SendControl) and self.refuser.answer(self.num_connections, REFUSED, self.pull.now):
                self.take(refuse_version(self.pull))


REFUSED = VersionMismatch(ours=3, theirs=2)


def test_load_after_a_refused_lease_question_ends_at_once_with_the_version(pull):
    peer = OtherVersion(pull)
    peer.take(pull.expect())
    peer.take(pull.tick(0.05))
    peer.take(pull.start())
    assert pull.failed == {"r": "version_mismatch"}


def test_load_that_tries_the_other_version_again_ends_at_once_with_the_version(pull):
    peer = OtherVersion(pull)
    for index in range(20):
        peer.take(pull.start(f"r{index}", transfer_id=f"t{index}"))
        assert pull.failed.get(f"r{index}") == "version_mismatch"
        peer.take(pull.tick(0.6))
    assert peer.num_connections < 10


def test_a_peer_that_was_upgraded_at_its_address_is_used_again(pull):
    """The connection is opened again once, and what the refused one was asked about the lease has no answer."""
    pull.start("a")
    refuse_version(pull)
    pull.tick(0.6)
    pull.start("b")
    pull.start("c")
    pull.accept()
    assert pull.failed == {"a": "version_mismatch"}
    assert len(pull.actions(CloseControl)) == 1
    assert len(pull.messages(LeaseRenew)) == 2, "asked again"
    pull.grant()
    pull.end_reads()
    assert pull.ended.keys() == {"a", "b", "c"}
    assert pull.failed.keys() == {"a"}


def test_refusal_of_the_version_by_an_open_peer_is_not_believed(pull):
    pull.start_reading()
    assert refuse_version(pull) == []
    pull.end_reads()
    assert pull.failed == {}
    assert pull.protocol.counts.unexpected_messages == 1
