"""Rotary position embedding as a configuration describes it: base frequency and scaling, layer by layer.

Owns the supported rope variants and the two layouts of ``config.json``. Torch-free; the arithmetic is in
``core.model.layers``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from core.errors import ConfigError

RopeKind = Literal["default", "linear", "llama3"]


@dataclass(frozen=True, slots=True)
class Rope:
    """``theta`` is the base; ``linear`` uses only ``factor`` to stretch the frequencies, ``llama3`` all following fields."""

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


def parse_rope(config: Mapping[str, Any], default_theta: float) -> Rope:
    """Return the rope of ``rope_parameters`` (new layout) or of ``rope_theta`` + ``rope_scaling`` (old one).

    Raises:
        ConfigError: the variant is not supported, or one of its parameters is missing.
    """
    field = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope: Mapping[str, Any] = config.get(field) or {}
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or default_theta)
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ConfigError(f"config.json: {field}.partial_rotary_factor must be 1.0", param=field)
    return _stretched(theta, rope, field)


def parse_rope_pair(config: Mapping[str, Any], default_theta: float, default_local_theta: float) -> tuple[Rope, Rope]:
    """Return the ropes of full and of sliding layers, for configurations with one for each (Gemma 3).

    Raises:
        ConfigError: as ``parse_rope``.
    """
    both: Mapping[str, Any] = config.get("rope_parameters") or {}
    if both:
        full, local = (both.get(kind) or {} for kind in ("full_attention", "sliding_attention"))
    else:
        full = {**(config.get("rope_scaling") or {}), "rope_theta": config.get("rope_theta")}
        local = {"rope_theta": config.get("rope_local_base_freq")}
    field = "rope_parameters" if both else "rope_scaling"
    return (
        _stretched(float(full.get("rope_theta") or default_theta), full, field),
        _stretched(float(local.get("rope_theta") or default_local_theta), local, field),
    )


def _stretched(theta: float, rope: Mapping[str, Any], field: str) -> Rope:
    kind = rope.get("rope_type", rope.get("type", "default"))
    try:
        if kind == "default":
            return Rope(theta)
        if kind == "linear":
            return Rope(theta, "linear", float(rope["factor"]))
        if kind == "llama3":
            return Rope(
                theta,
                "llama3",
                float(rope["factor"]),
                float(rope["low_freq_factor"]),
                float(rope["high_freq_factor"]),
                int(rope["original_max_position_embeddings"]),
            )
    except KeyError as missing:
        raise ConfigError(f"config.json: {field}.{missing.args[0]} is missing for rope type {kind!r}", param=field) from None
    raise ConfigError(
        f"config.json: {field}.rope_type={kind!r} is not supported; supported: default, linear, llama3", param=field
    )
