"""What the connector reads from vLLM's configuration: what is supported, and the identity of its KV.

Everything that knows vLLM's configuration objects is here and in ``connectors.vllm.pool``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from connectors.vllm.identity import ModelIdentity
from connectors.vllm.scheduler_side import TransferGroups
from core.constants import HASH_BLOCK_SIZE
from core.errors import ConfigError

SUPPORTED_MINORS = ("0.32",)
LAYERS_APART = "LBHNC"
LAYOUTS = ("BLHNC", LAYERS_APART)  # the first is better: one contiguous run of all layers per block
_MLA = frozenset({"MLAAttentionSpec", "SlidingWindowMLASpec"})
_SLIDING = frozenset({"SlidingWindowSpec", "SlidingWindowMLASpec"})
_ATTENTION = _MLA | _SLIDING | {"FullAttentionSpec"}


def check_version(version: str) -> str:
    """Return the minor version of vLLM.

    Raises:
        ConfigError: this minor is not supported: connectors' interface changes between minors.
    """
    minor = ".".join(version.split(".")[:2])
    if minor not in SUPPORTED_MINORS:
        raise ConfigError(
            f"kvferry supports vLLM {', '.join(SUPPORTED_MINORS)}, this is {version}: install a matching kvferry-vllm"
        )
    return minor


def check_supported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuse a configuration under which handoffs could not be verified, or would never work.

    Raises:
        ConfigError: the message names the setting and the reason.
    """
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name) > 1:
            raise ConfigError(f"KvferryConnector does not support {name} = {getattr(parallel, name)}: only tensor parallelism")
    if str(cache.prefix_caching_hash_algo).startswith("xxhash"):
        algorithm = cache.prefix_caching_hash_algo
        raise ConfigError(
            f"KvferryConnector refuses prefix_caching_hash_algo = {algorithm}: its hashes can be forged; use sha256"
        )
    for name in ("enable_sleep_mode", "enable_cumem_allocator"):
        if getattr(vllm_config.model_config, name):
            raise ConfigError(
                f"KvferryConnector does not support {name}: after a sleep other memory has the addresses of the KV cache, and "
                "readers would still read what was there before; turn it off"
            )
    multimodal = vllm_config.model_config.multimodal_config
    if multimodal is not None and not multimodal.mm_processor_cache_gb and not cache.enable_prefix_caching:
        raise ConfigError(
            "KvferryConnector refuses mm_processor_cache_gb = 0 without prefix caching: vLLM then numbers images instead of "
            "hashing them, and two images can have the same number; enable one of the two"
        )
    num_groups, num_transferred = len(kv_cache_config.kv_cache_groups), len(kv_cache_config.transfer_group_ids)
    if num_transferred < num_groups:
        raise ConfigError(
            f"KvferryConnector does not support this KV cache: vLLM transfers only {num_transferred} of its {num_groups} groups"
        )
    sizes: set[int] = set()
    for group_id in kv_cache_config.transfer_group_ids:
        for spec in _specs(kv_cache_config.kv_cache_groups[group_id].kv_cache_spec):
            kind = type(spec).__name__
            if kind not in _ATTENTION or spec.tokens_per_state != 1:
                raise ConfigError(f"KvferryConnector does not support KV caches of {kind} (group {group_id} of this model)")
            sizes.add(spec.block_size)
    if len(sizes) != 1 or not sizes or min(sizes) % HASH_BLOCK_SIZE:
        needed = f"one block_size for all KV cache groups, a multiple of {HASH_BLOCK_SIZE}"
        raise ConfigError(f"KvferryConnector needs {needed}, not {sorted(sizes)}")


def check_role(own: Any, outer: Any) -> None:
    """Compare the connector's ``KVTransferConfig`` with the engine's: the same, or that of MultiConnector around it.

    The scheduler goes by the engine's role. Unless it is a consumer's, and with async scheduling, it hands out blocks of a
    finished request that the step in flight still writes: a load would be overwritten after its seals have been checked.

    Raises:
        ConfigError: the connector loads, and the engine's role says that nothing is loaded.
    """
    if own.is_kv_consumer and not outer.is_kv_consumer:
        raise ConfigError(
            f"KvferryConnector with kv_role = {own.kv_role} cannot be a connector of {outer.kv_connector} with kv_role = "
            f"{outer.kv_role}: vLLM would hand out blocks to load into that a step still writes; use kv_both for "
            f"{outer.kv_connector}"
        )


def transfer_groups(kv_cache_config: Any) -> TransferGroups:
    """Return the KV cache groups that take part."""
    ids = tuple(kv_cache_config.transfer_group_ids)
    specs = [_specs(kv_cache_config.kv_cache_groups[group_id].kv_cache_spec)[0] for group_id in ids]
    return TransferGroups(ids, tuple(_window(spec) for spec in specs))


