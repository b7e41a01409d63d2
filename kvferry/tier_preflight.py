"""Checks of the tiers below a worker's pool before a start: that each holds one block of the model.

A tier that does not would refuse its worker when the model is loaded, or, as a process of its own, every client.
"""

from __future__ import annotations

from core.config import KVFerryConfig
from core.errors import ConfigError
from kvstore.arena import round_slot_bytes
from kvstore.capacity import check_memory, check_store


def check_tiers(config: KVFerryConfig, block_bytes: int) -> None:
    """Check the tiers that a worker with these settings has, or shares with others of this machine.

    The settings of a store that is elsewhere are not ours to judge.

    Raises:
        ConfigError: one does not hold a block of this size; names the setting, its value and the fix.
    """
    names, store = config.connector.names, config.kvstore
    if "offload" in names:
        check_memory("connector.offload.memory_bytes", config.connector.offload.memory_bytes, block_bytes)
    if "store" not in names or (store.address and not config.local.kvstore):
        return
    check_store(store, block_bytes)
    if store.block_bytes and round_slot_bytes(store.block_bytes) < block_bytes:
        raise ConfigError(
            f"kvstore.block_bytes = {store.block_bytes}: the model's blocks have {block_bytes} bytes; set it to that, or leave "
            "it out",
            param="kvstore.block_bytes",
        )


def check_own_store(config: KVFerryConfig) -> None:
    """Check a store that is a process of its own and knows the size of its blocks.

    Raises:
        ConfigError: it does not hold one.
    """
    if config.kvstore.block_bytes:
        check_store(config.kvstore, config.kvstore.block_bytes)
