"""The simulation of prefill workers, the published policies, and the figures that are made of them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.fixture(scope="module")
def simulation(load_benchmark):
    load_benchmark("routing")
    import routing_simulation

    return routing_simulation


@pytest.fixture(scope="module")
def policies(simulation):
    import routing_policies

    return routing_policies


@pytest.fixture(scope="module")
def routing(load_benchmark):
    return load_benchmark("routing")


def requests(simulation, seed=1, count=120, users=8):
    """Conversations: each prompt is the one before and some blocks."""
    source = random.Random(seed)
    lengths, now, result = [0] * users, 0.0, []
    for _ in range(count):
        user = source.randrange(users)
        lengths[user] += source.randrange(1, 12)
        now += source.expovariate(1 / 300)
        blocks = tuple(user * 10_000 + depth for depth in range(lengths[user]))
        result.append(simulation.TraceRequest(now, len(blocks) * 512 + 100, 20, blocks))
    return result


def run(simulation, make, count=1, **rest):
    rest.setdefault("requests", requests(simulation))
    scenario = simulation.Scenario(prefill_ms=simulation.qwen_prefill_ms, **rest)
    return simulation.simulate(scenario, [make(scenario.num_workers, scenario.prefill_ms, number) for number in range(count)])


def test_every_policy_serves_every_request(simulation, policies):
    for name, make in policies.ROUTERS.items():
        results = run(simulation, make)
        assert len(results.ttft_ms) == 120, name
        assert min(results.slowdown) > 0


def test_a_run_repeats_exactly(simulation, policies):
    assert run(simulation, policies.PredictedTime) == run(simulation, policies.PredictedTime)


def test_an_idle_worker_takes_the_prefill_time(simulation, policies):
    one = [simulation.TraceRequest(0.0, 1000, 1, (1,))]
    assert run(simulation, policies.LeastLoaded, requests=one).ttft_ms == [simulation.qwen_prefill_ms(1000, 0)]


def test_a_second_turn_goes_where_the_first_is_cached(simulation, policies):
    turns = [simulation.TraceRequest(0.0, 5220, 1, tuple(range(10))), simulation.TraceRequest(1e5, 5320, 1, tuple(range(10)))]
    assert run(simulation, policies.PredictedTime, requests=turns).hit_tokens == [0, 5120]


def test_requests_of_a_burst_meet_each_other(simulation, policies):
    prompt = tuple(range(40))
    burst = [simulation.TraceRequest(float(number), 40 * 512 + 1, 1, prompt) for number in range(3)]
    results = run(simulation, policies.PredictedTime, requests=burst)
    assert results.predicted_hit_tokens == [0, 40 * 512, 40 * 512]


def test_the_end_of_the_oldest_prompt_is_evicted_first(simulation):
    worker = simulation.PrefillWorker(0, 4)
    worker.store([1, 2, 3])
    assert worker.store([9, 8]) == ([8, 9], [3])
    assert worker.hit_tokens([1, 2, 3]) == 1024


def test_short_prompts_are_served_first_and_long_ones_in_the_end(simulation, policies):
    long = simulation.TraceRequest(0.0, 40_000, 1, ())
    waiting = [simulation.TraceRequest(1.0, 20_000, 1, ()), *(simulation.TraceRequest(2.0 + n, 600, 1, ()) for n in range(50))]
    results = run(simulation, policies.PredictedTime, requests=[long, *waiting], num_workers=1)
    assert results.num_tokens[0] == 40_000
    assert results.num_tokens[-1] == 20_000


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6), st.booleans()), max_size=30))
def test_hits_are_those_of_the_caches(simulation, history):
    workers = [simulation.PrefillWorker(number, 7) for number in range(3)]
    index, expected = simulation.Contents(3), simulation.Contents(3)
    for user, length, is_stored in history:
        blocks = [user * 10 + depth for depth in range(length)]
        if is_stored:
            added, evicted = workers[user % 3].store(blocks)
            for block in added:
                index.add(user % 3, block)
            for block in evicted:
                index.discard(user % 3, block)
        assert simulation.count_hits(blocks, 3, index, expected) == [worker.hit_tokens(blocks) for worker in workers]


def test_a_lying_worker_costs_only_time(simulation, policies):
    results = run(simulation, policies.LiedToRouter)
    assert len(results.ttft_ms) == 120
    assert results.hit_tokens != results.predicted_hit_tokens


def test_two_routers_hear_of_each_others_work(simulation, policies):
    scenario = simulation.Scenario(requests=requests(simulation), prefill_ms=simulation.qwen_prefill_ms, report_ms=100.0)
    routers = [policies.PredictedTime(6, scenario.prefill_ms, 0, rank=(rank, 2)) for rank in range(2)]
    assert len(simulation.simulate(scenario, routers).ttft_ms) == 120


def test_capacity_is_bisected_to_one_percent(routing, monkeypatch):
    class Fake:
        def __init__(self, speed):
            self.ok_share = 0.96 if speed <= 4.2 else 0.9

    monkeypatch.setattr(routing, "_simulate", lambda task, speed, until_ok: Fake(speed))
    task = routing.Task(folder=None, trace="conversation", model="qwen", policy="dynamo", seed=1)
    assert 4.2 / 1.01 <= routing.find_capacity(task) <= 4.2


def test_an_interval_covers_the_spread_of_the_seeds(routing):
    interval = routing.Interval.of([1.0, 2.0, 3.0])
    assert interval.mean == 2
    assert interval.half_width == pytest.approx(2.484, abs=0.01)
