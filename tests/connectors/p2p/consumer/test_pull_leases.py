"""The consumer's state machine: leases: expected, renewed, lost and released."""

import pytest

from connectors.p2p.actions import ConsumerStep, ExpectHandoff, HandoffRef, PostRead, PostSealRead, SendControl
from connectors.p2p.consumer.held_leases import MAX_OPEN_QUESTIONS
from connectors.p2p.transport.interface import PeerId
from connectors.reports import ALL_BLOCKS, LoadEnded
from core.errors import TransferError
from core.wire.kv import LeaseRelease, LeaseRenew, LeaseState

OTHER = "tcp://10.0.0.2:5600"


def test_hold_keeps_a_lease_alive_without_a_load(pull):
    (asked,) = pull.hold()
    assert asked.message == LeaseRenew(transfer_ids=("t",), number=1)
    assert pull.hold() == []
    (renewed,) = pull.tick(5)
    assert renewed.message == LeaseRenew(transfer_ids=("t",), number=2)


def test_lease_shorter_than_the_interval_is_renewed_while_it_lasts(pull):
    """How long it lasts is set at its owner, how often it is renewed here."""
    pull.hold()
    pull.grant(3_000)
    for number in range(2, 8):
        assert pull.protocol.next_timer() == pull.now + 1.5
        (renewed,) = pull.tick(1.5)
        assert renewed.message == LeaseRenew(transfer_ids=("t",), number=number)
        pull.grant(3_000)
    pull.grant(30_000)
    pull.release()
    assert pull.tick(5) == []
    assert pull.protocol.next_timer() is None


def test_short_lease_that_was_asked_about_in_time_is_renewed_while_it_lasts(pull, address):
    pull.take(pull.protocol.expect(ExpectHandoff(HandoffRef("t", PeerId(address, 1))), pull.now))
    pull.grant(3_000)
    pull.hold()
    assert pull.protocol.next_timer() == pull.now + 1.5


def test_lease_that_its_owner_prolongs_no_more_ends_after_few_questions(make_pull):
    pull = make_pull(lease_margin_s=1.0)
    pull.hold()
    ends_at = pull.now + 4
    while len(pull.protocol.leases):
        pull.grant(int(1000 * (ends_at - pull.now)))
        pull.tick((pull.protocol.next_timer() or pull.now) - pull.now)
    assert [message.number for message in pull.messages(LeaseRenew)] == [1, 2, 3]


def test_renewals_are_batched_per_owner(pull, address):
    for name in ("t", "u", "v"):
        pull.hold(name)
    pull.hold("w", address=OTHER)
    renewals = pull.tick(5)
    assert renewals == [
        SendControl(address, LeaseRenew(transfer_ids=("t", "u", "v"), number=5)),
        SendControl(OTHER, LeaseRenew(transfer_ids=("w",), number=6)),
    ]
    assert len(pull.tick(5)) == 2


def test_renewals_stop_with_the_release(pull, address):
    pull.hold()
    assert pull.release() == [SendControl(address, LeaseRelease(transfer_ids=("t",)))]
    assert pull.tick(5) == []
    assert pull.protocol.next_timer() is None


def test_leases_that_one_step_takes_are_asked_for_in_one_message_per_owner(pull, address):
    refs = [HandoffRef(name, PeerId(where, 1)) for name, where in (("t", address), ("u", OTHER), ("v", address))]
    assert pull.take(pull.protocol.on_step(ConsumerStep(holds=refs), pull.now)) == [
        SendControl(address, LeaseRenew(transfer_ids=("t", "v"), number=1)),
        SendControl(OTHER, LeaseRenew(transfer_ids=("u",), number=2)),
    ]


# ---- leases that may be held soon: the request is on its way to the engine


def test_lease_is_asked_for_ahead_of_its_request_and_read_with_it(pull):
    (asked,) = pull.expect()
    assert asked.message == LeaseRenew(transfer_ids=("t",), number=1)
    assert pull.hold() == [] == pull.expect()
    pull.start()
    pull.accept()
    pull.grant(30_000)
    assert pull.actions(PostRead)
    assert len(pull.messages(LeaseRenew)) == 1


def test_load_of_an_expected_lease_reads_at_once(pull):
    pull.start("opens the peer", transfer_id="another")
    pull.accept()
    pull.expect()
    pull.grant(30_000)
    assert [type(action) for action in pull.start(num_rows=2)] == [PostRead, PostSealRead]


