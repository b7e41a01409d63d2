"""The shape of a model: a Hugging Face ``config.json`` parsed into one frozen description.

Owns the supported architectures, the properties that their code fixes and their configuration omits, and the model's
fingerprint. Knows nothing of tensors or files and imports no torch: the router, the KV manager and the engine all read it. A
new architecture is one entry of ``_TRAITS``; a property that differs between layers is a tuple with one entry per layer. For a
model with image input it describes the text decoder; the rest is ``core.model.vision_arch``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from core.errors import ConfigError
from core.model.rope import Rope, parse_rope, parse_rope_pair

Activation = Literal["silu", "gelu_pytorch_tanh"]
# Root mean square norm of query and key heads: none, with weights of the checkpoint, or without weights and on rotated layers
# only.
QKNorm = Literal["none", "weighted", "unit"]


@dataclass(frozen=True, slots=True)
class AttentionTemperature:
    """Queries of layers without rope are multiplied by ``1 + scale * ln(1 + floor((position + 1) / floor_tokens))``.

    Source: Nakanishi, "Scalable-Softmax Is Superior for Attention" (2025), as Llama 4 uses it.
    """

    floor_tokens: float
    scale: float


@dataclass(frozen=True, slots=True)
class ModelArch:
    """Everything about a model except its weights. Sizes are in elements, windows and chunks in tokens.

    ``ropes``, ``sliding_windows`` and ``attention_chunk_sizes`` have one entry per layer: None where the layer ignores
    positions, or attends to everything. ``attention_scale`` is the factor on query-key products, ``embedding_scale`` that on
    embedded tokens. ``has_post_norms``: the outputs of attention and MLP are normalized, too, before they are added.
    ``weights_prefix``: the prefix of the decoder's tensors in the checkpoint.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention_scale: float
    embedding_scale: float
    activation: Activation
    rms_norm_eps: float
    ropes: tuple[Rope | None, ...]
    temperature: AttentionTemperature | None
    tie_word_embeddings: bool
    qkv_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    qk_norm: QKNorm
    has_post_norms: bool
    sliding_windows: tuple[int | None, ...]
    attention_chunk_sizes: tuple[int | None, ...]
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str  # of the checkpoint: "float32", "bfloat16" or "float16"
    weights_prefix: str = "model"


@dataclass(frozen=True, slots=True)
class _Traits:
    """Properties that an architecture fixes in its code, so that its config omits them.

    ``defaults``: fields that its config may leave out. ``only``: fields of which a single value is supported.
    """

    defaults: Mapping[str, Any]
    only: Mapping[str, Any] = field(default_factory=lambda: {"hidden_act": "silu"})
    qkv_bias: bool | None = None  # None: read ``attention_bias``
    attention_output_bias: bool | None = None
    qk_norm: QKNorm = "none"
    window_gate: str | None = None  # the flag that switches ``sliding_window`` on; None: the window alone decides


_QWEN_DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

_TRAITS: Mapping[str, _Traits] = {
    "gemma3_text": _Traits(
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
        },
        only={
            "hidden_activation": "gelu_pytorch_tanh",
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "use_bidirectional_attention": False,
        },
        qk_norm="weighted",
    ),
    "llama": _Traits(defaults={"max_position_embeddings": 2048, "sliding_window": None}),
    "llama4_text": _Traits(
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size_mlp": 16384,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "no_rope_layer_interval": 4,
            "attention_chunk_size": 8192,
            "interleave_moe_layer_step": 1,
            "use_qk_norm": True,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
            "max_position_embeddings": 4096 * 32,
        },
    ),
    "mistral": _Traits(
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 4096 * 32, "sliding_window": 4096},
        qkv_bias=False,
        attention_output_bias=False,
    ),
    "qwen2": _Traits(
        defaults=_QWEN_DEFAULTS,
        qkv_bias=True,
        attention_output_bias=False,
        window_gate="use_sliding_window",
    ),
    "qwen3": _Traits(
        defaults={**_QWEN_DEFAULTS, "head_dim": 128},
        qk_norm="weighted",
        window_gate="use_sliding_window",
    ),
}

VISION_MODEL_TYPES = ("idefics3", "smolvlm")  # their configurations contain that of a text model
VISION_WEIGHTS = ("model.vision_model.", "model.connector.")  # prefixes of their tensors outside the text model
SUPPORTED_MODEL_TYPES = tuple(sorted([*_TRAITS, *VISION_MODEL_TYPES]))

_DEFAULT_ROPE_THETA = 10000.0
_GEMMA3_FULL_ROPE_THETA = 1000000.0
_SAID_ABOVE = ("bos_token_id", "eos_token_id", "dtype", "torch_dtype", "quantization_config")
_NOT_IN_FINGERPRINT = ("max_position_embeddings", "bos_token_id", "eos_token_ids", "dtype", "weights_prefix")


