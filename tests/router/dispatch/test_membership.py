from __future__ import annotations

import msgspec
import pytest

from core.errors import EngineDead, Overloaded
from core.wire.kv import KVLayoutInfo
from core.wire.messages import ErrorInfo, Goodbye, Heartbeat, Refused, Register, Registered
from router.dispatch.members import WorkerKey
from router.dispatch.membership import (
    DUPLICATE_ENGINE_ID,
    MODEL_MISMATCH,
    NOT_REGISTERED,
    Joined,
    Left,
    Membership,
    ReplyToPeer,
    Switched,
)

LAYOUT = KVLayoutInfo(dtype="float32", order="HND", block_size=64, num_layers=1, num_kv_heads=1, head_dim=4, block_bytes=2048)


def registration(engine_id: str = "p0", incarnation: int = 1, **changes) -> Register:
    known = Register(
        engine_id=engine_id,
        incarnation=incarnation,
        role="prefill",
        model="tiny",
        model_fingerprint=b"w",
        layout=LAYOUT,
        max_model_len=100,
        max_num_seqs=4,
        num_blocks=10,
    )
    return msgspec.structs.replace(known, **changes)


def heartbeat(engine_id: str = "p0", incarnation: int = 1, **changes) -> Heartbeat:
    return Heartbeat(engine_id=engine_id, incarnation=incarnation, **changes)


@pytest.fixture
def membership() -> Membership:
    return Membership("tiny", "router-1", heartbeat_interval_s=1.0, heartbeat_timeout_s=5.0)


def only(actions, kind):
    found = [action for action in actions if isinstance(action, kind)]
    assert len(found) == 1, actions
    return found[0]


def refusal(actions) -> str:
    reply = only(actions, ReplyToPeer)
    assert isinstance(reply.message, Refused)
    return reply.message.error.code


def test_a_registration_is_answered_and_makes_a_member(membership):
    actions = membership.on_register(b"a", registration(), now=0.0)
    worker = only(actions, Joined).worker
    assert worker.key == WorkerKey("p0", 1)
    reply = only(actions, ReplyToPeer)
    assert reply == ReplyToPeer(b"a", Registered(router_id="router-1", heartbeat_interval_ms=1000, heartbeat_timeout_ms=5000))
    assert list(membership.workers) == [worker]
    assert membership.by_peer(b"a") is worker


def test_a_repeated_registration_is_answered_and_changes_nothing(membership):
    membership.on_register(b"a", registration(), now=0.0)
    actions = membership.on_register(b"a", registration(), now=1.0)
    assert [type(action) for action in actions] == [ReplyToPeer]
    assert len(list(membership.workers)) == 1


@pytest.mark.parametrize("error", [Overloaded("full"), EngineDead("it died")])
def test_heartbeats_between_two_regular_ones_end_no_refusal(membership, error):
    worker = only(membership.on_register(b"a", registration(), now=0.0), Joined).worker
    membership.on_heartbeat(b"a", heartbeat(), now=0.5)
    worker.note_failure(ErrorInfo.of(error))
    for early in (0.75, 1.0, 1.25):
        membership.on_heartbeat(b"a", heartbeat(num_running=2), now=early)
        assert worker.is_closed or not worker.has_room(1)
    assert worker.num_running == 2
    membership.on_heartbeat(b"a", heartbeat(), now=1.48)  # the network brought this one sooner
    assert worker.has_room(1)
    assert not worker.is_closed


def test_a_heartbeat_is_answered_and_updates_the_load(membership):
    membership.on_register(b"a", registration(), now=0.0)
    actions = membership.on_heartbeat(
        b"a", heartbeat(num_running=3, num_waiting=1, kv_cache_usage=0.5, is_draining=True), now=1.0
    )
    assert isinstance(only(actions, ReplyToPeer).message, Registered)
    worker = membership.get(WorkerKey("p0", 1))
    assert worker is not None
    assert (worker.load, worker.kv_cache_usage, worker.is_draining) == (1.0, 0.5, True)


