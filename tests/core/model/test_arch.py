"""Parsing of ``config.json`` and the model fingerprint."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from core.errors import ConfigError
from core.model.arch import AttentionTemperature, ModelArch, model_fingerprint, parse_arch
from core.model.rope import Rope

LLAMA = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


def parse(**overrides: object) -> ModelArch:
    return parse_arch({**LLAMA, **overrides})


def test_reads_sizes_and_derives_head_dim():
    arch = parse()
    assert (arch.num_layers, arch.num_heads, arch.num_kv_heads, arch.head_dim) == (4, 4, 2, 16)
    assert (arch.ropes, arch.dtype) == ((Rope(5000.0),) * 4, "bfloat16")
    assert arch.attention_scale == 0.25
    assert parse(head_dim=32).head_dim == 32
    assert parse(num_key_value_heads=None).num_kv_heads == 4


@pytest.mark.parametrize(("value", "expected"), [(2, (2,)), ([2, 7], (2, 7)), (None, ())])
def test_eos_may_be_one_id_several_or_none(value, expected):
    assert parse(eos_token_id=value).eos_token_ids == expected


@pytest.mark.parametrize(
    ("model_type", "qkv", "output", "qk_norm"),
    [
        ("llama", False, False, "none"),
        ("mistral", False, False, "none"),
        ("qwen2", True, False, "none"),
        ("qwen3", False, False, "weighted"),
    ],
)
def test_architectures_fix_their_biases_and_norms(model_type, qkv, output, qk_norm):
    arch = parse(model_type=model_type)
    assert (arch.qkv_bias, arch.attention_output_bias, arch.qk_norm) == (qkv, output, qk_norm)


def test_llama_and_qwen3_read_attention_bias():
    for model_type in ("llama", "qwen3"):
        arch = parse(model_type=model_type, attention_bias=True)
        assert arch.qkv_bias
        assert arch.attention_output_bias


def test_both_layouts_of_rope_settings_mean_the_same():
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
    old = parse(rope_scaling={"rope_type": "llama3", **scaling})
    new = parse(rope_theta=None, rope_parameters={"rope_type": "llama3", "rope_theta": 5000.0, **scaling})
    older = parse(rope_scaling={"type": "linear", "factor": 2})
    assert old == new
    assert old.ropes == (Rope(5000.0, "llama3", 8.0, 1.0, 4.0, 256),) * 4
    assert older.ropes == (Rope(5000.0, "linear", 2.0),) * 4


def test_both_layouts_at_once_must_mean_the_same():
    scaling = {"rope_type": "linear", "factor": 2.0}
    new = {**scaling, "rope_theta": 5000.0}
    assert parse(rope_parameters=new, rope_scaling=scaling).ropes == (Rope(5000.0, "linear", 2.0),) * 4
    assert parse(rope_theta=None, rope_parameters=new, rope_scaling=new).ropes == (Rope(5000.0, "linear", 2.0),) * 4
    for nothing in (None, {}):
        assert parse(rope_parameters=new, rope_scaling=nothing).ropes == (Rope(5000.0, "linear", 2.0),) * 4
        assert parse(rope_parameters=nothing, rope_scaling=scaling).ropes == (Rope(5000.0, "linear", 2.0),) * 4
    contradictions: list[dict[str, object]] = [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, "rope_scaling": scaling},
        {"rope_parameters": new, "rope_scaling": {**scaling, "factor": 4.0}},
        {"rope_parameters": new, "rope_scaling": scaling, "rope_theta": None},  # whose base is not that of rope_parameters
    ]
    for overrides in contradictions:
        with pytest.raises(ConfigError, match=r"rope_parameters \(.*\) and rope_scaling \(.*\) contradict") as caught:
            parse(**overrides)
        assert caught.value.param == "rope_scaling"


@pytest.mark.parametrize(
    ("overrides", "field", "words"),
    [
        (
            {"model_type": "gpt2"},
            "model_type",
            ["gpt2", "gemma3_text, idefics3, llama, llama4_text, mistral", "smolvlm"],
        ),
        ({"model_type": None}, "model_type", ["None"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling", ["yarn", "linear"]),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling", ["factor"]),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_parameters", ["dynamic"]),
        (
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope_scaling",
            ["yarn"],
        ),
        ({"partial_rotary_factor": 0.5}, "rope_scaling", ["partial_rotary_factor"]),
        ({"hidden_act": "gelu"}, "hidden_act", ["gelu", "silu"]),
        ({"vocab_size": None}, "vocab_size", ["vocab_size"]),
        ({"num_hidden_layers": "4"}, "num_hidden_layers", ["'4'"]),
        ({"num_key_value_heads": 3}, "num_key_value_heads", ["4", "3"]),
        ({"model_type": "mistral", "sliding_window": -1}, "sliding_window", ["-1"]),
        ({"model_type": "mistral", "sliding_window": 8, "layer_types": ["full_attention"]}, "layer_types", ["1 of 4"]),
        ({"layer_types": ["full_attention"]}, "layer_types", ["1 of 4"]),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types", ["sliding_attention", "supported: full_attention"]),
        (
            {"model_type": "qwen3", "use_sliding_window": False, "layer_types": ["sliding_attention"] * 4},
            "layer_types",
            ["sliding_attention", "sliding_window is off"],
        ),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "layer_types": ["linear_attention"] * 4},
            "layer_types",
            ["linear_attention", "full_attention, sliding_attention"],
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config", ["fp8"]),
        (
            {"model_type": "smolvlm", "text_config": LLAMA, "quantization_config": {"quant_method": "awq"}},
            "quantization_config",
            ["awq"],
        ),
        (
            {"model_type": "smolvlm", "text_config": {**LLAMA, "quantization_config": {"quant_method": "gptq"}}},
            "quantization_config",
            ["gptq"],
        ),
    ],
)
def test_refuses_what_it_cannot_compute_and_names_the_field(overrides, field, words):
    with pytest.raises(ConfigError) as caught:
        parse(**overrides)
    assert caught.value.param == field
    assert all(word in str(caught.value) for word in words)


def test_windows_are_per_layer():
    assert parse(model_type="mistral", sliding_window=8).sliding_windows == (8,) * 4
    assert parse(model_type="mistral", sliding_window=None).sliding_windows == (None,) * 4
    assert parse(model_type="llama", sliding_window=8).sliding_windows == (None,) * 4
    assert parse(model_type="qwen2", sliding_window=8).sliding_windows == (None,) * 4
    gated = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8}
    assert parse(**gated, max_window_layers=3).sliding_windows == (None, None, None, 8)
    for model_type in ("llama", "mistral", "qwen2", "qwen3"):
        full = parse(model_type=model_type, sliding_window=None, layer_types=["full_attention"] * 4)
        assert full.sliding_windows == (None,) * 4
    assert parse(layer_types=["attention"] * 4) == parse()  # an older name of full attention
    types = ["sliding_attention", "full_attention"] * 2
    assert parse(**gated, layer_types=types).sliding_windows == (8, None, 8, None)


GEMMA3 = {
    "model_type": "gemma3_text",
    "head_dim": 16,
    "query_pre_attn_scalar": 64,
    "sliding_window": 8,
    "num_hidden_layers": 7,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
LLAMA4 = {
    "model_type": "llama4_text",
    "num_hidden_layers": 5,
    "intermediate_size_mlp": 96,
    "moe_layers": [],
    "attention_chunk_size": 32,
}


def test_a_window_that_is_left_out_is_not_one_that_is_switched_off():
    assert parse(model_type="mistral").sliding_windows == (4096,) * 4
    gated = {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 2}
    assert parse(**gated).sliding_windows == (None, None, 4096, 4096)
    assert parse(**gated, sliding_window=None).sliding_windows == (None,) * 4
    assert parse(model_type="qwen3").sliding_windows == (None,) * 4


@pytest.mark.parametrize("model_type", ["mistral", "qwen2", "qwen3"])
def test_what_a_config_leaves_out_is_what_transformers_takes(model_type):
    from transformers import AutoConfig

    gate = {} if model_type == "mistral" else {"use_sliding_window": True}
    whole = AutoConfig.for_model(model_type, **gate)
    said = {"model_type": model_type, "vocab_size": 9, "hidden_size": 4096, "intermediate_size": 9, **gate}
    said |= {"num_hidden_layers": whole.num_hidden_layers, "num_attention_heads": whole.num_attention_heads}
    said |= {"bos_token_id": whole.bos_token_id, "eos_token_id": whole.eos_token_id}
    assert parse_arch(said) == parse_arch({**whole.to_dict(), **said})


def test_gemma3_slides_in_all_but_every_sixth_layer_and_has_a_rope_for_each_kind():
    arch = parse(**GEMMA3)
    assert arch.sliding_windows == (8,) * 5 + (None, 8)
    assert arch.ropes == (Rope(1e4),) * 5 + (Rope(1e6), Rope(1e4))
    assert (arch.attention_scale, arch.embedding_scale, arch.activation) == (0.125, 8.0, "gelu_pytorch_tanh")
    assert arch.has_post_norms
    assert arch.tie_word_embeddings
    assert parse(**GEMMA3, sliding_window_pattern=2).sliding_windows == (8, None) * 3 + (8,)


def test_gemma3_stretches_the_rope_of_full_layers_only():
    old = parse(**GEMMA3, rope_scaling={"rope_type": "linear", "factor": 8.0})
    both = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert old.ropes[4:6] == (Rope(1e4), Rope(1e6, "linear", 8.0))
    assert parse(**{**GEMMA3, "rope_theta": None, "rope_local_base_freq": None}, rope_parameters=both) == old


GEMMA3_ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
LINEAR = {"rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize(
    "overrides",
    [
        {"rope_theta": 5e5, "rope_local_base_freq": 2e4},
        {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_parameters": {"full_attention": {"rope_type": "default"}}},
        {"rope_theta": 5e5, "rope_parameters": GEMMA3_ROPES, "rope_scaling": None},
        {"rope_theta": 5e5, "rope_scaling": {**LINEAR, "rope_theta": 7e5}},
        {"rope_parameters": {**GEMMA3_ROPES, "full_attention": {**LINEAR, "rope_theta": 7e5}}, "rope_scaling": LINEAR},
    ],
)
def test_gemma3_takes_its_ropes_as_transformers_does(overrides):
    from transformers import Gemma3TextConfig

    whole = Gemma3TextConfig(**copy.deepcopy(overrides)).rope_parameters
    config = {**GEMMA3, "rope_theta": None, "rope_local_base_freq": None, **overrides}
    expected = (
        Rope(rope["rope_theta"], rope["rope_type"], rope.get("factor", 1.0))
        for rope in (whole["sliding_attention"], whole["full_attention"])
    )
    assert parse(**config).ropes[4:6] == tuple(expected)


@pytest.mark.parametrize("scaling", [LINEAR, {"type": "linear", "factor": 8.0}])
def test_gemma3_refuses_a_scaling_that_its_nested_ropes_lack(scaling):
    with pytest.raises(ConfigError, match=r"rope_parameters \(.*\) and rope_scaling \(.*\) contradict"):
        parse(**GEMMA3, rope_parameters=GEMMA3_ROPES, rope_scaling=scaling)
    stretched = {**GEMMA3_ROPES, "full_attention": {**LINEAR, "rope_theta": 1e6}}
    parse(**GEMMA3, rope_parameters=stretched, rope_scaling=scaling)


def test_llama4_attends_in_chunks_where_it_rotates():
    arch = parse(**LLAMA4)
    assert arch.attention_chunk_sizes == (32, 32, 32, None, 32)
    assert arch.ropes == (Rope(5000.0),) * 3 + (None, Rope(5000.0))
    assert (arch.intermediate_size, arch.qk_norm) == (96, "unit")
    assert arch.temperature == AttentionTemperature(8192.0, 0.1)
    named = parse(**LLAMA4, no_rope_layers=[0, 1, 1, 1, 1])
    assert [rope is None for rope in named.ropes] == [True, False, False, False, False]
    assert named.attention_chunk_sizes == (None, 32, 32, 32, 32)
    assert parse(**LLAMA4, no_rope_layers=[1] * 5).temperature is None


@pytest.mark.parametrize(
    ("config", "overrides", "field"),
    [
        (GEMMA3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (GEMMA3, {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA3, {"hidden_activation": "gelu"}, "hidden_activation"),
        (GEMMA3, {"sliding_window": None}, "sliding_window"),
        (LLAMA4, {"moe_layers": None}, "moe_layers"),
        (LLAMA4, {"moe_layers": [1, 3]}, "moe_layers"),
        (LLAMA4, {"attention_chunk_size": None}, "attention_chunk_size"),
        (LLAMA4, {"no_rope_layers": [1, 0]}, "no_rope_layers"),
        (LLAMA4, {"layer_types": ["sliding_attention"] * 5}, "layer_types"),
        (GEMMA3, {"layer_types": ["chunked_attention"] * 7}, "layer_types"),
    ],
)
def test_refuses_what_hybrid_models_may_have_and_is_not_computed_here(config, overrides, field):
    with pytest.raises(ConfigError) as caught:
        parse(**{**config, **overrides})
    assert caught.value.param == field


@pytest.mark.parametrize("model_type", ["idefics3", "smolvlm"])
def test_the_text_half_of_a_model_that_sees_images_is_a_model_of_its_own(model_type):
    text = {name: value for name, value in LLAMA.items() if not name.endswith("token_id")}
    whole = {"model_type": model_type, "text_config": text, "eos_token_id": [2, 7], "tie_word_embeddings": True}
    arch = parse_arch(whole)
    assert arch.weights_prefix == "model.text_model"
    assert (arch.eos_token_ids, arch.bos_token_id, arch.dtype) == ((2, 7), None, "bfloat16")
    expected = parse(tie_word_embeddings=True, eos_token_id=[2, 7], bos_token_id=None)
    assert replace(arch, weights_prefix="model") == expected
    assert model_fingerprint(arch, "w") == model_fingerprint(expected, "w")


def test_the_whole_model_says_whether_head_and_embedding_are_one():
    arch = parse_arch({"model_type": "smolvlm", "text_config": {**LLAMA, "tie_word_embeddings": True}})
    assert not arch.tie_word_embeddings


def test_fingerprint_is_the_same_in_every_process_and_release():
    assert model_fingerprint(parse(), "weights").hex() == "3f03dc2a06984da360500764be62658b"


@pytest.mark.parametrize("change", [{"rope_theta": 5001.0}, {"rms_norm_eps": 1e-6}, {"num_hidden_layers": 5}])
def test_fingerprint_differs_where_keys_and_values_would(change):
    assert model_fingerprint(parse(**change), "weights") != model_fingerprint(parse(), "weights")


def test_fingerprint_differs_where_weights_are_quantized_at_load():
    assert model_fingerprint(parse(), "weights", "int8") != model_fingerprint(parse(), "weights")
    assert model_fingerprint(parse(), "weights", "none") == model_fingerprint(parse(), "weights")


def test_fingerprint_differs_for_other_weights():
    assert model_fingerprint(parse(), "weights") != model_fingerprint(parse(), "other weights")


@pytest.mark.parametrize("change", [{"max_position_embeddings": 99}, {"eos_token_id": 5}, {"torch_dtype": "float16"}])
def test_fingerprint_ignores_what_changes_no_key_or_value(change):
    assert model_fingerprint(parse(**change), "weights") == model_fingerprint(parse(), "weights")