def can_name_blocks(kv_cache_config: Any) -> bool:
    """Return True if vLLM computes single blocks of a load again, from the tokens before them.

    It does so with one group only. With a window these tokens may have no blocks: they were needed by none of those to come.
    """
    groups = kv_cache_config.kv_cache_groups
    return len(groups) == 1 and all(_window(spec) is None for spec in _specs(groups[0].kv_cache_spec))


def block_size(kv_cache_config: Any) -> int:
    """Return the tokens of a block, the same for all groups that take part."""
    group_id = kv_cache_config.transfer_group_ids[0]
    return int(_specs(kv_cache_config.kv_cache_groups[group_id].kv_cache_spec)[0].block_size)


def attention_specs(kv_cache_config: Any) -> list[Any]:
    """Return the specs of all groups that take part."""
    return [
        spec
        for group_id in kv_cache_config.transfer_group_ids
        for spec in _specs(kv_cache_config.kv_cache_groups[group_id].kv_cache_spec)
    ]


def model_identity(vllm_config: Any, minor: str, weights: str, attention: Sequence[str]) -> ModelIdentity:
    """Return the identity of the engine's KV. ``weights`` names them if vLLM's name is a path that differs between machines."""
    model, speculative = vllm_config.model_config, vllm_config.speculative_config
    return ModelIdentity(
        weights=weights or str(model.model),
        revision=str(model.revision or ""),
        config=_digest_of(model.hf_config.to_dict()),
        dtype=str(model.dtype).removeprefix("torch."),
        quantization=_quantization(model),
        speculative="" if speculative is None else f"{speculative.method}:{speculative.model}",
        attention=",".join(attention),
        vllm=minor,
    )


def attention_names(vllm_config: Any, specs: Sequence[Any]) -> list[str]:
    """Return the names of the attention backends; on CPU with the instruction sets, which decide how a block is packed."""
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends

    names = sorted(backend.get_name() for backend in get_current_attn_backends(vllm_config))
    return names + instruction_sets(vllm_config, specs)


def instruction_sets(vllm_config: Any, specs: Sequence[Any]) -> list[str]:
    """Return for which instruction sets vLLM packs its blocks on this CPU; none on a device."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return []
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    dtype, cache_dtype = vllm_config.model_config.dtype, vllm_config.cache_config.cache_dtype
    return sorted({_get_attn_isa(dtype, spec.block_size, spec.head_size, cache_dtype) for spec in specs})


def holds_latents(specs: Sequence[Any]) -> bool:
    """Return True for attention that keeps one latent per token instead of keys and values (MLA)."""
    return all(type(spec).__name__ in _MLA for spec in specs)


def total_kv_heads(vllm_config: Any, specs: Sequence[Any]) -> int:
    """Return the KV heads of the model, on all ranks together; 1 for a latent (MLA), which every rank has."""
    if holds_latents(specs):
        return 1
    return int(vllm_config.model_config.get_total_num_kv_heads())


def _window(spec: Any) -> int | None:
    """Return the window outside of which vLLM keeps no blocks.

    A spec of full attention may name a window, too: that of some layers, which vLLM computes but keeps all blocks.
    """
    if type(spec).__name__ not in _SLIDING:
        return None
    return int(spec.sliding_window + spec.extra_retained_tokens)


def _specs(spec: Any) -> list[Any]:
    """Return the specs of a group's layers, each kind once."""
    by_layer = getattr(spec, "kv_cache_specs", None)
    return [spec] if by_layer is None else list(dict.fromkeys(by_layer.values()))


def _quantization(model_config: Any) -> str:
    """Return the method's name, with a digest of the user's rules for what vLLM quantizes itself, if there are any.

    The rules of a checkpoint are in its configuration. Of the patterns in ``ignore`` vLLM asks whether any matches: their order
    has no meaning.
    """
    method, rules = str(model_config.quantization or ""), model_config.quantization_config
    if rules is None:
        return method
    rules = dict(rules) if isinstance(rules, dict) else dataclasses.asdict(rules)
    rules["ignore"] = sorted(set(rules.get("ignore") or ()))
    return f"{method}:{_digest_of(rules)}"


def _digest_of(config: dict[str, Any]) -> str:
    """Return a digest of a model's configuration, without what says nothing of its KV."""
    meaningful = {key: value for key, value in config.items() if not key.startswith("_") and key != "transformers_version"}
    return hashlib.blake2b(json.dumps(meaningful, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()