def test_our_own_count_makes_load_before_any_heartbeat(membership):
    worker = only(membership.on_register(b"a", registration(), now=0.0), Joined).worker
    worker.num_inflight = 2
    assert worker.load == 0.5


def test_an_unregistered_worker_s_heartbeat_asks_it_to_register(membership):
    actions = membership.on_heartbeat(b"a", heartbeat(), now=0.0)
    assert refusal(actions) == NOT_REGISTERED
    assert only(actions, ReplyToPeer).message.error.retryable


def test_a_worker_of_another_model_is_refused_with_both_names(membership):
    actions = membership.on_register(b"a", registration(model="huge"), now=0.0)
    assert refusal(actions) == MODEL_MISMATCH
    message = only(actions, ReplyToPeer).message.error.message
    assert "'tiny'" in message
    assert "'huge'" in message
    assert not list(membership.workers)


def test_silence_ends_membership_after_the_timeout_not_before(membership):
    membership.on_register(b"a", registration(), now=0.0)
    membership.on_heartbeat(b"a", heartbeat(), now=2.0)
    assert membership.on_timer(now=7.0) == []
    left = only(membership.on_timer(now=7.1), Left)
    assert "no heartbeat for 5.1 s" in left.reason
    assert membership.by_peer(b"a") is None


def test_the_router_s_own_stall_is_no_silence_of_the_workers(membership):
    membership.on_register(b"a", registration(), now=0.0)
    assert membership.on_timer(now=0.0) == []
    assert membership.on_timer(now=20.0) == []  # 1 s of silence is counted, 19 s are the router's
    assert membership.on_timer(now=21.0) == []
    assert membership.on_timer(now=24.0) == []  # late by 2 s again: 3 s of silence are counted so far
    assert membership.on_timer(now=25.0) == []
    assert membership.on_timer(now=26.0) == []
    assert "no heartbeat" in only(membership.on_timer(now=26.1), Left).reason


def test_a_router_that_always_ticks_late_still_drops_the_dead(membership):
    membership.on_register(b"a", registration(), now=0.0)
    ends = [now for now in range(0, 100, 10) if membership.on_timer(now=float(now))]
    assert ends == [60]


def test_a_worker_heard_after_a_stall_is_not_seen_in_the_future(membership):
    worker = only(membership.on_register(b"a", registration(), now=0.0), Joined).worker
    membership.on_timer(now=0.0)
    membership.on_heartbeat(b"a", heartbeat(), now=20.0)
    membership.on_timer(now=20.0)
    assert worker.last_seen == 20.0


def test_any_message_counts_as_a_sign_of_life(membership):
    worker = only(membership.on_register(b"a", registration(), now=0.0), Joined).worker
    membership.touch(worker, now=4.0)
    assert membership.on_timer(now=8.0) == []


def test_goodbye_is_an_orderly_end(membership):
    membership.on_register(b"a", registration(), now=0.0)
    assert only(membership.on_goodbye(Goodbye(engine_id="p0", incarnation=1)), Left).is_orderly
    assert not list(membership.workers)
    assert membership.on_goodbye(Goodbye(engine_id="p0", incarnation=1)) == []


def test_the_goodbye_of_an_older_incarnation_is_ignored(membership):
    membership.on_register(b"a", registration(incarnation=2), now=0.0)
    assert membership.on_goodbye(Goodbye(engine_id="p0", incarnation=1)) == []
    assert len(list(membership.workers)) == 1


def test_a_new_incarnation_replaces_the_old_one_at_once(membership):
    membership.on_register(b"a", registration(incarnation=1), now=0.0)
    actions = membership.on_register(b"b", registration(incarnation=2), now=0.1)
    assert only(actions, Left).worker.key == WorkerKey("p0", 1)
    assert only(actions, Joined).worker.key == WorkerKey("p0", 2)
    assert [type(action) for action in actions] == [Left, Joined, ReplyToPeer]
    assert membership.get(WorkerKey("p0", 1)) is None
    assert membership.by_peer(b"a") is None