def parse_arch(config: Mapping[str, Any]) -> ModelArch:
    """Parse a Hugging Face ``config.json``; for a model with image input, its text decoder.

    Raises:
        ConfigError: unknown ``model_type``, unsupported rope, activation or experts, quantized weights, or a field that is
            missing or wrong.
    """
    if config.get("model_type") in VISION_MODEL_TYPES:
        return replace(_parse_text_arch(_nested_text_config(config)), weights_prefix="model.text_model")
    return _parse_text_arch(config)


def _nested_text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the text model's part, overridden by the whole model's special tokens, dtype, quantization and tied embeddings."""
    text = {"model_type": "llama", **(config.get("text_config") or {})}
    above = {name: config[name] for name in _SAID_ABOVE if config.get(name) is not None}
    return {**text, **above, "tie_word_embeddings": bool(config.get("tie_word_embeddings", False))}


def _parse_text_arch(config: Mapping[str, Any]) -> ModelArch:
    traits = _traits(config.get("model_type"))
    config = {**traits.defaults, **config}
    for name, value in traits.only.items():
        _require_value(config, name, value)
    _refuse_quantized(config)
    num_heads, num_kv_heads, head_dim = _parse_heads(config)
    is_gemma = config["model_type"] == "gemma3_text"
    attention_bias = bool(config.get("attention_bias", False))
    ropes = _parse_ropes(config, traits)
    return ModelArch(
        model_type=config["model_type"],
        vocab_size=positive_count(config, "vocab_size"),
        hidden_size=positive_count(config, "hidden_size"),
        intermediate_size=_parse_intermediate_size(config),
        num_layers=positive_count(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        attention_scale=float((config["query_pre_attn_scalar"] if is_gemma else head_dim) ** -0.5),
        embedding_scale=float(positive_count(config, "hidden_size") ** 0.5) if is_gemma else 1.0,
        activation="gelu_pytorch_tanh" if is_gemma else "silu",
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        ropes=ropes,
        temperature=_parse_temperature(config, ropes),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias if traits.qkv_bias is None else traits.qkv_bias,
        attention_output_bias=attention_bias if traits.attention_output_bias is None else traits.attention_output_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm="unit" if config.get("use_qk_norm") and config["model_type"] == "llama4_text" else traits.qk_norm,
        has_post_norms=is_gemma,
        sliding_windows=_parse_windows(config, traits),
        attention_chunk_sizes=_parse_chunk_sizes(config),
        max_position_embeddings=positive_count(config, "max_position_embeddings"),
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=as_token_ids(config.get("eos_token_id")),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
    )


def model_fingerprint(arch: ModelArch, weights_id: str, quantization: str = "none") -> bytes:
    """Hash everything that KV depends on into 16 bytes: equal in every process for equal files, different for other weights.

    Hashed with BLAKE2b: the fields of ``arch`` (rope included), ``weights_id``, the digest of the content of every weight
    file (``core.model.hub.ModelFiles.weights_id``), and how the weights are quantized at load (``model.quantization``). Left
    out are fields that do not change any key or value: context length, bos, eos, and the dtype, which ``layout_fingerprint``
    carries.
    """
    fields = {name: value for name, value in asdict(arch).items() if name not in _NOT_IN_FINGERPRINT}
    hashed: dict[str, object] = {"arch": fields, "weights": weights_id}
    if quantization != "none":
        hashed["quantization"] = quantization
    canonical = json.dumps(hashed, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=16, person=b"kvferry-model").digest()


def as_token_ids(value: int | list[int] | tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the ids of a config field that holds none, one or several token ids."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def positive_count(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Return a field that must be a positive integer.

    Raises:
        ConfigError: it is not.
    """
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


def _refuse_quantized(config: Mapping[str, Any]) -> None:
    quantization = config.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise ConfigError(
            f"config.json: quantization_config: weights quantized by {method!r} are not supported; name the checkpoint that is "
            "not quantized (model.quantization quantizes when it is loaded)",
            param="quantization_config",
        )


def _traits(model_type: object) -> _Traits:
    traits = _TRAITS.get(model_type) if isinstance(model_type, str) else None
    if traits is None:
        supported = ", ".join(SUPPORTED_MODEL_TYPES)
        raise ConfigError(f"model_type {model_type!r} is not supported; supported: {supported}", param="model_type")
    return traits


