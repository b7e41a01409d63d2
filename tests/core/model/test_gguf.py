"""GGUF conversion, on files written by the ``gguf`` package from tiny models of transformers."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from core.errors import ConfigError
from core.model.arch import parse_arch
from core.model.gguf import convert_gguf, read_hf_config
from core.model.loader import load_decoder

TOKENS = [3, 50, 61, 2, 44, 9, 13, 90]
GEMMA3 = {"num_hidden_layers": 7, "sliding_window": 5, "query_pre_attn_scalar": 16, "tie_word_embeddings": True}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def interleave(weight, num_heads):
    """Return the rows of q or k as llama.cpp stores them for the llama architecture: rope pairs side by side."""
    halves = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, model, architecture, *, rope_freqs=None, quantization=None, metadata=None):
    """Write a model with a tokenizer of as many one-letter tokens as it has ids."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim if hasattr(config, "head_dim") else 8)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters["full_attention"] if architecture == "gemma3" else config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if architecture == "gemma3":
        writer.add_sliding_window(config.sliding_window)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    tokens = [chr(0x100 + index) for index in range(config.vocab_size)]
    tokens[2] = tokens[0] + tokens[1]
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges([f"{tokens[0]} {tokens[1]}"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(7)
    for key, value in (metadata or {}).items():
        writer.add_string(key, value)
    names = gguf.get_tensor_name_map(architecture_id(architecture), config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        add_tensor(writer, names.get_name(name, (".weight", ".bias")), tensor.numpy(), config, architecture, quantization)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def architecture_id(architecture):
    return next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)


def add_tensor(writer, name, values, config, architecture, quantization):
    if architecture == "gemma3" and name.endswith("norm.weight"):
        values = values + 1
    if architecture == "llama" and ".attn_q." in name:
        values = interleave(values, config.num_attention_heads)
    if architecture == "llama" and ".attn_k." in name:
        values = interleave(values, config.num_key_value_heads)
    if quantization is None or values.ndim == 1:
        writer.add_tensor(name, np.ascontiguousarray(values))
    else:
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(values), quantization), raw_dtype=quantization)


SMALL = {
    "block_count": 6,
    "context_length": 64,
    "embedding_length": 32,
    "feed_forward_length": 32,
    "attention.head_count": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}