def replaced(membership: Membership, number: int = 2):
    """Let processes register under one name, one after another; return the members with that name: the last one."""
    for incarnation in range(1, number + 1):
        membership.on_register(b"%d" % incarnation, registration(incarnation=incarnation), now=0.0)
    return incarnations(membership)


def incarnations(membership: Membership) -> list[int]:
    return [worker.key.incarnation for worker in membership.workers]


def may_register(membership: Membership, incarnation: int, now: float) -> bool:
    """Return whether the router takes a process in; its heartbeat must be answered by the same rule."""
    by_heartbeat = refusal(membership.on_heartbeat(b"x", heartbeat(incarnation=incarnation), now))
    actions = membership.on_register(b"%d" % incarnation, registration(incarnation=incarnation), now)
    is_taken = incarnation in incarnations(membership)
    assert by_heartbeat == (NOT_REGISTERED if is_taken else DUPLICATE_ENGINE_ID)
    assert is_taken or refusal(actions) == DUPLICATE_ENGINE_ID
    return is_taken


def test_a_replaced_process_that_still_lives_is_refused_while_its_successor_lives(membership):
    assert replaced(membership) == [2]
    for now in range(1, 100):
        membership.on_heartbeat(b"2", heartbeat(incarnation=2), now=float(now))
        assert not may_register(membership, 1, now=float(now))
    assert incarnations(membership) == [2]


def test_a_replaced_process_is_taken_in_again_once_its_successor_is_lost(membership):
    replaced(membership)
    membership.on_heartbeat(b"2", heartbeat(incarnation=2), now=1.0)
    assert membership.on_unreachable(b"2", now=1.1)  # the network may have failed: it may be back in a moment
    assert not may_register(membership, 1, now=1.2)
    assert not may_register(membership, 1, now=5.9)
    assert may_register(membership, 1, now=6.1)


def test_a_replaced_process_is_taken_in_again_once_its_successor_is_silent(membership):
    replaced(membership)
    assert not may_register(membership, 1, now=5.0)
    assert membership.on_timer(now=5.1)
    assert may_register(membership, 1, now=5.1)


def test_a_replaced_process_is_taken_in_again_when_its_successor_says_goodbye(membership):
    replaced(membership)
    membership.on_goodbye(Goodbye(engine_id="p0", incarnation=2))
    assert may_register(membership, 1, now=0.1)


def test_a_message_that_comes_after_its_sender_s_goodbye_keeps_no_name(membership):
    replaced(membership)
    membership.on_goodbye(Goodbye(engine_id="p0", incarnation=2))
    membership.on_heartbeat(b"2", heartbeat(incarnation=2), now=0.1)
    assert may_register(membership, 1, now=0.2)


def test_a_goodbye_that_is_read_after_the_lost_connection_frees_the_name_at_once(membership):
    replaced(membership)
    membership.on_unreachable(b"2", now=0.1)
    assert not may_register(membership, 1, now=0.2)
    assert membership.on_goodbye(Goodbye(engine_id="p0", incarnation=2)) == []
    assert may_register(membership, 1, now=0.3)


def test_a_late_goodbye_of_a_replaced_process_takes_the_name_from_nobody(membership):
    replaced(membership, 3)
    assert membership.on_goodbye(Goodbye(engine_id="p0", incarnation=2)) == []
    assert membership.on_goodbye(Goodbye(engine_id="p0", incarnation=9)) == []  # it was never a member
    assert incarnations(membership) == [3]
    assert not may_register(membership, 1, now=0.1)


def test_a_successor_that_was_only_cut_off_takes_its_name_back_for_good(membership):
    replaced(membership)
    membership.on_unreachable(b"2", now=0.0)
    assert may_register(membership, 1, now=6.0)
    assert may_register(membership, 2, now=7.0)
    assert incarnations(membership) == [2]
    assert not may_register(membership, 1, now=7.1)


def test_a_successor_that_reconnects_at_once_finds_its_name_kept(membership):
    replaced(membership)
    membership.on_broken(membership.workers[0], "its connection is gone")
    assert not may_register(membership, 1, now=0.1)
    assert may_register(membership, 2, now=0.2)