def test_lease_that_no_request_comes_for_is_forgotten(pull):
    pull.expect()
    pull.grant(30_000)
    assert len(pull.protocol.leases) == 1
    assert pull.tick(5) == []
    assert len(pull.protocol.leases) == 0
    assert pull.protocol.leases.counts.leases_given_up == 1
    assert pull.protocol.next_timer() is None


def test_expected_lease_that_is_held_is_renewed(pull):
    pull.expect("t")
    pull.expect("never comes")
    pull.hold("t")
    (renewed,) = pull.tick(5)
    assert renewed.message == LeaseRenew(transfer_ids=("t",), number=3)


def test_lease_expected_shortly_before_the_renewals_is_still_known_to_its_request(pull):
    pull.hold("u")
    pull.tick(4.9)
    pull.expect()
    pull.grant(30_000)
    (renewed,) = pull.tick(0.1)
    assert renewed.message.transfer_ids == ("u",), "it is nobody's yet"
    assert pull.hold() == []
    assert pull.protocol.leases.counts.leases_known_in_time == 1


def test_lease_that_is_held_late_is_renewed_an_interval_after_it_was_asked_for(pull):
    pull.hold("u")
    pull.tick(0.1)
    pull.expect()
    pull.grant(6_000)
    pull.tick(4.9)
    assert pull.hold() == []
    (renewed,) = pull.tick(0.1)
    assert set(renewed.message.transfer_ids) == {"t", "u"}


def test_lease_expected_of_one_owner_is_asked_for_again_if_it_is_anothers(pull, address):
    pull.expect(address=OTHER)
    (asked,) = pull.hold()
    assert asked.address == address


def test_answer_from_before_the_release_says_nothing_of_the_lease_taken_again(pull):
    """The owner takes the release before the second question, so what it said before is no news."""
    pull.hold()
    pull.release()
    pull.expect()
    pull.grant(20_000, number=1)
    pull.start()
    pull.accept()
    assert not pull.actions(PostRead)
    pull.grant(0, number=2)
    assert pull.failed == {"r": "lease_expired"}


def test_request_after_a_forgotten_lease_asks_again(pull):
    pull.expect()
    pull.tick(5)
    pull.start()
    pull.accept()
    pull.grant(30_000)
    assert len(pull.messages(LeaseRenew)) == 2
    assert pull.actions(PostRead)


def test_expected_lease_that_is_over_fails_its_load_once_the_owner_has_said_so_again(pull):
    pull.expect()
    pull.grant(0)
    assert len(pull.protocol.leases) == 0
    pull.start()
    pull.accept()
    assert pull.failed == {}
    pull.grant(0)
    assert pull.failed == {"r": "lease_expired"}


# ---- what a lease decides: whether a read is started


@pytest.mark.parametrize("left_ms", [0, 1_000])
def test_read_that_would_outlive_the_lease_is_not_started(make_pull, left_ms):
    pull = make_pull(lease_margin_s=1.0)
    pull.start("a")
    pull.start("b")
    pull.accept()
    pull.grant(left_ms)
    assert pull.failed == {"a": "lease_expired", "b": "lease_expired"}
    assert not pull.actions(PostRead)


def test_read_that_just_fits_into_the_lease_is_started(make_pull):
    pull = make_pull(lease_margin_s=1.0)
    pull.start()
    pull.accept()
    pull.grant(1_001)
    assert pull.actions(PostRead)


def test_lease_that_ends_in_mid_load_keeps_what_is_verified_and_starts_no_more(pull):
    """Two reads of three are in flight; what they bring may be right all the same, and the seals say so."""
    pull.start_reading(num_rows=6)
    assert pull.grant(0) == []
    pull.end_read(pull.end_data_reads())
    assert len(pull.actions(PostRead)) == 2
    assert pull.ended["r"].error.code == "lease_expired"
    assert pull.ended["r"].invalid_block_ids == (4, 5)
    assert pull.usable_rows("r") == {0, 1, 2, 3}


def test_lease_that_ends_in_mid_load_with_the_blocks_reused_is_stale(pull, make_seal):
    pull.start_reading(num_rows=2)
    pull.grant(0)
    seal_read = pull.end_data_reads()
    pull.end_read(seal_read, seals={500: bytes(64), 501: bytes(64)})
    assert pull.failed == {"r": "stale"}
    assert pull.usable_rows("r") == set()


