"""The load client against a real HTTP server that answers as OpenAI servers do."""

import pytest

from kvferry.bench.client import Target
from kvferry.bench.load import run_load
from kvferry.bench.workload import BenchRequest

pytestmark = pytest.mark.slow


def target(server):
    return Target(base_url=f"http://127.0.0.1:{server.server_port}", model="m")


async def test_counts_and_times_come_from_the_stream(server):
    results, duration = await run_load(target(server), [BenchRequest(0, (1, 2, 3), 4)], concurrency=1, timeout_s=10)
    (result,) = results
    assert (result.error, result.num_output_tokens, result.num_prompt_tokens, result.num_cached_tokens) == ("", 4, 7, 5)
    assert len(result.itl_s) == 3
    assert 0 < result.ttft_s <= result.e2e_s <= duration
    assert server.bodies[0]["prompt"] == [1, 2, 3]
    assert server.bodies[0]["ignore_eos"] is True


async def test_refused_requests_are_reported_with_the_status(server):
    results, _ = await run_load(
        target(server), [BenchRequest(0, "hi", 99), BenchRequest(0, "hi", 2)], concurrency=2, timeout_s=10
    )
    assert "HTTP 503" in results[0].error
    assert results[1].error == ""


async def test_unreachable_server_is_an_error_not_an_exception():
    gone = Target(base_url="http://127.0.0.1:9", model="m")
    results, _ = await run_load(gone, [BenchRequest(0, "hi", 1)], concurrency=None, timeout_s=5)
    assert results[0].error


def token(text, finish_reason=None):
    return {"choices": [{"text": text, "finish_reason": finish_reason}]}


async def answer(server, *script):
    server.script = script
    results, _ = await run_load(target(server), [BenchRequest(0, "hi", 2)], concurrency=1, timeout_s=10)
    return results[0]


async def test_null_fields_of_other_servers_are_read(server):
    usage = {"prompt_tokens": None, "completion_tokens": None, "prompt_tokens_details": {"cached_tokens": None, "x": [1]}}
    result = await answer(server, token("a"), token("b", "stop"), {"choices": None, "usage": usage, "error": None}, "[DONE]")
    assert (result.error, result.num_output_tokens, result.num_cached_tokens) == ("", 2, 0)


async def test_only_chunks_with_a_token_are_timed(server):
    events = [token(None), token("a"), token(""), token("b"), token("", "stop"), {"choices": [], "usage": None}, "[DONE]"]
    result = await answer(server, *events)
    assert (result.error, len(result.itl_s), result.num_output_tokens) == ("", 2, 3)


async def test_finish_reason_ends_a_stream_without_done(server):
    assert (await answer(server, token("a"), token("b", "length"))).error == ""


async def test_answer_without_text_is_none_to_time_but_no_failure(server):
    result = await answer(server, token("", "stop"), {"choices": [], "usage": {"completion_tokens": 1}}, "[DONE]")
    assert (result.error, result.ttft_s, result.num_output_tokens) == ("", None, 1)
    assert "without a token" in (await answer(server, "[DONE]")).error


async def test_stream_that_breaks_off_is_an_error(server):
    assert "without [DONE] or a finish reason" in (await answer(server, token("a"), token("b"))).error


async def test_error_event_is_the_result(server):
    assert "no memory" in (await answer(server, token("a"), {"error": {"message": "no memory"}})).error


async def test_request_that_waits_for_its_turn_is_timed_from_its_arrival(server):
    requests = [BenchRequest(0.001 * number, "hi", 1) for number in range(1, 9)]
    results, _ = await run_load(target(server), requests, concurrency=1, timeout_s=10)
    assert [result.started_s for result in results] == pytest.approx([request.arrival_s for request in requests])
    ends = [result.started_s + result.e2e_s for result in results]
    starts_of_tokens = [result.started_s + result.ttft_s for result in results]
    assert all(end <= start for end, start in zip(ends, starts_of_tokens[1:], strict=False))


async def test_closed_loop_is_timed_from_the_sending(server):
    requests = [BenchRequest(0.0, "hi", 1) for _ in range(4)]
    results, _ = await run_load(target(server), requests, concurrency=1, timeout_s=10)
    starts = [result.started_s for result in results]
    assert all(start >= before.started_s + before.e2e_s for start, before in zip(starts[1:], results, strict=False))
