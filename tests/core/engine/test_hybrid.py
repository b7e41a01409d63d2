"""Engines of models that mix full attention with sliding windows or chunks, against transformers."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, Llama4TextConfig

from core.kv.invariants import find_violations
from core.request import NewRequest
from core.wire.sampling import SamplingParams

pytestmark = pytest.mark.slow

VOCAB = 211
BLOCK = 16
TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {
    # five sliding layers and a full one, as the real one; the window is no multiple of a block
    "gemma3": Gemma3TextConfig(**TINY, sliding_window=56, query_pre_attn_scalar=16),
    # five chunked layers and one without rope
    "llama4": Llama4TextConfig(
        **TINY,
        attention_chunk_size=4 * BLOCK,
        moe_layers=[],
        intermediate_size_mlp=80,
        no_rope_layers=[1, 1, 1, 0, 1, 1],
        floor_scale=100,
        attn_scale=0.3,
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def tiny_hybrid(request, tmp_path_factory, make_oracle):
    """A random model with spread-out logits, as a folder and as its oracle."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(MODELS[request.param], dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.3 if "norm" in name else 0.2)
            if "norm" in name and request.param == "llama4":
                parameter.add_(1.0)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps({}))
    return folder, make_oracle(model)


@pytest.fixture
def oracle(tiny_hybrid):
    return tiny_hybrid[1]


@pytest.fixture
def build_hybrid(tiny_hybrid, build_tiny):
    return lambda **settings: build_tiny(model__name=str(tiny_hybrid[0]), **settings)


def request(name, prompt, **sampling):
    return NewRequest(request_id=name, prompt_token_ids=prompt, sampling=SamplingParams(temperature=0.0, **sampling))


def prompts(lengths, seed=0):
    generator = np.random.default_rng(seed)
    return [generator.integers(3, VOCAB, length).tolist() for length in lengths]


def assert_nothing_held(built):
    manager = built.engine.scheduler.kv_cache_manager
    assert manager.usage == 0
    assert find_violations(manager) == []


def test_layers_are_spread_over_groups_of_equal_size(build_hybrid):
    groups = build_hybrid().pool.config.groups
    assert [len(group.layer_indices) for group in groups] == [1] * 6


def test_prompts_across_the_window_in_chunks_give_what_the_model_gives_each_alone(build_hybrid, run_engine, oracle):
    built = build_hybrid(scheduler__max_num_batched_tokens=40, scheduler__max_num_seqs=6, cache__num_blocks=400)
    texts = prompts([3, 55, 56, 57, 63, 64, 65, 130, 200, 257])
    found = run_engine(
        built.engine, [request(f"r{i}", text, max_tokens=12 + 8 * i) for i, text in enumerate(texts)], per_step=2
    )
    for i, text in enumerate(texts):
        assert len(found[f"r{i}"].token_ids) == 12 + 8 * i
        oracle.assert_greedy(text, found[f"r{i}"].token_ids)
    assert_nothing_held(built)


def test_prompt_of_2000_tokens_agrees_and_holds_few_blocks_of_local_layers(build_hybrid, run_engine, oracle):
    built = build_hybrid(scheduler__max_num_batched_tokens=256, cache__num_blocks=400)
    (text,) = prompts([2000])
    manager, most = built.engine.scheduler.kv_cache_manager, 0

    def note_usage(engine):
        nonlocal most
        most = max(most, round(manager.usage * (built.num_blocks - 1)))

    found = run_engine(built.engine, [request("r", text, max_tokens=20)], after_step=note_usage)
    oracle.assert_greedy(text, found["r"].token_ids)
    of_full_layers = -(-2020 // BLOCK)
    of_local_layers = -(-(4 * BLOCK + 256) // BLOCK) + 1
    assert of_full_layers < most <= of_full_layers + 5 * of_local_layers
    assert_nothing_held(built)


def test_prefix_hits_change_no_token(build_hybrid, run_engine, oracle):
    built = build_hybrid(scheduler__max_num_batched_tokens=80, cache__num_blocks=400)
    (common,) = prompts([160], seed=1)
    tails = ([], [5], [5, 6, 7], list(range(90, 130)))
    for number, tail in enumerate(tails):
        text = common + tail
        found = run_engine(built.engine, [request(f"r{number}", text, max_tokens=8)])
        oracle.assert_greedy(text, found[f"r{number}"].token_ids)
        stats = found[f"r{number}"].outputs[0].prefill_stats
        assert (stats.num_local_cached_tokens > 100) == (number > 0)
    assert_nothing_held(built)


def test_hit_whose_blocks_are_shared_with_a_running_request_changes_no_token(build_hybrid, run_engine, oracle):
    built = build_hybrid(scheduler__max_num_batched_tokens=64, cache__num_blocks=400)
    (common,) = prompts([150], seed=3)
    texts = [common + [number] * number for number in range(3, 9)]
    found = run_engine(built.engine, [request(f"r{i}", text, max_tokens=70) for i, text in enumerate(texts)], per_step=1)
    assert built.engine.stats.num_prefix_hit_tokens > 0
    for i, text in enumerate(texts):
        oracle.assert_greedy(text, found[f"r{i}"].token_ids)
    assert_nothing_held(built)


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_preempted_requests_give_the_same_tokens(enable_prefix_caching, build_hybrid, run_engine, oracle):
    built = build_hybrid(
        cache__num_blocks=110,
        cache__enable_prefix_caching=enable_prefix_caching,
        scheduler__max_num_batched_tokens=64,
    )
    texts = prompts([50, 60, 70, 80, 90, 100], seed=2)
    found = run_engine(built.engine, [request(f"r{i}", text, max_tokens=120) for i, text in enumerate(texts)])
    assert built.engine.stats.num_preemptions > 0
    for i, text in enumerate(texts):
        assert len(found[f"r{i}"].token_ids) == 120
        oracle.assert_greedy(text, found[f"r{i}"].token_ids)
    assert_nothing_held(built)


def test_blocks_that_others_had_are_read_nowhere_outside_the_window(build_hybrid, run_engine, oracle):
    built = build_hybrid(scheduler__max_num_batched_tokens=64, cache__num_blocks=120)
    texts = prompts([180, 190, 200], seed=4)
    for i, text in enumerate(texts):
        built.pool.cache.pool[1:].fill_(float("nan"))  # nothing is cached between requests but what the next may not use
        built.engine.scheduler.kv_cache_manager.reset_prefix_cache()
        oracle.assert_greedy(text, run_engine(built.engine, [request(f"r{i}", text, max_tokens=40)])[f"r{i}"].token_ids)
    assert not built.pool.cache.pool[0].any(), "the null block was written"