def small_config(folder, fields, metadata=None, architecture="llama", tensors=("token_embd.weight",)):
    """Return the configuration of a file with these fields of its architecture and this other metadata."""
    window = {"attention.sliding_window": 8} if architecture == "gemma3" else {}
    named = {f"{architecture}.{name}": value for name, value in {**SMALL, **window, **fields}.items()}
    writer = gguf.GGUFWriter(folder / "small.gguf", architecture)
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in {**named, **(metadata or {})}.items():
        adders.get(type(value), writer.add_array)(key, value)
    for name in tensors:
        writer.add_tensor(name, np.ones((16, 32) if name.startswith("token") else 8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_hf_config(folder / "small.gguf")


def convert(path, folder):
    folder.mkdir()
    convert_gguf(path, folder)
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True}),
        ("qwen2", {}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("gemma3", GEMMA3),
        ("gemma3", {**GEMMA3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    ],
)
def test_a_converted_model_gives_the_logits_of_its_original(architecture, overrides, tiny_model, paged, tmp_path):
    model = tiny_model("gemma3_text" if architecture == "gemma3" else architecture, **overrides)
    path = write_gguf(tmp_path / "model.gguf", model.reference, architecture)
    arch = parse_arch(convert(path, tmp_path / "converted"))
    assert arch == parse_arch({**json.loads((model.folder / "config.json").read_text()), "eos_token_id": [2, 7]})
    decoder = load_decoder(arch, [tmp_path / "converted" / "model.safetensors"], dtype=torch.float32)
    torch.testing.assert_close(paged(decoder).step([TOKENS]), model.logits(TOKENS), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("quantization", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F16])
def test_dequantizes_to_the_values_that_the_file_stands_for(quantization, tiny_model, tmp_path):
    model = tiny_model("llama", hidden_size=64, intermediate_size=96, num_attention_heads=4)
    path = write_gguf(tmp_path / "model.gguf", model.reference, "llama", quantization=quantization)
    convert(path, tmp_path / "converted")
    converted = load_file(tmp_path / "converted" / "model.safetensors")
    for name, tensor in model.reference.state_dict().items():
        assert converted[name].dtype == torch.float32
        torch.testing.assert_close(converted[name], tensor, atol=0.02, rtol=0.0)


def test_the_folder_opens_in_transformers(tiny_model, tmp_path):
    model = tiny_model("llama")
    convert(write_gguf(tmp_path / "model.gguf", model.reference, "llama"), tmp_path / "converted")
    reopened = AutoModelForCausalLM.from_pretrained(tmp_path / "converted").eval()
    with torch.inference_mode():
        torch.testing.assert_close(reopened(torch.tensor([TOKENS])).logits[0], model.logits(TOKENS))


def test_conversion_is_deterministic(tiny_model, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", tiny_model("llama").reference, "llama")
    convert(path, tmp_path / "first")
    convert(path, tmp_path / "second")
    names = sorted(file.name for file in (tmp_path / "first").iterdir())
    assert "model.safetensors" in names
    assert [(tmp_path / "first" / name).read_bytes() for name in names] == [
        (tmp_path / "second" / name).read_bytes() for name in names
    ]


def test_recovers_llama3_rope_from_its_frequency_divisors(tiny_model, tmp_path):
    config = LlamaConfig(hidden_size=128, num_attention_heads=2, rope_parameters=LLAMA3_ROPE)
    plain = LlamaConfig(hidden_size=128, num_attention_heads=2, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    divisors = (LlamaRotaryEmbedding(plain).inv_freq / LlamaRotaryEmbedding(config).inv_freq).numpy()
    model = tiny_model("llama", hidden_size=128, num_attention_heads=2, head_dim=64, rope_parameters=LLAMA3_ROPE)
    path = write_gguf(tmp_path / "model.gguf", model.reference, "llama", rope_freqs=divisors)
    assert convert(path, tmp_path / "converted")["rope_parameters"] == LLAMA3_ROPE


def test_refuses_frequency_divisors_that_are_no_llama3_rope(tiny_model, tmp_path):
    divisors = np.linspace(1, 3, 8, dtype=np.float32)
    path = write_gguf(tmp_path / "model.gguf", tiny_model("llama").reference, "llama", rope_freqs=divisors)
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight"):
        convert(path, tmp_path / "converted")


def test_refuses_an_architecture_it_does_not_know(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "rwkv7")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="'rwkv7' is not supported; supported: gemma3, llama, qwen2, qwen3"):
        convert(tmp_path / "model.gguf", tmp_path / "converted")


def test_refuses_a_scaled_rope_it_does_not_know(tiny_model, tmp_path):
    model = tiny_model("llama")
    path = write_gguf(tmp_path / "model.gguf", model.reference, "llama", metadata={"llama.rope.scaling.type": "yarn"})
    with pytest.raises(ConfigError, match=r"llama\.rope\.scaling\.type='yarn'"):
        convert(path, tmp_path / "converted")


LINEAR = {"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0}
UNSCALED = {"rope_theta": 10000.0, "rope_type": "default"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, LINEAR),
        ({"rope.scaling.factor": 4.0}, LINEAR),
        ({"rope.scale_linear": 4.0}, LINEAR),
        ({"rope.scaling.type": "linear", "rope.scale_linear": 4.0}, LINEAR),
        ({"rope.scaling.factor": 4.0, "rope.scale_linear": 2.0}, LINEAR),
        ({"rope.scaling.factor": 0.0, "rope.scale_linear": 2.0}, UNSCALED),
        ({"rope.scaling.type": "linear"}, UNSCALED),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}, UNSCALED),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, UNSCALED),
        ({"rope.scaling.finetuned": False, "rope.scaling.original_context_length": 64}, UNSCALED),
    ],
)
def test_rope_is_scaled_as_llama_cpp_reads_it(fields, expected, tmp_path):
    assert small_config(tmp_path, fields)["rope_parameters"] == expected


def test_refuses_linear_scaling_beside_frequency_divisors(tmp_path):
    tensors = ("token_embd.weight", "rope_freqs.weight")
    with pytest.raises(ConfigError, match=r"llama\.rope\.scale_linear=4\.0") as caught:
        small_config(tmp_path, {"rope.scale_linear": 4.0}, tensors=tensors)
    assert caught.value.param == "llama.rope.scale_linear"
    assert small_config(tmp_path, {"rope.scale_linear": 1.0}, tensors=tensors)["rope_parameters"]["rope_type"] == "llama3"


@pytest.mark.parametrize(
    ("architecture", "name", "value"),
    [
        ("llama", "attention.causal", False),
        ("qwen2", "rope.dimension_count", 8),
        ("qwen3", "rope.dimension_count", 32),
        ("llama", "rope.scaling.attn_factor", 0.5),
        ("gemma3", "attn_logit_softcapping", 50.0),
        ("gemma3", "final_logit_softcapping", 30.0),
        ("gemma3", "rope.freq_base_swa", "10000"),
        ("gemma3", "attention.sliding_window", 0),
        ("gemma3", "attention.sliding_window_pattern", 0),
        ("gemma3", "attention.sliding_window_pattern", [True, False]),
        ("llama", "attention.head_count", [2, 2]),
        ("llama", "attention.head_count_kv", 0),
        ("llama", "block_count", "6"),
        ("qwen3", "attention.key_length", 0),
        ("llama", "attention.layer_norm_rms_epsilon", "1e-5"),
    ],
)
def test_refuses_a_field_that_cannot_be_honoured(architecture, name, value, tmp_path):
    with pytest.raises(ConfigError, match="is not supported; supported: ") as caught:
        small_config(tmp_path, {name: value}, architecture=architecture)
    assert f"{architecture}.{name}={value!r}" in caught.value.message
    assert caught.value.param == f"{architecture}.{name}"


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_fields_that_say_what_is_assumed_change_nothing(architecture, tmp_path):
    assumed = {"attention.causal": True, "rope.dimension_count": 16, "rope.scaling.attn_factor": 1.0}
    if architecture == "gemma3":
        assumed |= {"attn_logit_softcapping": 0.0, "final_logit_softcapping": 0.0, "rope.freq_base_swa": 10000.0}
        assumed |= {"attention.sliding_window_pattern": 6}
    plain = small_config(tmp_path, {}, architecture=architecture)
    assert small_config(tmp_path, assumed, {"split.count": 1}, architecture) == plain
    parse_arch(plain)


