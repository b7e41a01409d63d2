import numpy as np
import pytest
import torch

from core.attention.base import AttentionBatch, AttentionSpec, KVLayout, PagedKVCache
from core.attention.sdpa import SdpaBackend
from core.connector import KVConnectorWorker
from core.engine.connector_steps import LayerwiseAttention, with_layer_hooks
from core.errors import PeerUnreachable
from core.request import NewRequest
from core.wire.sampling import SamplingParams

BLOCK = 16
PROMPT = list(range(10, 80))  # four full blocks and a partial one
SEQUENCE = ["handle_preemptions", "start_load_kv", "wait_for_save", "get_transfer_results", "get_block_ids_with_load_errors"]


def request(name="r", prompt=PROMPT, **sampling):
    return NewRequest(
        request_id=name, prompt_token_ids=prompt, sampling=SamplingParams(**{"temperature": 0.0, "max_tokens": 6, **sampling})
    )


@pytest.fixture
def computed_prompt(build_tiny):
    """Compute the prompt in one engine; return its pool, and where the prompt's blocks lie in it."""
    built = build_tiny()
    engine = built.engine
    engine.add_request(request(max_tokens=50))
    engine.step()
    (blocks,) = engine.scheduler.kv_cache_manager.get_block_ids("r")
    return built.pool.cache.pool.clone(), blocks[: -(-len(PROMPT) // BLOCK)]


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("num_tokens", [len(PROMPT), 64, 16])
def test_loaded_kv_gives_the_tokens_of_the_model(  # noqa: PLR0917
    is_async, num_tokens, computed_prompt, copy_connector, build_tiny, run_engine, oracle
):
    source, blocks = computed_prompt
    loaded = {"r": (num_tokens, blocks[: -(-num_tokens // BLOCK)])}
    connector = copy_connector(loaded, source, is_async)
    built = build_tiny(connector)
    found = run_engine(built.engine, [request(), request("other", PROMPT[5:])])
    oracle.assert_greedy(PROMPT, found["r"].token_ids)
    oracle.assert_greedy(PROMPT[5:], found["other"].token_ids)
    assert found["r"].outputs[0].prefill_stats.num_external_cached_tokens >= min(num_tokens, len(PROMPT) - 1)


def test_loaded_kv_is_used_and_not_computed_again(computed_prompt, copy_connector, build_tiny, run_engine, oracle):
    source, blocks = computed_prompt
    connector = copy_connector({"r": (64, blocks[:4])}, torch.zeros_like(source))
    found = run_engine(build_tiny(connector).engine, [request()])
    with pytest.raises(AssertionError, match="token"):
        oracle.assert_greedy(PROMPT, found["r"].token_ids)


def test_every_step_takes_the_connector_through_its_sequence(copy_connector, build_tiny):
    connector = copy_connector()
    engine = build_tiny(connector).engine
    engine.add_request(request(max_tokens=1))
    assert len(engine.step()) == 1
    assert connector.worker.calls == SEQUENCE
    engine.step()  # an empty one: it tells the runner and the connector that the request has ended
    assert connector.worker.calls == SEQUENCE * 2


def test_engine_waits_for_a_load_without_stepping(computed_prompt, copy_connector, build_tiny, run_engine, oracle):
    source, blocks = computed_prompt
    connector = copy_connector({"r": (len(PROMPT), blocks)}, source, hold=True)
    engine = build_tiny(connector).engine
    engine.add_request(request())
    steps = 0
    while engine.has_work():
        assert engine.step() == []
        steps += 1
    assert steps == 1
    assert engine.has_requests()
    assert engine.stats.num_loading == 1
    engine.wake()
    assert engine.has_work()
    engine.step()
    assert not engine.has_work()
    connector.worker.hold = False
    engine.wake()
    oracle.assert_greedy(PROMPT, run_engine(engine, [])["r"].token_ids)


def test_engine_keeps_stepping_while_its_connector_pushes(copy_connector, build_tiny):
    connector = copy_connector()
    engine = build_tiny(connector).engine
    assert not engine.has_work()
    connector.scheduler.has_pending_push_work = lambda: True
    engine.step()
    assert engine.has_work()


def test_other_requests_run_while_one_loads(copy_connector, computed_prompt, build_tiny, run_engine, oracle):
    source, blocks = computed_prompt
    connector = copy_connector({"r": (len(PROMPT), blocks)}, source, hold=True)
    engine = build_tiny(connector).engine
    found = run_engine(engine, [request(), request("other", PROMPT[3:])])
    assert set(found) == {"other"}
    oracle.assert_greedy(PROMPT[3:], found["other"].token_ids)


def test_error_before_the_pass_ends_the_engine_at_once(copy_connector, build_tiny):
    connector = copy_connector()
    connector.worker.raises["start_load_kv"] = PeerUnreachable("gone")
    engine = build_tiny(connector).engine
    engine.add_request(request())
    with pytest.raises(PeerUnreachable):
        engine.step()


@pytest.mark.parametrize("hook", ["wait_for_save", "get_transfer_results", "get_block_ids_with_load_errors"])
def test_error_behind_the_pass_comes_after_the_tokens_of_the_step(hook, copy_connector, build_tiny, oracle):
    connector = copy_connector()
    connector.worker.raises[hook] = RuntimeError("broken")
    engine = build_tiny(connector).engine
    engine.add_request(request(max_tokens=1))
    (output,) = engine.step()
    oracle.assert_greedy(PROMPT, output.new_token_ids)
    assert engine.has_work()
    with pytest.raises(RuntimeError, match="broken"):
        engine.step()


class LayerRecorder(KVConnectorWorker):
    """Logs the calls per layer, and whether the layer's KV was there."""

    def __init__(self, cache):
        self.cache = cache
        self.calls = []

    def register_kv_caches(self, pool):
        pass

    def start_load_kv(self, metadata):
        pass

    def wait_for_layer_load(self, layer):
        self.calls.append(("wait", layer, self.is_written(layer)))

    def save_kv_layer(self, layer):
        self.calls.append(("save", layer, self.is_written(layer)))

    def is_written(self, layer):
        return bool(self.cache.pool[1, layer % self.cache.pool.shape[1]].any())


def test_layer_hooks_wait_before_the_write_and_save_behind_it(build_tiny, run_engine):
    attention = SdpaBackend(PagedKVCache(torch.zeros(4, 3, 2, 2, BLOCK, 8), KVLayout.HND))
    recorder = LayerRecorder(attention.cache)
    wrapped = with_layer_hooks(attention, recorder, [(0, 1, 2)])
    built = build_tiny()
    runner = built.engine.runner
    inner, runner._attention = runner._attention, LayerwiseAttention(runner._attention, recorder, [(0, 1, 2)])
    recorder.cache = inner.cache
    run_engine(built.engine, [request(max_tokens=1)])
    expected = [(name, layer, name == "save") for layer in range(3) for name in ("wait", "save")]
    assert recorder.calls == expected
    assert isinstance(wrapped, LayerwiseAttention)


def test_layer_hooks_count_layers_as_the_model_does(build_tiny):
    attention = SdpaBackend(PagedKVCache(torch.zeros(4, 2, 2, 2, BLOCK, 8), KVLayout.HND))
    recorder = LayerRecorder(attention.cache)
    wrapped = with_layer_hooks(attention, recorder, [(0, 2), (1, 3)])
    key_value, query = torch.ones(1, 2, 2, 8), torch.ones(1, 6, 8)
    for group_id in (0, 1):
        one = np.array([1], dtype=np.int32)
        batch = AttentionBatch(np.array([0, 1], dtype=np.int32), one, one[None], np.array([BLOCK]), group_id)
        plan = wrapped.plan(batch)
        for layer in (0, 1):
            wrapped.write_kv(layer, key_value, plan)
            wrapped.attend(layer, query, AttentionSpec(6, 2, 8, 1.0), plan)
    assert [layer for name, layer, _ in recorder.calls if name == "wait"] == [0, 2, 1, 3]
    assert [layer for name, layer, _ in recorder.calls if name == "save"] == [0, 2, 1, 3]


def test_connector_without_layer_hooks_costs_nothing_per_layer(copy_connector):
    attention = SdpaBackend(PagedKVCache(torch.zeros(4, 3, 2, 2, BLOCK, 8), KVLayout.HND))
    assert with_layer_hooks(attention, copy_connector().worker, [(0, 1, 2)]) is attention
    assert with_layer_hooks(attention, None, [(0, 1, 2)]) is attention
