"""The measurements of a request. A test with real processes compares the splits with a client's clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.wire.messages import TransferUsage, Usage
from router.dispatch.timing import first_token_timing, second_token_timing, total_cost

COST = TransferUsage(
    transport="shm",
    transferred_tokens=10,
    transferred_bytes=2048,
    transfer_ms=30.0,
    verify_ms=4.0,
    queue_ms=5.0,
    first_step_ms=11.0,
    verified_blocks=1,
)
durations = st.floats(0, 1e7)


def test_the_first_token_is_queue_prefill_and_relay(pair):
    pair.submit()
    pair.now = 0.25
    pair.prefill_done(queue_ms=40.0, prefill_ms=200.0)
    timing = pair.updates["r1"][0].prompt.timing
    assert (timing.total_ms, timing.queue_ms, timing.prefill_ms, timing.relay_ms) == (250.0, 40.0, 200.0, 10.0)


def test_the_second_token_is_relay_queue_transfer_verification_and_first_step(pair):
    pair.submit()
    pair.now = 0.25
    pair.prefill_done()
    pair.now = 0.375
    pair.tokens(1, 51, usage=Usage(kv_transfer=COST))
    report = pair.updates["r1"][-1].handoff
    second = report.second_token
    assert report.first_token == pair.updates["r1"][0].prompt.timing
    assert (second.total_ms, second.relay_ms) == (125.0, 75.0)
    assert (second.queue_ms, second.transfer_ms, second.verify_ms, second.first_step_ms) == (5.0, 30.0, 4.0, 11.0)
    assert report.cost == COST
    assert pair.updates["r1"][-1].prompt is None, "the prefill worker has reported the prompt already"


def test_the_second_token_s_time_is_not_measured_again_at_the_last_one(pair):
    pair.submit()
    pair.prefill_done()
    pair.now = 0.5
    pair.tokens(1, 51, usage=Usage(kv_transfer=COST))
    pair.now = 9.0
    pair.tokens(2, 52, usage=Usage(kv_transfer=COST), finish_reason="length")
    first, last = (update.handoff for update in pair.updates["r1"][1:])
    assert last == first


def test_time_lost_with_a_worker_counts_as_relay(make_bench):
    bench = make_bench("p0", "p1", "d0", "d1")
    bench.submit()
    bench.now = 3.0
    bench.leave("p0")
    bench.now = 3.25
    bench.prefill_done("r1.2", "p1", queue_ms=50.0, prefill_ms=150.0)
    timing = bench.updates["r1"][0].prompt.timing
    assert (timing.total_ms, timing.relay_ms) == (3250.0, 3050.0)


def test_choices_are_added_up(after_handoff):
    after_handoff.tokens(1, 60, index=0, usage=Usage(kv_transfer=COST))
    local = TransferUsage(queue_ms=70.0, recomputed_tokens=3, fallback_reason="stale")
    after_handoff.tokens(1, 61, index=1, usage=Usage(kv_transfer=local))
    cost = after_handoff.updates["r1"][-1].handoff.cost
    assert (cost.transport, cost.transferred_tokens, cost.verified_blocks) == ("shm", 10, 1)
    assert (cost.queue_ms, cost.recomputed_tokens, cost.fallback_reason) == (70.0, 3, "stale")


def test_nothing_costs_nothing():
    assert total_cost([]) == TransferUsage()


@given(total_s=st.floats(0, 1e4), queue_ms=durations, prefill_ms=durations)
def test_the_first_split_is_cut_to_the_total_that_was_measured(total_s, queue_ms, prefill_ms):
    timing = first_token_timing(total_s, queue_ms, prefill_ms)
    parts = (timing.queue_ms, timing.prefill_ms, timing.relay_ms)
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(timing.total_ms)
    assert timing.total_ms == total_s * 1e3


@given(total_s=st.floats(0, 1e4), parts=st.tuples(durations, durations, durations, durations))
def test_the_second_split_is_cut_to_the_total_that_was_measured(total_s, parts):
    queue_ms, transfer_ms, verify_ms, first_step_ms = parts
    cost = TransferUsage(queue_ms=queue_ms, transfer_ms=transfer_ms, verify_ms=verify_ms, first_step_ms=first_step_ms)
    timing = second_token_timing(total_s, cost)
    found = (timing.relay_ms, timing.queue_ms, timing.transfer_ms, timing.verify_ms, timing.first_step_ms)
    assert min(found) >= 0
    assert sum(found) == pytest.approx(timing.total_ms)


def test_a_prompt_that_reads_no_cache_expects_no_hit(make_bench):
    bench = make_bench("a0")
    for request_id in ("first", "again"):
        bench.submit(request_id, prompt=80)
        predicted = bench.core.dispatcher.requests[request_id].placed.routing.predicted_hit_tokens
        bench.tokens(0, 7, request_id=request_id, peer="a0", usage=Usage(num_cached_tokens=predicted), finish_reason="length")
    assert predicted == 64
    bench.submit("whole", prompt=80, prompt_logprobs=0)
    assert bench.core.dispatcher.requests["whole"].placed.routing.predicted_hit_tokens == 0
