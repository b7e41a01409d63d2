"""Builds a store from the configuration.

Owns the parts that a section of settings stands for, and the order of the tiers: memory, disk, Redis. Libraries that only one
tier needs are imported for that tier.
"""

from __future__ import annotations

from pathlib import Path

from core.clock import Clock
from core.config_workers import KVStoreSection
from core.errors import KVFerryError
from core.ids import IdSource, new_incarnation
from kvstore.arena import NONCE_BYTES, arena_bytes, create_arena, round_slot_bytes
from kvstore.capacity import check_store
from kvstore.embedded import EmbeddedStore
from kvstore.eviction import make_policy
from kvstore.memory import MemoryTier
from kvstore.server_state import ServerOptions
from kvstore.tiers.base import Tier
from kvstore.tiers.disk import DiskOptions, DiskTier


def machine_options(config: KVStoreSection, ids: IdSource) -> ServerOptions:
    """Return the options of a store's state machine, with a new incarnation."""
    incarnation = new_incarnation(ids)

    def make_memory(block_bytes: int) -> MemoryTier:
        block_bytes = config.block_bytes or block_bytes
        check_store(config, block_bytes)
        slot_bytes = round_slot_bytes(block_bytes)
        num_slots = config.memory_bytes // slot_bytes
        while arena_bytes(num_slots, slot_bytes) > config.memory_bytes:
            num_slots -= 1
        nonce = ids.bits(8 * NONCE_BYTES).to_bytes(NONCE_BYTES, "little")
        arena = create_arena(num_slots, slot_bytes, incarnation, nonce, config.huge_pages)
        return MemoryTier(arena, make_policy(config.eviction, num_slots))

    return ServerOptions(
        incarnation,
        make_memory,
        client_timeout_s=config.client_timeout_s,
        max_pinned_share=config.max_pinned_share,
        write_back=config.write_policy == "back",
    )


def make_tiers(config: KVStoreSection, ids: IdSource) -> list[Tier]:
    """Return the tiers below memory that are configured, the fastest first.

    Raises:
        ConfigError: the folder cannot be used, or another process uses it.
        ConnectorUnavailable: the library for Redis is missing.
    """
    tiers: list[Tier] = []
    if config.redis_url:
        from kvstore.tiers.redis_tier import RedisTier

        tiers.append(RedisTier(config.redis_url, config.redis_timeout_s, config.redis_ttl_s, password=config.redis_password))
    if config.disk_path:  # made last, since it locks its folder: nothing after it can fail
        options = DiskOptions(Path(config.disk_path), config.disk_bytes, config.disk_segment_bytes, config.disk_sync)
        tiers.insert(0, DiskTier(options, ids))
    return tiers


def make_embedded_store(config: KVStoreSection, block_bytes: int, clock: Clock, ids: IdSource) -> EmbeddedStore:
    """Return a store inside this process, for blocks of at most this size.

    Raises:
        ConfigError, ConnectorUnavailable: as ``make_tiers``.
        Full: the host lacks the memory.
    """
    tiers = make_tiers(config, ids)
    try:
        return EmbeddedStore(machine_options(config, ids), tiers, block_bytes, config.request_timeout_s, clock, ids)
    except KVFerryError:
        for tier in tiers:
            tier.close()
        raise
