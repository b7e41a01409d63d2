"""Loads: chunks that the server writes into staging pages, and what of them passes into the pool.

    WAITING ──pages──▶ CALLED ──the server is done──▶ TAKING ──checked and copied──▶ over
       └──────────────────┴── deadline, abort, loss ──▶ over for its request; its pages are free when the reply comes

The pool is written in TAKING only, by this process: so a load that is over writes nothing any more, and its blocks need no
quarantine. A load that is being taken ends when that has ended, whatever happens meanwhile.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto

from connectors.lmcache.actions import LoadPages, TakePages
from connectors.lmcache.pending_requests import PendingRequests
from connectors.lmcache.sessions import ServerSessions
from connectors.lmcache.wire import is_done, retrieve_call
from connectors.reports import ALL_BLOCKS, LoadEnded
from core.errors import KVFerryError, NotFound, PeerUnreachable, TransferTimeout, fallback_reason
from core.wire.messages import ErrorInfo, TransferUsage

TRANSPORT = "lmcache"


class _Phase(Enum):
    WAITING = auto()  # for pages
    CALLED = auto()
    TAKING = auto()


@dataclass(slots=True)
class _Load:
    order: LoadPages
    started_at: float
    deadline: float
    pages: list[int] = field(default_factory=list)
    phase: _Phase = _Phase.WAITING
    arrived_at: float = math.inf
    is_aborted: bool = False

    @property
    def session_id(self) -> str:
        return self.order.transfer.chunks.span.session_id


class PageLoads:
    """The loads of all requests; one per request at a time."""

    def __init__(self, calls: PendingRequests, sessions: ServerSessions) -> None:
        self._calls = calls
        self._sessions = sessions
        self._loads: dict[str, _Load] = {}  # by request id, until they are over for their requests
        self._waiting: deque[_Load] = deque()

    @property
    def num_blocks(self) -> int:
        """Blocks of loads that are not over."""
        return sum(len(load.order.transfer.moves) for load in self._loads.values())

    def start(self, order: LoadPages) -> None:
        """Begin a load, as soon as there are pages for it."""
        now, settings = self._calls.clock.now(), self._calls.settings
        budget = math.inf if order.deadline is None else order.deadline
        load = _Load(order, now, min(now + settings.transfer_deadline_s, budget))
        self._loads[order.request_id] = load
        if order.transfer.server is not self._calls.server:
            self._fail(load, PeerUnreachable("the LMCache server was lost before the load began"))
            return
        chunks = order.transfer.chunks
        self._sessions.claim(load.session_id, chunks.start)
        self._waiting.append(load)
        self._call_waiting()

    def abort(self, request_id: str) -> None:
        """End the load of an aborted request, at once unless its blocks are being copied."""
        load = self._loads.get(request_id)
        if load is None:
            return
        load.is_aborted = True
        if load.phase is not _Phase.TAKING:
            self._end(load, None, ())

    def on_taken(self, request_id: str, faults: dict[int, KVFerryError]) -> None:
        """End a load whose pages were verified, possibly after the end of their session."""
        load = self._loads[request_id]
        load.order.transfer.server.staging.give_back(load.pages)
        moves = load.order.transfer.moves
        error = ErrorInfo.of(faults[min(faults)]) if faults else None
        self._end(load, error, tuple(moves[index].block_id for index in sorted(faults)))
        self._call_waiting()

    def on_timer(self, now: float) -> None:
        """Give up what takes too long."""
        for load in list(self._loads.values()):
            if load.deadline <= now and load.phase is not _Phase.TAKING:
                self._fail(load, TransferTimeout("the LMCache server did not bring the blocks in time"))

    def next_deadline(self) -> float:
        """Return when ``on_timer`` has something to do."""
        waiting = (load.deadline for load in self._loads.values() if load.phase is not _Phase.TAKING)
        return min(waiting, default=math.inf)

    def fail_all(self, error: KVFerryError) -> None:
        """End all loads, apart from those whose bytes are here."""
        self._waiting.clear()
        for load in list(self._loads.values()):
            if load.phase is not _Phase.TAKING:
                self._fail(load, error)

    # ---- details ---------------------------------------------------------------------------------------------------

    def _call_waiting(self) -> None:
        """Ask the server for the loads that there are pages for, in order."""
        while self._waiting:
            load = self._waiting[0]
            pages = load.order.transfer.server.staging.take_to_load(len(load.order.transfer.moves))
            if pages is None:
                return
            self._waiting.popleft()
            load.pages, load.phase = pages, _Phase.CALLED
            self._call(load)

    def _call(self, load: _Load) -> None:
        calls, transfer = self._calls, load.order.transfer
        chunks = transfer.chunks
        span = self._sessions.span_of(load.session_id)
        key = calls.settings.namespace.key(span, chunks.start, chunks.end)
        pages, num_skipped, instance_id = transfer.page_lists(load.pages), chunks.num_skipped_tokens, calls.instance_id
        calls.send(
            lambda uid: retrieve_call(uid, key, instance_id, pages, num_skipped),
            lambda result: self._on_reply(load, result),
            what="a load",
            timeout_s=calls.settings.transfer_deadline_s,
            is_vital=True,  # as long as it is open, the server may write into these pages
        )

    def _on_reply(self, load: _Load, result: object) -> None:
        """Verify and copy the pages if the load is still wanted."""
        self._sessions.let_go(load.session_id)
        is_wanted = self._loads.get(load.order.request_id) is load
        if is_wanted and is_done(result):
            load.phase = _Phase.TAKING
            load.arrived_at = self._calls.clock.now()
            self._calls.act(TakePages(load.order, tuple(load.pages)))
            return
        load.order.transfer.server.staging.give_back(load.pages)
        if is_wanted:
            self._fail(load, NotFound("the LMCache server does not have the blocks any more"))
        self._call_waiting()

    def _fail(self, load: _Load, error: KVFerryError) -> None:
        self._end(load, ErrorInfo.of(error), ())

    def _end(self, load: _Load, error: ErrorInfo | None, invalid_block_ids: tuple[int, ...]) -> None:
        """Report the end of a load, once. With no good block it has failed as a whole."""
        request_id = load.order.request_id
        del self._loads[request_id]
        if load.phase is _Phase.WAITING and load in self._waiting:
            self._waiting.remove(load)
            self._sessions.unclaim(load.session_id)
        moves = load.order.transfer.moves
        if len(invalid_block_ids) == len(moves):
            invalid_block_ids = ()
        usage = None if load.is_aborted else self._usage(load, error, invalid_block_ids)
        if load.is_aborted:
            self._calls.count("aborted_loads")
        elif error is None:
            self._calls.count("loads")
            self._calls.count("loaded_tokens", load.order.num_tokens)
        else:
            self._calls.count(f"failed_loads_{fallback_reason(error.code)}")
        if load.is_aborted or error is None:
            self._calls.act(LoadEnded(request_id, usage))
        else:
            self._calls.act(LoadEnded(request_id, usage, error, invalid_block_ids or ALL_BLOCKS))

    def _usage(self, load: _Load, error: ErrorInfo | None, invalid_block_ids: tuple[int, ...]) -> TransferUsage:
        now, transfer = self._calls.clock.now(), load.order.transfer
        is_failed = error is not None and not invalid_block_ids
        num_moved = len(transfer.moves) if load.phase is _Phase.TAKING else 0
        arrived_at = min(now, load.arrived_at)
        return TransferUsage(
            transport=TRANSPORT,
            transferred_tokens=0 if is_failed else _num_good_tokens(load.order, invalid_block_ids),
            transferred_bytes=num_moved * transfer.server.staging.block_bytes,
            transfer_ms=1000 * (arrived_at - load.started_at),
            verify_ms=1000 * (now - arrived_at),
            verified_blocks=0 if is_failed else num_moved - len(invalid_block_ids),
        )


def _num_good_tokens(order: LoadPages, invalid_block_ids: tuple[int, ...]) -> int:
    """Return how many tokens were loaded in front of the first bad block."""
    chunks, block_size = order.transfer.chunks, order.transfer.server.geometry.block_size
    bad = (move.index for move in order.transfer.moves if move.block_id in invalid_block_ids)
    first_bad = min(bad, default=None)
    return order.num_tokens if first_bad is None else first_bad * block_size - chunks.num_skipped_tokens
