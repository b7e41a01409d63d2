"""The tier of the offload connector: an arena in the worker's host memory, which no other process maps.

Owns the meaning of the settings for it. Everything else is ``connectors.tier`` and ``kvstore``.
"""

from __future__ import annotations

from connectors.tier.connector import TierConnector
from connectors.tier.scheduler import TierSettings
from core.config_workers import KVStoreSection
from core.connector import ConnectorContext
from core.errors import ConfigError, Full
from core.wire.contents import HOST, ContentPart
from kvstore.base import BlockStore
from kvstore.build import make_embedded_store

NAME = "offload"


def offload_connector(context: ConnectorContext) -> TierConnector:
    """Return the connector; its arena is allocated when it starts."""
    settings = TierSettings(
        name=NAME,
        load_timeout_s=context.config.connector.transfer_deadline_s,
        is_lazy=context.config.connector.offload.mode == "lazy",
    )
    num_blocks = max(1, context.config.connector.offload.memory_bytes // context.layout.block_bytes)
    part = ContentPart(medium=HOST, connector=NAME, num_blocks=num_blocks)
    return TierConnector(context, settings, lambda: open_arena(context), part)


def open_arena(context: ConnectorContext) -> BlockStore:
    """Allocate the arena.

    Raises:
        ConfigError: it is too small for one block, or the host lacks the memory.
    """
    section = context.config.connector.offload
    arena = KVStoreSection(
        memory_bytes=section.memory_bytes, huge_pages=section.huge_pages, eviction=section.eviction, max_pinned_share=1.0
    )
    try:
        return make_embedded_store(arena, context.layout.block_bytes, context.clock, context.ids)
    except (ConfigError, Full) as error:
        path = "connector.offload.memory_bytes"
        raise ConfigError(f"{path} = {section.memory_bytes}: {error}", param=path) from None
