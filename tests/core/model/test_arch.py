"""Parsing of ``config.json`` and the model fingerprint."""

from __future__ import annotations

import pytest

from core.errors import ConfigError
from core.model.arch import ModelArch, model_fingerprint, parse_arch
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


@pytest.mark.parametrize(
    ("overrides", "field", "words"),
    [
        ({"model_type": "gpt2"}, "model_type", ["gpt2", "gemma3_text, llama, llama4_text, mistral, qwen2, qwen3"]),
        ({"model_type": None}, "model_type", ["None"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling", ["yarn", "linear"]),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling", ["factor"]),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_parameters", ["dynamic"]),
        ({"partial_rotary_factor": 0.5}, "rope_scaling", ["partial_rotary_factor"]),
        ({"hidden_act": "gelu"}, "hidden_act", ["gelu", "silu"]),
        ({"vocab_size": None}, "vocab_size", ["vocab_size"]),
        ({"num_hidden_layers": "4"}, "num_hidden_layers", ["'4'"]),
        ({"num_key_value_heads": 3}, "num_key_value_heads", ["4", "3"]),
        ({"model_type": "mistral", "sliding_window": -1}, "sliding_window", ["-1"]),
        ({"model_type": "mistral", "sliding_window": 8, "layer_types": ["full_attention"]}, "layer_types", ["1 of 4"]),
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
    types = ["sliding_attention", "full_attention"] * 2
    assert parse(**gated, layer_types=types).sliding_windows == (8, None, 8, None)


def test_fingerprint_is_the_same_in_every_process_and_release():
    assert model_fingerprint(parse(), "weights").hex() == "3f03dc2a06984da360500764be62658b"


@pytest.mark.parametrize("change", [{"rope_theta": 5001.0}, {"rms_norm_eps": 1e-6}, {"num_hidden_layers": 5}])
def test_fingerprint_differs_where_keys_and_values_would(change):
    assert model_fingerprint(parse(**change), "weights") != model_fingerprint(parse(), "weights")


def test_fingerprint_differs_for_other_weights():
    assert model_fingerprint(parse(), "weights") != model_fingerprint(parse(), "other weights")


@pytest.mark.parametrize("change", [{"max_position_embeddings": 99}, {"eos_token_id": 5}, {"torch_dtype": "float16"}])
def test_fingerprint_ignores_what_changes_no_key_or_value(change):
    assert model_fingerprint(parse(**change), "weights") == model_fingerprint(parse(), "weights")
