"""The worker's protocol with its routers: membership, heartbeats, death, leaving."""

import pytest

from core.engine.step_watch import StepReading
from core.errors import ProtocolError, VersionMismatch
from core.request import EngineCoreOutput
from core.wire.early import MeetProducer
from core.wire.messages import (
    Drain,
    ErrorInfo,
    Goodbye,
    Heartbeat,
    Refused,
    Registered,
    Rejected,
    Release,
    Renew,
    RequestFailed,
    Tokens,
)
from core.worker.actions import MeetWorker, ReleaseTransfers, RenewTransfers, Stop, SubmitAbort, SubmitAdd
from core.worker.router_membership import REGISTER_INTERVAL_S
from tests.core.worker.conftest import REGISTERED, Harness, ended_unanswered, sent
from tests.support.registrations import REGISTRATION

# ---- membership ------------------------------------------------------------------------------------------------------


def test_registers_until_accepted_then_heartbeats():
    state = Harness().state
    assert sent(state.connect("a", 0.0)) == [REGISTRATION]
    assert sent(state.on_timer(0.1)) == []
    assert sent(state.on_timer(REGISTER_INTERVAL_S)) == [REGISTRATION]
    state.on_router_message("a", REGISTERED, 0.6)
    assert state.num_registered_routers == 1
    assert sent(state.on_timer(1.5)) == []
    (heartbeat,) = sent(state.on_timer(1.6))
    assert heartbeat == Heartbeat(engine_id="w0", incarnation=7, num_running=1, kv_cache_usage=0.5)


def test_a_pause_of_the_whole_process_is_no_stall_of_its_engine():
    harness = Harness()
    harness.join("a")
    harness.state.on_timer(1.0)
    harness.progress = StepReading(9.5, since_progress_s=9.5)  # since shortly before its process stood still
    (heartbeat,) = sent(harness.state.on_timer(10.25))  # due at 2.0
    assert heartbeat.stalled_ms == pytest.approx(1250.0)
    harness.progress = StepReading(10.5, since_progress_s=10.5)
    (heartbeat,) = sent(harness.state.on_timer(11.25))
    assert heartbeat.stalled_ms == pytest.approx(2250.0)
    harness.state.on_router_message("a", REGISTERED, 11.25)
    harness.progress = StepReading(19.5, since_progress_s=19.5)  # it stood still once more
    (heartbeat,) = sent(harness.state.on_timer(20.25))
    assert heartbeat.stalled_ms == pytest.approx(3250.0)
    harness.progress = StepReading(0.5, since_progress_s=0.5)  # it has made progress since
    (heartbeat,) = sent(harness.state.on_timer(21.25))
    assert heartbeat.stalled_ms == pytest.approx(500.0)


def test_a_pause_since_before_the_last_progress_leaves_no_negative_stall():
    harness = Harness()
    harness.join("a")
    harness.state.on_timer(1.0)
    harness.progress = StepReading(0.7, since_progress_s=0.7)  # 4.7 - (4.7 - 0.7) is more than 0.7
    (heartbeat,) = sent(harness.state.on_timer(4.7))  # due at 2.0
    assert heartbeat.stalled_ms == 0.0


def test_a_pause_that_both_readings_see_counts_once():
    harness = Harness()
    harness.join("a")
    harness.state.on_timer(1.0)
    harness.progress = StepReading(stalled_s=4.0, since_progress_s=9.5)  # the engine's watch has seen 5.5 s of it
    (heartbeat,) = sent(harness.state.on_timer(10.25))  # due at 2.0
    assert heartbeat.stalled_ms == pytest.approx(1250.0)


def test_a_heartbeat_tells_how_the_engine_does():
    harness = Harness()
    harness.join("a")
    harness.progress = StepReading(
        stalled_s=3.5, since_progress_s=3.5, slowest_step_s=0.25, predicted_step_s=0.125, is_warming_up=True
    )
    (heartbeat,) = sent(harness.state.on_timer(1.0))
    assert (heartbeat.stalled_ms, heartbeat.slowest_step_ms, heartbeat.predicted_step_ms) == (3500.0, 250.0, 125.0)
    assert heartbeat.is_warming_up


def test_timer_is_due_exactly_when_there_is_something_to_do():
    state = Harness().state
    assert state.next_timer(0.0) is None
    state.connect("a", 0.0)
    assert state.next_timer(0.0) == REGISTER_INTERVAL_S
    state.on_router_message("a", REGISTERED, 0.25)
    assert state.next_timer(0.25) == 1.25


