"""The tier connector: both sides, the store, and the thread that copies between pool and store.

Starts and stops these parts. ``connectors.offload`` and ``connectors.store`` build it, each with its own store.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from connectors.pool_access import open_pool
from connectors.tier.contents import TierContents
from connectors.tier.messages import Report, TierConnectorMetadata
from connectors.tier.metrics import publish_tier
from connectors.tier.scheduler import TierConnectorScheduler, TierSettings
from connectors.tier.thread import TierThread
from connectors.tier.transfer import TierTransfer
from connectors.tier.worker import TierConnectorWorker
from core.connector import Connector, ConnectorContext, ContentFollower
from core.errors import ConnectorUnavailable
from core.kv.pool_region import KVPoolRegion
from core.log import event
from core.wire.contents import ContentPart
from kvstore.base import BlockStore, LookupTicket

_log = logging.getLogger(__name__)


class TierConnector(Connector):
    """``open_store`` opens the tier. It may block, and is called once, when the connector starts.

    Routers know the tier as ``part``.
    """

    scheduler: TierConnectorScheduler
    worker: TierConnectorWorker

    def __init__(
        self, context: ConnectorContext, settings: TierSettings, open_store: Callable[[], BlockStore], part: ContentPart
    ) -> None:
        self._context = context
        self._part = part
        self._contents = TierContents(part.medium)
        self._settings = settings
        self._open_store = open_store
        self._store: BlockStore | None = None
        self._thread: TierThread[TierConnectorMetadata, Report] | None = None
        self._unpin: Callable[[], None] | None = None
        self.scheduler = TierConnectorScheduler(
            settings, context.layout, context.clock, self._opened, self._watch, self._contents
        )
        self.worker = TierConnectorWorker(settings.name, self._submit)

    def num_saving_blocks(self) -> int:
        """Return the number of blocks pinned for saves."""
        return self.scheduler.num_saving_blocks

    def saving_block_ids(self) -> list[int]:
        """Return the blocks pinned for saves."""
        return self.scheduler.saving_block_ids()

    @property
    def content_parts(self) -> tuple[ContentPart, ...]:
        """The tier."""
        return (self._part,)

    def follow_contents(self, publish: ContentFollower) -> None:
        """See ``Connector``."""
        self._contents.follow(publish)

    async def start(self) -> None:
        """Open the tier and start the thread.

        Raises:
            ConfigError: the tier cannot be opened with these settings.
            ConnectorUnavailable: the engine lacks what a tier needs, or the host does.
        """
        name, pool = self._settings.name, self.worker.pool
        assert pool is not None, "register_kv_caches comes before start"
        if pool.seals is None:
            raise ConnectorUnavailable(f"connector {name}: the engine makes no seals, and nothing is stored without")
        self._store = store = await asyncio.to_thread(self._open_store)
        pinned = await asyncio.to_thread(self._pin, pool, store)
        self._contents.is_exact = store.follow_evictions(self._contents.remove)
        mover = TierTransfer(name, store, open_pool(pool, pinned), pool.seals, pool.block_bytes, self._context.clock)
        mover.contents = self._contents
        self._thread = TierThread(mover, self.worker.report, self.worker.wake, self.worker.fail)
        self._thread.start()
        publish_tier(self._context.metrics, self.scheduler, mover, store, name)
        _log.info(
            event("kv_tier", tier=name, lazy=self._settings.is_lazy, connected=store.is_connected, pinned=pinned is not None)
        )

    async def stop(self) -> None:
        """End the thread and close the tier. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            await asyncio.to_thread(thread.stop)
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
        if self._store is not None:
            await asyncio.to_thread(self._store.close)

    def _pin(self, pool: KVPoolRegion, store: BlockStore) -> memoryview | None:
        """Pin the tier's memory if this process owns it and the pool is on a device; return it, or None if it is not pinned."""
        memory = store.own_memory
        if memory is None or pool.pin_memory is None:
            return None
        self._unpin = pool.pin_memory(memory)
        return memory if self._unpin is not None else None

    def _opened(self) -> BlockStore:
        assert self._store is not None, "the connector has not started"
        return self._store

    def _submit(self, metadata: TierConnectorMetadata) -> None:
        """Pass the message of a step to the thread. After ``stop`` it is dropped, and nothing is reported."""
        if self._thread is not None:
            self._thread.submit(metadata)

    def _watch(self, ticket: LookupTicket) -> None:
        if self._thread is not None:
            self._thread.watch(ticket)
