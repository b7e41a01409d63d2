"""A worker is replaced without a goodbye: the process on the old control connection is not the new incarnation."""

import pytest

from connectors.p2p.actions import CloseControl
from connectors.p2p.transport.interface import PeerId
from core.wire.kv import Handshake, LeaseRenew


def test_handshake_with_a_replaced_process_is_repeated_over_a_new_connection(pull, address):
    """The old process lives on, and so does the connection to it; at its address another one listens."""
    pull.start_reading("old")
    pull.end_reads()
    pull.start("new", transfer_id="new", incarnation=2)
    assert CloseControl(address) in pull.accept(incarnation=1)
    assert len(pull.messages(Handshake)) == 3
    assert "new" not in pull.ended
    load_from_second_life(pull, address)


def test_lease_is_asked_for_again_if_a_replaced_process_answers(pull, address):
    pull.start_reading("old")
    pull.end_reads()
    pull.start("new", transfer_id="new", incarnation=2)
    num_questions = len(pull.messages(LeaseRenew))
    assert CloseControl(address) in pull.grant(0, "new", incarnation=1)
    assert [question.transfer_ids for question in pull.messages(LeaseRenew)[num_questions:]] == [("new",)]
    assert "new" not in pull.ended
    load_from_second_life(pull, address)


def load_from_second_life(pull, address):
    pull.accept(incarnation=2)
    pull.grant(60_000, "new", incarnation=2)
    pull.end_reads()
    assert pull.ended["new"].error is None
    assert pull.open_peers == {PeerId(address, 2)}


@pytest.mark.parametrize("answers_first", [True, False])
def test_process_that_answers_over_the_new_connection_too_was_not_replaced(pull, address, answers_first):
    pull.start("old")
    pull.grant(60_000, incarnation=1)
    if answers_first:
        pull.accept(incarnation=1)
        pull.end_reads()
    pull.start("new", transfer_id="new", incarnation=2)
    assert CloseControl(address) in pull.accept(incarnation=1)
    assert "new" not in pull.ended
    pull.accept(incarnation=1)
    assert pull.failed == {"new": "stale"}
    pull.end_reads()
    assert pull.ended["old"].error is None
    assert pull.open_peers == {PeerId(address, 1)}


def test_life_that_has_answered_on_a_lost_connection_has_to_answer_again(pull, address):
    pull.start_reading("old")
    pull.end_reads()
    pull.disconnect()
    pull.start("new", transfer_id="new", incarnation=2)
    assert CloseControl(address) not in pull.accept(incarnation=1)
    assert pull.failed == {"new": "stale"}
