"""Requests that wait for a worker: for room, for the end of a stall, or for the successor of a lost worker.

Owns their order and the longest wait. Those that have begun come first, then those of smaller ``priority``, then those of
tenants with fewer open requests, then the oldest.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from core.errors import NoWorker, Overloaded
from core.wire.messages import Role
from router.dispatch.kept_room import KeptRoom, Need
from router.dispatch.members import WorkerKey
from router.dispatch.membership import Membership
from router.dispatch.request_state import RequestState
from router.dispatch.restarts import Restarts
from router.dispatch.shares import TenantShares

PASS_S = 2.0  # so long a held request lets others pass that need less room, or the room of other workers
_NoRoom = NoWorker | Overloaded
# By context, weights and ``gives_way``, then by number of choices: why no room was found.
_Tried = dict[tuple[int, bytes, bool], dict[int, _NoRoom]]
_ROLES_THAT_GO_ON: tuple[Role, ...] = ("decode", "aggregated")


class Waiting:
    """The waiting requests. Times are seconds of the router's clock."""

    def __init__(self, membership: Membership, restarts: Restarts, shares: TenantShares) -> None:
        self._membership = membership
        self._restarts = restarts
        self._shares = shares
        self._requests: dict[str, RequestState] = {}
        self._errors: dict[str, _NoRoom] = {}  # by request: why no worker can take it
        self._kept: KeptRoom | None = None  # in turns: for those that found no room in them
        # Those without a turn in the latest turns, and why the one before them found no room.
        self.not_tried: list[tuple[RequestState, _NoRoom]] = []

    def __len__(self) -> int:
        return len(self._requests)

    def kept_from(self, request: RequestState, now: float) -> frozenset[WorkerKey]:
        """Return the workers whose room is kept from a request, for those that are held for long and come before it.

        They come before all new ones. No room is kept at a worker that has enough, nor at one that they cannot use now: it
        refuses them, or is closed, or all do that could serve them with it.
        """
        if request.request_id in self._requests:
            return self._kept.workers() if self._kept is not None else frozenset()
        due = [held for held in self._requests.values() if _is_due(held, now)]
        if not due:
            return frozenset()
        kept, contexts = KeptRoom(self._membership.workers), self._contexts(now)
        for held in due:
            kept.keep(_need(held, contexts), held.retries.refusing(now))
        return kept.workers()

    def turns(self, now: float) -> Iterator[RequestState]:
        """Yield the waiting requests that may look for a worker now, the next one first; each looks before the next is drawn.

        One before its first token that finds no room has looked for all that need as much at the same workers: these are not
        tried. One that gives way to others looks for such only. One that is held keeps others from its workers after a while
        (``kept_from``). One that some workers refuse, and not others like it, looks for itself, unless the
        others are full.
        """
        self.not_tried.clear()
        if not self._requests:
            return
        contexts = self._contexts(now)
        kept = self._kept = KeptRoom(self._membership.workers)
        tried: _Tried = {}
        latest: dict[Need, _NoRoom] = {}  # why one that needs the same found none, whoever refuses it
        for request in sorted(self._requests.values(), key=self._order):
            need, gives_way, refusing = _need(request, contexts), request.standing.gives_way, request.retries.refusing(now)
            why = None if request.has_begun else _why_in_vain(tried, need, kept, gives_way=gives_way)
            if why is None and refusing and not request.has_begun and need in latest:
                why = latest[need] if not kept.may_begin(need, refusing, gives_way=gives_way) else None
            if why is not None:
                self.not_tried.append((request, why))
            else:
                yield request
                if request.request_id not in self._requests:
                    continue
                if not request.has_begun:
                    latest[need] = self._errors[request.request_id]
                if not request.has_begun and not refusing:
                    alike = need.max_model_len, need.model_fingerprint, gives_way
                    tried.setdefault(alike, {})[need.num_choices] = latest[need]
            if _is_due(request, now):
                kept.keep(need, refusing)
        self._kept = None

    def _contexts(self, now: float) -> list[int]:
        """Return the contexts of all workers, those too whose successors are waited for: not all requests fit each of them."""
        workers = [*self._membership.workers, *self._restarts.absent(now)]
        return sorted({worker.facts.max_model_len for worker in workers})

    def _order(self, request: RequestState) -> tuple[bool, int, int]:
        wanted = request.submission
        return not request.has_begun, wanted.priority, self._shares.num_open(wanted.tenant)

    def remove(self, request: RequestState) -> None:
        """Remove a request; does nothing if it does not wait."""
        self._requests.pop(request.request_id, None)
        self._errors.pop(request.request_id, None)

    def keep(self, request: RequestState, error: _NoRoom, now: float, *, is_only_busy: bool) -> NoWorker | None:
        """Keep a request that no worker can take now because of ``error``; return an error if it has waited too long.

        If suitable workers are members but busy (``is_only_busy``), it waits until its deadline. Otherwise it waits for a
        successor, for the time that a restart may take.
        """
        if request.request_id not in self._requests:
            self._requests[request.request_id] = request
            request.standing.waits_since = now
        self._errors[request.request_id] = error
        if is_only_busy:
            request.standing.waits_since = now
        patience_s = self._restarts.patience_s(_ROLES_THAT_GO_ON)
        if now < request.standing.waits_since + patience_s:
            return None
        why = request.attempt.previous_error.message if request.attempt.previous_error else error.message
        return NoWorker(
            f"{why}; no worker could continue the request for {patience_s:g} s",
            retry_after_s=self._restarts.retry_after_s(now),
        )

    def exclude_pause(self, lateness_s: float, now: float) -> None:
        """Exclude a pause of the router of this many seconds that ends now from the waits."""
        for request in self._requests.values():
            request.standing.waits_since = min(now, request.standing.waits_since + lateness_s)


def _is_due(request: RequestState, now: float) -> bool:
    """Return True if a request is held for so long that the room it needs is kept for it."""
    return request.standing.is_held and now >= request.arrival + PASS_S


def _need(request: RequestState, contexts: Sequence[int]) -> Need:
    wanted = request.submission
    index = bisect_left(contexts, wanted.num_tokens)
    max_model_len = contexts[index] if index < len(contexts) else sys.maxsize
    return Need(max_model_len, wanted.model_fingerprint, wanted.n)


def _why_in_vain(tried: _Tried, need: Need, kept: KeptRoom, *, gives_way: bool) -> _NoRoom | None:
    """Return why one that needs no more, or as much of others' room, found none in these turns; None if none has tried.

    What needs more has the same reason only if open workers could hold it. Where they could not, one looks for each number of
    choices, since for some there may be no worker ever.
    """
    for gave_way in {False, gives_way}:
        looked = tried.get((need.max_model_len, need.model_fingerprint, gave_way), {})
        if need.num_choices in looked:
            return looked[need.num_choices]
        fewest = min(looked, default=need.num_choices)
        if fewest < need.num_choices and kept.is_possible(need):
            return looked[fewest]
    return None
