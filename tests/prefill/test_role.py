"""How the prefill role handles requests, first tokens and aborts."""

import msgspec
import pytest

from core.errors import InvalidRequest
from core.request import EngineCoreOutput, PrefillStats
from core.wire.kv import KVHandoff, KVLayoutInfo
from core.wire.messages import ChoiceStart, ErrorInfo, Generate, PrefillDone, RequestFailed, TransferUsage
from core.wire.sampling import SamplingParams
from core.worker.role import EngineFacts
from prefill.role import MAX_REMEMBERED_HANDOFFS, PrefillHandler

EOS = 2
LAYOUT = KVLayoutInfo(dtype="float32", order="HND", block_size=16, num_layers=1, num_kv_heads=1, head_dim=8, block_bytes=1024)


def handoff(transfer_id="t1"):
    return KVHandoff(
        transfer_id=transfer_id,
        engine_id="p0",
        incarnation=1,
        control_address="tcp://127.0.0.1:1",
        model_fingerprint=b"f",
        layout=LAYOUT,
        groups=(),
        num_tokens=3,
        lease_ms=1000,
    )


def generate(request_id="r", *, n=1, prompt=(5, 6, 7), is_handoff=True, **sampling):
    params = SamplingParams(**{"max_tokens": 8, **sampling})
    return Generate(request_id=request_id, prompt_token_ids=tuple(prompt), sampling=params, n=n, handoff=is_handoff)


def first_token(engine_request_id, token_id, finish_reason="length", **more):
    return EngineCoreOutput(engine_request_id, [token_id], finish_reason=finish_reason, **more)


def all_choices(handler, message, now):
    """Return the engine requests of all choices, those included that wait for the tokens of others."""
    requests, begun = [], handler.on_generate(message, now)
    while begun:
        requests += begun
        begun = handler.on_outputs([first_token(request.request_id, 11) for request in begun], now).new_requests
    return requests


@pytest.fixture
def handler():
    return PrefillHandler(EngineFacts(max_model_len=64, eos_token_ids=frozenset({EOS})))


def test_one_engine_request_per_choice_of_which_the_last_keeps_the_blocks(handler):
    requests = all_choices(handler, generate(n=3, min_tokens=4), 1.5)
    assert [request.request_id for request in requests] == ["r/0", "r/1", "r/2"]
    assert [request.choice_index for request in requests] == [0, 1, 2]
    assert [request.needs_handoff for request in requests] == [False, False, True]
    assert {request.sampling.max_tokens for request in requests} == {1}
    assert {request.sampling.min_tokens for request in requests} == {1}
    assert {request.arrival_time for request in requests} == {1.5}


def test_other_choices_start_when_the_prompt_is_in_the_cache(handler):
    assert [request.request_id for request in handler.on_generate(generate(n=3), 0.0)] == ["r/0"]
    assert handler.on_outputs([EngineCoreOutput("r/0", [])], 0.0).new_requests == []
    result = handler.on_outputs([first_token("r/0", 11)], 0.0)
    assert [request.request_id for request in result.new_requests] == ["r/1"]


def test_no_blocks_are_kept_while_another_choice_waits_for_blocks(handler):
    """Two requests that keep blocks could each wait for the other's, and no router would renew what it has not heard of."""
    handler.on_generate(generate(n=4), 0.0)
    (*middle,) = handler.on_outputs([first_token("r/0", 11)], 0.0).new_requests
    assert [request.request_id for request in middle] == ["r/1", "r/2"]
    assert handler.on_outputs([first_token("r/1", 12)], 0.0).new_requests == []
    (last,) = handler.on_outputs([first_token("r/2", 13)], 0.0).new_requests
    assert (last.request_id, last.needs_handoff) == ("r/3", True)
    assert not any(request.needs_handoff for request in middle)


