"""Models of known shapes with random weights, as folders that the engine and transformers load; no network is needed.

Owns the shapes and what is written. All matrices are cut from one piece of random numbers, so that 16 GB are written at the
pace of the file system: a matrix product takes as long for these as for trained weights. ``write_small`` makes a model of truly
random weights for comparing numbers.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

STD = 0.02
PATTERN_ELEMENTS = (32 << 20) + 12_347  # odd, so that rows of a matrix differ


@dataclass(frozen=True, slots=True)
class Shape:
    """What decides about the time of a Llama."""

    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    is_tied: bool
    max_tokens: int = 32_768

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def layer_parameters(self) -> int:
        """Elements of the matrices of all layers."""
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * self.kv_heads * self.head_dim
        return self.layers * (attention + 3 * self.hidden * self.inner)

    @property
    def head_parameters(self) -> int:
        return self.vocab * self.hidden

    @property
    def num_bytes(self) -> int:
        """Size of the weights in bfloat16."""
        return 2 * (self.layer_parameters + self.head_parameters * (1 if self.is_tied else 2))

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype_bytes

    def prefill_flops(self, num_tokens: int) -> float:
        """Multiplications and additions of a prompt whose last token is sampled; attention is causal."""
        attention = 4 * self.layers * self.hidden * num_tokens * (num_tokens + 1) / 2
        return 2 * self.layer_parameters * num_tokens + attention + 2 * self.head_parameters

    def decode_bytes(self, batch: int, context: int, dtype_bytes: int) -> float:
        """What a step must read at least: every matrix once, and the keys and values of every context."""
        weights = dtype_bytes * (self.layer_parameters + self.head_parameters)
        return weights + batch * context * self.kv_bytes_per_token(dtype_bytes)


LLAMA_8B = Shape("Llama-3.1-8B", 4096, 14336, 32, 32, 8, 128_256, is_tied=False)
SMOLLM2 = Shape("SmolLM2-135M", 576, 1536, 30, 9, 3, 49_152, is_tied=True, max_tokens=8_192 + 512)
TINY = Shape("tiny", 64, 128, 2, 4, 2, 512, is_tied=False, max_tokens=1_024)
NUMERICS = Shape("small", 512, 1024, 4, 8, 4, 2_048, is_tied=False, max_tokens=1_024)


def write_model(folder: Path, shape: Shape) -> Path:
    """Write a model in bfloat16, a file for every layer, and return its folder. Enough for timing only."""
    folder.mkdir(parents=True)
    pattern = torch.empty(min(PATTERN_ELEMENTS, 4 * shape.hidden * shape.inner + 1), dtype=torch.float32)
    pattern = pattern.normal_(0.0, STD, generator=torch.Generator().manual_seed(1)).bfloat16()
    places: dict[str, str] = {}
    for number, tensors in enumerate(_files(shape)):
        name = f"model-{number:05}.safetensors"
        _write_tensors(folder / name, tensors, pattern)
        places |= dict.fromkeys(tensors, name)
    index = {"metadata": {"total_size": shape.num_bytes}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    write_description(folder, shape)
    return folder


def write_small(folder: Path, shape: Shape, seed: int = 0) -> Path:
    """Write a model whose weights are all random, with logits that are spread out."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    write_description(folder, shape)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0.0, 1.5 / math.sqrt(parameter.shape[-1]))
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def write_description(folder: Path, shape: Shape) -> None:
    """Write everything but the weights; the tokenizer is an empty one, since prompts are token ids."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_tokens,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": shape.is_tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")


def _files(shape: Shape) -> Iterator[dict[str, tuple[int, ...]]]:
    """Yield the tensors of one file after another."""
    yield {
        "model.embed_tokens.weight": (shape.vocab, shape.hidden),
        "model.norm.weight": (shape.hidden,),
        **({} if shape.is_tied else {"lm_head.weight": (shape.vocab, shape.hidden)}),
    }
    kv = shape.kv_heads * shape.head_dim
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        yield {
            f"{prefix}.self_attn.q_proj.weight": (shape.hidden, shape.hidden),
            f"{prefix}.self_attn.k_proj.weight": (kv, shape.hidden),
            f"{prefix}.self_attn.v_proj.weight": (kv, shape.hidden),
            f"{prefix}.self_attn.o_proj.weight": (shape.hidden, shape.hidden),
            f"{prefix}.mlp.gate_proj.weight": (shape.inner, shape.hidden),
            f"{prefix}.mlp.up_proj.weight": (shape.inner, shape.hidden),
            f"{prefix}.mlp.down_proj.weight": (shape.hidden, shape.inner),
            f"{prefix}.input_layernorm.weight": (shape.hidden,),
            f"{prefix}.post_attention_layernorm.weight": (shape.hidden,),
        }


def _write_tensors(path: Path, tensors: dict[str, tuple[int, ...]], pattern: torch.Tensor) -> None:
    """Write a safetensors file: u64 length of the header, the header in JSON, the bytes of the tensors in its order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dimensions in tensors.items():
        start, end = end, end + 2 * math.prod(dimensions)
        header[name] = {"dtype": "BF16", "shape": dimensions, "data_offsets": (start, end)}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    matrix = pattern.view(torch.int16).numpy()
    ones = np.full(max(max(dimensions) for dimensions in tensors.values()), 0x3F80, dtype=np.int16)  # 1.0
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for dimensions in tensors.values():
            left = math.prod(dimensions)
            source = ones if len(dimensions) == 1 else matrix
            while left:
                piece = source[:left]
                file.write(piece.data)
                left -= len(piece)
