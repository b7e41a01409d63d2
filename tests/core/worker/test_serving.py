"""A worker's requests: admission, replies, aborts, deadlines."""

import pytest

from core.request import EngineCoreOutput, PrefillStats
from core.wire.engine_calls import EngineCall, EngineReply
from core.wire.messages import Abort, ChoiceStart, ErrorInfo, RequestFailed
from core.worker.actions import ExpectTransfer, Send, Stop, SubmitAbort, SubmitAdd, SubmitCall
from tests.core.worker.conftest import Harness, sent


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
            actions = api.state.disconnect("a", 1.0)
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


def test_a_release_is_taken_by_a_full_worker_and_takes_no_place(api):
    for name in "cde":
        call(api, name)
    for name in "fg":
        assert isinstance(call(api, name, is_release=True)[0], SubmitCall)
    api.state.on_router_message("a", Abort(request_ids=("d",)), 0.1)
    assert isinstance(call(api, "h")[0], SubmitCall)
    assert sent(call(api, "i"))[0].error.code == "overloaded"


def test_a_draining_worker_takes_a_release_and_waits_for_its_end(api):
    call(api, "d")
    api.state.start_drain(1.0)
    assert isinstance(call(api, "c", is_release=True)[0], SubmitCall)
    assert sent(call(api, "e"))[0].error.code == "no_worker"
    assert Stop(0) not in api.state.on_router_message("a", Abort(request_ids=("d",)), 1.1)
    assert api.state.on_call_reply(part(0, is_last=True), 1.2)[-1] == Stop(0)


def test_a_drain_that_is_out_of_time_ends_no_release(api):
    call(api, "d")
    call(api, "c", is_release=True)
    api.state.start_drain(1.0, 0.5)
    actions = api.state.on_timer(1.6)
    assert SubmitAbort(["d"]) in actions
    assert SubmitAbort(["c"]) not in actions
    assert api.state.on_call_reply(part(0, is_last=True), 1.7)[-1] == Stop(0)


def test_a_drain_without_time_waits_for_no_release(api):
    call(api, "c", is_release=True)
    api.state.start_drain(1.0)
    assert api.state.start_drain(1.5, 0.0)[-1] == Stop(0)


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
    worker.state.disconnect("a", 1.0)
    assert len(worker.state.serving.requests._deadlines) == 0


def test_handoff_is_expected_when_its_request_is_on_the_way_to_the_engine(worker, handoff):
    added, expected = worker.generate(kv_handoff=handoff, choices=(ChoiceStart(index=0, output_token_ids=(1,)),))
    assert expected == ExpectTransfer(handoff)
    assert isinstance(added, SubmitAdd)


def test_handoff_of_a_refused_request_is_not_expected(worker, handoff):
    worker.state.start_drain(0.0)
    assert not [action for action in worker.generate(kv_handoff=handoff) if isinstance(action, ExpectTransfer)]
