"""The shape of a model: a Hugging Face ``config.json`` parsed into one frozen description.

Owns which architectures and rope variants exist here, and the model's fingerprint. Knows nothing of tensors or files and
imports no torch: the router, the KV manager and the engine all read it. A new architecture is one entry of ``_TRAITS``;
a hybrid model (Gemma 3) is one more, because window sizes are already per layer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from core.errors import ConfigError

RopeKind = Literal["default", "linear", "llama3"]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How the base frequencies of rope are stretched; ``linear`` uses ``factor`` alone, ``llama3`` all four."""

    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True)
class ModelArch:
    """Everything about a model that is not a weight. Sizes are in elements, ``sliding_windows`` in tokens per layer."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    tie_word_embeddings: bool
    qkv_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str  # of the checkpoint: "float32", "bfloat16" or "float16"

    @property
    def attention_scale(self) -> float:
        """The factor on query-key products."""
        return float(self.head_dim**-0.5)

    @property
    def kv_groups(self) -> tuple[tuple[int, ...], ...]:
        """Layer numbers that share one KV cache group: one group per distinct window, in order of first appearance."""
        groups: dict[int | None, list[int]] = {}
        for layer, window in enumerate(self.sliding_windows):
            groups.setdefault(window, []).append(layer)
        return tuple(tuple(layers) for layers in groups.values())


@dataclass(frozen=True, slots=True)
class _Traits:
    """What an architecture fixes in its code and therefore does not say in its config."""

    qkv_bias: bool | None  # None: read ``attention_bias``
    attention_output_bias: bool | None
    qk_norm: bool = False
    window_gate: str | None = None  # the flag that switches ``sliding_window`` on; None: the window alone decides
    num_kv_heads: int | None = None  # default where the config may leave it out
    max_position_embeddings: int = 2048


_TRAITS: Mapping[str, _Traits] = {
    "llama": _Traits(qkv_bias=None, attention_output_bias=None),
    "mistral": _Traits(qkv_bias=False, attention_output_bias=False, num_kv_heads=8, max_position_embeddings=4096 * 32),
    "qwen2": _Traits(
        qkv_bias=True,
        attention_output_bias=False,
        window_gate="use_sliding_window",
        num_kv_heads=32,
        max_position_embeddings=32768,
    ),
    "qwen3": _Traits(
        qkv_bias=None,
        attention_output_bias=None,
        qk_norm=True,
        window_gate="use_sliding_window",
        num_kv_heads=32,
        max_position_embeddings=32768,
    ),
}

SUPPORTED_MODEL_TYPES = tuple(sorted(_TRAITS))

_DEFAULT_ROPE_THETA = 10000.0
_NOT_IN_FINGERPRINT = ("max_position_embeddings", "bos_token_id", "eos_token_ids", "dtype")


def parse_arch(config: Mapping[str, Any]) -> ModelArch:
    """Parse a Hugging Face ``config.json``.

    Raises:
        ConfigError: unknown ``model_type``, unsupported rope or activation, or a field that is missing or inconsistent.
    """
    model_type = config.get("model_type")
    traits = _TRAITS.get(model_type) if isinstance(model_type, str) else None
    if traits is None or not isinstance(model_type, str):
        supported = ", ".join(SUPPORTED_MODEL_TYPES)
        raise ConfigError(f"model_type {model_type!r} is not supported; supported: {supported}", param="model_type")
    _require_value(config, "hidden_act", "silu")
    num_heads = _count(config, "num_attention_heads")
    hidden_size = _count(config, "hidden_size")
    num_kv_heads = _count(config, "num_key_value_heads", traits.num_kv_heads or num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}",
            param="num_key_value_heads",
        )
    attention_bias = bool(config.get("attention_bias", False))
    theta, scaling = _parse_rope(config)
    return ModelArch(
        model_type=model_type,
        vocab_size=_count(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_count(config, "intermediate_size"),
        num_layers=_count(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_count(config, "head_dim", 128 if model_type == "qwen3" else hidden_size // num_heads),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias if traits.qkv_bias is None else traits.qkv_bias,
        attention_output_bias=attention_bias if traits.attention_output_bias is None else traits.attention_output_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=traits.qk_norm,
        sliding_windows=_parse_windows(config, traits),
        max_position_embeddings=_count(config, "max_position_embeddings", traits.max_position_embeddings),
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=as_token_ids(config.get("eos_token_id")),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
    )


def model_fingerprint(arch: ModelArch, weights_id: str) -> bytes:
    """Hash what KV depends on into 16 bytes: equal in every process for equal files, different for other weights.

    Hashed with BLAKE2b: the fields of ``arch`` (rope included) and ``weights_id``, the digest of the content of every
    weight file (``core.model.hub.ModelFiles.weights_id``; quantized weights differ in content). Left out are fields that do
    not change any key or value: context length, bos, eos, and the dtype, which ``layout_fingerprint`` carries.
    """
    fields = {name: value for name, value in asdict(arch).items() if name not in _NOT_IN_FINGERPRINT}
    canonical = json.dumps({"arch": fields, "weights": weights_id}, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=16, person=b"kvferry-model").digest()


def as_token_ids(value: int | list[int] | tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the ids of a config field that holds none, one or several token ids."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _count(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ConfigError(f"config.json: {name} must be a positive integer, got {value!r}", param=name)
    return value


def _require_value(config: Mapping[str, Any], name: str, only: object) -> None:
    value = config.get(name, only)
    if value != only:
        raise ConfigError(f"config.json: {name}={value!r} is not supported; supported: {only!r}", param=name)


def _parse_rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling]:
    """Return (theta, scaling) from ``rope_parameters`` (new layout) or ``rope_theta`` + ``rope_scaling`` (old one)."""
    field = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope: Mapping[str, Any] = config.get(field) or {}
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or _DEFAULT_ROPE_THETA)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ConfigError(f"config.json: {field}.partial_rotary_factor must be 1.0", param=field)
    try:
        if kind == "default":
            return theta, RopeScaling()
        if kind == "linear":
            return theta, RopeScaling(kind="linear", factor=float(rope["factor"]))
        if kind == "llama3":
            return theta, RopeScaling(
                kind="llama3",
                factor=float(rope["factor"]),
                low_freq_factor=float(rope["low_freq_factor"]),
                high_freq_factor=float(rope["high_freq_factor"]),
                original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
            )
    except KeyError as missing:
        raise ConfigError(f"config.json: {field}.{missing.args[0]} is missing for rope type {kind!r}", param=field) from None
    raise ConfigError(
        f"config.json: {field}.rope_type={kind!r} is not supported; supported: default, linear, llama3", param=field
    )


def _parse_windows(config: Mapping[str, Any], traits: _Traits) -> tuple[int | None, ...]:
    """Return the sliding window of each layer, None where the layer attends to everything."""
    num_layers = _count(config, "num_hidden_layers")
    window = config.get("sliding_window")
    if traits.window_gate is not None and not config.get(traits.window_gate, False):
        window = None
    if window is None or config["model_type"] == "llama":
        return (None,) * num_layers
    window = _count(config, "sliding_window")
    layer_types = config.get("layer_types")
    if layer_types is not None:
        if len(layer_types) != num_layers:
            raise ConfigError(f"config.json: layer_types names {len(layer_types)} of {num_layers} layers", param="layer_types")
        return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
    first_windowed = 0 if traits.window_gate is None else int(config.get("max_window_layers", 28))
    return tuple(window if layer >= first_windowed else None for layer in range(num_layers))
