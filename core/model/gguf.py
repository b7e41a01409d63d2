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
from core.model.gguf_file import GGUFFile, GGUFTensor, read_gguf
from core.model.gguf_tokenizer import write_tokenizer

CONVERTER_VERSION = 1  # part of the cache key: raise it when the output for the same file changes

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
_GEMMA3_FULL_EVERY = 6  # layers; the others slide
_EMBEDDINGS = "token_embd.weight"
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
    metadata = file.metadata
    architecture = metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        supported = ", ".join(sorted(_ARCHITECTURES))
        raise ConfigError(
            f"GGUF architecture {architecture!r} is not supported; supported: {supported}", param="general.architecture"
        )

    def required(key: str) -> Any:  # noqa: ANN401
        name = f"{architecture}.{key}"
        if name not in metadata:
            raise ConfigError(f"GGUF metadata lacks {name}", param=name)
        return metadata[name]

    tensors = {tensor.name: tensor for tensor in file.tensors}
    if _EMBEDDINGS not in tensors:
        raise ConfigError(
            "the GGUF file has no token embeddings: if it is one part of a split file, join the parts with "
            "llama-gguf-split --merge",
            param="model.name",
        )
    num_heads = required("attention.head_count")
    theta = metadata.get(f"{architecture}.rope.freq_base", 10000.0)
    config = {
        "model_type": _ARCHITECTURES[architecture],
        "vocab_size": tensors[_EMBEDDINGS].shape[0],
        "hidden_size": required("embedding_length"),
        "intermediate_size": required("feed_forward_length"),
        "num_hidden_layers": required("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.get(f"{architecture}.attention.head_count_kv", num_heads),
        "head_dim": metadata.get(f"{architecture}.attention.key_length", required("embedding_length") // num_heads),
        "rms_norm_eps": _shortest(required("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": required("context_length"),
        "rope_parameters": {"rope_theta": _shortest(theta), **_rope_scaling(metadata, architecture, tensors)},
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": architecture != "qwen2" and "blk.0.attn_q.bias" in tensors,
        "dtype": "float32",
    }
    if architecture == "gemma3":
        config.update(_gemma3_fields(config, required("attention.sliding_window")))
    else:
        config["hidden_act"] = "silu"
    if (bos := metadata.get("tokenizer.ggml.bos_token_id")) is not None:
        config["bos_token_id"] = bos
    stops = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    config["eos_token_id"] = sorted({token_id for token_id in stops if token_id is not None})
    return config


def _gemma3_fields(config: Mapping[str, Any], sliding_window: int) -> dict[str, Any]:
    """Return the fields that only Gemma 3 has; llama.cpp keeps most of them in its code."""
    scaled_by = config["head_dim"]
    if config["num_hidden_layers"] == _GEMMA3_27B_LAYERS:
        scaled_by = config["hidden_size"] // config["num_attention_heads"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scaled_by,
        "sliding_window": sliding_window,
        "layer_types": [
            "full_attention" if (layer + 1) % _GEMMA3_FULL_EVERY == 0 else "sliding_attention"
            for layer in range(config["num_hidden_layers"])
        ],
        "rope_parameters": {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    }


def _rope_scaling(metadata: Mapping[str, Any], architecture: str, tensors: Mapping[str, GGUFTensor]) -> dict[str, Any]:
    kind = metadata.get(f"{architecture}.rope.scaling.type", "none")
    if kind == "linear":
        return {"rope_type": "linear", "factor": _shortest(metadata[f"{architecture}.rope.scaling.factor"])}
    if kind != "none":
        key = f"{architecture}.rope.scaling.type"
        raise ConfigError(f"GGUF {key}={kind!r} is not supported; supported: none, linear", param=key)
    if _ROPE_FREQS in tensors:
        factors = tensors[_ROPE_FREQS].dequantized()
        return _llama3_rope(factors, metadata.get(f"{architecture}.rope.freq_base", 10000.0))
    return {"rope_type": "default"}


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


def _shortest(value: float) -> float:
    """Undo the widening of a float32: 9.999999747378752e-06 was written as 1e-05."""
    return float(str(np.float32(value)))


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
