"""KV that arrives broken in a real model's pool: what rests on it is taken back and computed, and comes out the same."""

import pytest

from core.kv.invariants import find_violations
from core.request import NewRequest
from core.wire.sampling import SamplingParams

BLOCK = 16
PROMPT = [(7 * i) % 200 + 3 for i in range(75)]


def request(name="r", prompt=PROMPT, **sampling):
    sampling = {"temperature": 0.0, "max_tokens": 8} | sampling
    return NewRequest(request_id=name, prompt_token_ids=prompt, sampling=SamplingParams(**sampling))


RANDOM = {
    "temperature": 1.0,
    "seed": 5,
    "max_tokens": 12,
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.4,
    "logprobs": 2,
    "min_tokens": 3,
}


@pytest.fixture
def computed(build_tiny):
    """Compute the prompt in one engine; return a copy of its pool, and where the prompt's full blocks lie in it."""
    built = build_tiny()
    built.engine.add_request(request())
    built.engine.step()
    (blocks,) = built.engine.scheduler.kv_cache_manager.get_block_ids("r")
    return built.pool.cache.pool.clone(), blocks[: len(PROMPT) // BLOCK]


@pytest.mark.parametrize("is_async", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("sampling", [{}, RANDOM], ids=["greedy", "random with penalties"])
@pytest.mark.parametrize("bad", [[0], [2], [1, 3], [3]])
def test_request_gives_the_same_tokens_as_without_the_load(  # noqa: PLR0917
    computed, copy_connector, build_tiny, run_engine, is_async, sampling, bad
):
    source, blocks = computed
    connector = copy_connector({"r": (64, blocks)}, source, is_async)
    connector.worker.bad = {blocks[position] for position in bad}
    other = request("other", PROMPT[5:], **sampling)
    expected = run_engine(build_tiny().engine, [request(**sampling), other])
    built = build_tiny(connector)
    found = run_engine(built.engine, [request(**sampling), other])
    for name in ("r", "other"):
        assert found[name].token_ids == expected[name].token_ids
        assert found[name].finish_reason == "length"
        for one, two in zip(found[name].outputs, expected[name].outputs, strict=True):
            assert (one.logprobs is None) == (two.logprobs is None)
            if one.logprobs is not None:
                assert one.logprobs[0].token_ids == two.logprobs[0].token_ids
    usage = found["r"].outputs[0].transfer_usage
    assert usage.recomputed_tokens == 64 - bad[0] * BLOCK
    assert usage.fallback_reason == "rejected"
    assert built.engine.stats.num_load_fallbacks == {("rejected", "recompute"): 1}
    assert find_violations(built.engine.scheduler.kv_cache_manager) == []
    assert built.engine.scheduler.kv_cache_manager.usage == 0


def test_late_bytes_change_no_token_and_the_engine_sleeps_beside_them(computed, copy_connector, build_tiny, run_engine, oracle):
    source, blocks = computed
    connector = copy_connector({"r": (64, blocks)}, source)
    connector.worker.late = {blocks[2], blocks[3]}
    engine = build_tiny(connector).engine
    found = run_engine(engine, [request()], after_step=lambda _: connector.worker.bring_late_bytes())
    oracle.assert_greedy(PROMPT, found["r"].token_ids)
    assert engine.stats.num_quarantined_blocks == 2
    assert engine.has_requests()
    assert not engine.has_work(), "nothing can be done until the connector says so"
    connector.worker.late = set()
    engine.wake()
    assert engine.has_work()
    while engine.has_work():
        engine.step()
    assert engine.stats.num_quarantined_blocks == 0
    assert not engine.has_requests()
    assert engine.scheduler.kv_cache_manager.usage == 0


def test_sleeping_engine_is_woken_by_a_failed_load(computed, copy_connector, build_tiny, run_engine, oracle):
    source, blocks = computed
    connector = copy_connector({"r": (64, blocks)}, source, hold=True)
    connector.worker.bad = {blocks[0]}
    engine = build_tiny(connector).engine
    assert run_engine(engine, [request()]) == {}
    assert not engine.has_work()
    connector.worker.hold = False
    engine.wake()
    oracle.assert_greedy(PROMPT, run_engine(engine, [])["r"].token_ids)


def test_policy_of_the_configuration_ends_the_request(computed, copy_connector, build_tiny, run_engine):
    source, blocks = computed
    connector = copy_connector({"r": (64, blocks)}, source)
    connector.worker.bad = {blocks[1]}
    built = build_tiny(connector, connector__kv_load_failure_policy="fail")
    found = run_engine(built.engine, [request()])
    assert (found["r"].finish_reason, found["r"].outputs[-1].error.code) == ("error", "transfer_error")
    assert built.engine.stats.num_load_fallbacks == {("rejected", "fail"): 1}
    assert built.engine.scheduler.kv_cache_manager.usage == 0
