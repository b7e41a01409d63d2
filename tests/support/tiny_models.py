"""Tiny models whose every token depends on the whole prompt, as folders that vLLM loads: 4 layers, 2 KV heads, 4.5 MB.

Heads are of 32, vLLM's smallest on CPU. Weights are seeded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCAB_SIZE = 2048
LORA_RANK = 8


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


def write_tiny_llama(folder: Path, num_kv_heads: int = 2) -> Path:
    """Write a Llama: full attention in all layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = _SIZES | {"num_key_value_heads": num_kv_heads}
    return _write(LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2)), folder)


def write_tiny_gemma(folder: Path, window: int, *, has_full_layers: bool = True) -> Path:
    """Write a Gemma 3: every second layer, or without full layers each, attends to the last ``window`` tokens only."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    layers = ["sliding_attention", "full_attention" if has_full_layers else "sliding_attention"] * 2
    sizes = _SIZES | {"query_pre_attn_scalar": 32, "tie_word_embeddings": False}
    model = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, sliding_window=window, layer_types=layers))
    return _write(model, folder, embedding_scale=_SIZES["hidden_size"] ** -0.5)  # a Gemma multiplies them by the inverse


def write_tiny_deepseek(folder: Path) -> Path:
    """Write a DeepSeek-V2 without experts: MLA in all layers, of the only size that vLLM's CPU build computes."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "q_lora_rank": None}
    sizes = _SIZES | {"num_key_value_heads": _SIZES["num_attention_heads"]}
    config = DeepseekV2Config(**sizes, **latent, first_k_dense_replace=_SIZES["num_hidden_layers"])
    return _write(DeepseekV2ForCausalLM(config), folder)


def write_tiny_lora(folder: Path, seed: int) -> Path:
    """Write a LoRA adapter for the Llama: rank 8, of queries, keys and values in all layers. Equal seeds give equal weights."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> torch.Tensor:
        return 0.25 * torch.randn(*shape, generator=generator)

    heads = {"q_proj": _SIZES["num_attention_heads"], **dict.fromkeys(["k_proj", "v_proj"], _SIZES["num_key_value_heads"])}
    weights = {}
    for layer in range(_SIZES["num_hidden_layers"]):
        for name, num_heads in heads.items():
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{module}.lora_A.weight"] = weight(LORA_RANK, _SIZES["hidden_size"])
            weights[f"{module}.lora_B.weight"] = weight(num_heads * _SIZES["head_dim"], LORA_RANK)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": LORA_RANK, "lora_alpha": LORA_RANK, "target_modules": list(heads)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def write_tiny_tokenizer(folder: Path) -> None:
    """Write a tokenizer of bytes beside a model; the words ``t300``, ``t301`` … are tokens of their own.

    The chat template shows tools in the Hermes form.
    """
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<unk>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {name: token for token, name in enumerate([*special, *alphabet])}
    words = {f"t{token}": token for token in range(len(vocabulary), VOCAB_SIZE)}
    vocabulary |= words
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[], unk_token=special[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(list(words))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "unk_token": special[0],
        "eos_token": special[2],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": _TEMPLATE_WITH_TOOLS,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


_TEMPLATE_WITH_TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _write(model: Any, folder: Path, embedding_scale: float = 1.0) -> Path:
    import torch

    generator = torch.Generator().manual_seed(7)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:  # as large as this, or the first tokens would count for nothing
            scale = embedding_scale if "embed" in name else 0.25
            weight.data = scale * torch.randn(weight.shape, generator=generator)
    model.save_pretrained(folder)
    return folder
