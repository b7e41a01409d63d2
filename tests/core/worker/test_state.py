"""The worker's protocol with its routers: membership, admission, deadlines, aborts, death, leaving."""

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from core.engine.step_watch import StepReading
from core.errors import ProtocolError, VersionMismatch
from core.metrics import WorkerMetrics
from core.request import EngineCoreOutput, PrefillStats
from core.wire.early import MeetProducer
from core.wire.engine_calls import EngineCall, EngineReply
from core.wire.messages import (
    Abort,
    ChoiceStart,
    Drain,
    ErrorInfo,
    Generate,
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
from core.wire.sampling import SamplingParams
from core.worker.actions import (
    AdmissionLimits,
    EndUnanswered,
    EngineLoad,
    ExpectTransfer,
    MeetWorker,
    ReleaseTransfers,
    RenewTransfers,
    Send,
    Stop,
    SubmitAbort,
    SubmitAdd,
    SubmitCall,
)
from core.worker.role import EngineFacts
from core.worker.router_membership import REGISTER_INTERVAL_S
from core.worker.state import WorkerState
from decode.role import DecodeHandler
from tests.support.registrations import REGISTRATION

REGISTERED = Registered(router_id="R1", heartbeat_interval_ms=1000, heartbeat_timeout_ms=5000)


class Harness:
    """A worker's state with one or more routers, and what it counted."""

    def __init__(self, num_leased_blocks=0, longest_lease_s=0.0, takes_calls=False, contents=None):
        self.registry = CollectorRegistry()
        self.num_leased_blocks = num_leased_blocks
        self.longest_lease_s = longest_lease_s
        self.progress = StepReading()
        self.state = WorkerState(
            msgspec.structs.replace(REGISTRATION, takes_calls=takes_calls),
            DecodeHandler(EngineFacts(max_model_len=64, eos_token_ids=frozenset({2}))),
            AdmissionLimits(max_num_seqs=2, max_waiting_requests=1, drain_timeout_s=10.0),
            lambda: EngineLoad(
                num_running=1,
                kv_cache_usage=0.5,
                num_leased_blocks=self.num_leased_blocks,
                longest_lease_s=self.longest_lease_s,
                progress=self.progress,
            ),
            WorkerMetrics(self.registry, {}),
            contents,
        )

    def join(self, *links, now=0.0):
        for number, link in enumerate(links):
            self.state.connect(link, now)
            self.state.on_router_message(link, Registered(router_id=f"R{number}"), now)

    def generate(self, request_id="r", link="a", now=0.0, **fields):
        message = Generate(request_id=request_id, prompt_token_ids=(5, 6), sampling=SamplingParams(max_tokens=4), **fields)
        return self.state.on_router_message(link, message, now)

    def count(self, name, **labels):
        return self.registry.get_sample_value(f"kvferry_{name}", labels) or 0


@pytest.fixture
def worker():
    harness = Harness()
    harness.join("a", "b")
    return harness


def sent(actions, link=None):
    return [action.message for action in actions if isinstance(action, Send) and link in (None, action.link)]


def ended_unanswered(request_id):
    return [SubmitAbort([f"{request_id}/0"]), EndUnanswered((request_id,), "aborted:router_lost")]


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
    assert worker.state.disconnect("a") == ended_unanswered("r")
    assert worker.generate("late", "a", 1.0) == []


def test_malformed_frame_is_answered_and_counted(worker):
    (reply,) = sent(worker.state.on_bad_frame("a", ProtocolError("malformed"), 0.0))
    assert isinstance(reply, Rejected)
    assert (reply.error.code, reply.error.message) == ("protocol_error", "malformed")
    assert worker.count("rejected_frames_total") == 1


# ---- requests --------------------------------------------------------------------------------------------------------


def test_replies_go_to_the_router_that_asked_in_one_frame_per_step(worker):
    worker.generate("r1", "a")
    worker.generate("r2", "b")
    worker.generate("r3", "a")
    actions = worker.state.on_outputs([EngineCoreOutput(f"r{n}/0", [n]) for n in (1, 2, 3)], 0.1)
    frames = {action.link: action.message for action in actions}
    assert len(actions) == 2
    assert [tokens.request_id for tokens in frames["a"]] == ["r1", "r3"]
    assert [tokens.request_id for tokens in frames["b"]] == ["r2"]


def test_finished_request_is_forgotten_and_counted(worker):
    worker.generate("r", "a")
    stats = PrefillStats(2, 1, 0)
    worker.state.on_outputs([EngineCoreOutput("r/0", [4], prefill_stats=stats)], 0.5)
    worker.state.on_outputs([EngineCoreOutput("r/0", [2], finish_reason="stop", stop_reason=2)], 0.75)
    assert worker.state.num_requests == 0
    assert worker.count("prompt_tokens_total") == 2
    assert worker.count("prompt_tokens_cached_total", source="local") == 1
    assert worker.count("generation_tokens_total") == 2
    assert worker.count("request_success_total", finished_reason="stop") == 1
    assert worker.count("time_to_first_token_seconds_sum") == 0.5
    assert worker.count("e2e_request_latency_seconds_sum") == 0.75


def test_failed_request_is_answered_with_the_engines_error(worker, caplog):
    caplog.set_level("INFO")
    worker.generate("r", "a")
    error = ErrorInfo(code="peer_lost", message="gone", retryable=True)
    actions = worker.state.on_outputs([EngineCoreOutput("r/0", [], finish_reason="error", error=error)], 0.1)
    assert sent(actions, "a") == [RequestFailed(request_id="r", error=error)]
    assert worker.state.num_requests == 0
    assert worker.count("request_failure_total", code="peer_lost") == 1
    assert worker.count("request_success_total", finished_reason="error") == 0
    assert worker.count("e2e_request_latency_seconds_count") == 0
    assert [line for line in caplog.messages if "outcome=peer_lost" in line]
    assert "outcome=served" not in caplog.text


@pytest.fixture
def api():
    harness = Harness(takes_calls=True)
    harness.join("a", "b")
    return harness


def call(harness, request_id="c", link="a", **fields):
    return harness.state.on_router_message(link, EngineCall(request_id=request_id, path="/x", body=b"{}", **fields), 0.0)


def part(position, **fields):
    return EngineReply(request_id="c", position=position, body=b"p", **fields)


def test_a_call_is_passed_to_the_engines_api_and_its_parts_to_the_router(api):
    (submitted,) = call(api)
    assert isinstance(submitted, SubmitCall)
    assert submitted.call.path == "/x"
    assert api.state.on_call_reply(part(0), 1.0) == [Send("a", part(0))]
    assert api.state.num_requests == 1
    assert api.state.on_call_reply(part(1, is_last=True), 2.0) == [Send("a", part(1, is_last=True))]
    assert api.state.num_requests == 0
    assert api.state.on_call_reply(part(2), 3.0) == []


def test_a_failed_call_ends_with_its_error(api, caplog):
    caplog.set_level("INFO")
    call(api)
    failed = RequestFailed(request_id="c", error=ErrorInfo(code="engine_dead", message="gone"))
    assert api.state.on_call_reply(failed, 1.0) == [Send("a", failed)]
    assert api.state.num_requests == 0
    assert api.count("request_failure_total", code="engine_dead") == 1
    assert api.count("e2e_request_latency_seconds_count") == 0
    assert "outcome=engine_dead" in caplog.text
    assert "outcome=served" not in caplog.text


def test_a_worker_without_an_api_refuses_calls(worker):
    (reply,) = sent(call(worker))
    assert reply.error.code == "invalid_request"
    assert worker.state.num_requests == 0


@pytest.mark.parametrize("end", ["abort", "router lost", "deadline"])
def test_a_call_ends_at_the_engine_with_its_abort_its_router_or_its_deadline(api, end):
    call(api, deadline_ms=500)
    match end:
        case "abort":
            actions = api.state.on_router_message("a", Abort(request_ids=("c",)), 0.1)
        case "router lost":
            actions = api.state.disconnect("a")
        case "deadline":
            actions = api.state.on_timer(0.5)
    assert SubmitAbort(["c"]) in actions
    assert api.state.num_requests == 0


def test_calls_take_places_and_keep_a_draining_worker(api):
    for name in "cde":
        assert isinstance(call(api, name)[0], SubmitCall)
    assert sent(call(api, "f"))[0].error.code == "overloaded"
    assert Stop(0) not in api.state.start_drain(1.0)
    api.state.on_router_message("a", Abort(request_ids=("d", "e")), 1.1)
    assert api.state.on_call_reply(part(0, is_last=True), 1.2)[-1] == Stop(0)


def test_id_in_use_is_refused_without_touching_the_first(worker):
    worker.generate("r", "a")
    (reply,) = sent(worker.generate("r", "b"), "b")
    assert reply.error.code == "invalid_request"
    assert worker.state.num_requests == 1


def test_more_choices_than_slots_and_waiting_places_are_refused_retryably(worker):
    assert isinstance(worker.generate("r1", n=2)[0], SubmitAdd)
    (reply,) = sent(worker.generate("r2", n=2))
    assert (reply.error.code, reply.error.http_status, reply.error.retryable) == ("overloaded", 429, True)
    assert isinstance(worker.generate("r3")[0], SubmitAdd)
    worker.state.on_router_message("a", Abort(request_ids=("r1",)), 0.0)
    assert isinstance(worker.generate("r4", n=2)[0], SubmitAdd)


def test_request_for_another_role_is_refused(worker):
    (reply,) = sent(worker.generate("r", handoff=True))
    assert (reply.error.code, reply.error.retryable) == ("invalid_request", False)
    assert worker.state.num_requests == 0


def test_bug_in_the_hands_is_the_requests_answer_and_leaves_no_trace(worker, monkeypatch, caplog):
    real = worker.state.serving._handler.on_generate

    def stumble(message, now):
        real(message, now)
        raise RuntimeError("bug")

    with monkeypatch.context() as patch:
        patch.setattr(worker.state.serving._handler, "on_generate", stumble)
        actions = worker.generate("r")
    (failed,) = sent(actions, "a")
    assert (failed.request_id, failed.error.code, failed.error.http_status) == ("r", "internal_error", 500)
    assert "RuntimeError: bug" in caplog.text
    assert "bug" not in failed.error.message
    assert worker.state.num_requests == 0
    assert isinstance(worker.generate("r")[0], SubmitAdd)


def test_abort_stops_the_request_silently_and_twice_is_harmless(worker):
    worker.generate("r", "a", n=2)
    abort = Abort(request_ids=("r", "unknown"))
    assert worker.state.on_router_message("a", abort, 0.1) == [SubmitAbort(["r/0", "r/1"])]
    assert worker.state.on_router_message("a", abort, 0.1) == []
    assert worker.state.on_outputs([EngineCoreOutput("r/0", [1])], 0.2) == []


def test_single_choice_is_stopped_by_its_name(worker):
    worker.generate("r", "a", n=2)
    worker.state.on_outputs([EngineCoreOutput("r/0", [4])], 0.0)
    assert worker.state.on_router_message("b", Abort(request_ids=("r/0",)), 0.1) == []
    assert worker.state.on_router_message("a", Abort(request_ids=("r/0",)), 0.1) == [SubmitAbort(["r/0"])]
    assert worker.state.num_requests == 1
    assert worker.state.on_router_message("a", Abort(request_ids=("r/1",)), 0.1) == [SubmitAbort(["r/1"])]
    assert worker.state.num_requests == 0


@pytest.mark.parametrize("end", ["by a token", "by its text"])
def test_ended_choice_leaves_its_place_to_another_request(worker, end):
    worker.generate("r", n=3)
    assert sent(worker.generate("early"))[0].error.code == "overloaded"
    if end == "by a token":
        worker.state.on_outputs([EngineCoreOutput("r/0", [2], finish_reason="stop")], 0.0)
    else:
        worker.state.on_router_message("a", Abort(request_ids=("r/0",)), 0.0)
        worker.state.on_router_message("a", Abort(request_ids=("r/0",)), 0.0)
    assert isinstance(worker.generate("next")[0], SubmitAdd)
    assert sent(worker.generate("late"))[0].error.code == "overloaded"
    worker.state.on_router_message("a", Abort(request_ids=("r", "next")), 0.1)
    assert isinstance(worker.generate("all", n=3)[0], SubmitAdd)
    assert sent(worker.generate("more"))[0].error.code == "overloaded"


def test_choices_that_wait_for_the_prompt_reach_the_engine_after_the_first_token(worker):
    (first,) = worker.generate("r", "a", n=2)
    assert [request.request_id for request in first.requests] == ["r/0"]
    actions = worker.state.on_outputs([EngineCoreOutput("r/0", [4])], 0.0)
    (added,) = [action for action in actions if isinstance(action, SubmitAdd)]
    assert [request.request_id for request in added.requests] == ["r/1"]


def test_aborting_the_last_request_lets_a_draining_worker_leave(worker):
    worker.generate("r", "a")
    worker.state.start_drain(1.0)
    assert worker.state.on_router_message("a", Abort(request_ids=("r",)), 1.1)[-1] == Stop(0)


def test_router_cannot_abort_the_request_of_another(worker):
    worker.generate("r", "a")
    assert worker.state.on_router_message("b", Abort(request_ids=("r",)), 0.1) == []
    assert worker.state.num_requests == 1


def test_deadline_aborts_and_answers(worker):
    worker.generate("slow", "a", deadline_ms=700)
    worker.generate("free", "a")
    worker.state.on_timer(0.3)  # the other router hears of the prompts
    assert worker.state.next_timer(0.3) == 0.7
    assert worker.state.on_timer(0.69) == []
    actions = worker.state.on_timer(0.7)
    assert actions[0] == SubmitAbort(["slow/0"])
    (reply,) = sent(actions, "a")
    assert (reply.request_id, reply.error.code, reply.error.http_status) == ("slow", "deadline_exceeded", 504)
    assert worker.state.num_requests == 1


def test_deadline_of_a_finished_request_does_nothing(worker):
    worker.generate("r", "a", deadline_ms=700)
    worker.state.on_timer(0.3)  # the other router hears of the prompts
    worker.state.on_outputs([EngineCoreOutput("r/0", [2], finish_reason="stop")], 0.5)
    assert worker.state.on_timer(0.7) == []


def test_reused_id_does_not_inherit_a_deadline(worker):
    worker.generate("kept", "a", deadline_ms=60_000)
    worker.generate("r", "a", deadline_ms=700)
    worker.state.on_router_message("a", Abort(request_ids=("r",)), 0.1)
    worker.generate("r", "a", 0.2, deadline_ms=1200)
    worker.state.on_timer(0.3)  # the other router hears of the prompts
    assert sent(worker.state.on_timer(0.7)) == []
    assert worker.state.num_requests == 2
    (reply,) = [message for message in sent(worker.state.on_timer(1.4)) if isinstance(message, RequestFailed)]
    assert (reply.request_id, reply.error.code) == ("r", "deadline_exceeded")


def test_deadlines_of_ended_requests_are_not_kept(worker):
    worker.generate("kept", "a", deadline_ms=60_000)
    for number in range(100):
        worker.generate(f"r{number}", "a", deadline_ms=30_000)
        worker.state.on_router_message("a", Abort(request_ids=(f"r{number}",)), 0.0)
        assert len(worker.state.serving.requests._deadlines) <= 2
    worker.state.disconnect("a")
    assert len(worker.state.serving.requests._deadlines) == 0


def test_handoff_is_expected_when_its_request_is_on_the_way_to_the_engine(worker, handoff):
    added, expected = worker.generate(kv_handoff=handoff, choices=(ChoiceStart(index=0, output_token_ids=(1,)),))
    assert expected == ExpectTransfer(handoff)
    assert isinstance(added, SubmitAdd)


def test_handoff_of_a_refused_request_is_not_expected(worker, handoff):
    worker.state.start_drain(0.0)
    assert not [action for action in worker.generate(kv_handoff=handoff) if isinstance(action, ExpectTransfer)]


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