def _parse_heads(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the numbers of query and of key-value heads, and their size."""
    num_heads = positive_count(config, "num_attention_heads")
    num_kv_heads = positive_count(config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}",
            param="num_key_value_heads",
        )
    return num_heads, num_kv_heads, positive_count(config, "head_dim", positive_count(config, "hidden_size") // num_heads)


def _parse_intermediate_size(config: Mapping[str, Any]) -> int:
    """Return the width of the MLP. Raises: ConfigError for a mixture of experts, which is not supported."""
    if config["model_type"] != "llama4_text":
        return positive_count(config, "intermediate_size")
    moe_layers = config.get("moe_layers")
    if moe_layers is None:
        step = positive_count(config, "interleave_moe_layer_step")
        moe_layers = list(range(step - 1, positive_count(config, "num_hidden_layers"), step))
    if moe_layers:
        raise ConfigError(
            f"config.json: layers {moe_layers} are mixtures of experts, which are not supported; supported: moe_layers = []",
            param="moe_layers",
        )
    return positive_count(config, "intermediate_size_mlp")


def _parse_ropes(config: Mapping[str, Any], traits: _Traits) -> tuple[Rope | None, ...]:
    """Return the rope of each layer, None where queries and keys are not rotated."""
    num_layers = positive_count(config, "num_hidden_layers")
    if config["model_type"] == "gemma3_text":
        full, local = parse_rope_pair(config, _GEMMA3_FULL_ROPE_THETA, _DEFAULT_ROPE_THETA)
        return tuple(full if window is None else local for window in _parse_windows(config, traits))
    rope = parse_rope(config, _DEFAULT_ROPE_THETA)
    if config["model_type"] == "llama4_text":
        return tuple(rope if rotates else None for rotates in _llama4_rotations(config))
    return (rope,) * num_layers


def _llama4_rotations(config: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return whether each layer rotates; a 1 in the field means that it does, despite the field's name."""
    num_layers = positive_count(config, "num_hidden_layers")
    named = config.get("no_rope_layers")
    if named:
        return tuple(bool(flag) for flag in _one_per_layer("no_rope_layers", named, num_layers))
    interval = positive_count(config, "no_rope_layer_interval")
    return tuple((layer + 1) % interval != 0 for layer in range(num_layers))


def _parse_temperature(config: Mapping[str, Any], ropes: tuple[Rope | None, ...]) -> AttentionTemperature | None:
    if None not in ropes or not config.get("attn_temperature_tuning"):
        return None
    return AttentionTemperature(float(config["floor_scale"]), float(config["attn_scale"]))


def _parse_windows(config: Mapping[str, Any], traits: _Traits) -> tuple[int | None, ...]:
    """Return the sliding window of each layer, None where the layer attends to everything."""
    num_layers = positive_count(config, "num_hidden_layers")
    if config["model_type"] == "llama4_text":
        return (None,) * num_layers
    window = config.get("sliding_window")
    if traits.window_gate is not None and not config.get(traits.window_gate, False):
        window = None
    is_gemma = config["model_type"] == "gemma3_text"
    if config["model_type"] == "llama" or (window is None and not is_gemma):
        _parse_layer_types(config, "full_attention")
        return (None,) * num_layers
    window = positive_count(config, "sliding_window")
    kinds = _parse_layer_types(config, "full_attention", "sliding_attention")
    if kinds is not None:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if is_gemma:  # every n-th layer attends to everything
        pattern = positive_count(config, "sliding_window_pattern")
        return tuple(window if (layer + 1) % pattern else None for layer in range(num_layers))
    first_windowed = 0 if traits.window_gate is None else int(config["max_window_layers"])
    return tuple(window if layer >= first_windowed else None for layer in range(num_layers))


def _parse_chunk_sizes(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return the attention chunk of each layer, None where the layer attends to everything."""
    num_layers = positive_count(config, "num_hidden_layers")
    if config["model_type"] != "llama4_text":
        return (None,) * num_layers
    kinds = _parse_layer_types(config, "full_attention", "chunked_attention")
    if kinds is None:
        kinds = ["chunked_attention" if rotates else "full_attention" for rotates in _llama4_rotations(config)]
    return tuple(positive_count(config, "attention_chunk_size") if kind == "chunked_attention" else None for kind in kinds)


def _parse_layer_types(config: Mapping[str, Any], *supported: str) -> list[str] | None:
    """Return the kind of attention of each layer, None if the config names none.

    Raises:
        ConfigError: a layer has another kind than those supported, or the layers are not as many.
    """
    named = config.get("layer_types")
    if named is None:
        return None
    one_per_layer = _one_per_layer("layer_types", named, positive_count(config, "num_hidden_layers"))
    kinds: list[str] = ["full_attention" if kind == "attention" else kind for kind in one_per_layer]  # the older name
    for kind in kinds:
        if kind not in supported:
            is_off = kind == "sliding_attention" and config["model_type"] not in ("llama", "llama4_text")
            raise ConfigError(
                f"config.json: layer_types: {kind!r} is not supported{' while sliding_window is off' if is_off else ''}; "
                f"supported: {', '.join(supported)}",
                param="layer_types",
            )
    return kinds


def _one_per_layer(name: str, values: list[Any], num_layers: int) -> list[Any]:
    if len(values) != num_layers:
        raise ConfigError(f"config.json: {name} names {len(values)} of {num_layers} layers", param=name)
    return values
