"""How the decode and aggregated roles handle requests, tokens and aborts."""

import msgspec
import pytest

from core.errors import InvalidRequest
from core.request import EngineCoreOutput, FirstTokenTimes, PrefillStats
from core.wire.kv import KVHandoff, KVLayoutInfo
from core.wire.messages import ChoiceStart, ErrorInfo, Generate, RequestFailed, TokenLogprobs, Tokens, TransferUsage, Usage
from core.wire.sampling import SamplingParams
from core.worker.role import EngineFacts
from decode.role import DecodeHandler

HANDOFF = KVHandoff(
    transfer_id="t1",
    engine_id="p0",
    incarnation=1,
    control_address="tcp://127.0.0.1:1",
    model_fingerprint=b"f",
    layout=KVLayoutInfo(
        dtype="float32", order="HND", block_size=16, num_layers=1, num_kv_heads=1, head_dim=8, block_bytes=1024
    ),
    groups=(),
    num_tokens=3,
    lease_ms=1000,
)
TRANSFER = TransferUsage(transport="shm", transferred_tokens=3)


def generate(request_id="r", **fields):
    defaults = {"prompt_token_ids": (5, 6, 7), "sampling": SamplingParams(max_tokens=8, prompt_logprobs=1)}
    return Generate(request_id=request_id, **{**defaults, **fields})


def with_handoff(*indices):
    starts = tuple(ChoiceStart(index=index, output_token_ids=(90 + index,)) for index in indices)
    return generate(kv_handoff=HANDOFF, choices=starts, n=4)


def all_choices(handler, message):
    """Return the engine requests of all choices, those included that wait for the first one's token."""
    first = handler.on_generate(message, 0.0)
    return first + handler.on_outputs([EngineCoreOutput(first[0].request_id, [11])], 0.0).new_requests


@pytest.fixture
def handler():
    return DecodeHandler(EngineFacts(max_model_len=64, eos_token_ids=frozenset({2})))


def test_continues_with_the_live_choices_only(handler):
    requests = handler.on_generate(with_handoff(0, 3), 2.0)
    assert [(request.request_id, request.choice_index) for request in requests] == [("r/0", 0), ("r/3", 3)]
    assert [request.output_token_ids for request in requests] == [(90,), (93,)]
    assert all(request.kv_handoff is HANDOFF for request in requests)
    assert all(request.sampling.max_tokens == 8 for request in requests)
    assert all(request.stop_token_ids == {2} for request in requests)


def test_prompt_logprobs_come_from_the_worker_that_computes_the_prompt(handler):
    assert [r.sampling.prompt_logprobs for r in all_choices(handler, generate("own", n=2))] == [1, None]
    assert [r.sampling.prompt_logprobs for r in handler.on_generate(with_handoff(0, 1), 0.0)] == [None, None]


def test_aggregated_request_starts_all_choices_here(handler):
    requests = all_choices(handler, generate(n=2))
    assert [(request.request_id, request.output_token_ids) for request in requests] == [("r/0", ()), ("r/1", ())]


def test_other_choices_start_when_the_prompt_is_in_the_cache(handler):
    assert [request.request_id for request in handler.on_generate(generate(n=3), 0.0)] == ["r/0"]
    result = handler.on_outputs([EngineCoreOutput("r/0", [1])], 0.0)
    assert [request.request_id for request in result.new_requests] == ["r/1", "r/2"]
    assert handler.on_outputs([EngineCoreOutput("r/0", [1])], 0.0).new_requests == []


def test_first_choice_that_ends_at_once_still_starts_the_others(handler):
    handler.on_generate(generate(n=2), 0.0)
    result = handler.on_outputs([EngineCoreOutput("r/0", [2], "stop")], 0.0)
    assert [request.request_id for request in result.new_requests] == ["r/1"]
    assert result.ended == []


def test_only_the_first_choice_loads_a_handoff_if_the_engine_loads_once():
    handler = DecodeHandler(EngineFacts(max_model_len=64, eos_token_ids=frozenset()), loads_once=True)
    (first,) = handler.on_generate(with_handoff(0, 1, 3), 0.0)
    assert first.kv_handoff is HANDOFF
    others = handler.on_outputs([EngineCoreOutput("r/0", [11])], 0.0).new_requests
    assert [(other.request_id, other.kv_handoff, other.output_token_ids) for other in others] == [
        ("r/1", None, (91,)),
        ("r/3", None, (93,)),
    ]
    assert handler.on_outputs([EngineCoreOutput("r/0", [12])], 0.0).new_requests == []


def test_choice_that_was_stopped_before_it_started_never_starts(handler):
    handler.on_generate(generate(n=3), 0.0)
    assert [request.request_id for request in handler.on_abort_choice("r", 1).new_requests] == ["r/2"]
    assert handler.on_outputs([EngineCoreOutput("r/0", [1])], 0.0).new_requests == []


