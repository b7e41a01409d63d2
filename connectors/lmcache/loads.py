"""Loads: chunks that the server writes into staging pages, and what of them passes into the pool.

    order ──pages──▶ asked ──the server is done──▶ taking ──checked and copied──▶ LoadEnded
      └─────────────────┴── deadline, abort, loss ──▶ LoadEnded; the pages are free when the reply comes

The pool is written while taking only, by this process: a load that has ended writes nothing any more, and its blocks need no
quarantine. A load that is being taken ends when that has ended, whatever happens meanwhile.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from connectors.lmcache.messages import LoadPages
from connectors.lmcache.registered_server import PromptSession, RegisteredServer
from connectors.lmcache.wire import is_done
from connectors.reports import ALL_BLOCKS, LoadEnded
from core.clock import Clock
from core.errors import KVFerryError, NotFound, PeerUnreachable, TransferTimeout, fallback_reason
from core.wire.messages import ErrorInfo, TransferUsage

TRANSPORT = "lmcache"

Faults = dict[int, KVFerryError]  # by move: what is wrong with its page
TakePages = Callable[[LoadPages, list[int]], Awaitable[Faults]]


@dataclass(slots=True, eq=False)
class _Load:
    order: LoadPages
    started_at: float
    task: asyncio.Task[Faults] | None = None
    pages: list[int] = field(default_factory=list)
    filling: asyncio.Task[bool] | None = None  # until the server has replied
    is_aborted: bool = False
    arrived_at: float = math.inf

    @property
    def is_being_taken(self) -> bool:
        return self.arrived_at != math.inf


class PageLoads:
    """The loads of all requests; one per request at a time.

    ``take`` checks pages and copies the good ones into the pool; ``report`` is called once for each load.
    """

    def __init__(
        self,
        clock: Clock,
        transfer_deadline_s: float,
        take: TakePages,
        report: Callable[[LoadEnded], None],
        counts: Counter[str],
    ) -> None:
        self._clock = clock
        self._transfer_deadline_s = transfer_deadline_s
        self._take = take
        self._report = report
        self._counts = counts
        self._loads: dict[str, _Load] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks of loads that are not over."""
        return sum(len(load.order.transfer.moves) for load in self._loads.values())

    def start(self, order: LoadPages, server: RegisteredServer | None) -> None:
        """Begin a load; None instead of a server if the one of its lookup was left."""
        load = self._loads[order.request_id] = _Load(order, self._clock.now())
        if server is None:
            self._end(load, PeerUnreachable("the LMCache server was lost before the load began"), {})
            return
        chunks = order.transfer.chunks
        session = server.sessions[chunks.span.session_id]
        session.claim(chunks.start)
        load.task = server.spawn(self._run(load, server, session))
        load.task.add_done_callback(lambda task: self._on_end(load, server, session, task))

    def abort(self, request_id: str) -> None:
        """End the load of an aborted request, at once unless its blocks are being copied."""
        load = self._loads.get(request_id)
        if load is not None and load.task is not None:
            load.is_aborted = True
            if not load.is_being_taken:
                load.task.cancel()

    async def _run(self, load: _Load, server: RegisteredServer, session: PromptSession) -> Faults:
        """Load, and return the faults. It may be cancelled, even before it begins, until its pages are taken."""
        try:
            async with asyncio.timeout(self._time_left(load)):
                load.pages = await server.take_pages(len(load.order.transfer.moves))
                load.filling = server.spawn(self._fill(load.order, server, session, load.pages))
                is_filled = await asyncio.shield(load.filling)
        except TimeoutError:
            raise TransferTimeout("the LMCache server did not bring the blocks in time") from None
        if not is_filled:
            raise NotFound("the LMCache server does not have the blocks any more")
        load.arrived_at = self._clock.now()
        assert load.task is not None
        server.outlive(load.task)
        return await self._take(load.order, load.pages)

    def _on_end(self, load: _Load, server: RegisteredServer, session: PromptSession, task: asyncio.Task[Faults]) -> None:
        """Give back what the load had, its pages once the server is done with them, and report its end."""
        if load.filling is None:
            server.spawn(self._give_up(server, session))
        else:
            load.filling.add_done_callback(lambda filling: self._on_filled(load, server, filling))
        if not task.cancelled():
            error = task.exception()
            if error is None or isinstance(error, KVFerryError):
                self._end(load, error, task.result() if error is None else {})
        elif load.is_aborted:
            self._end(load, None, {})
        elif server.error is not None:
            left = f"the LMCache server was left in the middle of a load: {server.error.message}"
            self._end(load, PeerUnreachable(left), {})

    @staticmethod
    def _on_filled(load: _Load, server: RegisteredServer, filling: asyncio.Task[bool]) -> None:
        """Give the pages back. Without a reply they stay taken: the server may still write them."""
        if not filling.cancelled() and filling.exception() is None:
            server.give_back(load.pages)

    def _time_left(self, load: _Load) -> float:
        budget = math.inf if load.order.deadline is None else load.order.deadline - load.started_at
        return min(self._transfer_deadline_s, budget)

    @staticmethod
    async def _fill(order: LoadPages, server: RegisteredServer, session: PromptSession, pages: list[int]) -> bool:
        """Have the server fill the pages, which consumes the locks; goes on if the load has ended meanwhile."""
        chunks = order.transfer.chunks
        try:
            key = server.settings.namespace.key(session.span, chunks.start, chunks.end)
            session.claimed = None
            return is_done(await server.retrieve(key, order.transfer.page_lists(pages), chunks.num_skipped_tokens))
        finally:
            session.let_go()

    @staticmethod
    async def _give_up(server: RegisteredServer, session: PromptSession) -> None:
        """Free the locks of a load that has ended before the server was asked."""
        claimed, session.claimed = session.claimed, None
        assert claimed is not None, "a load that has not asked has consumed no locks"
        try:
            await server.free_locks(session, claimed)
        finally:
            session.let_go()

    def _end(self, load: _Load, error: KVFerryError | None, faults: Faults) -> None:
        """Report the end of a load. With no good block it has failed as a whole."""
        request_id, moves = load.order.request_id, load.order.transfer.moves
        del self._loads[request_id]
        if load.is_aborted:
            self._counts["aborted_loads"] += 1
            self._report(LoadEnded(request_id, None))
            return
        if faults:
            error = faults[min(faults)]
        is_failed = error is not None and len(faults) in (0, len(moves))
        usage = self._usage(load, faults, is_failed=is_failed)
        if error is None:
            self._counts["loads"] += 1
            self._counts["loaded_tokens"] += load.order.num_tokens
            self._report(LoadEnded(request_id, usage))
            return
        self._counts[f"failed_loads_{fallback_reason(error.code)}"] += 1
        invalid_block_ids = tuple(moves[index].block_id for index in sorted(faults))
        self._report(LoadEnded(request_id, usage, ErrorInfo.of(error), ALL_BLOCKS if is_failed else invalid_block_ids))

    def _usage(self, load: _Load, faults: Faults, *, is_failed: bool) -> TransferUsage:
        now, transfer = self._clock.now(), load.order.transfer
        num_moved = len(transfer.moves) if load.is_being_taken else 0
        arrived_at = min(now, load.arrived_at)
        return TransferUsage(
            transport=TRANSPORT,
            transferred_tokens=0 if is_failed else _num_good_tokens(load.order, faults),
            transferred_bytes=num_moved * transfer.server.staging.block_bytes,
            transfer_ms=1000 * (arrived_at - load.started_at),
            verify_ms=1000 * (now - arrived_at),
            verified_blocks=0 if is_failed else num_moved - len(faults),
        )


def _num_good_tokens(order: LoadPages, faults: Faults) -> int:
    """Return how many tokens were loaded before the first bad block."""
    transfer = order.transfer
    first_bad = min((transfer.moves[index].index for index in faults), default=None)
    if first_bad is None:
        return order.num_tokens
    return first_bad * transfer.server.geometry.block_size - transfer.chunks.num_skipped_tokens
