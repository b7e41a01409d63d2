"""What the answers of vLLM servers do not tell, so that the router must not learn it from them."""

from __future__ import annotations

import pytest

from core.wire.messages import Usage


@pytest.fixture
def pair(make_bench):
    bench = make_bench("d0")
    bench.join("p0", takes_calls=True, leaves_first_token=True)
    return bench


def test_the_time_of_a_prompt_behind_another_one_is_no_prefill_time(pair):
    for number in (1, 2):
        pair.submit(f"r{number}", prompt=50)
    for number in (1, 2):
        pair.now = 0.1 * number
        pair.prefill_done(f"r{number}", choices=(), num_cached_tokens=0, queue_ms=0.0, prefill_ms=100.0 * number)
    worker = pair.core.membership.by_peer(b"p0")
    assert pair.core.route_costs.prefill_time(worker).ms(50, 0) == pytest.approx(100, rel=0.05)


def test_what_a_server_does_not_tell_of_its_cache_is_unknown(pair):
    pair.submit(prompt=80)
    pair.prefill_done(choices=(), num_cached_tokens=0, tells_hits=False)
    request = pair.core.dispatcher.requests["r1"]
    assert (request.measurements.hit_tokens, request.placed.routing.hit_tokens) == (None, None)
    assert pair.core.route_costs._workers[pair.core.membership.by_peer(b"p0").key].accuracy.real_tokens == 0


def test_an_answer_that_is_no_stream_tells_no_pace_of_prompts(make_bench):
    bench = make_bench()
    bench.join("a0", takes_calls=True)
    bench.submit(prompt=50, prompt_logprobs=0)
    bench.now = 20.0
    bench.tokens(0, *range(20), peer="a0", finish_reason="length", usage=Usage(is_late=True))
    assert "r1" in bench.ended
    bench.submit("r2", prompt=50)
    worker = bench.core.membership.by_peer(b"a0").key
    assert bench.core.wait_estimates.wait_s(worker, bench.now) == 0
    bench.now = 20.5
    bench.tokens(0, 7, request_id="r2", peer="a0", usage=Usage())
    bench.submit("r3", prompt=50)
    assert bench.core.wait_estimates.wait_s(worker, bench.now) == pytest.approx(0.5)
