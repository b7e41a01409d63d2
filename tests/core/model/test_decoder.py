"""The decoder against transformers on tiny random models: one test per thing that an architecture may do differently."""

from __future__ import annotations

import pytest
import torch

from core.model.loader import load_decoder

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

LINEAR_ROPE = {"rope_type": "linear", "factor": 3.0}
GEMMA3 = {
    "tie_word_embeddings": True,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
LLAMA4 = {
    "moe_layers": [],
    "intermediate_size_mlp": 80,
    "attention_chunk_size": 24,
    "no_rope_layers": [1, 0, 1],
    "floor_scale": 10,
    "attn_scale": 0.3,
}
VARIANTS = {
    "llama": ("llama", {}),
    "llama, tied head": ("llama", {"tie_word_embeddings": True}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, llama3 rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama, linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}}),
    "llama, one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama, wide heads": ("llama", {"head_dim": 32}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, window": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {}),
    "qwen2, window in some layers": ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "gemma3": ("gemma3_text", GEMMA3),
    "gemma3, scaled rope": ("gemma3_text", {**GEMMA3, "rope_scaling": LINEAR_ROPE}),
    "gemma3, query scaling": ("gemma3_text", {**GEMMA3, "query_pre_attn_scalar": 50}),
    "gemma3, own head": ("gemma3_text", {**GEMMA3, "tie_word_embeddings": False}),
    "llama4": ("llama4_text", LLAMA4),
    "llama4, no norms of queries and keys": ("llama4_text", {**LLAMA4, "use_qk_norm": False}),
    "llama4, no temperature": ("llama4_text", {**LLAMA4, "attn_temperature_tuning": False}),
    "llama4, biases, llama3 rope": ("llama4_text", {**LLAMA4, "attention_bias": True, "rope_parameters": LLAMA3_ROPE}),
    "llama4, rope everywhere": ("llama4_text", {**LLAMA4, "no_rope_layers": [1, 1, 1]}),
    "qwen3": ("qwen3", {}),
    "qwen3, biases": ("qwen3", {"attention_bias": True}),
}


def random_tokens(count, seed=0):
    return torch.randint(0, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_then_decode_gives_the_logits_of_transformers(variant, tiny_model, paged):
    model_type, overrides = VARIANTS[variant]
    model = tiny_model(model_type, **overrides)
    tokens = random_tokens(70)
    expected = model.logits(tokens)
    run = paged(model.load())
    prefill = run.step([tokens[:60]])
    decode = [run.step([[token]]) for token in tokens[60:]]
    torch.testing.assert_close(torch.cat([prefill, *decode]), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("model_type", "overrides", "change"),
    [
        ("mistral", {"sliding_window": None}, {"sliding_window": 24}),
        ("gemma3_text", GEMMA3, {"sliding_window": 21}),
        ("gemma3_text", GEMMA3, {"rope_scaling": LINEAR_ROPE}),
        ("gemma3_text", GEMMA3, {"query_pre_attn_scalar": 50}),
        ("llama4_text", LLAMA4, {"attention_chunk_size": 32}),
        ("llama4_text", LLAMA4, {"use_qk_norm": False}),
        ("llama4_text", LLAMA4, {"attn_temperature_tuning": False}),
        ("llama4_text", LLAMA4, {"no_rope_layers": [1, 1, 1]}),
    ],
)
def test_variants_differ_so_that_the_comparison_can_fail(model_type, overrides, change, tiny_model):
    tokens = random_tokens(70)
    one, other = (tiny_model(model_type, **{**overrides, **more}).logits(tokens) for more in ({}, change))
    assert (one - other).abs().max() > 1e-2


@pytest.mark.parametrize(("model_type", "overrides"), [("qwen3", {}), ("gemma3_text", GEMMA3), ("llama4_text", LLAMA4)])
def test_chunked_prefill_gives_the_logits_of_one_pass(model_type, overrides, tiny_model, paged):
    model = tiny_model(model_type, **overrides)
    tokens = random_tokens(61)
    run = paged(model.load())
    chunks = [run.step([tokens[start : start + 16]]) for start in range(0, 61, 16)]
    torch.testing.assert_close(torch.cat(chunks), model.logits(tokens), atol=2e-4, rtol=1e-4)


def test_sequences_of_one_batch_do_not_see_each_other(tiny_model, paged):
    model = tiny_model("qwen2")
    prompts = [random_tokens(33, seed=1), random_tokens(5, seed=2), random_tokens(17, seed=3)]
    run = paged(model.load(), num_sequences=3)
    run.step([prompt[:-2] for prompt in prompts])
    mixed = run.step([prompts[0][-2:], prompts[1][-2:], prompts[2][-2:]])
    expected = torch.cat([model.logits(prompt)[-2:] for prompt in prompts])
    torch.testing.assert_close(mixed, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("rows", [[39], [3, 39, 0], []])
def test_output_rows_picks_rows_and_still_writes_all_kv(rows, tiny_model, paged):
    model = tiny_model("llama")
    tokens = random_tokens(41)
    expected = model.logits(tokens)
    run = paged(model.load())
    picked = run.step([tokens[:40]], output_rows=torch.tensor(rows, dtype=torch.int64))
    torch.testing.assert_close(picked, expected[rows], atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(run.step([tokens[40:]]), expected[40:], atol=2e-4, rtol=1e-4)


def test_int32_inputs_give_the_same_logits(tiny_model, paged):
    decoder = tiny_model("llama").load()
    run, other = paged(decoder), paged(decoder)
    tokens = random_tokens(8)
    expected = run.step([tokens])
    plan = other.backend.plan(other._batch(0, [(0, 8)]))
    with torch.inference_mode():
        ids, positions = torch.tensor(tokens, dtype=torch.int32), torch.arange(8, dtype=torch.int32)
        hidden = decoder.forward(ids, positions, other.backend, [plan])
        torch.testing.assert_close(decoder.compute_logits(hidden), expected, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("model_type", "overrides"), [("llama", {}), ("qwen3", {}), ("gemma3_text", GEMMA3), ("llama4_text", LLAMA4)]
)
def test_bfloat16_runs_and_stays_near_float32(model_type, overrides, tiny_model, paged):
    model = tiny_model(model_type, **overrides)
    tokens = random_tokens(20)
    decoder = load_decoder(model.arch, model.weight_files, dtype=torch.bfloat16)
    logits = paged(decoder).step([tokens])
    assert logits.dtype == torch.bfloat16
    similarity = torch.nn.functional.cosine_similarity(logits.float(), model.logits(tokens), dim=-1)
    assert similarity.min() > 0.99


def test_layers_with_and_without_window_use_their_own_kv_group(tiny_model):
    decoder = tiny_model("qwen2", use_sliding_window=True, sliding_window=20, max_window_layers=1).load()
    assert decoder.layer_groups == ((0,), (1, 2))
    places = [(place.group_id, place.index_in_group, place.spec.sliding_window) for place in decoder._places]
    assert places == [(0, 0, None), (1, 0, 20), (1, 1, 20)]