def test_silent_router_loses_its_requests_and_is_asked_again(worker):
    worker.generate("mine", "a")
    worker.generate("other", "b")
    actions = hear_only_from("b", worker, until=5)
    assert [action for action in actions if isinstance(action, SubmitAbort)] == [SubmitAbort(["mine/0"])]
    assert REGISTRATION in sent(actions, "a")
    assert worker.state.num_requests == 1
    assert worker.state.num_registered_routers == 1


def test_silent_router_is_told_what_it_has_lost_in_case_it_lives(worker):
    worker.generate("mine", "a")
    (failed,) = [message for message in sent(hear_only_from("b", worker, until=5), "a") if isinstance(message, RequestFailed)]
    assert (failed.request_id, failed.error.code, failed.error.retryable) == ("mine", "router_silent", True)


def test_worker_that_was_paused_does_not_take_its_own_silence_for_the_routers(worker):
    worker.generate("r", "a")
    hear_only_from("b", worker, until=3)
    assert not [action for action in worker.state.on_timer(60.0) if isinstance(action, SubmitAbort)]  # the fourth second
    assert SubmitAbort(["r/0"]) in worker.state.on_timer(61.0)


def hear_only_from(link, worker, until):
    """Let seconds pass in which one router answers; return what happened in the last one."""
    actions = []
    for now in range(1, until + 1):
        worker.state.on_router_message(link, REGISTERED, float(now))
        actions = worker.state.on_timer(float(now))
    return actions


def test_answered_heartbeats_keep_a_quiet_router(worker):
    worker.generate()
    for now in range(1, 20):
        worker.state.on_router_message("a", Registered(router_id="R0"), float(now))
        worker.state.on_timer(float(now))
    assert worker.state.num_requests == 1


def test_restarted_router_does_not_inherit_requests(worker):
    worker.generate("old", "a")
    actions = worker.state.on_router_message("a", Registered(router_id="reborn"), 1.0)
    assert actions == ended_unanswered("old")
    assert isinstance(worker.generate("new", "a", 1.0)[0], SubmitAdd)


def test_worker_unknown_to_the_router_registers_again(worker):
    worker.generate("old", "a")
    refused = Refused(error=ErrorInfo(code="protocol_error", message="unknown worker"))
    assert worker.state.on_router_message("a", refused, 1.0) == ended_unanswered("old")
    assert sent(worker.state.on_timer(1.0 + REGISTER_INTERVAL_S), "a") == [REGISTRATION]


def test_a_refused_worker_goes_on_asking_and_logs_the_reason_each_minute(caplog):
    state = Harness().state
    state.connect("a", 0.0)
    refused = Refused(error=ErrorInfo(code="duplicate_engine_id", message="another has its name"))
    for now in range(1, 71):
        state.on_router_message("a", refused, float(now))
        assert sent(state.on_timer(now + 0.5), "a") == [REGISTRATION]
    assert state.refusals == {"a": "another has its name"}
    assert caplog.text.count("event=refused_by_router") == 2
    state.on_router_message("a", REGISTERED, 71.0)
    assert state.refusals == {}


def test_a_router_that_forgets_the_worker_now_and_then_is_logged_once(caplog):
    state = Harness().state
    state.connect("a", 0.0)
    forgotten = Refused(error=ErrorInfo(code="not_registered", message="register first", retryable=True))
    for now in range(1, 71):
        state.on_router_message("a", forgotten, float(now))
    assert caplog.text.count("event=refused_by_router") == 1


def test_a_refusal_for_another_reason_than_the_last_one_is_logged_at_once(caplog):
    state = Harness().state
    state.connect("a", 0.0)
    unknown = ErrorInfo(code="not_registered", message="register first", retryable=True)
    duplicate = ErrorInfo(code="duplicate_engine_id", message="another has its name")
    for number, error in enumerate((unknown, duplicate, unknown, duplicate)):
        state.on_router_message("a", Refused(error=error), 1.0 + number)
    logged = [word for word in caplog.text.split() if word.startswith("code=")]
    assert logged == ["code=not_registered", "code=duplicate_engine_id"]


def test_request_that_came_late_ends_when_its_router_does_not_know_the_worker(worker):
    hear_only_from("b", worker, until=5)
    worker.generate("late", "a", 5.0)
    refused = Refused(error=ErrorInfo(code="not_registered", message="unknown worker"))
    assert worker.state.on_router_message("a", refused, 5.1) == ended_unanswered("late")


