"""Safetensors files turned into a ``Decoder``: names mapped, projections fused, weights cast, moved and packed.

Owns the Hugging Face tensor names. Knows nothing of where files come from (``core.model.hub``). Called once per worker.
Tensors are read one layer at a time through a memory map, so the peak is the model plus one layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from core.errors import ConfigError
from core.model.arch import ModelArch
from core.model.decoder import Decoder, DecoderWeights, LayerWeights
from core.model.layers import RMSNorm, RotaryEmbedding
from core.model.linear import Linear, make_linear


def load_decoder(
    arch: ModelArch, weight_files: Sequence[Path], *, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Decoder:
    """Load the weights of ``arch`` from safetensors files into a decoder on ``device``.

    Raises:
        ConfigError: a file cannot be read, or a tensor is missing, has another shape, or has no place in ``arch``.
    """
    target = torch.device(device)
    with ExitStack() as open_files, torch.inference_mode():
        tensors = _Checkpoint(_open_all(weight_files, open_files), dtype, target)
        weights = _decoder_weights(tensors, arch)
        tensors.require_all_used()
        rotary = RotaryEmbedding(arch, dtype, target)
    return Decoder(arch, weights, rotary)


def _open_all(weight_files: Sequence[Path], open_files: ExitStack) -> dict[str, Any]:
    """Return {tensor name: open safetensors file}."""
    sources: dict[str, Any] = {}
    for path in weight_files:
        try:
            handle = open_files.enter_context(safe_open(path, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path} cannot be read as safetensors: {error}", param="model") from error
        sources.update(dict.fromkeys(handle.keys(), handle))
    return sources


class _Checkpoint:
    """The named tensors of a model; checks every shape, and at the end that none was left over."""

    def __init__(self, sources: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        self._sources = sources
        self._dtype = dtype
        self._device = device
        self._unused = set(sources)

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    def take(self, name: str, *shape: int) -> Tensor:
        """Read one tensor in the target dtype, on the target device."""
        if name not in self._sources:
            raise ConfigError(f"the weights lack {name}", param="model")
        tensor: Tensor = self._sources[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ConfigError(f"{name} has shape {tuple(tensor.shape)}, the config says {shape}", param="model")
        self._unused.discard(name)
        return tensor.to(device=self._device, dtype=self._dtype)

    def linear(self, names: Sequence[str], rows: Sequence[int], columns: int, has_bias: bool) -> Linear:
        """Read one or several projections of the same input and fuse them into one layer."""
        parts = list(zip(names, rows, strict=True))
        weight = torch.cat([self.take(f"{name}.weight", size, columns) for name, size in parts])
        bias = torch.cat([self.take(f"{name}.bias", size) for name, size in parts]) if has_bias else None
        return make_linear(weight, bias)

    def ignore(self, name: str) -> None:
        """Accept a tensor that is present but needless."""
        self._unused.discard(name)

    def require_all_used(self) -> None:
        """Refuse weights that the architecture has no place for: computing without them would be silently wrong."""
        left = sorted(name for name in self._unused if not name.endswith("rotary_emb.inv_freq"))
        if left:
            shown = ", ".join(left[:3])
            raise ConfigError(f"{len(left)} tensors have no place in this architecture: {shown}", param="model")


def _decoder_weights(tensors: _Checkpoint, arch: ModelArch) -> DecoderWeights:
    embedding = tensors.take("model.embed_tokens.weight", arch.vocab_size, arch.hidden_size)
    if arch.tie_word_embeddings:
        tensors.ignore("lm_head.weight")
        head = make_linear(embedding)
    else:
        head = tensors.linear(["lm_head"], [arch.vocab_size], arch.hidden_size, has_bias=False)
    layers = tuple(_layer_weights(tensors, arch, f"model.layers.{number}") for number in range(arch.num_layers))
    norm = RMSNorm(tensors.take("model.norm.weight", arch.hidden_size), arch.rms_norm_eps)
    return DecoderWeights(embedding=embedding, layers=layers, norm=norm, head=head)


def _layer_weights(tensors: _Checkpoint, arch: ModelArch, prefix: str) -> LayerWeights:
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    query_size, kv_size = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    hidden, inner = arch.hidden_size, arch.intermediate_size
    qkv_names = [f"{attention}.{name}_proj" for name in ("q", "k", "v")]
    gate_up_names = [f"{mlp}.gate_proj", f"{mlp}.up_proj"]
    return LayerWeights(
        input_norm=RMSNorm(tensors.take(f"{prefix}.input_layernorm.weight", hidden), arch.rms_norm_eps),
        qkv=tensors.linear(qkv_names, [query_size, kv_size, kv_size], hidden, arch.qkv_bias),
        qk_norm=_qk_norm(tensors, arch, attention) if arch.qk_norm else None,
        output=tensors.linear([f"{attention}.o_proj"], [hidden], query_size, arch.attention_output_bias),
        post_attention_norm=RMSNorm(tensors.take(f"{prefix}.post_attention_layernorm.weight", hidden), arch.rms_norm_eps),
        gate_up=tensors.linear(gate_up_names, [inner, inner], hidden, arch.mlp_bias),
        down=tensors.linear([f"{mlp}.down_proj"], [hidden], inner, arch.mlp_bias),
    )


def _qk_norm(tensors: _Checkpoint, arch: ModelArch, attention: str) -> Tensor:
    """Return ``[num_heads + num_kv_heads, head_dim]``: one multiplication then serves query and key heads."""
    query = tensors.take(f"{attention}.q_norm.weight", arch.head_dim)
    key = tensors.take(f"{attention}.k_norm.weight", arch.head_dim)
    return torch.cat((query.expand(arch.num_heads, -1), key.expand(arch.num_kv_heads, -1)))
