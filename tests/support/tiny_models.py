"""Tiny models whose every token depends on the whole prompt, as folders that vLLM loads: 4 layers, 2 KV heads, 4.5 MB.

Heads are of 32, vLLM's smallest on CPU. Weights are seeded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB_SIZE = 2048


_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 8192,
}


def write_tiny_llama(folder: Path) -> Path:
    """Write a Llama: full attention in all layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return _write(LlamaForCausalLM(LlamaConfig(**_SIZES, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2)), folder)


def write_tiny_gemma(folder: Path, window: int) -> Path:
    """Write a Gemma 3: every second layer attends to the last ``window`` tokens only."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    layers = ["sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(**_SIZES, sliding_window=window, layer_types=layers, query_pre_attn_scalar=32)
    return _write(Gemma3ForCausalLM(config), folder)


def _write(model: Any, folder: Path) -> Path:
    import torch

    generator = torch.Generator().manual_seed(7)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:  # as large as this, or the first tokens would count for nothing
            scale = 1.0 if "embed" in name else 0.25
            weight.data = scale * torch.randn(weight.shape, generator=generator)
    model.save_pretrained(folder)
    return folder