@pytest.mark.parametrize(
    ("pattern", "sliding"),
    [(6, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (1, []), ([True, True, False, False, True, False], [0, 1, 4])],
)
def test_gemma_slides_in_the_layers_that_the_file_names(pattern, sliding, tmp_path):
    config = small_config(
        tmp_path, {"attention.sliding_window_pattern": pattern, "rope.freq_base_swa": 5e4}, architecture="gemma3"
    )
    assert [layer for layer, kind in enumerate(config["layer_types"]) if kind == "sliding_attention"] == sliding
    assert config["rope_parameters"]["sliding_attention"]["rope_theta"] == 5e4
    parse_arch(config)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ({"eos": 1}, [1, 3, 5]),
        ({"eos": 1, "eot": 3}, [1, 3, 5]),
        ({"eos": 1, "unknown": 5}, [1, 3]),  # SmolLM2: the end of a text is also its unknown token
        ({"eos": 3}, [1, 3, 5]),
        ({"eos": 3, "bos": 1}, [3, 5]),
        ({"eos": 3, "bos": 5}, [1, 3, 5]),  # Qwen: the end of a text is also its BOS
        ({"eos": 6}, [1, 3, 5, 6]),
        ({}, [1, 3, 5]),
    ],
)
def test_tokens_spelled_like_an_end_end_answers(ids, expected, tmp_path):
    metadata = {f"tokenizer.ggml.{kind}_token_id": token_id for kind, token_id in ids.items()}
    tokens = ["<pad>", "<eos>", "<start_of_turn>", "<end_of_turn>", "end", "<|endoftext|>", "</s>"]
    metadata["tokenizer.ggml.tokens"] = tokens
    metadata["tokenizer.ggml.token_type"] = [3, 3, 3, 3, 1, 3, 4]  # Gemma's vocabulary has HTML's tags, as ordinary text
    assert small_config(tmp_path, {}, metadata)["eos_token_id"] == expected


def test_refuses_an_end_that_is_no_token(tmp_path):
    with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.eos_token_id=\[1, 106\]"):
        small_config(tmp_path, {}, {"tokenizer.ggml.eos_token_id": [1, 106]})


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q1_0, gguf.GGMLQuantizationType.I32])
def test_names_a_tensor_of_a_type_that_cannot_be_dequantized(kind, tiny_model, tmp_path, monkeypatch):
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    monkeypatch.setattr(gguf.quants, "quantize", lambda values, _: stored(values, block_elements, block_bytes))
    model = tiny_model("qwen3", hidden_size=128, intermediate_size=128, num_attention_heads=4, head_dim=32)
    path = write_gguf(tmp_path / "model.gguf", model.reference, "qwen3", quantization=kind)
    for read in (lambda: convert(path, tmp_path / "converted"), lambda: read_hf_config(path)):
        with pytest.raises(ConfigError, match=rf"GGUF tensor 'token_embd\.weight' has the type {kind.name}"):
            read()
    assert list((tmp_path / "converted").iterdir()) == []


def stored(values, block_elements, block_bytes):
    return np.zeros((len(values), values.shape[-1] // block_elements * block_bytes), dtype=np.uint8)


def test_a_first_part_with_embeddings_names_how_to_join_the_parts(tmp_path):
    with pytest.raises(ConfigError, match=r"split\.count=3.*llama-gguf-split --merge") as caught:
        small_config(tmp_path, {}, {"split.no": 0, "split.count": 3})
    assert caught.value.param == "model.name"


def test_a_part_without_embeddings_names_how_to_join_the_parts(tiny_model, tmp_path):
    model = tiny_model("llama").reference
    weights = {name: tensor for name, tensor in model.state_dict().items() if "embed_tokens" not in name}
    model.state_dict = lambda: weights
    path = write_gguf(tmp_path / "model.gguf", model, "llama")
    with pytest.raises(ConfigError, match=r"no token embeddings.*llama-gguf-split --merge") as caught:
        convert(path, tmp_path / "converted")
    assert caught.value.param == "model.name"


@pytest.mark.parametrize("content", [b"", b"not a gguf file at all, but long enough to hold a header"])
def test_names_a_file_that_is_no_gguf(content, tmp_path):
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.gguf cannot be read as a GGUF file"):
        convert(tmp_path / "model.gguf", tmp_path / "converted")


def test_names_a_truncated_file(tiny_model, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", tiny_model("llama").reference, "llama")
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ConfigError, match=r"model\.gguf cannot be read as a GGUF file"):
        convert(path, tmp_path / "converted")
