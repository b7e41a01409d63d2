"""The model of a worker, held against times that can be computed by hand, and of a cluster."""

import math

import pytest

from kvferry.advise.cluster import Layout, Slo, run
from kvferry.advise.costs import Costs, HandoffCost, PrefillCost, StepCost
from kvferry.advise.trace import TraceRequest
from kvferry.advise.worker import Job, Worker

COSTS = Costs(
    prefill=PrefillCost(base_ms=10, token_ms=0.1),
    step=StepCost(base_ms=20, request_ms=1, kv_token_ms=0.01),
    handoff=HandoffCost(base_ms=5, token_ms=0.001),
    kv_tokens=10_000,
)


def job(num_tokens=1000, num_output_tokens=1, arrival_ms=0.0, blocks=()):
    return Job(TraceRequest(arrival_ms, num_tokens, num_output_tokens, blocks), arrival_ms)


def serve(worker, *jobs):
    for one in jobs:
        worker.advance(one.arrival_ms)
        worker.submit(one, worker.prompt_ms(one.request.num_tokens, 0))
    worker.advance(jobs[-1].arrival_ms + 1e6)


def test_a_prompt_takes_the_prefill_time():
    first, second = job(), job()
    serve(Worker(COSTS, 2048), first, second)
    assert (first.first_ms, second.first_ms) == pytest.approx((110, 220))


def test_each_chunk_pays_the_base_of_a_step():
    alone = job()
    serve(Worker(COSTS, 500), alone)
    assert alone.first_ms == pytest.approx(120)


def test_decode_steps_grow_with_the_context():
    worker, alone = Worker(COSTS, 2048), job(num_output_tokens=4)
    serve(worker, alone)
    assert alone.end_ms - alone.first_ms == pytest.approx(3 * 31 + 0.01 * (1 + 2))
    assert sum(number for _, number in worker.gaps) == 3


def test_runs_of_steps_take_as_long_as_single_steps():
    whole, stepped = job(num_output_tokens=200), job(num_output_tokens=200)
    serve(Worker(COSTS, 2048), whole)
    worker = Worker(COSTS, 2048)
    worker.submit(stepped, 0.0)
    while stepped.end_ms == math.inf:
        worker.advance(worker.clock + 1.0)
    assert stepped.end_ms == pytest.approx(whole.end_ms)


def test_a_prompt_delays_the_running_requests_by_its_chunks():
    worker, running, late = Worker(COSTS, 500, slow_ms=60), job(num_output_tokens=50), job(arrival_ms=200)
    serve(worker, running, late)
    assert running.num_slow == 2
    assert max(gap for gap, _ in worker.gaps) == pytest.approx(31 + 50, abs=1)


def test_cached_blocks_are_not_computed_again():
    first, second = job(1025, blocks=(1, 2)), job(1025, blocks=(1, 2))
    serve(Worker(COSTS, 2048), first, second)
    assert second.first_ms - first.first_ms == pytest.approx(10.1)


def test_the_least_recently_used_blocks_are_evicted():
    worker = Worker(Costs(prefill=COSTS.prefill, step=COSTS.step, kv_tokens=1600), 2048)
    serve(worker, job(1025, blocks=(1, 2)), job(1025, blocks=(1, 3)))
    assert worker.hit_tokens((1, 3)) == 1024
    assert worker.hit_tokens((1, 2)) == 1024
    serve(worker, job(1025, blocks=(4, 5), arrival_ms=1e6))
    assert worker.hit_tokens((1, 2)) == 512


def test_a_request_that_does_not_fit_waits_for_memory():
    first, second = job(6000, 100), job(6000, 2)
    serve(Worker(COSTS, 8192), first, second)
    assert second.first_ms >= first.end_ms + 610


def test_a_request_larger_than_the_memory_is_served_alone():
    large = job(20_000, 2)
    serve(Worker(COSTS, 50_000), large)
    assert large.end_ms < math.inf


def test_a_busy_worker_says_how_long_a_prompt_would_wait():
    worker = Worker(COSTS, 10_000)
    for _ in range(2):
        worker.submit(job(), 110.0)
    assert worker.wait_ms(0.0) == pytest.approx(220)
    worker.advance(50.0)
    assert worker.wait_ms(50.0) == pytest.approx(60 + 110)


def requests(number, every_ms, num_tokens=1000, num_output_tokens=10):
    return [TraceRequest(index * every_ms, num_tokens, num_output_tokens) for index in range(number)]


def test_prompts_are_spread_over_prefill_workers_and_handed_over():
    outcome = run(requests(20, 60), COSTS, Layout(2, 1), Slo())
    assert outcome.ttft_ms(0.99) == pytest.approx(110)
    assert all(one.decode_ms - one.first_ms >= 6 for one in outcome.jobs)


def test_prompts_disturb_answers_only_on_aggregated_workers():
    slo = Slo(tpot_ms=100, itl_ms=100)
    apart = run(requests(100, 300, num_output_tokens=20), COSTS, Layout(1, 1), slo)
    together = run(requests(100, 300, num_output_tokens=20), COSTS, Layout(num_aggregated=1, chunk=2048), slo)
    assert apart.good_share == 1
    assert together.good_share < 0.1
    assert together.itl_ms(0.99) > 100 > apart.itl_ms(0.99)


def test_an_overloaded_cluster_is_given_up_early():
    outcome = run(requests(1000, 20), COSTS, Layout(1, 1), Slo(ttft_ms=200), until_share=0.95)
    assert outcome.num_good == 0
    assert sum(one.first_ms < math.inf for one in outcome.jobs) < 200
