"""EC connector "shared": a store that all workers of a host share keeps the embeddings, whoever has computed them.

Encode workers put, all others put and get: an image that any worker has embedded is embedded by none again. The store is the
server of ``kvstore``, whose arena is mapped where it runs on the same host; from one elsewhere, and from its lower tiers,
chunks come into the worker's host memory while the request waits and others run. Owns the client, the memory and the thread.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable

import msgspec
import numpy as np

from connectors.ec.alarm import Alarm
from connectors.ec.chunks import ChunkLayout, num_chunks
from connectors.ec.jobs import FetchingMetadata, StoreSource
from connectors.ec.memory import ChunkMemory
from connectors.ec.metrics import publish_fetches, publish_store
from connectors.ec.mover import (
    NAME,
    CheckStored,
    EmbeddingMover,
    Forgotten,
    Holder,
    Order,
    SaveEmbeddings,
    StoreReport,
)
from connectors.ec.registry import ECConnector, ECContext
from connectors.ec.scheduler import FetchingScheduler
from connectors.ec.tensors import to_bytes, to_tensor
from connectors.ec.worker import FetchingWorker, OfferEnded
from connectors.tier.thread import TierThread
from core.encoder import ECRole, EmbeddingsLayout
from core.errors import Full
from core.wire.media import ECSource
from core.wire.messages import ErrorInfo
from kvstore.base import BlockStore
from kvstore.client import connect_store

CONNECT_TIMEOUT_S = 2.0  # so that the first images can hit; a worker starts without its store as well
MAX_REMEMBERED = 4096  # embeddings that an encode worker knows to be in the store

OpenStore = Callable[[ECContext, int], BlockStore]


class StoredOffers:
    """What this worker has put into the store, as far as it remembers. ``submit`` gets the orders for the mover."""

    def __init__(self, layout: ChunkLayout, max_bytes: int, submit: Callable[[Order], None]) -> None:
        self._layout = layout
        self._max_bytes = max_bytes
        self._submit = submit
        self._stored: OrderedDict[bytes, ECSource] = OrderedDict()
        self._saving: dict[bytes, int] = {}  # identifier → bytes
        self._news: deque[OfferEnded | Forgotten] = deque()

    @property
    def num_saving_bytes(self) -> int:
        """Copies of embeddings that are on their way to the store. Any thread may ask."""
        return sum(list(self._saving.values()))

    def offer(self, identifier: bytes, num_embeds: int, rows: memoryview) -> OfferEnded | None:
        """Copy the rows and have them stored. While an earlier copy is on its way that one counts."""
        if identifier in self._saving:
            return None
        num_bytes = num_chunks(num_embeds) * self._layout.chunk_bytes
        if self.num_saving_bytes + num_bytes > self._max_bytes:
            error = Full(f"{self.num_saving_bytes} bytes of embeddings are on their way to the store already")
            return OfferEnded(identifier, error=ErrorInfo.of(error))
        content = np.zeros(num_bytes, dtype=np.uint8)
        content[: rows.nbytes] = np.frombuffer(rows, dtype=np.uint8)
        self._saving[identifier] = num_bytes
        self._submit(SaveEmbeddings(identifier, num_embeds, content.data))
        return None

    def find(self, identifier: bytes) -> ECSource | None:
        """Return where an item is, as far as is known; the store is asked for the next time."""
        source = self._stored.get(identifier)
        if source is not None:
            self._stored.move_to_end(identifier)
            self._submit(CheckStored(source.seal))
        return source

    def on_step(self) -> None:
        """Take in what the mover has said."""
        while self._news:
            news = self._news.popleft()
            if isinstance(news, Forgotten):
                self._stored.pop(news.identifier, None)
                continue
            self._saving.pop(news.identifier, None)
            if news.source is not None:
                self._stored[news.identifier] = news.source
                if len(self._stored) > MAX_REMEMBERED:
                    self._stored.popitem(last=False)

    def tell(self, news: OfferEnded | Forgotten) -> None:
        """Say what has become of an order. Any thread."""
        self._news.append(news)


class SharedECConnector(ECConnector):
    """``open_store`` opens the store for chunks of a size; it may take its time."""

    name = NAME
    scheduler: FetchingScheduler
    worker: FetchingWorker

    def __init__(self, context: ECContext, open_store: OpenStore | None = None) -> None:
        self._context = context
        self._open_store = open_store or connect_to_store
        self._layout: ChunkLayout | None = None
        self._memory: ChunkMemory | None = None
        self._offers: StoredOffers | None = None
        self._store: BlockStore | None = None
        self._thread: TierThread[Order, StoreReport] | None = None
        self.scheduler = FetchingScheduler(
            self.name,
            context.clock,
            context.config.transfer_deadline_s,
            lambda feature, announced: StoreSource(),
            is_consumer=not context.is_encoder,
        )
        self.worker = FetchingWorker(to_bytes, to_tensor, self._on_layout)
        self._alarm = Alarm(context.clock, self.worker.wake)

    @property
    def role(self) -> ECRole:
        """What it does here."""
        return "producer" if self._context.is_encoder else "both"

    @property
    def num_saving_bytes(self) -> int:
        """Copies of embeddings that are on their way to the store."""
        return 0 if self._offers is None else self._offers.num_saving_bytes

    async def start(self) -> None:
        """Connect to the store and start the thread. A store that cannot be reached is a miss, now and later.

        Raises:
            ConfigError: the address of the store cannot be used.
        """
        layout, memory, context = self._layout, self._memory, self._context
        assert layout is not None, "register_caches comes before start"
        assert memory is not None, "it comes with the layout"
        self._store = store = await asyncio.to_thread(self._open_store, context, layout.chunk_bytes)
        holder = Holder(engine_id=context.engine_id, incarnation=context.incarnation)
        mover = EmbeddingMover(store, layout, memory, holder, context.clock)
        self._thread = TierThread(mover, self._on_report, self.worker.wake, self.worker.fail)
        self._thread.start()
        self._alarm.start()
        publish_store(context.metrics, mover, lambda: self.num_saving_bytes)
        if not context.is_encoder:
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
        num_bytes = layout.chunk_bytes if context.is_encoder else context.config.memory_bytes  # it fetches nothing
        memory = self._memory = ChunkMemory(layout, num_bytes, context.incarnation)
        self.scheduler.bind(layout, memory.num_chunks)
        self._offers = StoredOffers(layout, context.config.memory_bytes, self._order)
        self.worker.bind(memory.rows, self._submit, self._offers)

    def _submit(self, metadata: FetchingMetadata) -> None:
        if metadata.has_orders:
            self._order(metadata)
        if metadata.wake_at is not None:
            self._alarm.set_soon(metadata.wake_at)

    def _order(self, order: Order) -> None:
        """Pass an order to the thread. After ``stop`` nobody is there, and nothing is reported."""
        if self._thread is not None:
            self._thread.submit(order)

    def _on_report(self, report: StoreReport) -> None:
        if isinstance(report, (OfferEnded, Forgotten)) and self._offers is not None:
            self._offers.tell(report)
        if not isinstance(report, Forgotten):
            self.worker.report(report)


def connect_to_store(context: ECContext, chunk_bytes: int) -> BlockStore:
    """Return a client of the store that the settings name.

    Raises:
        ConfigError: its address cannot be used.
    """
    config = context.kvstore
    if context.config.kvstore_address:
        config = msgspec.structs.replace(config, address=context.config.kvstore_address)
    client = connect_store(config, f"{context.engine_id}-ec", chunk_bytes, context.clock, context.ids, context.keys)
    client.wait_until_connected(CONNECT_TIMEOUT_S)
    return client
