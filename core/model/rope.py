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
_FIELDS = ("rope_parameters", "rope_scaling")


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
        ConfigError: the variant is not supported, one of its parameters is missing, or both layouts contradict each other.
    """
    fields = [field for field in _FIELDS if config.get(field)] or ["rope_scaling"]
    ropes = [_flat_rope(config, field, default_theta) for field in fields]
    if ropes[0] != ropes[-1]:
        raise _contradiction(ropes[0], ropes[-1])
    return ropes[0]


def parse_rope_pair(config: Mapping[str, Any], default_theta: float, default_local_theta: float) -> tuple[Rope, Rope]:
    """Return the ropes of full and of sliding layers, for configurations with one for each (Gemma 3).

    ``rope_scaling`` is of the full layers alone.

    Raises:
        ConfigError: as ``parse_rope``.
    """
    both: Mapping[str, Any] = config.get("rope_parameters") or {}
    scaling: Mapping[str, Any] = config.get("rope_scaling") or {}
    field = "rope_parameters" if both else "rope_scaling"
    full, local = ({**(both.get(kind) or {})} for kind in ("full_attention", "sliding_attention"))
    theta = config.get("rope_theta") or default_theta
    local_theta = config.get("rope_local_base_freq") or default_local_theta
    scaled = {**full, **scaling}
    if "rope_type" not in scaling and "type" in scaling:
        scaled["rope_type"] = scaling["type"]
    rope = _stretched(float(scaled.get("rope_theta") or theta), scaled, "rope_scaling" if scaling else field)
    if both and scaling:
        unscaled = _stretched(float(full.get("rope_theta") or theta), full, field)
        if rope != unscaled:
            raise _contradiction(unscaled, rope)
    return rope, _stretched(float(local.get("rope_theta") or local_theta), local, field)


def _flat_rope(config: Mapping[str, Any], field: str, default_theta: float) -> Rope:
    rope: Mapping[str, Any] = config.get(field) or {}
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or default_theta)
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ConfigError(f"config.json: {field}.partial_rotary_factor must be 1.0", param=field)
    return _stretched(theta, rope, field)


def _contradiction(new: Rope, old: Rope) -> ConfigError:
    return ConfigError(
        f"config.json: rope_parameters ({_shown(new)}) and rope_scaling ({_shown(old)}) contradict each other: "
        "describe the rope in rope_parameters and remove rope_scaling",
        param="rope_scaling",
    )


def _shown(rope: Rope) -> str:
    return f"{rope.kind}, factor {rope.factor:g}, theta {rope.theta:g}"


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
