"""Converts GGUF files, once, to folders of the Hugging Face layout: fp32 safetensors, config, tokenizer.

Owns llama.cpp's names and shapes of weights and metadata, and how to undo them. Knows nothing of caches or locks:
``core.model.hub`` chooses the folder. Torch-free; tensors are streamed one at a time, so memory stays at the size of the
largest one.
Formats: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from core.errors import ConfigError
from core.model.gguf_fields import Fields
from core.model.gguf_file import GGUFFile, GGUFTensor, can_dequantize, read_gguf
from core.model.gguf_tokenizer import end_tokens, token_id, write_tokenizer

CONVERTER_VERSION = 2  # part of the cache key: raise it when the output for the same file changes

Array = npt.NDArray[np.float32]

# llama.cpp stores the q and k rows of these architectures with each rope pair side by side; Hugging Face keeps halves.
_PERMUTED = frozenset({"llama"})
_ARCHITECTURES = {"gemma3": "gemma3_text", "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}

_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA3_LAYER_NAMES = {
    **_LAYER_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA3_27B_LAYERS = 62  # llama.cpp recognises this size by its number of layers; its queries have another scale
_GEMMA3_FULL_EVERY = 6  # layers; the others slide, if the file does not say otherwise
_EMBEDDINGS = "token_embd.weight"
_JOIN = "join the parts with llama-gguf-split --merge"
_ROPE_FREQS = "rope_freqs.weight"  # llama3 rope, given as one divisor per frequency


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One tensor of the output: its Hugging Face name and shape, and how to make its fp32 values."""

    name: str
    shape: tuple[int, ...]
    values: Callable[[], Array]


def convert_gguf(gguf_path: Path, folder: Path) -> None:
    """Write ``config.json``, ``generation_config.json``, tokenizer files and ``model.safetensors`` (fp32) into ``folder``.

    Deterministic: the same file gives the same bytes.

    Raises:
        ConfigError: the file is not a GGUF, has no embeddings, or its architecture, rope, tokenizer or a tensor is unsupported.
    """
    file = read_gguf(gguf_path)
    config = _hf_config(file)
    generation: dict[str, Any] = {key: config[key] for key in config if key in ("bos_token_id", "eos_token_id")}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation)
    write_tokenizer(file.metadata, gguf_path, folder)
    _write_safetensors(folder / "model.safetensors", _hf_tensors(file, config))


def read_hf_config(gguf_path: Path) -> dict[str, Any]:
    """Return the ``config.json`` that ``convert_gguf`` would write.

    Raises:
        ConfigError: as ``convert_gguf``.
    """
    return _hf_config(read_gguf(gguf_path))


def converted_bytes(gguf_path: Path) -> int:
    """Return approximately how many bytes ``convert_gguf`` writes.

    Raises:
        ConfigError: the file is not a GGUF.
    """
    return sum(4 * math.prod(tensor.shape) for tensor in read_gguf(gguf_path).tensors)


