"""EC connector "shared": the workers of a host keep their embeddings in a shared store.

Encode workers put, all others put and get: an image that one worker has embedded is not embedded again. The store is a
server of ``kvstore``, whose arena is mapped if it runs on the same host; from a server elsewhere, and from its lower tiers,
chunks are copied into the worker's host memory while the request waits and others run. Owns the client, the memory and the
thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from connectors.ec.chunks import ChunkLayout
from connectors.ec.jobs import FetchingMetadata, StoreSource
from connectors.ec.memory import ChunkMemory
from connectors.ec.metrics import publish_fetches, publish_store
from connectors.ec.mover import NAME, EmbeddingHolder, EmbeddingTransfer, Order, StoreReport
from connectors.ec.scheduler import FetchingScheduler
from connectors.ec.store_offers import StoreOffers, pass_on
from connectors.ec.tensors import to_bytes, to_tensor
from connectors.ec.wakeup_timer import WakeupTimer
from connectors.ec.worker import FetchingWorker
from connectors.tier.thread import TierThread
from core.ec_connector import ECConnector, ECContext, EmbeddingsLayout
from kvstore.base import BlockStore
from kvstore.client import connect_store

CONNECT_TIMEOUT_S = 2.0  # so that the first images can hit; a worker starts without its store, too

OpenStore = Callable[[ECContext, int], BlockStore]


class StoreECConnector(ECConnector):
    """``open_store`` opens the store for chunks of a size; it may block."""

    name = NAME
    scheduler: FetchingScheduler
    worker: FetchingWorker

    def __init__(self, context: ECContext, open_store: OpenStore | None = None) -> None:
        self._context = context
        self._settings = context.config.ec_connector
        self._is_producer = context.role == "encode"
        self._open_store = open_store or connect_to_store
        self._layout: ChunkLayout | None = None
        self._memory: ChunkMemory | None = None
        self._offers: StoreOffers | None = None
        self._store: BlockStore | None = None
        self._thread: TierThread[Order, StoreReport] | None = None
        self.scheduler = FetchingScheduler(
            self.name,
            context.clock,
            self._settings.transfer_deadline_s,
            lambda feature, announced: StoreSource(),
            is_consumer=not self._is_producer,
        )
        self.worker = FetchingWorker(to_bytes, to_tensor, self._on_layout)
        self._alarm = WakeupTimer(context.clock, self.worker.wake)

    @property
    def num_saving_bytes(self) -> int:
        """Bytes of copies that are on their way to the store."""
        return 0 if self._offers is None else self._offers.num_saving_bytes

    async def start(self) -> None:
        """Connect to the store and start the thread. While the store cannot be reached, every lookup misses.

        Raises:
            ConfigError: the address of the store cannot be used.
        """
        layout, memory, context = self._layout, self._memory, self._context
        assert layout is not None, "register_caches comes before start"
        assert memory is not None, "it comes with the layout"
        self._store = store = await asyncio.to_thread(self._open_store, context, layout.chunk_bytes)
        holder = EmbeddingHolder(engine_id=context.engine_id, incarnation=context.incarnation)
        mover = EmbeddingTransfer(store, layout, memory, holder, context.clock)
        self._thread = TierThread(mover, self._on_report, self.worker.wake, self.worker.fail)
        self._thread.start()
        self._alarm.start()
        publish_store(context.metrics, mover, lambda: self.num_saving_bytes)
        if not self._is_producer:
            publish_fetches(context.metrics, self.scheduler)

    async def stop(self) -> None:
        """End the thread, close the connection and the memory. Idempotent."""
        self._alarm.stop()
        thread, self._thread = self._thread, None
        if thread is not None:
            await asyncio.to_thread(thread.stop)
        if self._store is not None:
            await asyncio.to_thread(self._store.close)
        if self._memory is not None:
            self._memory.close()

    def _on_layout(self, embeddings: EmbeddingsLayout) -> None:
        context = self._context
        layout = self._layout = ChunkLayout(embeddings, context.model_fingerprint)
        num_bytes = layout.chunk_bytes if self._is_producer else self._settings.memory_bytes  # a producer fetches nothing
        memory = self._memory = ChunkMemory(layout, num_bytes, context.incarnation)
        self.scheduler.bind(layout, memory.num_chunks)
        self._offers = StoreOffers(layout, self._settings.memory_bytes, self._order)
        self.worker.bind(memory.rows, self._submit, self._offers)

    def _submit(self, metadata: FetchingMetadata) -> None:
        if metadata.has_orders:
            self._order(metadata)
        if metadata.wake_at is not None:
            self._alarm.set_soon(metadata.wake_at)

    def _order(self, order: Order) -> None:
        """Pass an order to the thread. After ``stop`` it is dropped, and nothing is reported."""
        if self._thread is not None:
            self._thread.submit(order)

    def _on_report(self, report: StoreReport) -> None:
        assert self._offers is not None, "they come with the layout"
        pass_on(report, self._offers, self.worker)


def connect_to_store(context: ECContext, chunk_bytes: int) -> BlockStore:
    """Return a client of the store that the settings name.

    Raises:
        ConfigError: its address cannot be used.
    """
    config = context.config.kvstore
    if context.config.ec_connector.kvstore_address:
        config = msgspec.structs.replace(config, address=context.config.ec_connector.kvstore_address)
    client = connect_store(config, f"{context.engine_id}-ec", chunk_bytes, context.clock, context.ids, context.keys)
    client.wait_until_connected(CONNECT_TIMEOUT_S)
    return client
