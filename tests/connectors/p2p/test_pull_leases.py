"""The consumer's state machine: leases that are asked for, renewed, lost and released."""

import pytest

from connectors.p2p.actions import CancelRead, LoadFailed, PostRead, SendControl
from core.wire.kv import LeaseRelease, LeaseRenew, LeaseState

OTHER = "tcp://10.0.0.2:5600"


def test_hold_keeps_a_lease_alive_without_a_load(pull):
    (asked,) = pull.hold()
    assert asked.message == LeaseRenew(transfer_ids=("t",))
    assert pull.hold() == []
    (renewed,) = pull.tick(5)
    assert renewed.message == LeaseRenew(transfer_ids=("t",))


def test_renewals_are_batched_per_owner(pull, address):
    for name in ("t", "u", "v"):
        pull.hold(name)
    pull.hold("w", address=OTHER)
    renewals = pull.tick(5)
    assert renewals == [
        SendControl(address, LeaseRenew(transfer_ids=("t", "u", "v"))),
        SendControl(OTHER, LeaseRenew(transfer_ids=("w",))),
    ]
    assert len(pull.tick(5)) == 2


def test_renewals_stop_with_the_release(pull, address):
    pull.hold()
    assert pull.release() == [SendControl(address, LeaseRelease(transfer_ids=("t",)))]
    assert pull.tick(5) == []
    assert pull.protocol.next_timer() is None


def test_release_in_mid_read_stops_renewals_and_fails_the_load(pull):
    pull.start_reading(num_rows=1)
    pull.release()
    pull.end_reads()
    assert pull.failed == {"r": "lease_expired"}
    assert "r" in pull.ended


def test_lease_that_is_not_held_fails_waiting_loads(pull):
    pull.start("a")
    pull.start("b")
    pull.accept()
    pull.grant(0)
    assert pull.failed == {"a": "lease_expired", "b": "lease_expired"}
    assert not pull.actions(PostRead)


def test_lease_that_ends_in_mid_read_cancels_the_reads(pull):
    pull.start_reading(num_rows=4)
    actions = pull.grant(0)
    assert pull.failed == {"r": "lease_expired"}
    assert [type(action) for action in actions] == [LoadFailed, CancelRead, CancelRead]
    pull.end_reads()
    assert pull.ended["r"].usage is None


def test_load_behind_an_ended_lease_asks_the_owner_again(pull):
    pull.start("a")
    pull.accept()
    pull.grant(0)
    pull.start("b")
    assert len(pull.messages(LeaseRenew)) == 2
    pull.grant(0)
    assert pull.failed["b"] == "lease_expired"


@pytest.mark.parametrize("seconds", [2.0, 2.5])  # at the last moment the owner gives the blocks up
def test_bytes_that_came_after_the_lease_do_not_count(pull, seconds):
    pull.start(num_rows=1)
    pull.accept()
    pull.grant(2_000)
    pull.clock.advance(seconds)
    pull.end_reads()
    assert pull.failed == {"r": "lease_expired"}


def test_lease_is_counted_from_the_question_not_from_the_answer(pull):
    pull.start(num_rows=1)
    pull.accept()
    pull.clock.advance(1.5)  # the answer takes its time
    pull.grant(2_000)
    pull.clock.advance(1)
    pull.end_reads()
    assert pull.failed == {"r": "lease_expired"}


def test_delayed_answer_is_not_taken_for_one_to_a_later_question(pull):
    """Three questions, two answers: what the second answer left counts from the second question."""
    pull.start(num_rows=1)  # asks at 0
    pull.accept()
    pull.tick(5)  # asks
    pull.grant(20_000)  # answers 0: good until 20
    pull.tick(5)  # asks
    pull.grant(20_000)  # answers 5: good until 25
    pull.clock.advance(17)
    pull.end_reads()
    assert pull.failed == {"r": "lease_expired"}


def test_expired_lease_is_asked_for_before_a_read_is_posted(pull):
    pull.hold()
    pull.grant(1_000)
    pull.clock.advance(2)
    pull.start()
    pull.accept()
    assert not pull.actions(PostRead)
    assert len(pull.messages(LeaseRenew)) == 2
    pull.grant(20_000)
    assert pull.actions(PostRead)


def test_renewals_keep_a_long_read_good(pull):
    pull.start_reading(num_rows=1)
    for _ in range(5):
        pull.tick(5)
        pull.grant(10_000)
    pull.tick(3)
    pull.end_reads()
    assert pull.ended["r"].usage is not None


def test_lease_of_another_owner_is_not_its_to_end(pull):
    pull.start_reading()
    pull.receive(LeaseState(incarnation=9, left_ms={"t": 0, "unheard of": 5}), OTHER)
    assert pull.failed == {}


def test_lost_connection_forgets_its_leases(pull):
    pull.hold()
    pull.disconnect()
    assert pull.tick(5) == []
    assert pull.protocol.next_timer() is None


def test_timer_is_silent_when_nothing_is_due(pull):
    assert pull.protocol.next_timer() is None
    pull.start()
    assert pull.protocol.next_timer() == pull.now + 5
    assert pull.tick(1) == []