def test_of_several_replaced_processes_the_newest_that_lives_has_the_name(membership):
    replaced(membership, 4)
    membership.on_heartbeat(b"4", heartbeat(incarnation=4), now=10.0)
    assert not may_register(membership, 3, now=10.0)  # it lives; the second one does not
    assert not may_register(membership, 1, now=10.0)
    membership.on_goodbye(Goodbye(engine_id="p0", incarnation=4))
    assert not may_register(membership, 1, now=10.1)
    assert may_register(membership, 3, now=10.2)
    assert not may_register(membership, 1, now=10.3)
    membership.on_register(b"5", registration(incarnation=5), now=10.4)
    assert incarnations(membership) == [5]
    assert not any(may_register(membership, older, now=10.5) for older in range(1, 4))


def test_a_process_that_was_not_waited_for_replaces_its_predecessor_when_it_is_back(membership):
    replaced(membership, 3)
    membership.on_goodbye(Goodbye(engine_id="p0", incarnation=3))
    assert may_register(membership, 1, now=6.0)
    assert may_register(membership, 2, now=6.1)
    assert incarnations(membership) == [2]


def test_a_replaced_process_that_has_come_back_may_lose_its_connection_and_return(membership):
    replaced(membership)
    membership.on_goodbye(Goodbye(engine_id="p0", incarnation=2))
    assert may_register(membership, 1, now=0.1)
    membership.on_broken(membership.workers[0], "its connection is gone")
    assert may_register(membership, 1, now=0.2)


def test_after_a_pause_a_name_is_kept_until_its_last_holder_could_be_heard(membership):
    replaced(membership)
    membership.on_timer(now=0.0)
    membership.on_unreachable(b"2", now=0.5)
    assert not may_register(membership, 1, now=20.0)  # messages of the other one may be unread
    membership.on_timer(now=20.0)
    assert not may_register(membership, 1, now=20.1)
    for now in range(21, 26):
        membership.on_timer(now=float(now))
    assert may_register(membership, 1, now=25.1)


def test_a_worker_that_timed_out_may_come_back(membership):
    membership.on_register(b"a", registration(), now=0.0)
    membership.on_timer(now=10.0)
    assert refusal(membership.on_heartbeat(b"a", heartbeat(), now=10.1)) == NOT_REGISTERED
    assert only(membership.on_register(b"a", registration(), now=10.2), Joined)


def test_a_new_connection_of_a_busy_worker_loses_its_requests_but_not_its_membership(membership):
    worker = only(membership.on_register(b"a", registration(), now=0.0), Joined).worker
    worker.num_inflight = 1
    actions = membership.on_heartbeat(b"b", heartbeat(), now=1.0)
    left = only(actions, Left)
    assert left.is_back
    assert membership.get(worker.key) is worker
    assert worker.peer == b"b"


def test_a_new_connection_of_an_idle_worker_loses_nothing(membership):
    worker = only(membership.on_register(b"a", registration(), now=0.0), Joined).worker
    actions = membership.on_register(b"b", registration(), now=1.0)
    assert [type(action) for action in actions] == [ReplyToPeer]
    assert worker.peer == b"b"


def test_two_connections_of_one_worker_do_not_flap(membership):
    worker = only(membership.on_register(b"a", registration(), now=0.0), Joined).worker
    membership.on_register(b"b", registration(), now=0.1)
    worker.num_inflight = 1
    for peer in (b"a", b"b", b"a"):
        actions = membership.on_heartbeat(peer, heartbeat(), now=1.0)
        assert [type(action) for action in actions] == [ReplyToPeer]


def test_a_worker_that_reconnects_often_is_not_remembered_by_every_connection(membership):
    worker = only(membership.on_register(b"0", registration(), now=0.0), Joined).worker
    for number in range(1, 10):
        membership.on_heartbeat(b"%d" % number, heartbeat(), now=1.0)
    known = [number for number in range(10) if membership.by_peer(b"%d" % number) is worker]
    assert known == [6, 7, 8, 9]
    assert worker.peer == b"9"
    membership.on_broken(worker, "gone")
    assert membership.by_peer(b"8") is membership.by_peer(b"9") is None


