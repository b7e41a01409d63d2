"""A tiny Llama whose every token depends on the whole prompt, as a folder that vLLM loads: 4 layers, 2 KV heads, 4.5 MB."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB_SIZE = 2048


def write_tiny_llama(folder: Path, **changes: Any) -> Path:
    """Write configuration and seeded weights; ``changes`` are to ``LlamaConfig``. Heads are of 32, vLLM's smallest on CPU."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    values = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(**(values | changes)))
    generator = torch.Generator().manual_seed(7)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:  # as large as this, or the first tokens would count for nothing
            scale = 1.0 if "embed" in name else 0.25
            weight.data = scale * torch.randn(weight.shape, generator=generator)
    model.save_pretrained(folder)
    return folder