def test_release_in_mid_read_starts_no_more_reads(pull):
    pull.start_reading(num_rows=6)
    pull.release()
    pull.end_reads()
    assert pull.failed == {"r": "lease_expired"}
    assert pull.usable_rows("r") == {0, 1, 2, 3}


@pytest.mark.parametrize("seconds", [2.0, 2.5, 29.0])
def test_our_own_reckoning_of_the_lease_fails_nothing_that_the_seals_prove(pull, seconds):
    pull.start(num_rows=1)
    pull.accept()
    pull.grant(2_000)
    pull.clock.advance(seconds)
    pull.end_reads()
    assert pull.failed == {}
    assert pull.usable_rows("r") == {0}


def test_reads_wait_for_the_renewal_when_the_lease_may_be_over(make_pull):
    pull = make_pull(max_reads_in_flight=1, lease_renew_interval_s=60.0)
    pull.start(num_rows=6)
    pull.accept()
    pull.grant(2_000)
    pull.clock.advance(3)
    (asked,) = pull.end_read(1)
    assert asked.message == LeaseRenew(transfer_ids=("t",), number=2)
    assert "r" not in pull.ended
    (posted,) = pull.grant(20_000)
    assert isinstance(posted, PostRead)
    pull.end_reads()
    assert pull.usable_rows("r") == set(range(6))


def test_lease_is_counted_from_the_question_not_from_the_answer(make_pull):
    pull = make_pull(lease_renew_interval_s=60.0)
    pull.start(num_rows=1)
    pull.accept()
    pull.clock.advance(2.5)  # the answer takes its time
    (asked,) = pull.grant(2_000)
    assert isinstance(asked.message, LeaseRenew)
    assert not pull.actions(PostRead)
    pull.grant(2_000)
    assert pull.actions(PostRead)


def test_answer_counts_from_the_question_that_it_names(make_pull):
    """The first answer is lost; the second names the second question, which was asked at 5."""
    pull = make_pull(max_reads_in_flight=1, handshake_timeout_s=60.0)
    pull.start(num_rows=4)
    pull.tick(5)
    pull.accept()
    pull.grant(4_000, number=1)  # good until 4, which is over
    assert not pull.actions(PostRead)
    pull.grant(4_000, number=2)  # good until 9
    assert len(pull.actions(PostRead)) == 1
    pull.clock.advance(4)
    pull.end_read(1)
    assert len(pull.actions(PostRead)) == 1, "asks again"
    assert len(pull.messages(LeaseRenew)) == 3


@pytest.mark.parametrize("are_expected", [False, True])
def test_each_of_many_loads_reads_after_the_answer_to_its_only_question(pull, are_expected):
    """The owner answers in order, when all questions have been asked."""
    pull.start_reading("opens the peer", num_rows=1)
    pull.end_reads()
    names = [f"t{index}" for index in range(200)]
    for name in names if are_expected else []:
        pull.expect(name)
    for name in names:
        pull.start(name, num_rows=1, transfer_id=name)
    questions = pull.messages(LeaseRenew)[1:]
    assert [question.transfer_ids for question in questions] == [(name,) for name in names]
    for question in questions:
        pull.grant(60_000, *question.transfer_ids, number=question.number)
        pull.end_reads()
    assert pull.failed == {}
    assert set(names) < set(pull.ended)
    assert len(pull.messages(LeaseRenew)) == 1 + len(names)


def test_only_the_last_questions_to_an_owner_that_never_answers_are_remembered(pull):
    pull.hold()
    for _ in range(MAX_OPEN_QUESTIONS):
        pull.tick(5)
    pull.grant(400_000, number=1)  # counted from the first question it would last 80 s more
    pull.start()
    pull.accept()
    assert not pull.actions(PostRead), "when that was asked is forgotten"
    pull.grant(30_000)
    assert pull.actions(PostRead)


def test_repeated_and_made_up_answers_prolong_nothing(make_pull):
    pull = make_pull(lease_renew_interval_s=60.0)
    pull.start(num_rows=1)
    pull.grant(2_000, number=1)
    pull.clock.advance(3)
    pull.grant(2_000, number=1)
    pull.grant(2_000, number=77)
    pull.accept()
    assert not pull.actions(PostRead)


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


