"""The LMCache connector as a worker sees it: a ``LMCacheNode`` carried by the event loop, a connection and a copying thread.

Passes events to the node and carries out the node's actions in order. The engine thread and the copying thread reach it by
``call_soon_threadsafe``, which keeps order. A missing or lost server costs cache hits only. A bug in the node ends the worker,
because loads that depend on it might never end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from connectors.lmcache.actions import (
    Action,
    ConnectToServer,
    LMCacheMPConnectorMetadata,
    LookupAnswered,
    ProbeServer,
    SavePages,
    SealPages,
    SendToServer,
    ServerFacts,
    SessionClosed,
    SessionOpened,
    TakePages,
)
from connectors.lmcache.client import LMCacheClient, fetch_facts
from connectors.lmcache.node import LMCacheNode, NodePhase
from connectors.lmcache.pending_requests import LMCacheSettings
from connectors.lmcache.scheduler import LMCacheMPConnectorScheduler
from connectors.lmcache.staging import PAGE_VERSION, SHM_PREFIX, PageSealer, Staging, sweep_segments
from connectors.lmcache.wire import Namespace
from connectors.lmcache.worker import LMCacheMPConnectorWorker
from connectors.reports import LoadEnded
from core.connector import Connector, ConnectorContext
from core.digest import BlockDigester
from core.errors import ConnectorUnavailable, KVFerryError
from core.ids import new_hex_id
from core.kv.seals import SEAL_BYTES, layout_fingerprint
from core.kv.spec import ChunkedLocalAttentionSpec, KVCacheSpec, SlidingWindowSpec
from core.log import event
from core.metrics import read_gauge, read_labelled_counter
from core.wire.sockets import AsyncContext

_GOOD_BYE_S = 0.2

_log = logging.getLogger(__name__)


class LMCacheConnector(Connector):
    """Loads from and saves to the LMCache server of this host, in workers of any role."""

    scheduler: LMCacheMPConnectorScheduler
    worker: LMCacheMPConnectorWorker

    def __init__(self, context: ConnectorContext) -> None:
        self._context = context
        self._settings = context.config.connector.lmcache
        self.scheduler = LMCacheMPConnectorScheduler(
            context.ids,
            context.clock,
            saves_output=self._settings.save_decode_cache,
            handoff_wait_s=self._settings.handoff_wait_s,
        )
        self.worker = LMCacheMPConnectorWorker(
            lambda metadata: self._call_soon(self._on_metadata, metadata), lambda saves: self._call_soon(self._on_copied, saves)
        )
        self._sealer = self._new_sealer()  # of the copying thread
        self._node: LMCacheNode | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._zmq: AsyncContext | None = None
        self._link: LMCacheClient | None = None
        self._copies: ThreadPoolExecutor | None = None
        self._allocated: Staging | None = None  # the latest
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_tried = asyncio.Event()

    @property
    def transports(self) -> tuple[str, ...]:
        """None: nothing is read from peers."""
        return ()

    @property
    def is_connected(self) -> bool:
        """True while the server can be used."""
        return self._node is not None and self._node.phase is NodePhase.UP

    # ---- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start connecting to the server, and return after the first attempt, successful or not.

        Raises:
            ConnectorUnavailable: the engine's pool is not in host memory, or has no seals.
        """
        pool = self.worker.pool
        assert pool is not None, "register_kv_caches comes before start"
        if pool.buffer is None:
            raise ConnectorUnavailable(f"connector lmcache: the KV pool is on {pool.device}, and only host memory is copied")
        if pool.seals is None:
            raise ConnectorUnavailable("connector lmcache: the engine makes no seals, and nothing is saved without")
        num_swept = await asyncio.to_thread(sweep_segments)
        if num_swept:
            _log.info(event("lmcache_swept", segments=num_swept))
        self._loop = asyncio.get_running_loop()
        self._zmq = AsyncContext()
        self._copies = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvferry-lmcache")
        self._node = LMCacheNode(self._node_settings(), self._context.ids, self._context.clock)
        self._publish(self._node)
        self._on_timer()
        await self._has_tried.wait()

    async def stop(self) -> None:
        """Unregister, end tasks and threads, close sockets and release the memory."""
        if self._loop is None:
            return
        await self._part()
        self._loop = self._node = None  # later events do not reach the node
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.scheduler.server = None
        if self._allocated is not None:
            self._allocated.unlink()
        if self._link is not None:
            self._link.close()
            await self._link.join()
        if self._copies is not None:
            await asyncio.to_thread(self._copies.shutdown)
        if self._zmq is not None:
            self._zmq.destroy(linger=0)

    async def _part(self) -> None:
        """Unregister and wait briefly for the reply: the server logs an error if it cannot deliver it."""
        has_parted = asyncio.Event()
        self._tell(lambda node: node.on_stop(has_parted.set))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(has_parted.wait(), _GOOD_BYE_S if self.is_connected else 0)

    # ---- what happens, in the event loop ---------------------------------------------------------------------------

    def _call_soon(self, callback: Callable[..., None], *arguments: object) -> None:
        """Call back in the event loop, in order; nothing after ``stop``. Any thread."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(callback, *arguments)

    def _on_metadata(self, metadata: LMCacheMPConnectorMetadata) -> None:
        self._tell(lambda node: node.on_metadata(metadata))

    def _on_copied(self, saves: Sequence[SavePages]) -> None:
        if self._node is not None:
            self._node.on_copied(saves)

    def _on_sealed(self, save: SavePages) -> None:
        self._tell(lambda node: node.on_sealed(save))

    def _on_taken(self, request_id: str, faults: dict[int, KVFerryError]) -> None:
        self._tell(lambda node: node.on_taken(request_id, faults))

    def _on_timer(self) -> None:
        self._timer = None
        self._tell(LMCacheNode.on_timer)

    def _tell(self, happened: Callable[[LMCacheNode], list[Action]]) -> None:
        """Pass an event to the node and carry out the actions that it returns."""
        node = self._node
        if node is None:
            return
        try:
            for action in happened(node):
                self._carry_out(action)
            self._arm_timer(node)
        except Exception as error:  # a load may wait without end
            _log.exception(event("lmcache_node_failed"))
            self.worker.fail(error)

    def _arm_timer(self, node: LMCacheNode) -> None:
        """Schedule ``_on_timer`` for the node's next deadline."""
        if self._timer is not None:
            self._timer.cancel()
        if self._loop is not None:
            self._timer = self._loop.call_later(max(0.0, node.next_timer() - self._context.clock.now()), self._on_timer)

    # ---- what the node wants ---------------------------------------------------------------------------------------

    def _carry_out(self, action: Action) -> None:
        match action:
            case SendToServer():
                if self._link is not None:
                    self._link.send(action.frames)
            case LookupAnswered():
                self.scheduler.on_lookup_answer(action.session_id, action.num_tokens)
                self.worker.wake()
            case LoadEnded():
                self.worker.report(action)
            case SealPages():
                self._copy(self._seal, action)
            case TakePages():
                self._copy(self._take, action)
            case ProbeServer():
                self._spawn(self._probe(action.attempt))
            case ConnectToServer():
                self._connect(action.attempt)
            case SessionOpened():
                self._open(action)
            case SessionClosed():
                self._close(action)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _probe(self, attempt: int) -> None:
        """Read the server's version and settings, and allocate staging memory."""
        staging: Staging | None = None
        found: ServerFacts | KVFerryError
        try:
            address, timeout_s = self._settings.http_address.rstrip("/"), self._settings.request_timeout_s
            found = await asyncio.to_thread(fetch_facts, address, timeout_s)
            staging = await asyncio.to_thread(self._allocate, new_hex_id(self._context.ids, SHM_PREFIX))
        except KVFerryError as error:
            found = error
        self._tell(lambda node: node.on_probed(attempt, found, staging))

    def _allocate(self, name: str) -> Staging:
        """Return new staging memory. Runs on a thread that cannot be cancelled, so ``stop`` may run meanwhile."""
        layout = self._context.layout
        self._allocated = Staging(name, self._settings.staging_bytes, layout.block_bytes, layout.block_size)
        if self._loop is None:
            self._allocated.unlink()
        return self._allocated

    def _connect(self, attempt: int) -> None:
        assert self._zmq is not None
        self._link = LMCacheClient(
            self._zmq,
            self._settings.server_address,
            lambda uid, result: self._tell(lambda node: node.on_reply(attempt, uid, result)),
            lambda: self._tell(lambda node: node.on_disconnected(attempt)),
            self.worker.fail,
        )

    def _open(self, opened: SessionOpened) -> None:
        server = opened.server
        server.staging.unlink()  # the server has mapped it, so the name is not needed, and a crash cannot leave it
        self.scheduler.server = server
        self._has_tried.set()
        pages = server.staging.pages
        _log.info(event("lmcache_connected", chunk_size=server.geometry.chunk_size, pages=pages.num_pages))

    def _close(self, closed: SessionClosed) -> None:
        if closed.staging is not None:
            closed.staging.unlink()
        if closed.attempt == 0:
            return
        was_connected, self.scheduler.server = self.scheduler.server is not None, None
        if self._link is not None:
            self._link.close()
            self._link = None
        if was_connected or not self._has_tried.is_set():
            _log.warning(event("lmcache_unavailable", code=closed.error.code, error=closed.error.message))
        self._has_tried.set()

    # ---- the copying thread ----------------------------------------------------------------------------------------

    def _copy(self, job: Callable[[Any], None], action: SealPages | TakePages) -> None:
        """Run a job on the copying thread."""
        assert self._copies is not None
        done = self._copies.submit(job, action)
        done.add_done_callback(lambda future: self.worker.fail(error) if (error := future.exception()) is not None else None)

    def _seal(self, action: SealPages) -> None:
        save = action.save
        rows = save.transfer.server.staging.rows
        for move, page in zip(save.transfer.moves, save.pages, strict=True):
            self._sealer.seal(rows[page], move.identity)
        self._call_soon(self._on_sealed, save)

    def _take(self, action: TakePages) -> None:
        """Copy pages into the pool and verify the copies, which later writes of the server cannot change.

        A block that fails stays in the pool as garbage and is reported with its error; the request does not use it.
        """
        transfer, faults = action.load.transfer, dict[int, KVFerryError]()
        staging, pool = transfer.server.staging, self.worker.rows
        for index, (move, page) in enumerate(zip(transfer.moves, action.pages, strict=True)):
            pool[move.block_id] = staging.rows[page, : staging.block_bytes]
            seal = staging.rows[page, staging.block_bytes : staging.block_bytes + SEAL_BYTES].tobytes()
            fault = self._sealer.find_fault(pool[move.block_id], seal, move.identity)
            if fault is not None:
                faults[index] = fault
        self._call_soon(self._on_taken, action.load.request_id, faults)

    def _new_sealer(self) -> PageSealer:
        layout = self._context.layout
        return PageSealer(
            self._context.incarnation, layout_fingerprint(layout), layout.block_size, BlockDigester(layout.block_bytes)
        )

    # ---- settings and metrics --------------------------------------------------------------------------------------

    def _node_settings(self) -> LMCacheSettings:
        settings, layout = self._settings, self._context.layout
        return LMCacheSettings(
            namespace=Namespace.of(self._context.model_fingerprint, layout, PAGE_VERSION),
            block_size=layout.block_size,
            windows=tuple(window_of(group.spec) for group in self.scheduler.groups),
            lookup_timeout_s=settings.lookup_timeout_s,
            request_timeout_s=settings.request_timeout_s,
            transfer_deadline_s=self._context.config.connector.transfer_deadline_s,
            heartbeat_interval_s=settings.heartbeat_interval_s,
            retry_interval_s=settings.retry_interval_s,
        )

    def _publish(self, node: LMCacheNode) -> None:
        registry = self._context.metrics
        read_gauge(registry, "lmcache_connected", "1 while the LMCache server can be used.", lambda: float(self.is_connected))
        read_gauge(registry, "lmcache_loading_blocks", "Blocks of loads that are not over.", lambda: node.num_loading_blocks)
        read_gauge(registry, "lmcache_staging_pages", "Staging pages in use.", self._num_used_pages)
        read_labelled_counter(
            registry,
            "lmcache_events",
            "Lookups, loads, saves and what became of them.",
            ("event",),
            lambda: [((name,), count) for name, count in self._counts(node).items()],
        )

    def _num_used_pages(self) -> float:
        server = self.scheduler.server
        return server.staging.num_used_pages if server is not None else 0

    def _counts(self, node: LMCacheNode) -> dict[str, int]:
        return {**node.counts(), "saves_without_room": self.scheduler.num_saves_without_room}


def window_of(spec: KVCacheSpec) -> int:
    """Return the attention window of a group in tokens; -1 = full attention."""
    match spec:
        case SlidingWindowSpec():
            return spec.sliding_window
        case ChunkedLocalAttentionSpec():
            return spec.attention_chunk_size
        case _:
            return -1