def test_no_choice_starts_after_a_failure_or_an_abort(handler):
    handler.on_generate(generate("failed", n=2), 0.0)
    assert handler.on_outputs([EngineCoreOutput("failed/0", [], "error")], 0.0).new_requests == []
    handler.on_generate(generate("aborted", n=2), 0.0)
    handler.on_abort("aborted")
    assert handler.on_outputs([EngineCoreOutput("aborted/0", [1])], 0.0).new_requests == []


@pytest.mark.parametrize("message", [generate(handoff=True), with_handoff(1, 1), with_handoff()])
def test_refuses_what_is_not_for_a_decode_worker(handler, message):
    with pytest.raises(InvalidRequest):
        handler.on_generate(message, 0.0)
    assert handler.on_abort("r").abort_ids == []


def test_positions_continue_after_the_tokens_of_the_prefill_worker(handler):
    handler.on_generate(with_handoff(0), 0.0)
    first = handler.on_outputs([EngineCoreOutput("r/0", [11])], 0.0).replies
    second = handler.on_outputs([EngineCoreOutput("r/0", [12, 13])], 0.0).replies
    third = handler.on_outputs([EngineCoreOutput("r/0", [14])], 0.0).replies
    assert [(reply.position, reply.token_ids) for reply in first + second + third] == [(1, (11,)), (2, (12, 13)), (4, (14,))]


def test_the_last_tokens_tell_what_an_engine_learns_at_the_end(handler):
    handler.on_generate(generate(), 0.0)
    outputs = [
        EngineCoreOutput("r/0", [11], prefill_stats=PrefillStats(3, 0, 0)),
        EngineCoreOutput("r/0", [12], finish_reason="length", late_cached_tokens=2),
    ]
    usages = [handler.on_outputs([output], 0.0).replies[0].usage for output in outputs]
    assert usages == [Usage(), Usage(num_cached_tokens=2, is_late=True)]


def test_usage_travels_with_the_first_and_the_last_tokens(handler):
    handler.on_generate(with_handoff(0), 0.0)
    outputs = [
        EngineCoreOutput("r/0", [11], prefill_stats=PrefillStats(3, 0, 3), transfer_usage=TRANSFER),
        EngineCoreOutput("r/0", [12]),
        EngineCoreOutput("r/0", [13], finish_reason="length"),
    ]
    usages = [handler.on_outputs([output], 0.0).replies[0].usage for output in outputs]
    assert usages == [Usage(num_cached_tokens=3, kv_transfer=TRANSFER), None, usages[0]]


def test_wait_that_was_no_transfer_and_the_first_step_are_reported_with_the_transfer(handler):
    handler.on_generate(with_handoff(0), 0.0)
    cost = TransferUsage(transport="shm", transferred_tokens=3, transfer_ms=30.0, verify_ms=10.0)
    times = FirstTokenTimes(wait_s=0.25, compute_s=0.0625)
    (reply,) = handler.on_outputs([EngineCoreOutput("r/0", [11], first_token_times=times, transfer_usage=cost)], 0.0).replies
    told = reply.usage.kv_transfer
    assert (told.transfer_ms, told.verify_ms, told.queue_ms, told.first_step_ms) == (30.0, 10.0, 210.0, 62.5)
    assert (told.transport, told.transferred_tokens) == ("shm", 3)


def test_time_in_the_queue_is_never_negative(handler):
    handler.on_generate(with_handoff(0), 0.0)
    output = EngineCoreOutput("r/0", [11], first_token_times=FirstTokenTimes(0.25, 0.0))
    output.transfer_usage = TransferUsage(transport="shm", transfer_ms=251.0)
    assert handler.on_outputs([output], 0.0).replies[0].usage.kv_transfer.queue_ms == 0.0


def test_times_are_told_of_a_handoff_that_moved_nothing_but_not_without_one(handler):
    times = FirstTokenTimes(wait_s=0.25, compute_s=0.5)
    handler.on_generate(with_handoff(0), 0.0)
    (taken_over,) = handler.on_outputs([EngineCoreOutput("r/0", [11], first_token_times=times)], 0.0).replies
    assert taken_over.usage.kv_transfer == TransferUsage(queue_ms=250.0, first_step_ms=500.0)
    handler.on_generate(generate("own"), 0.0)
    output = EngineCoreOutput("own/0", [11], prefill_stats=PrefillStats(3, 0, 0), first_token_times=times)
    assert handler.on_outputs([output], 0.0).replies[0].usage.kv_transfer is None


def test_continues_without_a_handoff_by_computing_the_prompt_once(handler):
    starts = tuple(ChoiceStart(index=index, output_token_ids=(90, 91)) for index in (1, 2))
    (first,) = handler.on_generate(generate(choices=starts, n=4), 0.0)
    assert (first.request_id, first.output_token_ids, first.kv_handoff) == ("r/1", (90, 91), None)
    result = handler.on_outputs([EngineCoreOutput("r/1", [92])], 0.0)
    assert (result.replies[0].position, result.replies[0].token_ids) == (2, (92,))
    assert [(new.request_id, new.output_token_ids) for new in result.new_requests] == [("r/2", (90, 91))]


