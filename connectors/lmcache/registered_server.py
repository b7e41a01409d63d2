"""A server that has this worker registered: used from its reply to the registration until the first doubt.

A server that is silent, gone, or forgets this worker is left at once. Then every coroutine that uses it is cancelled, and what
the server may still write is memory that is not used again: the next registration gets fresh memory, a fresh connection and
another instance id.

A lookup makes the server lock the chunks that it finds until they are retrieved or freed. So every session of a prompt ends in
the same way: wait for the answer to its lookup, free the locks that no load consumes, and end the session when nothing is open
in it. A name is used for one session only, because the server assumes that a session's tokens never change.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from connectors.lmcache.client import Calls
from connectors.lmcache.messages import LookupPages, ServerFacts, ServerSession
from connectors.lmcache.staging import Staging
from connectors.lmcache.tracker import ChunkGeometry
from connectors.lmcache.wire import (
    EVENT,
    TESTED_VERSIONS,
    CacheKey,
    GroupInfo,
    Namespace,
    RequestType,
    TokenSpan,
    registration,
)
from core.errors import ConnectorUnavailable, KVFerryError, PeerUnreachable, TransferTimeout
from core.ids import IdSource

POLL_INTERVAL_S = 0.005  # between questions whether a lookup is done; a hit in the server's memory is done at once
MAX_POLL_INTERVAL_S = 1.0  # once nobody waits for the answer, and each pause is twice the one before

_GOODBYE_S = 0.2  # for the replies to the last requests of a kind
_INSTANCE_BITS = 48
_TP_SIZE = 1  # a field of former versions

Answer = Callable[[str, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LMCacheSettings:
    """Deadlines, in seconds, and what this worker registers."""

    namespace: Namespace
    block_size: int
    windows: tuple[int, ...]  # of the KV cache groups, -1 = full attention
    lookup_timeout_s: float
    request_timeout_s: float
    transfer_deadline_s: float
    heartbeat_interval_s: float
    retry_interval_s: float


@dataclass(slots=True, eq=False)
class PromptSession:
    """A session of the server. ``locked`` are the tokens [start, end) whose locks must be freed once it is ``released``.

    ``claimed`` are those of the load that has not asked the server yet, which consumes their locks. A session is ``over`` once
    its request has ended and none of the ``num_open`` loads and saves in it goes on.
    """

    span: TokenSpan
    is_waited_for: bool
    locked: tuple[int, int] | None = None
    claimed: tuple[int, int] | None = None
    num_open: int = 0
    is_ended: bool = False
    released: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def claim(self, start: int) -> None:
        """Set the locks from token ``start`` on apart, and keep the session open, for a load."""
        assert self.locked is not None, "a load follows a lookup that has found something"
        first, end = self.locked
        self.locked = (first, start) if first < start else None
        self.claimed = (start, end)
        self.num_open += 1

    def take_locks(self) -> list[tuple[int, int]]:
        """Return the tokens of all locks that nobody will consume, once."""
        found = [tokens for tokens in (self.locked, self.claimed) if tokens is not None]
        self.locked = self.claimed = None
        return found

    def let_go(self) -> None:
        """Note that a load or save has ended."""
        self.num_open -= 1
        self._settle()

    def end(self) -> None:
        """Note that the request has ended."""
        self.is_ended = True
        self.is_waited_for = False
        self.released.set()
        self._settle()

    def _settle(self) -> None:
        if self.is_ended and not self.num_open:
            self.over.set()


class RegisteredServer:
    """Prompt sessions, heartbeats and page transfers of one registration. Call ``run`` first.

    ``answer`` is called once for each lookup, with its session and the number of tokens that the server has of the prompt;
    ``fail`` when a coroutine of it raises. ``view`` is what the scheduler side sees.
    """

    def __init__(
        self,
        calls: Calls,
        view: ServerSession,
        instance_id: int,
        settings: LMCacheSettings,
        answer: Answer,
        fail: Callable[[BaseException], None],
    ) -> None:
        self.view = view
        self.settings = settings
        self.error: KVFerryError | None = None  # why it was left
        self.sessions: dict[str, PromptSession] = {}
        self._calls = calls
        self._instance_id = instance_id
        self._answer = answer
        self._fail = fail
        self._left = asyncio.Event()
        self._parting: tuple[asyncio.Task[None], asyncio.Task[None]] | None = None  # what it waits for, and all of it
        self._tasks: set[asyncio.Task[Any]] = set()
        self._load_turn = asyncio.Lock()
        self._pages_freed = asyncio.Event()
        calls.on_lost = self._lose
        if calls.is_lost:
            self._lose()

    @property
    def counts(self) -> Counter[str]:
        """What has happened how often."""
        return self._calls.counts

    # ---- life ------------------------------------------------------------------------------------------------------

    async def run(self) -> KVFerryError:
        """Send heartbeats until the server is left; return why it was."""
        self.spawn(self._heartbeats())
        await self._left.wait()
        assert self.error is not None
        return self.error

    def leave(self, error: KVFerryError) -> None:
        """Use the server no more: cancel everything that goes on with it. Only the first error counts."""
        self._cancel(error)
        self._left.set()

    async def say_goodbye(self, timeout_s: float) -> None:
        """End all sessions and unregister, once the server has replied to what it was asked, or after ``timeout_s``.

        It handles requests on several threads: a save that it handles after the end of its session would begin it again, for
        nobody to end. Also for a server that was left because it was slow: else it would keep locks and sessions until it
        misses the worker. Replies are waited for briefly, because the server logs an error if it cannot deliver one.
        A second call may shorten the time of the first, and returns with it.
        """
        self._cancel(PeerUnreachable("this worker stops"))  # the connection stays open until the server is left
        if self._parting is None:
            waiting = asyncio.create_task(self._calls.wait_for_replies())
            self._parting = waiting, asyncio.create_task(self._part(waiting))
        waiting, parting = self._parting
        timer = asyncio.get_running_loop().call_later(timeout_s, waiting.cancel)
        try:
            await asyncio.shield(parting)
        finally:
            timer.cancel()

    async def _part(self, waiting: asyncio.Task[None]) -> None:
        """Say goodbye. A server that has not freed the locks stays registered until it misses this worker.

        It unregisters out of turn, and frees no locks of a model that nobody has registered.
        """
        await asyncio.wait([waiting])
        locks = [(session, tokens) for session in self.sessions.values() for tokens in session.take_locks()]
        are_free = await self._say_last(
            RequestType.FREE_LOOKUP_LOCKS, [(self._key(session, *tokens), _TP_SIZE) for session, tokens in locks]
        )
        await self._say_last(RequestType.END_SESSION, [(session_id,) for session_id in self.sessions])
        if are_free:
            await self._say_last(RequestType.UNREGISTER_KV_CACHE, [(self._instance_id,)])
        self._left.set()

    async def _say_last(self, operation: RequestType, arguments: Sequence[tuple[object, ...]]) -> bool:
        """Make requests of one kind, and wait briefly for their replies; return whether all came.

        No request is made once the connection is lost.
        """
        if self._calls.is_lost:
            return False
        calls = (self._calls.call(_GOODBYE_S, operation, *each) for each in arguments)
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, KVFerryError):
                raise outcome
        return not any(isinstance(outcome, KVFerryError) for outcome in outcomes)

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine until the server is left."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)
        if self.error is not None:
            task.cancel()
        return task

    def outlive(self, task: asyncio.Task[Any]) -> None:
        """Let a task that needs the server no more go on after the server is left."""
        self._tasks.discard(task)

    def _cancel(self, error: KVFerryError) -> None:
        if self.error is None:
            self.error = error
            for task in self._tasks:
                task.cancel()

    def _lose(self) -> None:
        self.leave(PeerUnreachable("the connection to the LMCache server is lost"))

    def _on_task_end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, KVFerryError):
            self._fail(error)

    async def _heartbeats(self) -> None:
        while True:
            await asyncio.sleep(self.settings.heartbeat_interval_s)
            await self._call_vital("a heartbeat", self.settings.request_timeout_s, RequestType.PING, self._instance_id)

    # ---- prompt sessions -------------------------------------------------------------------------------------------

    def look_up(self, lookup: LookupPages) -> None:
        """Ask for the longest prefix of a prompt that the server has."""
        session = PromptSession(lookup.span, is_waited_for=True)
        self.sessions[lookup.span.session_id] = session
        following = self.spawn(self._follow(session, lookup))
        following.add_done_callback(lambda _: self._tell(session, "lookups_unanswered", 0))

    def open_for_save(self, span: TokenSpan) -> PromptSession:
        """Keep a session open for a save; one that was never looked up begins with it."""
        session = self.sessions.get(span.session_id)
        if session is None:
            session = self.sessions[span.session_id] = PromptSession(span, is_waited_for=False)
            self.spawn(self._follow(session, None))
        session.num_open += 1
        return session

    async def free_locks(self, session: PromptSession, locked: tuple[int, int]) -> None:
        """Free the locks of tokens [start, end)."""
        with contextlib.suppress(TransferTimeout):
            await self._call(RequestType.FREE_LOOKUP_LOCKS, self._key(session, *locked), _TP_SIZE)

    async def _follow(self, session: PromptSession, lookup: LookupPages | None) -> None:
        """Go with a session from its lookup, if it has one, to its end."""
        session_id = session.span.session_id
        if lookup is not None:
            await self._find(session, lookup.num_tokens)
        await session.released.wait()
        locked, session.locked = session.locked, None
        if locked is not None:
            await self.free_locks(session, locked)
        await session.over.wait()
        del self.sessions[session_id]
        with contextlib.suppress(TransferTimeout):
            await self._call(RequestType.END_SESSION, session_id)

    async def _find(self, session: PromptSession, num_tokens: int) -> None:
        """Look a prompt up. Without an answer in time it is a miss; what is found later is locked, and freed again.

        A lookup that does not finish within ``transfer_deadline_s`` is abandoned, as is one without a reply.
        """
        session.locked = (0, num_tokens)  # perhaps, until the answer is here
        timer = asyncio.get_running_loop().call_later(self.settings.lookup_timeout_s, self._miss, session)
        try:
            await self._call(RequestType.LOOKUP, self._key(session, 0, num_tokens), _TP_SIZE)
            num_found = min(await self._poll(session) * self.view.geometry.chunk_size, len(session.span.token_ids))
            session.locked = (0, num_found) if num_found else None
        except TransferTimeout:
            num_found = 0
        finally:
            timer.cancel()
        self._tell(session, "lookup_hits" if num_found else "lookup_misses", num_found)

    async def _poll(self, session: PromptSession) -> int:
        """Ask until a lookup is done, and return the number of chunks found.

        Raises:
            TransferTimeout: a question had no reply, or no request waits for the lookup any more and its time is over.
        """
        loop = asyncio.get_running_loop()
        pause_s, end = POLL_INTERVAL_S, loop.time() + self.settings.transfer_deadline_s
        while not isinstance(found := await self._call(RequestType.QUERY_PREFETCH_STATUS, session.span.session_id), int):
            if not session.is_waited_for and loop.time() >= end:
                raise TransferTimeout("the LMCache server does not finish a lookup")
            await asyncio.sleep(pause_s)
            if not session.is_waited_for:
                pause_s = min(2 * pause_s, MAX_POLL_INTERVAL_S)
        return found

    def _miss(self, session: PromptSession) -> None:
        session.released.set()
        self._tell(session, "lookups_unanswered", 0)

    def _tell(self, session: PromptSession, outcome: str, num_tokens: int) -> None:
        """Report the answer to a lookup, once."""
        if session.is_waited_for:
            session.is_waited_for = False
            self.counts[outcome] += 1
            self._answer(session.span.session_id, num_tokens)

    # ---- pages -----------------------------------------------------------------------------------------------------

    async def take_pages(self, count: int) -> list[int]:
        """Return pages for a load as soon as there are so many, in the order of the calls."""
        async with self._load_turn:
            while (pages := self.view.staging.take_to_load(count)) is None:
                self._pages_freed.clear()
                await self._pages_freed.wait()
            return pages

    def give_back(self, pages: Sequence[int]) -> None:
        """Return pages that neither the server nor this process uses any more."""
        self.view.staging.give_back(pages)
        self._pages_freed.set()

    async def retrieve(self, key: CacheKey, pages: Sequence[Sequence[int]], num_skipped_tokens: int) -> object:
        """Have the server fill pages, one list per group; without a reply it is left, because it may still write them."""
        arguments = (key, self._instance_id, pages, EVENT, num_skipped_tokens)
        return await self._call_vital("a load", self.settings.transfer_deadline_s, RequestType.RETRIEVE, *arguments)

    async def store(self, key: CacheKey, pages: Sequence[Sequence[int]]) -> object:
        """Have the server keep pages, one list per group; without a reply it is left, because it may still read them."""
        arguments = (key, self._instance_id, pages, EVENT)
        return await self._call_vital("a save", self.settings.transfer_deadline_s, RequestType.STORE, *arguments)

    # ---- calls -----------------------------------------------------------------------------------------------------

    async def _call(self, operation: RequestType, *arguments: object) -> object:
        return await self._calls.call(self.settings.request_timeout_s, operation, *arguments)

    async def _call_vital(self, what: str, timeout_s: float, operation: RequestType, *arguments: object) -> object:
        """Make a request whose reply is needed to go on with this server."""
        try:
            return await self._calls.call(timeout_s, operation, *arguments)
        except TransferTimeout:
            self.leave(TransferTimeout(f"the LMCache server has not answered: {what}"))
            raise

    def _key(self, session: PromptSession, start: int, end: int) -> CacheKey:
        """Return the key of tokens [start, end) for all ranks, as lookups and their locks have it."""
        return self.settings.namespace.key(session.span, start, end, worker_id=None)


def check_server(facts: ServerFacts, settings: LMCacheSettings) -> None:
    """Raise ConnectorUnavailable if this server must not be used."""
    if facts.version not in TESTED_VERSIONS:
        raise ConnectorUnavailable(
            f"LMCache {facts.version} is not a version that this client was tested with: {', '.join(TESTED_VERSIONS)}"
        )
    if facts.chunk_size % settings.block_size:
        raise ConnectorUnavailable(
            f"the LMCache server's --chunk-size {facts.chunk_size} is not a multiple of "
            f"cache.block_size = {settings.block_size}"
        )
    if max(settings.windows) >= 0 and not facts.separate_object_groups:
        raise ConnectorUnavailable("the model has attention windows: start the LMCache server with --separate-object-groups")


def check_staging(staging: Staging, facts: ServerFacts, settings: LMCacheSettings) -> None:
    """Raise ConnectorUnavailable if the pages for loads, which are at most those for saves, hold no chunk of all groups."""
    num_pages = ChunkGeometry(facts.chunk_size, settings.block_size, settings.windows).pages_per_chunk
    if staging.load_capacity < num_pages:
        raise ConnectorUnavailable(
            f"connector.lmcache.staging_bytes is too small: half of it must hold the {num_pages} pages of a chunk of "
            f"{facts.chunk_size} tokens; set at least {(2 * num_pages + 1) * staging.pages.page_bytes}"
        )


async def register(
    calls: Calls,
    number: int,
    facts: ServerFacts,
    staging: Staging,
    settings: LMCacheSettings,
    ids: IdSource,
) -> tuple[ServerSession, int]:
    """Register this worker's pages, and return the server as the scheduler side sees it, and the instance id.

    Raises:
        TransferTimeout: no reply came in time.
        PeerUnreachable: the connection was lost.
    """
    instance_id = ids.bits(_INSTANCE_BITS)
    geometry = ChunkGeometry(facts.chunk_size, settings.block_size, settings.windows)
    groups = [
        GroupInfo(
            engine_group_id=index,
            layer_indices=(index,),
            tokens_per_block=settings.block_size,
            sw_size_tokens=geometry.declared_window(settings.windows[group_id]),
        )
        for index, group_id in enumerate(geometry.server_order)
    ]
    try:
        arguments = registration(instance_id, settings.namespace, staging.pages, groups)
        await calls.call(settings.request_timeout_s, RequestType.REGISTER_KV_CACHE, *arguments)
    except TransferTimeout:
        raise TransferTimeout("the LMCache server has not answered: a registration") from None
    calls.counts["connections"] += 1
    return ServerSession(number, staging, geometry), instance_id