def test_no_choice_starts_after_a_failure_or_an_abort(handler):
    error = ErrorInfo(code="overloaded", message="full")
    handler.on_generate(generate("failed", n=2), 0.0)
    assert handler.on_outputs([EngineCoreOutput("failed/0", [], "error", error=error)], 0.0).new_requests == []
    handler.on_generate(generate("aborted", n=2), 0.0)
    handler.on_abort("aborted")
    assert handler.on_outputs([first_token("aborted/0", 11)], 0.0).new_requests == []


def test_prompt_logprobs_are_computed_once(handler):
    requests = all_choices(handler, generate(n=2, prompt_logprobs=3), 0.0)
    assert [request.sampling.prompt_logprobs for request in requests] == [3, None]


def test_stop_tokens_are_the_clients_and_the_models(handler):
    (request,) = handler.on_generate(generate("a", stop_token_ids=(9,)), 0.0)
    (ignoring,) = handler.on_generate(generate("b", stop_token_ids=(9,), ignore_eos=True), 0.0)
    assert request.stop_token_ids == {9, EOS}
    assert ignoring.stop_token_ids == {9}


@pytest.mark.parametrize(
    "message",
    [
        generate(is_handoff=False),
        Generate(
            request_id="r",
            prompt_token_ids=(1,),
            sampling=SamplingParams(),
            handoff=True,
            choices=(ChoiceStart(index=0, output_token_ids=(1,)),),
        ),
        Generate(request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(), handoff=True, kv_handoff=handoff()),
    ],
)
def test_refuses_what_is_not_for_a_prefill_worker(handler, message):
    with pytest.raises(InvalidRequest):
        handler.on_generate(message, 0.0)


def test_answers_once_when_every_choice_has_its_first_token(handler):
    handler.on_generate(generate(n=2), 1.0)
    early = handler.on_outputs([first_token("r/0", 11, prefill_stats=PrefillStats(3, 2, 0, queue_s=0.05))], 1.1)
    assert early.replies == []
    late = handler.on_outputs([first_token("r/1", 12, kv_handoff=handoff(), prefill_stats=PrefillStats(3, 3, 0))], 1.25)
    (done,) = late.replies
    assert isinstance(done, PrefillDone)
    assert [(choice.index, choice.token_id, choice.finish_reason) for choice in done.choices] == [(0, 11, None), (1, 12, None)]
    assert done.kv_handoff == handoff()
    assert done.num_cached_tokens == 2
    assert (done.queue_ms, done.prefill_ms) == (pytest.approx(50.0), pytest.approx(200.0))
    assert late.ended == ["r"]
    assert late.release_transfer_ids == []


def test_answer_reports_what_a_tier_has_lost_of_every_choice(handler):
    handler.on_generate(generate(n=2), 0.0)
    lost = [TransferUsage(recomputed_tokens=2, fallback_reason=reason) for reason in ("digest", "store_miss")]
    handler.on_outputs([first_token("r/0", 11, transfer_usage=lost[0])], 0.0)
    (done,) = handler.on_outputs([first_token("r/1", 12, kv_handoff=handoff(), transfer_usage=lost[1])], 0.0).replies
    assert (done.recomputed_tokens, done.fallback_reason) == (4, "digest")


def test_answer_says_nothing_of_a_tier_that_has_lost_nothing(handler):
    handler.on_generate(generate(), 0.0)
    loaded = TransferUsage(transport="offload", transferred_tokens=3)
    (done,) = handler.on_outputs([first_token("r/0", 11, transfer_usage=loaded)], 0.0).replies
    assert (done.recomputed_tokens, done.fallback_reason) == (0, "")


def test_finish_reason_follows_the_original_limit_not_the_forced_one(handler):
    handler.on_generate(generate("one", max_tokens=1), 0.0)
    handler.on_generate(generate("more", max_tokens=2), 0.0)
    result = handler.on_outputs([first_token("one/0", 11), first_token("more/0", 11)], 0.0)
    assert [reply.choices[0].finish_reason for reply in result.replies] == ["length", None]