def test_late_request_of_a_lost_router_ends_when_another_process_answers(worker):
    hear_only_from("b", worker, until=5)
    worker.generate("late", "a", 5.0)
    actions = worker.state.on_router_message("a", Registered(router_id="reborn"), 5.1)
    assert [action for action in actions if isinstance(action, SubmitAbort)] == [SubmitAbort(["late/0"])]
    (failed,) = sent(actions, "a")
    assert (failed.request_id, failed.error.code) == ("late", "router_silent"), "the new process may have sent it all the same"


def test_late_request_of_a_lost_router_stays_when_that_router_answers(worker):
    hear_only_from("b", worker, until=5)
    worker.generate("late", "a", 5.0)
    assert worker.state.on_router_message("a", Registered(router_id="R0"), 5.1) == []
    assert worker.state.num_requests == 1


def test_late_request_of_a_lost_router_ends_when_one_of_another_version_answers(worker):
    hear_only_from("b", worker, until=5)
    worker.generate("late", "a", 5.0)
    error = VersionMismatch(ours=1, theirs=2)
    assert worker.state.on_bad_frame("a", error, 5.1) == ended_unanswered("late")


def test_router_that_left_the_name_service_loses_its_requests(worker):
    worker.generate("r", "a")
    assert worker.state.disconnect("a", 1.0) == ended_unanswered("r")
    assert worker.generate("late", "a", 1.0) == []


def test_malformed_frame_is_answered_and_counted(worker):
    (reply,) = sent(worker.state.on_bad_frame("a", ProtocolError("malformed"), 0.0))
    assert isinstance(reply, Rejected)
    assert (reply.error.code, reply.error.message) == ("protocol_error", "malformed")
    assert worker.count("rejected_frames_total") == 1


def test_malformed_frame_of_one_request_fails_that_request(worker):
    (reply,) = sent(worker.state.on_bad_frame("a", ProtocolError("malformed"), 0.0, "r"))
    assert reply == RequestFailed(request_id="r", error=ErrorInfo.of(ProtocolError("malformed")))


# ---- connector and engine --------------------------------------------------------------------------------------------


def test_connector_meets_a_producer_of_which_the_router_tells(worker):
    producer = MeetProducer(engine_id="prefill-0", incarnation=3, control_address="tcp://10.0.0.1:5600")
    assert worker.state.on_router_message("a", producer, 0.0) == [MeetWorker(producer)]


def test_lease_messages_reach_the_connector(worker):
    assert worker.state.on_router_message("a", Release(transfer_ids=("t",)), 0.0) == [ReleaseTransfers(("t",))]
    assert worker.state.on_router_message("a", Renew(transfer_ids=("t",)), 0.0) == [RenewTransfers(("t",))]


def test_engine_death_answers_every_request_and_ends_the_process(worker):
    worker.generate("r1", "a")
    worker.generate("r2", "b")
    actions = worker.state.on_engine_death(ValueError("boom"))
    replies = sent(actions)
    assert [reply.request_id for reply in replies] == ["r1", "r2"]
    assert {(reply.error.code, reply.error.retryable) for reply in replies} == {("engine_dead", True)}
    assert "boom" in replies[0].error.message
    assert actions[-1] == Stop(1)
    assert worker.state.on_engine_death(ValueError("again")) == []


def test_worker_whose_engine_has_died_does_not_leave_as_if_it_had_drained(worker):
    worker.state.on_engine_death(ValueError("boom"))
    assert not [action for action in worker.state.start_drain(1.0) if isinstance(action, Stop)]
    assert not [action for action in worker.state.on_outputs([], 2.0) if isinstance(action, Stop)]


# ---- leaving ---------------------------------------------------------------------------------------------------------


def test_idle_worker_says_goodbye_and_leaves_at_once(worker):
    actions = worker.state.start_drain(1.0)
    assert [type(message) for message in sent(actions, "a")] == [Heartbeat, Goodbye]
    assert sent(actions, "a")[0].is_draining
    assert actions[-1] == Stop(0)


def test_draining_worker_finishes_what_runs_and_takes_nothing_new(worker):
    worker.generate("running", "a")
    assert Stop(0) not in worker.state.start_drain(1.0)
    (reply,) = sent(worker.generate("new", "a", 1.1), "a")
    assert (reply.error.code, reply.error.retryable) == ("no_worker", True)
    actions = worker.state.on_outputs([EngineCoreOutput("running/0", [2], finish_reason="stop")], 1.2)
    assert isinstance(sent(actions, "a")[0][0], Tokens)
    assert isinstance(sent(actions, "a")[1], Goodbye)
    assert actions[-1] == Stop(0)