def _hf_config(file: GGUFFile) -> dict[str, Any]:
    """Derive a Hugging Face ``config.json`` from GGUF metadata."""
    _require_one_part(file)
    architecture = file.metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        supported = ", ".join(sorted(_ARCHITECTURES))
        raise ConfigError(
            f"GGUF architecture {architecture!r} is not supported; supported: {supported}", param="general.architecture"
        )
    tensors = {tensor.name: tensor for tensor in file.tensors}
    _require_computable(tensors)
    fields = Fields(architecture, file.metadata)
    num_heads, hidden_size = fields.count("attention.head_count"), fields.count("embedding_length")
    head_dim = fields.count("attention.key_length", hidden_size // num_heads)
    _require_assumed(fields, head_dim)
    config = {
        "model_type": _ARCHITECTURES[architecture],
        "vocab_size": tensors[_EMBEDDINGS].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": fields.count("feed_forward_length"),
        "num_hidden_layers": fields.count("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.count("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": fields.count("context_length"),
        "rope_parameters": _rope(fields, tensors),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": architecture != "qwen2" and "blk.0.attn_q.bias" in tensors,
        "dtype": "float32",
    }
    if architecture == "gemma3":
        config.update(_gemma3_fields(config, fields))
    else:
        config["hidden_act"] = "silu"
    if (bos := token_id(file.metadata, "bos")) is not None:
        config["bos_token_id"] = bos
    config["eos_token_id"] = sorted(end_tokens(file.metadata))
    return config


def _require_one_part(file: GGUFFile) -> None:
    parts = file.metadata.get("split.count", 1)
    if parts not in (0, 1):
        raise ConfigError(f"the GGUF file is one part of a split file (split.count={parts!r}): {_JOIN}", param="model.name")


def _require_computable(tensors: Mapping[str, GGUFTensor]) -> None:
    """Check that the values of all tensors can be computed, before any are written.

    Raises:
        ConfigError: the embeddings are missing, or a tensor has a type that cannot be dequantized.
    """
    if _EMBEDDINGS not in tensors:
        raise ConfigError(
            f"the GGUF file has no token embeddings: if it is one part of a split file, {_JOIN}", param="model.name"
        )
    refused = {kind for kind in {tensor.kind for tensor in tensors.values()} if not can_dequantize(kind)}
    for name, tensor in tensors.items():
        if tensor.kind in refused:
            text = f"GGUF tensor {name!r} has the type {tensor.kind.name}, which cannot be dequantized here"
            raise ConfigError(text, param=name)


def _require_assumed(fields: Fields, head_dim: int) -> None:
    """Check the fields that no ``config.json`` of these models has: their values are part of the code.

    Raises:
        ConfigError: names the first that has another value.
    """
    fields.require("attention.causal", True)
    fields.require("rope.dimension_count", head_dim)
    fields.require("rope.scaling.attn_factor", 1.0)
    if fields.architecture == "gemma3":
        fields.require("attn_logit_softcapping", 0.0)
        fields.require("final_logit_softcapping", 0.0)


def _gemma3_fields(config: Mapping[str, Any], fields: Fields) -> dict[str, Any]:
    """Return the fields that only Gemma 3 has; llama.cpp keeps most of them in its code."""
    scaled_by = config["head_dim"]
    if config["num_hidden_layers"] == _GEMMA3_27B_LAYERS:
        scaled_by = config["hidden_size"] // config["num_attention_heads"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scaled_by,
        "sliding_window": fields.count("attention.sliding_window"),
        "layer_types": [
            "sliding_attention" if slides else "full_attention" for slides in _sliding(fields, config["num_hidden_layers"])
        ],
        "rope_parameters": {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": fields.number("rope.freq_base_swa", 10000.0)},
        },
    }


def _sliding(fields: Fields, num_layers: int) -> list[bool]:
    """Return which layers slide: the pattern says it for each, or every how many layers one does not."""
    name = "attention.sliding_window_pattern"
    pattern = fields.get(name, _GEMMA3_FULL_EVERY)
    if isinstance(pattern, list):
        if len(pattern) != num_layers:
            raise fields.unsupported(name, f"an array of {num_layers} values")
        return [bool(slides) for slides in pattern]
    period = fields.count(name, _GEMMA3_FULL_EVERY)
    return [(layer + 1) % period != 0 for layer in range(num_layers)]


def _rope(fields: Fields, tensors: Mapping[str, GGUFTensor]) -> dict[str, Any]:
    """Return rope parameters. As in llama.cpp, scaling whose type is absent is linear, and a factor of 0 is none."""
    theta = fields.number("rope.freq_base", 10000.0)
    fields.require("rope.scaling.type", "none", "linear")
    name = "rope.scaling.factor" if "rope.scaling.factor" in fields else "rope.scale_linear"  # an older name
    factor = fields.number(name, 0.0) or 1.0
    if fields.get("rope.scaling.type", "linear") == "none":
        factor = 1.0
    if factor == 1.0 and _ROPE_FREQS not in tensors:
        return {"rope_theta": theta, "rope_type": "default"}
    if factor == 1.0:
        return {"rope_theta": theta, **_llama3_rope(tensors[_ROPE_FREQS].dequantized(), theta)}
    if _ROPE_FREQS in tensors:
        raise fields.unsupported(name, f"1.0 in a file with {_ROPE_FREQS}")
    return {"rope_theta": theta, "rope_type": "linear", "factor": factor}


def _llama3_rope(factors: Array, theta: float) -> dict[str, Any]:
    """Recover llama3 rope parameters from their per-frequency divisors.

    Only Meta's published parameters (1, 4, 8192) are tried; they must give the same divisors.
    """
    low, high, context, factor = 1.0, 4.0, 8192, float(factors.max())
    wavelengths = 2 * math.pi * theta ** (np.arange(0, 2 * len(factors), 2) / (2 * len(factors)))
    smooth = np.clip((context / wavelengths - low) / (high - low), 0.0, 1.0)
    if not np.allclose(1 / ((1 - smooth) / factor + smooth), factors, rtol=1e-3):
        raise ConfigError(f"GGUF {_ROPE_FREQS} holds no llama3 rope known here", param=_ROPE_FREQS)
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }


