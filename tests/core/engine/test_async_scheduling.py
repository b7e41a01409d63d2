"""With async scheduling every request gets the tokens that it gets without, among other requests and aborts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from core.engine.step_watch import FirstSteps, StepWatch
from core.kv.invariants import find_violations
from core.request import NewRequest
from core.wire.sampling import SamplingParams

VOCAB = 211


def prompts(count, seed=0, longest=60):
    generator = np.random.default_rng(seed)
    return [generator.integers(3, VOCAB, generator.integers(1, longest)).tolist() for _ in range(count)]


def request(name, prompt, stop=(), **sampling):
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **sampling})
    return NewRequest(request_id=name, prompt_token_ids=prompt, stop_token_ids=frozenset(stop), sampling=params)


def mixed_requests():
    """Every kind of sampling, several ends, in one batch."""
    kinds = [
        {},
        {"temperature": 1.0, "seed": 3, "top_p": 0.9},
        {"temperature": 0.8, "seed": 4, "top_k": 20, "min_p": 0.01},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"temperature": 1.0, "seed": 5, "presence_penalty": 0.7, "logprobs": 2},
        {"logprobs": 1, "prompt_logprobs": 1},
        {"max_tokens": 1},
        {"min_tokens": 4, "logit_bias": {9: 3.0}},
    ]
    texts = prompts(len(kinds))
    return [request(f"r{i}", texts[i], **{"max_tokens": 5 + 2 * i, **kind}) for i, kind in enumerate(kinds)]


def said(found):
    """Return what the clients see: tokens, ends, and tokens and ranks of the log-probabilities."""
    return {
        name: (
            finished.token_ids,
            finished.finish_reason,
            [(entry.token_ids, entry.rank) for output in finished.outputs for entry in output.logprobs or ()],
            [entry and (entry.token_ids, entry.rank) for output in finished.outputs for entry in output.prompt_logprobs or ()],
        )
        for name, finished in found.items()
    }


@pytest.fixture
def run_both(build_tiny, run_engine):
    """Return a function that runs requests with and without async scheduling, checks that nothing is left, and returns both."""

    def run(requests, per_step=10**9, **settings):
        results = []
        for mode in ("off", "on"):
            built = build_tiny(scheduler__async_scheduling=mode, **settings)
            results.append(said(run_engine(built.engine, requests, per_step)))
            manager = built.engine.scheduler.kv_cache_manager
            assert manager.usage == 0
            assert find_violations(manager) == []
            assert not built.engine.has_work()
            assert len(built.engine.runner._batch) == 0
        return results

    return run


def test_every_kind_of_sampling_gives_the_same(run_both):
    without, with_it = run_both(mixed_requests(), per_step=2, scheduler__max_num_batched_tokens=40)
    assert with_it == without


def test_a_stop_token_ends_a_request_whose_next_step_is_under_way(run_both, build_tiny, run_engine):
    texts = prompts(6, seed=4)
    free = run_engine(build_tiny().engine, [request(f"r{i}", text) for i, text in enumerate(texts)])
    requests = [request(f"r{i}", text, stop={free[f"r{i}"].token_ids[2 + i]}) for i, text in enumerate(texts)]
    without, with_it = run_both(requests)
    assert with_it == without
    assert {result[1] for result in with_it.values()} == {"stop"}


@pytest.mark.slow
def test_preempted_requests_give_the_same(run_both):
    requests = [request(f"r{i}", text, max_tokens=40) for i, text in enumerate(prompts(5, seed=2, longest=40))]
    settings = {"cache__num_blocks": 12, "scheduler__max_num_batched_tokens": 32, "cache__enable_prefix_caching": False}
    without, with_it = run_both(requests, **settings)
    assert with_it == without


def test_the_longest_sequence_ends_where_it_must(run_both):
    without, with_it = run_both([request("r", list(range(3, 40)), max_tokens=400)], model__max_model_len=64)
    assert with_it == without
    assert len(with_it["r"][0]) == 64 - 37


def test_one_step_stays_in_flight_and_its_tokens_are_fed_to_the_next(build_tiny):
    built = build_tiny(scheduler__async_scheduling="on")
    engine = built.engine
    engine.add_request(request("r", list(range(3, 20)), max_tokens=3))
    assert engine.step() == []  # the prompt is under way
    assert engine.has_work()
    first = engine.step()  # the second token is under way, the first is known
    assert [len(output.new_token_ids) for output in first] == [1]
    second = engine.step()
    third = engine.step() if engine.has_work() and not any(o.finish_reason for o in second) else []
    outputs = [*second, *third]
    assert sum(len(output.new_token_ids) for output in outputs) == 2
    assert outputs[-1].finish_reason == "length"
    assert engine.runner._batch.num_computed.max() == 18  # nothing was computed beyond the token before the last


def test_an_aborted_request_says_nothing_more_and_its_blocks_wait_for_the_step(build_tiny):
    engine = build_tiny(scheduler__async_scheduling="on").engine
    engine.add_request(request("r", list(range(3, 40)), max_tokens=50))
    engine.add_request(request("s", list(range(3, 30)), max_tokens=4))
    for _ in range(3):
        engine.step()
    assert engine.abort_requests(["r"]) == ["r"]
    assert engine.scheduler.kv_cache_manager.usage > 0
    outputs = [output for _ in range(20) if engine.has_work() for output in engine.step()]
    assert {output.request_id for output in outputs} == {"s"}
    assert engine.scheduler.kv_cache_manager.usage == 0


def test_an_id_may_be_used_again_while_the_step_of_its_first_life_is_under_way(build_tiny, run_engine, oracle):
    engine = build_tiny(scheduler__async_scheduling="on").engine
    engine.add_request(request("r", list(range(3, 40)), max_tokens=50))
    for _ in range(3):
        engine.step()
    engine.abort_requests(["r"])
    text = list(range(60, 90))
    found = run_engine(engine, [request("r", text, max_tokens=6)])
    assert len(found["r"].token_ids) == 6
    oracle.assert_greedy(text, found["r"].token_ids)


def test_a_request_with_a_handoff_is_not_computed_ahead(build_tiny, copy_connector):
    engine = build_tiny(copy_connector(), scheduler__async_scheduling="on").engine
    params = SamplingParams(temperature=0.0, max_tokens=3)
    engine.add_request(NewRequest(request_id="r", prompt_token_ids=[5] * 20, sampling=params, needs_handoff=True))
    engine.step()
    (output,) = engine.step()  # nothing was scheduled beside the prompt, so it is waited for
    assert len(output.new_token_ids) == 1


def test_bad_kv_of_a_synchronous_load_is_computed_again(build_tiny, run_engine, copy_connector, oracle):
    """The step that runs on it is under way with its successor when the report comes."""
    text = list(range(10, 80))
    source = build_tiny(cache__enable_prefix_caching=False)
    source.engine.add_request(request("p", text, max_tokens=30))
    source.engine.step()
    (table,) = source.engine.scheduler.kv_cache_manager.get_block_ids("p")
    connector = copy_connector({"r": (64, table[:4])}, source.pool.cache.pool, is_async=False)
    connector.worker.bad = {table[2]}
    engine = build_tiny(connector, scheduler__async_scheduling="on").engine
    found = run_engine(engine, [request("r", text, max_tokens=9), request("s", text[:30], max_tokens=9)])
    oracle.assert_greedy(text, found["r"].token_ids)
    oracle.assert_greedy(text[:30], found["s"].token_ids)
    assert engine.scheduler.kv_cache_manager.usage == 0


def test_rows_without_finite_logits_end_alone(build_tiny, run_engine):
    built = build_tiny(scheduler__async_scheduling="on")
    head = built.engine.runner.decoder.compute_logits
    calls = []

    def spoiled(hidden):
        logits = head(hidden)
        calls.append(len(logits))
        if len(calls) == 4:
            logits[0] = float("nan")
        return logits

    built.engine.runner.decoder.compute_logits = spoiled
    found = run_engine(built.engine, [request("r", [5] * 20), request("s", [6] * 20)])
    assert sorted(finished.finish_reason for finished in found.values()) == ["error", "length"]
    assert built.engine.scheduler.kv_cache_manager.usage == 0


def test_the_step_that_is_awaited_is_the_one_judged_by_its_size(build_tiny):
    """Not its successor, which has been launched behind it: a first step of a size warms up until its own result is here."""
    engine = build_tiny(scheduler__async_scheduling="on").engine
    watch, launch = StepWatch(lambda: engine.step_size, FirstSteps(100.0)), engine.runner.launch_model
    awaited = []  # (tokens of the step, what the watch takes it for, whether it warms up)

    def noting(output):
        result = launch(output)

        def collect():
            awaited.append((output.total_num_scheduled_tokens, engine.step_size.num_tokens, watch.reading(0.0).is_warming_up))
            return result()

        return collect

    engine.runner.launch_model = noting
    engine.add_request(request("r", [5] * 3))
    for number in range(9):
        if number == 5:
            engine.add_request(request("s", [6] * 40))
        watch.begin_step(0.0)
        engine.step()
        watch.end_step(0.0)
    assert [known for _, known, _ in awaited] == [num_tokens for num_tokens, _, _ in awaited]
    assert [(num_tokens, warms_up) for num_tokens, _, warms_up in awaited[:2]] == [(3, True), (1, True)]
    assert [warms_up for num_tokens, _, warms_up in awaited[2:] if num_tokens == 1] == [False] * 3
    assert [warms_up for num_tokens, _, warms_up in awaited if num_tokens > 3] == [True]


def test_the_last_step_of_all_is_remembered_by_its_size(build_tiny):
    """An empty step is launched behind it, and both are awaited in one turn."""
    engine = build_tiny(scheduler__async_scheduling="on").engine
    ended_with = []
    engine.add_request(request("r", [5] * 20, max_tokens=1))
    while engine.has_work():
        engine.step()
        ended_with.append(engine.step_size.num_tokens)
    assert 20 in ended_with[1:], ended_with


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_async_scheduling_on_cuda_gives_what_single_steps_give(run_both):
    """In float32: what is computed together differs, and in 16 bits rounding would decide between close logits."""
    settings = {"model__device": "cuda", "model__dtype": "float32", "scheduler__max_num_batched_tokens": 40}
    without, with_it = run_both(mixed_requests(), per_step=2, **settings)
    assert with_it == without