def test_draining_worker_waits_for_readers_of_its_blocks():
    worker = Harness(num_leased_blocks=3)
    worker.join("a")
    assert Stop(0) not in worker.state.start_drain(1.0)
    assert worker.state.next_timer(1.0) <= 1.1
    assert Stop(0) not in worker.state.on_timer(1.1)
    worker.num_leased_blocks = 0
    assert worker.state.on_timer(1.2)[-1] == Stop(0)


def test_drain_lasts_as_long_as_the_longest_lease_of_its_start():
    worker = Harness(num_leased_blocks=3, longest_lease_s=25.0)
    worker.join("a")
    worker.state.start_drain(1.0)
    worker.longest_lease_s = 25.0  # a reader renews all the while
    for now in range(2, 26):
        worker.state.on_router_message("a", Registered(router_id="R0"), float(now))
        assert Stop(0) not in worker.state.on_timer(float(now))
    assert worker.state.on_timer(26.0)[-1] == Stop(0)


def test_leases_granted_while_the_worker_drains_are_waited_for():
    worker = Harness()
    worker.join("a")
    worker.generate("running", "a")
    worker.state.start_drain(1.0)
    worker.num_leased_blocks, worker.longest_lease_s = 3, 25.0
    worker.state.on_outputs([EngineCoreOutput("running/0", [2], finish_reason="stop")], 9.0)
    for now in range(10, 34):
        worker.state.on_router_message("a", Registered(router_id="R0"), float(now))
        assert Stop(0) not in worker.state.on_timer(float(now))
        assert worker.state.next_timer(float(now)) > now, "the event loop would spin"
    assert worker.state.on_timer(34.0)[-1] == Stop(0)


def test_requests_end_at_the_drain_s_deadline_and_their_readers_later():
    worker = Harness(num_leased_blocks=3, longest_lease_s=25.0)
    worker.join("a")
    worker.generate("endless", "a")
    worker.state.start_drain(1.0)
    worker.state.on_router_message("a", Registered(router_id="R0"), 10.0)
    actions = worker.state.on_timer(11.0)
    assert SubmitAbort(["endless/0"]) in actions
    assert Stop(0) not in actions
    worker.num_leased_blocks = 0
    assert worker.state.on_timer(11.1)[-1] == Stop(0)


def test_second_signal_waits_for_no_lease():
    worker = Harness(num_leased_blocks=3, longest_lease_s=25.0)
    worker.join("a")
    worker.state.start_drain(1.0)
    assert worker.state.start_drain(1.5, 0.0)[-1] == Stop(0)


def test_drain_deadline_answers_what_is_left_and_leaves(worker):
    worker.generate("endless", "a")
    worker.state.start_drain(1.0)
    for now in (2.0, 6.0, 10.9):
        worker.state.on_router_message("a", Registered(router_id="R0"), now)
        assert Stop(0) not in worker.state.on_timer(now)
    actions = worker.state.on_timer(11.0)
    assert SubmitAbort(["endless/0"]) in actions
    assert [type(message) for message in sent(actions, "a")][-2:] == [RequestFailed, Goodbye]
    assert actions[-1] == Stop(0)


def test_second_signal_leaves_at_once(worker):
    worker.generate("endless", "a")
    worker.state.start_drain(1.0)
    assert worker.state.start_drain(1.5, 0.0)[-1] == Stop(0)


def test_router_may_ask_to_drain_with_a_deadline_of_its_own(worker):
    worker.generate("endless", "a")
    worker.state.on_router_message("a", Drain(deadline_ms=500), 1.0)
    assert worker.state.is_draining
    assert worker.state.on_timer(1.5)[-1] == Stop(0)


def test_draining_worker_does_not_register_anywhere_new():
    worker = Harness(num_leased_blocks=1)
    worker.join("a")
    worker.state.start_drain(1.0)
    assert sent(worker.state.connect("late", 1.1)) == []


def test_nothing_happens_after_the_end(worker):
    worker.state.start_drain(1.0)
    assert worker.state.is_stopped
    assert worker.generate("r", "a", 2.0) == []
    assert worker.state.on_timer(2.0) == []
    assert worker.state.next_timer(2.0) is None