def _hf_tensors(file: GGUFFile, config: Mapping[str, Any]) -> list[_Tensor]:
    """Describe every output tensor, sorted by name so that the file is the same on every machine."""
    head_counts = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    is_gemma = config["model_type"] == "gemma3_text"
    layer_names = _GEMMA3_LAYER_NAMES if is_gemma else _LAYER_NAMES
    permuted = config["model_type"] in _PERMUTED
    tensors = []
    for source in file.tensors:
        if source.name == _ROPE_FREQS:
            continue
        stem, name = _hf_name(source.name, layer_names)
        values: Callable[[], Array] = source.dequantized
        if permuted and stem in head_counts:
            values = partial(_halves, source, head_counts[stem])
        elif is_gemma and stem.endswith("norm"):
            values = partial(_less_one, source)
        tensors.append(_Tensor(name, source.shape, values))
    return sorted(tensors, key=lambda tensor: tensor.name)


def _hf_name(gguf_name: str, layer_names: Mapping[str, str]) -> tuple[str, str]:
    """Return (stem, Hugging Face name) of ``token_embd.weight`` or ``blk.7.attn_q.bias``."""
    stem, _, kind = gguf_name.rpartition(".")
    if stem in _GLOBAL_NAMES:
        return stem, f"{_GLOBAL_NAMES[stem]}.{kind}"
    prefix, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if prefix == "blk" and part in layer_names:
        return part, f"model.layers.{layer}.{layer_names[part]}.{kind}"
    raise ConfigError(f"GGUF tensor {gguf_name!r} belongs to no architecture supported here", param="model")


def _less_one(source: GGUFTensor) -> Array:
    """Return a norm's weight as Gemma stores it: llama.cpp has added the one that its code adds."""
    return source.dequantized() - np.float32(1.0)


def _halves(source: GGUFTensor, num_heads: int) -> Array:
    """Dequantize, and turn interleaved rope pairs ``(d/2, 2)`` into halves ``(2, d/2)``."""
    values = source.dequantized()
    rows = values.shape[0]
    pairs = values.reshape(num_heads, rows // num_heads // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _write_safetensors(path: Path, tensors: list[_Tensor]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for tensor, (start, end) in zip(tensors, _offsets(tensors), strict=True):
        header[tensor.name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # the data starts aligned to 8 bytes
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for tensor in tensors:
            file.write(np.ascontiguousarray(tensor.values(), dtype="<f4").data)


def _offsets(tensors: list[_Tensor]) -> Iterator[tuple[int, int]]:
    position = 0
    for tensor in tensors:
        end = position + 4 * math.prod(tensor.shape)
        yield position, end
        position = end


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
