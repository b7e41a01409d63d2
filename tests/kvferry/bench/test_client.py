"""The load client against a real HTTP server that answers as OpenAI servers do."""

from kvferry.bench.client import Target
from kvferry.bench.load import run_load
from kvferry.bench.workload import BenchRequest


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