def test_a_connection_that_changes_its_name_leaves_the_old_one(membership):
    membership.on_register(b"a", registration("p0"), now=0.0)
    actions = membership.on_register(b"a", registration("p1"), now=0.1)
    assert only(actions, Left).worker.key.engine_id == "p0"
    assert [worker.key.engine_id for worker in membership.workers] == ["p1"]
    assert membership.by_peer(b"a") is not None


def test_a_broken_worker_is_dropped_once(membership):
    worker = only(membership.on_register(b"a", registration(), now=0.0), Joined).worker
    assert only(membership.on_broken(worker, "it sent garbage"), Left).reason == "it sent garbage"
    assert membership.on_broken(worker, "it sent garbage") == []


def test_a_process_that_was_cut_off_when_its_successor_came_is_refused(membership):
    worker = only(membership.on_register(b"a", registration(incarnation=1), now=0.0), Joined).worker
    membership.on_broken(worker, "its connection is gone")
    successor = only(membership.on_register(b"b", registration(incarnation=2), now=1.0), Joined).worker
    assert refusal(membership.on_register(b"c", registration(incarnation=1), now=2.0)) == DUPLICATE_ENGINE_ID
    assert membership.workers == [successor]


def test_a_process_that_was_cut_off_comes_back_if_its_name_is_free(membership):
    for number in range(3):
        joined = only(membership.on_register(b"%d" % number, registration(incarnation=1), now=0.0), Joined)
        membership.on_broken(joined.worker, "its connection is gone")


def test_superseded_incarnations_are_forgotten_in_the_end(membership):
    for incarnation in range(1, 1030):
        membership.on_register(b"%d" % incarnation, registration(incarnation=incarnation), now=0.0)
    assert refusal(membership.on_heartbeat(b"z", heartbeat(incarnation=1), now=0.0)) == NOT_REGISTERED
    assert refusal(membership.on_heartbeat(b"z", heartbeat(incarnation=1000), now=0.0)) == DUPLICATE_ENGINE_ID


# ---- roles that change -------------------------------------------------------------------------------------------------


def switched(role: str, num_switches: int) -> Register:
    return registration(role=role, can_switch_role=True, num_switches=num_switches)


def test_a_worker_that_registers_with_another_role_stays_a_member(membership):
    worker = only(membership.on_register(b"a", switched("prefill", 0), now=0.0), Joined).worker
    actions = membership.on_register(b"a", switched("decode", 1), now=1.0)
    assert only(actions, Switched) == Switched(worker, "prefill")
    assert worker.role == "decode"
    assert not [action for action in actions if isinstance(action, Joined | Left)]


def test_answers_show_the_latest_registration(membership):
    membership.on_register(b"a", switched("prefill", 0), now=0.0)
    membership.on_register(b"a", switched("decode", 1), now=1.0)
    answers = (
        membership.on_heartbeat(b"a", heartbeat(num_switches=2), 2.0),
        membership.on_register(b"a", switched("decode", 1), 2.0),
    )
    assert [only(actions, ReplyToPeer).message.num_switches for actions in answers] == [1, 1]


def test_a_registration_from_before_a_switch_changes_nothing(membership):
    """It was under way on an earlier connection."""
    worker = only(membership.on_register(b"a", switched("decode", 1), now=0.0), Joined).worker
    actions = membership.on_register(b"b", switched("prefill", 0), now=1.0)
    assert worker.role == "decode"
    assert not [action for action in actions if isinstance(action, Switched)]
    assert only(actions, ReplyToPeer).message.num_switches == 1


def test_a_decode_worker_that_was_a_prefill_worker_may_serve_alone(membership):
    membership.on_register(b"a", switched("prefill", 0), now=0.0)
    membership.on_register(b"a", switched("decode", 1), now=1.0)
    assert membership.workers[0].may_serve_alone
