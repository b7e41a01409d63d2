"""The tier of the store connector: the server at ``kvstore.address``, or, without one, a store inside the worker.

Owns the choice between them. Everything else is ``connectors.tier`` and ``kvstore``. While a server cannot be reached every
lookup misses, and the client tries again.
"""

from __future__ import annotations

import socket

from connectors.tier.connector import TierConnector
from connectors.tier.scheduler import TierSettings
from core.connector import ConnectorContext
from core.errors import ConfigError, Full
from core.wire.contents import STORE, ContentPart
from kvstore.base import BlockStore
from kvstore.build import make_embedded_store
from kvstore.client import connect_store
from kvstore.metrics import register_store_metrics

NAME = "store"
MAX_REPORTED_BLOCKS = 1 << 17  # of a store, by one worker: it holds their names in memory
CONNECT_TIMEOUT_S = 2.0  # so that the first requests can hit; a worker starts without its store, too


def store_connector(context: ConnectorContext) -> TierConnector:
    """Return the connector; its store is opened when it starts."""
    settings = TierSettings(
        name=NAME,
        load_timeout_s=context.config.connector.transfer_deadline_s,
        saves_output=context.config.connector.store.save_decode_cache,
    )
    return TierConnector(context, settings, lambda: open_store(context), _content_part(context))


def _content_part(context: ConnectorContext) -> ContentPart:
    """Return how routers know the store: workers with one server hold its blocks together."""
    section = context.config.kvstore
    if not section.address:
        num_bytes = section.memory_bytes + (section.disk_bytes if section.disk_path else 0)
        num_blocks = min(MAX_REPORTED_BLOCKS, max(1, num_bytes // context.layout.block_bytes))
        return ContentPart(medium=STORE, connector=NAME, num_blocks=num_blocks)
    is_of_this_host = any(name in section.address for name in ("127.0.0.1", "localhost", "[::1]"))
    store = f"{section.address}@{socket.gethostname()}" if is_of_this_host else section.address
    return ContentPart(medium=STORE, connector=NAME, num_blocks=MAX_REPORTED_BLOCKS, store=store)


def open_store(context: ConnectorContext) -> BlockStore:
    """Connect to the server, or make a store.

    Raises:
        ConfigError: the settings of the store inside the worker are not possible here.
        ConnectorUnavailable: a library that it needs is missing.
    """
    block_bytes = context.layout.block_bytes
    if not context.config.kvstore.address:
        try:
            store = make_embedded_store(context.config.kvstore, block_bytes, context.clock, context.ids)
        except Full as error:
            raise ConfigError(f"kvstore.memory_bytes: {error}", param="kvstore.memory_bytes") from None
        register_store_metrics(context.metrics, store.machine, store.workers)
        return store
    client = connect_store(context.config.kvstore, context.engine_id, block_bytes, context.clock, context.ids, context.keys)
    client.wait_until_connected(CONNECT_TIMEOUT_S)
    return client