def test_stop_token_ends_the_choice(handler):
    handler.on_generate(generate(), 0.0)
    (done,) = handler.on_outputs([first_token("r/0", EOS, "stop", stop_reason=EOS)], 0.0).replies
    assert (done.choices[0].finish_reason, done.choices[0].stop_reason) == ("stop", EOS)


def test_context_that_is_full_after_the_first_token_ends_the_choice(handler):
    handler.on_generate(generate(prompt=range(63)), 0.0)
    (done,) = handler.on_outputs([first_token("r/0", 11)], 0.0).replies
    assert done.choices[0].finish_reason == "length"


def test_releases_the_blocks_at_once_if_every_choice_has_ended(handler):
    handler.on_generate(generate(n=2), 0.0)
    result = handler.on_outputs([first_token("r/0", EOS, "stop"), first_token("r/1", EOS, "stop", kv_handoff=handoff())], 0.0)
    assert result.replies[0].kv_handoff is None
    assert result.release_transfer_ids == ["t1"]


def test_keeps_the_blocks_if_one_choice_continues(handler):
    handler.on_generate(generate(n=2), 0.0)
    result = handler.on_outputs([first_token("r/0", EOS, "stop"), first_token("r/1", 9, kv_handoff=handoff())], 0.0)
    assert result.replies[0].kv_handoff == handoff()
    assert result.release_transfer_ids == []


def test_failed_choice_fails_the_request_and_frees_everything(handler):
    handler.on_generate(generate(n=3), 0.0)
    error = ErrorInfo(code="overloaded", message="full")
    handler.on_outputs([first_token("r/0", 11)], 0.0)
    result = handler.on_outputs([EngineCoreOutput("r/1", [], finish_reason="error", error=error)], 0.0)
    assert result.replies == [RequestFailed(request_id="r", error=error)]
    assert result.ended == ["r"]
    assert result.abort_ids == ["r/2"]
    late = handler.on_outputs([first_token("r/2", 12, kv_handoff=handoff())], 0.0)
    assert (late.replies, late.release_transfer_ids) == ([], ["t1"])


def test_abort_before_the_answer_stops_what_still_runs(handler):
    handler.on_generate(generate(n=2), 0.0)
    handler.on_outputs([first_token("r/0", 11)], 0.0)
    result = handler.on_abort("r")
    assert result.abort_ids == ["r/1"]
    assert handler.on_abort("r") == type(result)()


def test_abort_that_crosses_the_answer_releases_the_blocks(handler):
    handler.on_generate(generate(), 0.0)
    handler.on_outputs([first_token("r/0", 11, kv_handoff=handoff())], 0.0)
    assert handler.on_abort("r").release_transfer_ids == ["t1"]
    assert handler.on_abort("r").release_transfer_ids == []


def test_handoff_of_an_aborted_request_is_released_when_it_appears(handler):
    handler.on_generate(generate(), 0.0)
    handler.on_abort("r")
    result = handler.on_outputs([first_token("r/0", 11, kv_handoff=handoff())], 0.0)
    assert result.replies == []
    assert result.release_transfer_ids == ["t1"]


def test_memory_of_answered_requests_is_bounded(handler):
    for number in range(MAX_REMEMBERED_HANDOFFS + 1):
        handler.on_generate(generate(f"r{number}"), 0.0)
        handler.on_outputs([first_token(f"r{number}/0", 11, kv_handoff=handoff(f"t{number}"))], 0.0)
    assert handler.on_abort("r0").release_transfer_ids == []
    assert handler.on_abort("r1").release_transfer_ids == ["t1"]


def test_failure_policy_and_deadline_reach_every_choice(handler):
    message = msgspec.structs.replace(generate(n=2), kv_load_failure_policy="fail", deadline_ms=1500)
    requests = all_choices(handler, message, 10.0)
    assert [(new.kv_load_failure_policy, new.deadline) for new in requests] == [("fail", 11.5)] * 2
    assert handler.on_generate(generate("free"), 10.0)[0].deadline is None
