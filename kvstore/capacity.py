"""Whether the settings of a store hold one block, before anything is allocated.

Owns the sizes that are needed for one, and the texts of the refusals. A store learns the size of a block from its first client
unless ``kvstore.block_bytes`` names it; who knows the model can check earlier (``kvferry.tier_preflight``).
"""

from __future__ import annotations

from core.config_workers import KVStoreSection
from core.errors import ConfigError
from kvstore.arena import arena_bytes, round_slot_bytes
from kvstore.segments import least_capacity_bytes


def check_store(section: KVStoreSection, block_bytes: int) -> None:
    """Check that memory and disk hold a block of ``section.block_bytes``, or, without it, of this size.

    Raises:
        ConfigError: one of them does not; names the setting, its value and the least that will do.
    """
    block_bytes = section.block_bytes or block_bytes
    check_memory("kvstore.memory_bytes", section.memory_bytes, block_bytes)
    least_bytes = least_capacity_bytes(section.disk_segment_bytes, block_bytes)
    if section.disk_path and section.disk_bytes < least_bytes:
        raise ConfigError(
            f"kvstore.disk_bytes = {section.disk_bytes} does not hold one block of {block_bytes} bytes: set it to at least "
            f"{least_bytes}, or leave kvstore.disk_path out",
            param="kvstore.disk_bytes",
        )


def check_memory(setting: str, memory_bytes: int, block_bytes: int) -> None:
    """Check that an arena of this size, which a setting names, holds one block.

    Raises:
        ConfigError: it does not.
    """
    least_bytes = arena_bytes(1, round_slot_bytes(block_bytes))
    if memory_bytes < least_bytes:
        raise ConfigError(
            f"{setting} = {memory_bytes} does not hold one block of {block_bytes} bytes: set it to at least {least_bytes}",
            param=setting,
        )
