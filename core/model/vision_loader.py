"""Loads safetensors files into a ``VisionTower``.

Owns the Hugging Face names of the image half's tensors; ``core.model.checkpoint`` reads them. An encode worker loads
no other part of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from core.model.arch import VISION_WEIGHTS
from core.model.checkpoint import Checkpoint, open_checkpoint
from core.model.linear import make_linear
from core.model.vision import LayerNorm, VisionLayerWeights, VisionTower, VisionWeights
from core.model.vision_arch import VisionArch

_TOWER = "model.vision_model"


def load_vision_tower(
    arch: VisionArch, weight_files: Sequence[Path], *, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> VisionTower:
    """Load the image half of a checkpoint onto ``device``.

    Raises:
        ConfigError: a file cannot be read, or a tensor is missing, has another shape, or has no place in ``arch``.
    """
    with open_checkpoint(weight_files, dtype, device) as tensors, torch.inference_mode():
        weights = _weights(tensors, arch)
        tensors.require_all_used(*VISION_WEIGHTS)
    return VisionTower(arch, weights)


def _weights(tensors: Checkpoint, arch: VisionArch) -> VisionWeights:
    embeddings, hidden = f"{_TOWER}.embeddings", arch.hidden_size
    kernel = tensors.take(f"{embeddings}.patch_embedding.weight", hidden, arch.num_channels, arch.patch_size, arch.patch_size)
    patch_bias = tensors.take(f"{embeddings}.patch_embedding.bias", hidden)
    layers = tuple(_layer_weights(tensors, arch, f"{_TOWER}.encoder.layers.{number}") for number in range(arch.num_layers))
    return VisionWeights(
        patch_embedding=make_linear(kernel.flatten(1), patch_bias),  # a convolution whose windows do not overlap
        positions=tensors.take(f"{embeddings}.position_embedding.weight", arch.num_positions_per_side**2, hidden),
        layers=layers,
        norm=_norm(tensors, arch, f"{_TOWER}.post_layernorm"),
        projection=tensors.linear(
            ["model.connector.modality_projection.proj"], [arch.output_size], hidden * arch.scale_factor**2, has_bias=False
        ),
    )


def _layer_weights(tensors: Checkpoint, arch: VisionArch, prefix: str) -> VisionLayerWeights:
    hidden, inner = arch.hidden_size, arch.intermediate_size
    qkv = [f"{prefix}.self_attn.{name}_proj" for name in ("q", "k", "v")]
    return VisionLayerWeights(
        attention_norm=_norm(tensors, arch, f"{prefix}.layer_norm1"),
        qkv=tensors.linear(qkv, [hidden] * 3, hidden, has_bias=True),
        output=tensors.linear([f"{prefix}.self_attn.out_proj"], [hidden], hidden, has_bias=True),
        mlp_norm=_norm(tensors, arch, f"{prefix}.layer_norm2"),
        up=tensors.linear([f"{prefix}.mlp.fc1"], [inner], hidden, has_bias=True),
        down=tensors.linear([f"{prefix}.mlp.fc2"], [hidden], inner, has_bias=True),
    )


def _norm(tensors: Checkpoint, arch: VisionArch, name: str) -> LayerNorm:
    weight, bias = (tensors.take(f"{name}.{part}", arch.hidden_size) for part in ("weight", "bias"))
    return LayerNorm(weight, bias, arch.layer_norm_eps)