@pytest.mark.parametrize("policy", ["recompute", "fail", None])
def test_failure_policy_and_deadline_reach_every_choice(handler, policy):
    message = msgspec.structs.replace(with_handoff(0, 1), kv_load_failure_policy=policy, deadline_ms=1500)
    requests = handler.on_generate(message, 10.0)
    assert [(new.kv_load_failure_policy, new.deadline) for new in requests] == [(policy, 11.5)] * 2
    assert handler.on_generate(generate("free"), 10.0)[0].deadline is None


def test_usage_that_comes_before_the_first_token_is_not_lost(handler):
    handler.on_generate(with_handoff(0), 0.0)
    assert handler.on_outputs([EngineCoreOutput("r/0", [], transfer_usage=TRANSFER)], 0.0).replies == []
    (reply,) = handler.on_outputs([EngineCoreOutput("r/0", [11], prefill_stats=PrefillStats(3, 0, 3))], 0.0).replies
    assert reply.usage == Usage(num_cached_tokens=3, kv_transfer=TRANSFER)


def test_prompt_logprobs_are_reported_once(handler):
    handler.on_generate(generate(), 0.0)
    row = (None, TokenLogprobs((6,), (-0.5,), 1), TokenLogprobs((7,), (-0.1,), 1))
    first = handler.on_outputs([EngineCoreOutput("r/0", [11], prompt_logprobs=row)], 0.0).replies[0]
    last = handler.on_outputs([EngineCoreOutput("r/0", [12], finish_reason="stop", stop_reason=12)], 0.0).replies[0]
    assert first.usage.prompt_logprobs == row
    assert last.usage is None
    assert (last.finish_reason, last.stop_reason) == ("stop", 12)


def test_request_ends_with_its_last_choice(handler):
    handler.on_generate(generate(n=2), 0.0)
    assert handler.on_outputs([EngineCoreOutput("r/1", [4], finish_reason="stop")], 0.0).ended == []
    assert handler.on_outputs([EngineCoreOutput("r/0", [4], finish_reason="length")], 0.0).ended == ["r"]


def test_tokens_of_one_step_keep_their_order(handler):
    handler.on_generate(generate("a"), 0.0)
    handler.on_generate(generate("b"), 0.0)
    result = handler.on_outputs([EngineCoreOutput("b/0", [1]), EngineCoreOutput("a/0", [2])], 0.0)
    assert [reply.request_id for reply in result.replies] == ["b", "a"]


def test_failed_choice_fails_the_request_and_stops_the_others(handler):
    handler.on_generate(with_handoff(0, 1, 2), 0.0)
    error = ErrorInfo(code="peer_lost", message="p0 is gone", retryable=True)
    result = handler.on_outputs(
        [EngineCoreOutput("r/1", [], finish_reason="error", error=error), EngineCoreOutput("r/2", [1])], 0.0
    )
    assert result.replies == [RequestFailed(request_id="r", error=error)]
    assert result.ended == ["r"]
    assert result.abort_ids == ["r/0", "r/2"]


@pytest.mark.parametrize("reason", ["error", "abort"])
def test_end_without_a_reason_is_an_error_not_silence(handler, reason):
    handler.on_generate(generate(), 0.0)
    (reply,) = handler.on_outputs([EngineCoreOutput("r/0", [], finish_reason=reason)], 0.0).replies
    assert reply.error.code == "internal_error"


def test_outputs_after_an_abort_are_ignored(handler):
    handler.on_generate(generate(n=2), 0.0)
    assert handler.on_abort("r").abort_ids == ["r/0", "r/1"]
    assert handler.on_outputs([EngineCoreOutput("r/0", [1])], 0.0).replies == []


def test_request_ids_may_contain_slashes(handler):
    handler.on_generate(generate("a/b/c"), 0.0)
    (reply,) = handler.on_outputs([EngineCoreOutput("a/b/c/0", [1])], 0.0).replies
    assert isinstance(reply, Tokens)
    assert (reply.request_id, reply.index) == ("a/b/c", 0)


def test_stopped_choice_ends_alone_and_the_last_one_ends_the_request(handler):
    handler.on_generate(generate(n=2), 0.0)
    first = handler.on_abort_choice("r", 0)
    assert (first.abort_ids, first.ended) == (["r/0"], [])
    assert handler.on_abort_choice("r", 0).abort_ids == []
    assert [
        reply.index for reply in handler.on_outputs([EngineCoreOutput("r/0", [1]), EngineCoreOutput("r/1", [1])], 0.0).replies
    ] == [1]
    last = handler.on_abort_choice("r", 1)
    assert (last.abort_ids, last.ended) == (["r/1"], ["r"])
