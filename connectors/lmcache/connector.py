"""The LMCache connector as a worker sees it: the coroutine that keeps a server registered, and the copying thread.

The engine thread reaches the event loop by ``call_soon_threadsafe``, which keeps order. A missing or lost server costs cache
hits only. A bug in a coroutine ends the worker, because loads that depend on it might never end.

    probe: version, settings ──▶ staging memory ──▶ registration ──reply──▶ in use ──doubt──▶ a pause, and again
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import zmq

from connectors.lmcache.client import LMCacheClient, fetch_facts
from connectors.lmcache.loads import Faults, PageLoads
from connectors.lmcache.messages import LMCacheMPConnectorMetadata, LoadPages, SavePages, ServerSession
from connectors.lmcache.registered_server import LMCacheSettings, RegisteredServer, check_server, check_staging, register
from connectors.lmcache.saves import PageSaves
from connectors.lmcache.scheduler import LMCacheMPConnectorScheduler
from connectors.lmcache.staging import PAGE_VERSION, SHM_PREFIX, PageSealer, Staging, sweep_segments
from connectors.lmcache.wire import Namespace
from connectors.lmcache.worker import LMCacheMPConnectorWorker
from core.connector import Connector, ConnectorContext
from core.digest import BlockDigester
from core.errors import ConnectorUnavailable, KVFerryError, TransferTimeout
from core.ids import new_hex_id
from core.kv.seals import SEAL_BYTES, layout_fingerprint
from core.kv.spec import ChunkedLocalAttentionSpec, KVCacheSpec, SlidingWindowSpec
from core.log import event
from core.metrics import read_gauge, read_labelled_counter
from core.wire.contexts import started_context
from core.wire.sockets import AsyncContext

_STOP_S = 1.0  # for the replies that are still missing when a worker stops
_FAREWELL_S = 30.0  # for those of a server that was left: its sessions end once it goes on

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
            lambda metadata: self._call_soon(self._on_metadata, metadata),
            lambda saves: self._call_soon(self.saves.on_copied, saves),
        )
        self.counts: Counter[str] = Counter()
        transfer_deadline_s = context.config.connector.transfer_deadline_s
        self.loads = PageLoads(context.clock, transfer_deadline_s, self._take_pages, self.worker.report, self.counts)
        self.saves = PageSaves(self._seal_pages, self.counts)
        self.server: RegisteredServer | None = None  # in use now
        self._sealer = self._new_sealer()  # of the copying thread
        self._loop: asyncio.AbstractEventLoop | None = None
        self._staying: asyncio.Task[None] | None = None
        self._farewells: dict[asyncio.Task[None], RegisteredServer] = {}  # to servers that were left
        self._zmq: AsyncContext | None = None
        self._copies: ThreadPoolExecutor | None = None
        self._allocated: Staging | None = None  # the latest
        self._num_attempts = 0
        self._has_tried = asyncio.Event()

    @property
    def transports(self) -> tuple[str, ...]:
        """None: nothing is read from peers."""
        return ()

    @property
    def is_connected(self) -> bool:
        """True while the server can be used."""
        return self.server is not None

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
        self._zmq = started_context(AsyncContext)
        self._copies = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvferry-lmcache")
        self._publish()
        self._staying = asyncio.create_task(self._stay_connected(self._server_settings()))
        self._staying.add_done_callback(self._on_end)
        await self._has_tried.wait()

    async def stop(self) -> None:
        """Unregister, end tasks and threads, close sockets and release the memory."""
        if self._loop is None:
            return
        self._loop = None  # later events do not reach the coroutines
        known = [*self._farewells.values(), *([self.server] if self.server is not None else [])]
        await asyncio.gather(*(server.say_goodbye(_STOP_S) for server in known))
        if self._staying is not None:
            self._staying.cancel()
            await asyncio.gather(self._staying, return_exceptions=True)
        await asyncio.gather(*self._farewells, return_exceptions=True)
        if self._allocated is not None:
            self._allocated.unlink()
        if self._copies is not None:
            await asyncio.to_thread(self._copies.shutdown)
        if self._zmq is not None:
            self._zmq.destroy(linger=0)

    async def _stay_connected(self, settings: LMCacheSettings) -> None:
        """Use the server, and after each loss of it try again."""
        while True:
            num_connections = self.counts["connections"]
            error = await self._use_server(settings)
            is_news = self.counts["connections"] > num_connections or not self._has_tried.is_set()
            if is_news and self._loop is not None:  # else this worker has left it
                _log.warning(event("lmcache_unavailable", code=error.code, error=error.message))
            self._has_tried.set()
            await asyncio.sleep(settings.retry_interval_s)

    async def _use_server(self, settings: LMCacheSettings) -> KVFerryError:
        """Register with the server and use it until the first doubt; return why it is not used, or not any more."""
        staging: Staging | None = None
        client: LMCacheClient | None = None
        self._num_attempts += 1
        try:
            async with asyncio.timeout(2 * settings.request_timeout_s):
                facts = await asyncio.to_thread(
                    fetch_facts, self._settings.http_address.rstrip("/"), settings.request_timeout_s
                )
            check_server(facts, settings)
            staging = await asyncio.to_thread(self._allocate, new_hex_id(self._context.ids, SHM_PREFIX))
            check_staging(staging, facts, settings)
            assert self._zmq is not None
            client = LMCacheClient(self._zmq, self._settings.server_address, self.counts, self.worker.fail)
            view, instance_id = await register(client.calls, self._num_attempts, facts, staging, settings, self._context.ids)
            server = RegisteredServer(client.calls, view, instance_id, settings, self._on_answer, self.worker.fail)
            self._open(server)
            error = await server.run()
            self._part(server, client)
            client = None
            return error
        except TimeoutError:
            return TransferTimeout("the LMCache server could not be reached in time")
        except KVFerryError as error:
            return error
        except (OSError, zmq.ZMQError) as error:  # such as too few descriptors
            return ConnectorUnavailable(f"no connection to the LMCache server can be made: {error}")
        finally:
            self.server = self.scheduler.server = None
            if staging is not None:
                staging.unlink()
                asyncio.get_running_loop().run_in_executor(self._copies, self._discard, staging)  # ``stop`` waits for it
            if client is not None:
                await client.close()

    def _part(self, server: RegisteredServer, client: LMCacheClient) -> None:
        """Say goodbye to a server that is not used any more; meanwhile another registration may begin."""
        farewell = asyncio.create_task(self._say_goodbye(server, client))
        self._farewells[farewell] = server
        farewell.add_done_callback(self._on_farewell)

    @staticmethod
    async def _say_goodbye(server: RegisteredServer, client: LMCacheClient) -> None:
        try:
            await server.say_goodbye(_FAREWELL_S)
        finally:
            await client.close()

    def _on_farewell(self, farewell: asyncio.Task[None]) -> None:
        del self._farewells[farewell]
        if not farewell.cancelled() and (error := farewell.exception()) is not None:
            self.worker.fail(error)

    def _allocate(self, name: str) -> Staging:
        """Return new staging memory. Runs on a thread that cannot be cancelled, so ``stop`` may run meanwhile."""
        layout = self._context.layout
        self._allocated = Staging(name, self._settings.staging_bytes, layout.block_bytes, layout.block_size)
        if self._loop is None:
            self._allocated.unlink()
        return self._allocated

    def _open(self, server: RegisteredServer) -> None:
        staging, geometry = server.view.staging, server.view.geometry
        staging.unlink()  # the server has mapped it, so the name is not needed, and a crash cannot leave it
        self.server, self.scheduler.server = server, server.view
        self._has_tried.set()
        _log.info(event("lmcache_connected", chunk_size=geometry.chunk_size, pages=staging.pages.num_pages))

    def _on_end(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception() or RuntimeError("it returned")
        _log.error(event("lmcache_died", error=repr(error)), exc_info=error)
        self._has_tried.set()  # ``start`` returns, and the next step raises
        self.worker.fail(error)

    # ---- what the engine thread says -------------------------------------------------------------------------------

    def _call_soon(self, callback: Callable[..., None], *arguments: object) -> None:
        """Call back in the event loop, in order; nothing after ``stop``. Any thread."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(callback, *arguments)

    def _on_metadata(self, metadata: LMCacheMPConnectorMetadata) -> None:
        """Begin what a step has decided, apart from its saves, in the order of the fields."""
        if self._loop is None:
            return
        for number, is_good in metadata.verdicts.items():
            self.saves.judge(number, is_good, self._server_of)
        for lookup in metadata.lookups:
            server = self._server_of(lookup.server)
            if server is not None:
                server.look_up(lookup)
            else:
                self._on_answer(lookup.span.session_id, 0)
        for load in metadata.loads:
            self.loads.start(load, self._server_of(load.transfer.server))
        sessions = self.server.sessions if self.server is not None else {}
        for session_id in metadata.unclaimed:
            if session_id in sessions:
                sessions[session_id].released.set()
        for request_id in metadata.aborts:
            self.loads.abort(request_id)
        for session_id in metadata.ended:
            if session_id in sessions:
                sessions[session_id].end()

    def _server_of(self, view: ServerSession) -> RegisteredServer | None:
        """Return the server that the scheduler side knew as ``view``, None if it was left."""
        server = self.server
        return server if server is not None and server.view is view and server.error is None else None

    def _on_answer(self, session_id: str, num_tokens: int) -> None:
        self.scheduler.on_lookup_answer(session_id, num_tokens)
        self.worker.wake()

    # ---- the copying thread ----------------------------------------------------------------------------------------

    async def _copy(self, job: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401 - what the job returns
        """Run a job on the copying thread. One that raises ends the worker."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._copies, job, *arguments)
        except Exception as error:
            self.worker.fail(error)
            raise

    async def _seal_pages(self, save: SavePages) -> None:
        await self._copy(self._seal, save)

    async def _take_pages(self, load: LoadPages, pages: Sequence[int]) -> Faults:
        faults: Faults = await self._copy(self._take, load, pages)
        return faults

    def _seal(self, save: SavePages) -> None:
        rows = save.transfer.server.staging.rows
        for move, page in zip(save.transfer.moves, save.pages, strict=True):
            self._sealer.seal(rows[page], move.identity)

    @staticmethod
    def _discard(staging: Staging) -> None:
        """Give the memory of free pages back: on this thread, behind the seals of cancelled saves, whose pages are free."""
        staging.discard()

    def _take(self, load: LoadPages, pages: Sequence[int]) -> Faults:
        """Copy pages into the pool and verify the copies, which later writes of the server cannot change.

        A block that fails stays in the pool as garbage and is reported with its error; the request does not use it.
        """
        faults, staging, pool = Faults(), load.transfer.server.staging, self.worker.rows
        for index, (move, page) in enumerate(zip(load.transfer.moves, pages, strict=True)):
            pool[move.block_id] = staging.rows[page, : staging.block_bytes]
            seal = staging.rows[page, staging.block_bytes : staging.block_bytes + SEAL_BYTES].tobytes()
            fault = self._sealer.find_fault(pool[move.block_id], seal, move.identity)
            if fault is not None:
                faults[index] = fault
        return faults

    def _new_sealer(self) -> PageSealer:
        layout = self._context.layout
        return PageSealer(
            self._context.incarnation, layout_fingerprint(layout), layout.block_size, BlockDigester(layout.block_bytes)
        )

    # ---- settings and metrics --------------------------------------------------------------------------------------

    def _server_settings(self) -> LMCacheSettings:
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

    def _publish(self) -> None:
        registry = self._context.metrics
        read_gauge(registry, "lmcache_connected", "1 while the LMCache server can be used.", lambda: float(self.is_connected))
        read_gauge(registry, "lmcache_loading_blocks", "Blocks of loads that are not over.", lambda: self.loads.num_blocks)
        read_gauge(registry, "lmcache_staging_pages", "Staging pages in use.", self._num_used_pages)
        read_labelled_counter(
            registry,
            "lmcache_events",
            "Lookups, loads, saves and what became of them.",
            ("event",),
            lambda: [((name,), count) for name, count in self._event_counts().items()],
        )

    def _num_used_pages(self) -> float:
        server = self.scheduler.server
        return server.staging.num_used_pages if server is not None else 0

    def _event_counts(self) -> dict[str, int]:
        return {**self.counts, "saves_without_room": self.scheduler.num_saves_without_room}


def window_of(spec: KVCacheSpec) -> int:
    """Return the attention window of a group in tokens; -1 = full attention."""
    match spec:
        case SlidingWindowSpec():
            return spec.sliding_window
        case ChunkedLocalAttentionSpec():
            return spec.attention_chunk_size
        case _:
            return -1
