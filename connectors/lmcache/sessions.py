"""The server's sessions of our requests: their lookups, the locks that they hold, and their ends.

A lookup makes the server lock the chunks that it finds until they are retrieved or freed. So every session ends in the same
way: wait for the answer to its lookup, free the locks that no load consumes, and end the session when none of its requests is
open. A name is used for one session only, because the server assumes that a session's tokens never change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial

from connectors.lmcache.actions import LookupAnswered, LookupPages
from connectors.lmcache.pending_requests import PendingRequests
from connectors.lmcache.wire import Operation, TokenSpan, encode_call

POLL_INTERVAL_S = 0.005  # between questions whether a lookup is done; a hit in the server's memory is done at once

_TP_SIZE = 1  # a field of former versions


@dataclass(slots=True)
class _Session:
    """``num_open`` counts the lookups, loads, saves and lock requests that must end before the session.

    ``locked`` are the ranges of tokens whose locks must be freed; a load consumes the range ``claimed``.
    """

    span: TokenSpan
    num_open: int = 0
    deadline: float = math.inf  # of the answer to the lookup
    poll_at: float = math.inf
    is_waited_for: bool = False
    locked: list[tuple[int, int]] = field(default_factory=list)
    claimed: tuple[int, int] | None = None
    is_released: bool = False
    is_ended: bool = False


class ServerSessions:
    """All sessions that are open on the server, or about to be."""

    def __init__(self, calls: PendingRequests) -> None:
        self._calls = calls
        self._sessions: dict[str, _Session] = {}

    # ---- lookups ---------------------------------------------------------------------------------------------------

    def look_up(self, lookup: LookupPages) -> None:
        """Ask the server what it has; without a server the answer is nothing."""
        calls, session_id = self._calls, lookup.span.session_id
        if lookup.server is not calls.server:
            calls.act(LookupAnswered(session_id, 0))
            return
        session = self._sessions[session_id] = _Session(lookup.span, is_waited_for=True)
        session.deadline = calls.clock.now() + calls.settings.lookup_timeout_s
        session.num_open += 1
        key = calls.settings.namespace.key(lookup.span, 0, lookup.num_tokens, worker_id=None)
        calls.send(
            lambda uid: encode_call(uid, Operation.LOOKUP, key, _TP_SIZE),
            lambda _: self._ask(session),
            lambda: self._on_found(session, 0),
            what="a lookup",
        )

    def _ask(self, session: _Session) -> None:
        """Ask whether the lookup is done."""
        session.poll_at = math.inf
        session_id = session.span.session_id
        self._calls.send(
            lambda uid: encode_call(uid, Operation.QUERY_PREFETCH_STATUS, session_id),
            partial(self._on_status, session),
            lambda: self._on_found(session, 0),
            what="a lookup",
        )

    def _on_status(self, session: _Session, num_chunks: object) -> None:
        if isinstance(num_chunks, int):
            self._on_found(session, num_chunks)
        else:
            session.poll_at = self._calls.clock.now() + POLL_INTERVAL_S

    def _on_found(self, session: _Session, num_chunks: int) -> None:
        """Take the result of a lookup. If the server never gives one, its locks end by its own clock."""
        server = self._calls.server
        assert server is not None, "replies come from the server that is in use"
        num_tokens = min(num_chunks * server.geometry.chunk_size, len(session.span.token_ids))
        if num_tokens:
            session.locked = [(0, num_tokens)]
        self._answer(session, "lookup_hits" if num_tokens else "lookup_misses", num_tokens)
        session.num_open -= 1
        self._settle(session)

    def _answer(self, session: _Session, outcome: str, num_tokens: int) -> None:
        """Report the answer, once."""
        if session.is_waited_for:
            session.is_waited_for = False
            session.deadline = math.inf
            self._calls.count(outcome)
            self._calls.act(LookupAnswered(session.span.session_id, num_tokens))

    # ---- what else happens in a session ------------------------------------------------------------------------------

    def claim(self, session_id: str, start: int) -> None:
        """Reserve the locks from token ``start`` on for a load, and keep the session open for it."""
        session = self._sessions[session_id]
        ((first, end),) = session.locked
        session.locked = [(first, start)] if first < start else []
        session.claimed = (start, end)
        session.num_open += 1

    def unclaim(self, session_id: str) -> None:
        """Return the claimed locks of a load that ends before its request was sent."""
        session = self._sessions.get(session_id)
        if session is not None:
            assert session.claimed is not None
            session.locked.append(session.claimed)
            session.claimed = None
            self.let_go(session_id)

    def span_of(self, session_id: str) -> TokenSpan:
        """Return the tokens that were looked up in a session that is open."""
        return self._sessions[session_id].span

    def hold(self, span: TokenSpan) -> None:
        """Keep a session open for a save; one that was never looked up begins with it."""
        session = self._sessions.get(span.session_id)
        if session is None:
            session = self._sessions[span.session_id] = _Session(span)
        session.num_open += 1

    def let_go(self, session_id: str) -> None:
        """Note that a load or save of the session has ended."""
        session = self._sessions.get(session_id)
        if session is not None:
            session.num_open -= 1
            self._settle(session)

    def release(self, session_id: str) -> None:
        """Free the locks that no load has claimed."""
        session = self._sessions.get(session_id)
        if session is not None:
            session.is_released = True
            self._settle(session)

    def end(self, session_id: str) -> None:
        """End the session as soon as none of its requests is open. Sessions unknown to the server need no end."""
        session = self._sessions.get(session_id)
        if session is not None:
            session.is_released = session.is_ended = True
            session.is_waited_for = False
            session.deadline = math.inf
            self._settle(session)

    def end_all(self) -> None:
        """Free all locks and end all sessions at once, including those with open requests."""
        for session_id, session in list(self._sessions.items()):
            session.num_open = 0
            self.end(session_id)
            if session_id in self._sessions:  # it is freeing locks
                session.num_open = 0
                self._settle(session)

    def on_timer(self, now: float) -> None:
        """Answer overdue lookups as misses, and poll the server for pending ones."""
        for session in list(self._sessions.values()):
            if session.deadline <= now:
                session.is_released = True  # it may still find something, and lock it
                self._answer(session, "lookups_unanswered", 0)
            if session.poll_at <= now:
                self._ask(session)

    def next_deadline(self) -> float:
        """Return when ``on_timer`` has something to do."""
        return min((min(session.deadline, session.poll_at) for session in self._sessions.values()), default=math.inf)

    def fail_all(self) -> None:
        """Forget all sessions; the server has lost them or expires them."""
        for session in self._sessions.values():
            self._answer(session, "lookups_unanswered", 0)
        self._sessions.clear()

    # ---- ends --------------------------------------------------------------------------------------------------------

    def _settle(self, session: _Session) -> None:
        """Free the locks of a released session, then end it if none of its requests is open."""
        if session.is_released:
            while session.locked:
                self._free_locks(session, *session.locked.pop())
        if session.is_ended and not session.num_open:
            session_id = session.span.session_id
            del self._sessions[session_id]
            self._calls.send(lambda uid: encode_call(uid, Operation.END_SESSION, session_id), what="the end of a session")

    def _free_locks(self, session: _Session, start: int, end: int) -> None:
        session.num_open += 1
        session_id = session.span.session_id
        key = self._calls.settings.namespace.key(session.span, start, end, worker_id=None)
        self._calls.send(
            lambda uid: encode_call(uid, Operation.FREE_LOOKUP_LOCKS, key, _TP_SIZE),
            lambda _: self.let_go(session_id),
            lambda: self.let_go(session_id),
            what="locks to be let go",
        )
