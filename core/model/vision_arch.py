"""The shape of a model's image half: vision tower, pixel shuffle and projection, parsed from ``config.json``.

Owns the supported image halves. Torch-free: the router counts placeholder tokens with it. The text decoder of the same
``config.json`` is ``core.model.arch``; pixels are ``core.model.image_processor``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from core.errors import ConfigError
from core.model.arch import VISION_MODEL_TYPES, positive_count

_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
_DEFAULT_IMAGE_TOKEN_ID = 128257
_DEFAULT_SCALE_FACTOR = 2


@dataclass(frozen=True, slots=True)
class VisionArch:
    """A SigLIP tower (Zhai et al., 2023) and its connection to the text decoder, as in Idefics 3 (Laurençon et al., 2024).

    ``image_size`` and ``patch_size`` in pixels: the tower has ``(image_size / patch_size)²`` positions. ``scale_factor``:
    this many patches in either direction become one embedding of ``output_size`` elements, the decoder's hidden size.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_channels: int
    image_size: int
    patch_size: int
    layer_norm_eps: float
    scale_factor: int
    output_size: int
    image_token_id: int

    @property
    def head_dim(self) -> int:
        """Elements of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def num_positions_per_side(self) -> int:
        """Rows, and columns, of the learned positions."""
        return self.image_size // self.patch_size

    def num_embeds(self, tile_size: int) -> int:
        """Return how many embeddings one square tile has, its side in pixels; incomplete patches do not count."""
        return (tile_size // self.patch_size // self.scale_factor) ** 2

    @property
    def canonical(self) -> bytes:
        """Every field, in one canonical spelling: for hashes of all that embeddings depend on except the weights."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()


def parse_vision_arch(config: Mapping[str, Any]) -> VisionArch | None:
    """Return the image half of a Hugging Face ``config.json``, None for a model without one.

    Raises:
        ConfigError: a field is wrong, or has a value that is not supported.
    """
    if config.get("model_type") not in VISION_MODEL_TYPES:
        return None
    vision = {**_DEFAULTS, **(config.get("vision_config") or {})}
    if vision["hidden_act"] != _DEFAULTS["hidden_act"]:
        raise ConfigError(
            f"config.json: vision_config.hidden_act={vision['hidden_act']!r} is not supported; "
            f"supported: {_DEFAULTS['hidden_act']!r}",
            param="vision_config.hidden_act",
        )
    text = config.get("text_config") or {}
    arch = VisionArch(
        hidden_size=positive_count(vision, "hidden_size"),
        intermediate_size=positive_count(vision, "intermediate_size"),
        num_layers=positive_count(vision, "num_hidden_layers"),
        num_heads=positive_count(vision, "num_attention_heads"),
        num_channels=positive_count(vision, "num_channels"),
        image_size=positive_count(vision, "image_size"),
        patch_size=positive_count(vision, "patch_size"),
        layer_norm_eps=float(vision["layer_norm_eps"]),
        scale_factor=positive_count({"scale_factor": _DEFAULT_SCALE_FACTOR, **config}, "scale_factor"),
        output_size=positive_count(text, "hidden_size"),
        image_token_id=positive_count({"image_token_id": _DEFAULT_IMAGE_TOKEN_ID, **config}, "image_token_id"),
    )
    _check(arch, text)
    return arch


def _check(arch: VisionArch, text: Mapping[str, Any]) -> None:
    if arch.hidden_size % arch.num_heads:
        raise ConfigError(
            f"config.json: vision_config.hidden_size {arch.hidden_size} is not a multiple of {arch.num_heads} heads",
            param="vision_config.num_attention_heads",
        )
    if arch.num_channels != 3:
        raise ConfigError(
            "config.json: vision_config.num_channels must be 3: images are RGB", param="vision_config.num_channels"
        )
    if arch.image_token_id >= positive_count(text, "vocab_size"):
        raise ConfigError(f"config.json: image_token_id {arch.image_token_id} is not in the vocabulary", param="image_token_id")