def test_lost_question_is_asked_again_by_the_next_round(pull):
    pull.start()
    pull.accept()
    pull.tick(5)
    assert len(pull.messages(LeaseRenew)) == 2
    pull.grant(20_000)
    assert pull.actions(PostRead)


def test_renewals_keep_a_long_load_going(make_pull):
    pull = make_pull(max_reads_in_flight=1)
    pull.start_reading(num_rows=10)
    for _ in range(4):
        pull.tick(5)
        pull.grant(6_000)
        pull.end_read(min(pull.open_reads))
    pull.end_reads()
    assert pull.usable_rows("r") == set(range(10))


def test_load_after_an_ended_lease_asks_the_owner_again(pull):
    pull.start("a")
    pull.accept()
    pull.grant(0)
    pull.start("b")
    assert len(pull.messages(LeaseRenew)) == 2
    pull.grant(0)
    assert pull.failed["b"] == "lease_expired"


# ---- whose lease it is


def test_lease_of_another_owner_is_not_its_to_end(pull):
    pull.start_reading()
    pull.receive(LeaseState(incarnation=9, left_ms={"t": 0, "unheard of": 5}), OTHER)
    assert pull.failed == {}


def test_leases_of_one_name_at_two_owners_are_two(pull, address):
    """A client can give the name of a handoff to an address of its own choice."""
    pull.hold(address=OTHER)
    (asked,) = pull.hold()
    assert asked.address == address
    pull.start()
    pull.accept()
    pull.grant(30_000)
    assert pull.actions(PostRead)


def test_release_of_a_lease_leaves_the_one_of_its_name_at_another_owner(pull):
    pull.start_reading(num_rows=6)
    pull.hold(address=OTHER)
    pull.release(address=OTHER)
    pull.end_reads()
    assert pull.failed == {}


def test_release_with_another_incarnation_leaves_the_lease_of_its_name(pull, address):
    """A release names no incarnation: the owner would end the lease that is read."""
    pull.start_reading(num_rows=6)
    pull.hold(incarnation=2)
    assert pull.release(incarnation=2) == []
    pull.end_reads()
    assert pull.failed == {}
    assert pull.release() == [SendControl(address, LeaseRelease(transfer_ids=("t",)))]


def test_lease_is_released_though_another_incarnations_is_expected(pull, address):
    """The expected one may never be held, and then nothing releases it."""
    pull.hold()
    pull.expect(incarnation=2)
    assert pull.release() == [SendControl(address, LeaseRelease(transfer_ids=("t",)))]


def test_lease_of_another_incarnation_is_forgotten_at_once(pull):
    pull.hold(incarnation=1)
    pull.hold("u", incarnation=2)
    pull.grant(10_000, "u", incarnation=2)
    (renewed,) = pull.tick(5)
    assert renewed.message.transfer_ids == ("u",)


def test_lost_connection_keeps_leases_for_the_next_process(pull):
    """A partition that heals costs the loads in progress, not the handoffs of the requests that wait."""
    pull.hold()
    pull.grant(30_000)
    pull.disconnect()
    (renewed,) = pull.tick(5)
    assert renewed.message == LeaseRenew(transfer_ids=("t",), number=2)
    pull.grant(20_000)
    pull.start()
    pull.accept()
    assert pull.actions(PostRead)


def test_timer_is_silent_when_nothing_is_due(pull):
    assert pull.protocol.next_timer() is None
    pull.start()
    assert pull.protocol.next_timer() == pull.now + 5
    assert pull.tick(1) == []


def test_lease_plays_no_part_once_the_bytes_are_here(pull):
    pull.start_reading(num_rows=2)
    pull.end_data_reads()
    assert pull.grant(0) == []
    assert len(pull.actions(PostSealRead)) == 1
    pull.end_reads()
    assert pull.usable_rows("r") == {0, 1}


def test_load_whose_lease_and_reads_fail_gives_the_reason_of_its_first_block(pull):
    pull.start_reading(num_rows=6)
    pull.grant(0)
    for read_id in sorted(pull.open_reads):
        pull.end_read(read_id, TransferError("no"))
    (ended,) = pull.actions(LoadEnded)
    assert (ended.error.code, ended.invalid_block_ids) == ("transfer_error", ALL_BLOCKS)
