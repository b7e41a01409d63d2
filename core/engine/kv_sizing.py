"""How large the KV cache of a worker is, and what fits into it: from a configuration and a model's shape.

The only place that computes these numbers: for the pool and the scheduler of an engine, and for planning a deployment. Owns
no memory and imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.config import KVFerryConfig
from core.config_workers import CacheSection, ModelSection, SchedulerSection
from core.errors import ConfigError
from core.kv.grouping import group_layers
from core.kv.spec import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheConfig, KVCacheSpec, SlidingWindowSpec
from core.model.arch import ModelArch


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSizing:
    """The pool of a worker and its bounds in tokens; ``max_model_len`` is what the model and the pool both allow."""

    config: KVCacheConfig
    max_in_flight_tokens: int
    max_model_len: int

    def num_blocks_of(self, num_tokens: int) -> int:
        """Return the most blocks that a sequence of ``num_tokens`` tokens really holds at a time."""
        return self.config.num_blocks_of_sequence(num_tokens, self.max_in_flight_tokens, self.max_model_len)


def size_kv_cache(config: KVFerryConfig, arch: ModelArch, dtype_bytes: int) -> KVCacheSizing:
    """Return the KV cache that a worker of this configuration has.

    Raises:
        ConfigError: blocks, memory or context length do not fit the model or each other.
    """
    cache_config = kv_cache_config(arch, config.cache, dtype_bytes)
    in_flight = max_in_flight_tokens(config.scheduler)
    return KVCacheSizing(
        config=cache_config,
        max_in_flight_tokens=in_flight,
        max_model_len=_max_model_len(config.model, arch, cache_config, in_flight),
    )


def block_bytes_of(arch: ModelArch, section: CacheSection, dtype_bytes: int) -> int:
    """Return the size of a block of the model's pool.

    Raises:
        ConfigError: the blocks do not fit the model's attention.
    """
    return KVCacheConfig(2, group_layers(layer_specs(arch, section.block_size, dtype_bytes))).block_bytes


def max_in_flight_tokens(section: SchedulerSection) -> int:
    """Return how many tokens can be scheduled and not yet processed, over all concurrent steps."""
    num_steps = 2 if section.async_scheduling == "on" else 1  # scheduled before the output of the first is processed
    return section.step_tokens * num_steps


def kv_cache_config(arch: ModelArch, section: CacheSection, dtype_bytes: int) -> KVCacheConfig:
    """Return the groups of a model and the number of blocks that the configured memory holds.

    Raises:
        ConfigError: the blocks do not fit the model's attention, or the memory holds no usable block.
    """
    groups = group_layers(layer_specs(arch, section.block_size, dtype_bytes))
    block_bytes = KVCacheConfig(2, groups).block_bytes
    num_blocks = section.num_blocks or section.memory_bytes // block_bytes
    if num_blocks < 2:
        raise ConfigError(
            f"the KV pool holds {num_blocks} blocks of {block_bytes} bytes (cache.memory_bytes = {section.memory_bytes}, "
            f"cache.num_blocks = {section.num_blocks}); at least 2 are needed",
            param="cache.num_blocks" if section.num_blocks else "cache.memory_bytes",
        )
    return KVCacheConfig(num_blocks, groups)


def layer_specs(arch: ModelArch, block_size: int, dtype_bytes: int) -> tuple[KVCacheSpec, ...]:
    """Return what each layer keeps of a sequence.

    Raises:
        ConfigError: chunks of local attention do not consist of whole blocks.
    """
    try:
        return tuple(
            _layer_spec(window, chunk_size, (block_size, arch.num_kv_heads, arch.head_dim, dtype_bytes))
            for window, chunk_size in zip(arch.sliding_windows, arch.attention_chunk_sizes, strict=True)
        )
    except ValueError as error:
        raise ConfigError(
            f"cache.block_size = {block_size} does not fit the model: {error}", param="cache.block_size"
        ) from None


def _layer_spec(window: int | None, chunk_size: int | None, shape: tuple[int, int, int, int]) -> KVCacheSpec:
    size, num_kv_heads, head_dim, dtype_bytes = shape
    if window is not None:
        return SlidingWindowSpec(
            block_size=size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype_bytes=dtype_bytes,
            sliding_window=window,
        )
    if chunk_size is not None:
        return ChunkedLocalAttentionSpec(
            block_size=size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype_bytes=dtype_bytes,
            attention_chunk_size=chunk_size,
        )
    return FullAttentionSpec(block_size=size, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype_bytes=dtype_bytes)


def _max_model_len(section: ModelSection, arch: ModelArch, cache_config: KVCacheConfig, max_in_flight_tokens: int) -> int:
    """Return the longest sequence: as configured, or what both the model and an otherwise empty pool allow."""
    if section.max_model_len > arch.max_position_embeddings:
        raise ConfigError(
            f"model.max_model_len = {section.max_model_len}: the model allows {arch.max_position_embeddings}",
            param="model.max_model_len",
        )
    wanted = section.max_model_len or arch.max_position_embeddings
    fitting = cache_config.max_tokens_of_sequence(max_in_flight_tokens, wanted)
    if section.max_model_len > fitting:
        raise ConfigError(
            f"model.max_model_len = {section.max_model_len}: the KV pool holds {fitting}, see cache.memory_bytes",
            param="model.max_model_len",
        )
    if not fitting:
        raise ConfigError(
            f"the KV pool of {cache_config.num_blocks} blocks does not hold one token of the model's "
            f"{len(cache_config.groups)} KV cache groups, see cache.memory_bytes",
            param="cache.num_blocks",
        )
    return fitting
