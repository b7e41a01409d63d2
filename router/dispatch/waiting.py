"""Requests that wait for a worker: for room, for the end of a stall, or for the successor of a lost worker.

Owns their order and the longest wait. Those that have begun come first, then those of smaller ``priority``, then those of
tenants with fewer open requests, then the oldest.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from core.errors import NoWorker, Overloaded
from core.wire.messages import Role
from router.dispatch.members import GenerationWorker, WorkerKey
from router.dispatch.membership import Membership
from router.dispatch.policy import Demand, usable
from router.dispatch.request_state import RequestState
from router.dispatch.restarts import Restarts
from router.dispatch.shares import TenantShares

PASS_S = 2.0  # so long a held request lets others pass that need less room, or the room of other workers
_NoRoom = NoWorker | Overloaded
_ROLES_THAT_GO_ON: tuple[Role, ...] = ("decode", "aggregated")


class _Kind(NamedTuple):
    """Which workers a request can use: those with so much context, and these weights (empty = any)."""

    max_model_len: int
    model_fingerprint: bytes


class Waiting:
    """The waiting requests. Times are seconds of the router's clock."""

    def __init__(self, membership: Membership, restarts: Restarts, shares: TenantShares) -> None:
        self._membership = membership
        self._restarts = restarts
        self._shares = shares
        self._requests: dict[str, RequestState] = {}
        self._errors: dict[str, _NoRoom] = {}  # by request: why no worker can take it
        self._passed: list[RequestState] = []  # those that found no room in the present turns, and keep it from others
        # Those without a turn in the latest turns, and why the one before them found no room.
        self.not_tried: list[tuple[RequestState, _NoRoom]] = []

    def __len__(self) -> int:
        return len(self._requests)

    def kept_from(self, request: RequestState, now: float) -> frozenset[WorkerKey]:
        """Return the workers whose room is kept from a request, for those that are held for long and come before it.

        They come before all new ones. No room is kept at a worker that has enough, nor at one that they cannot use now: it
        refuses them, or is closed, or all do that could serve them with it.
        """
        is_new = request.request_id not in self._requests
        due = [held for held in self._requests.values() if _is_due(held, now)] if is_new else self._passed
        if not due:
            return frozenset()
        workers = self._membership.workers
        contexts = _contexts(workers)
        wanted = {(_kind(held, contexts), held.submission.n, held.refusing(now)) for held in due}
        demands = [
            Demand(num_tokens=kind.max_model_len, model_fingerprint=kind.model_fingerprint, num_choices=n, refusing=refusing)
            for kind, n, refusing in wanted
        ]
        return frozenset(
            worker.key for demand in demands for worker in usable(workers, demand) if not worker.has_room(demand.num_choices)
        )

    def turns(self, now: float) -> Iterator[RequestState]:
        """Yield the waiting requests that may look for a worker now, the next one first; each looks before the next is drawn.

        One before its first token that finds no room has looked for all that need as much at the same workers: these are not
        tried. One that gives way to others looks for such only. One that is held keeps others from its workers after a while
        (``kept_from``). One that some workers refuse, and not others like it, looks for itself.
        """
        self.not_tried.clear()
        self._passed.clear()
        if not self._requests:
            return
        contexts = _contexts(self._membership.workers)
        tried: dict[tuple[_Kind, bool], tuple[int, _NoRoom]] = {}  # by ``gives_way`` too: the fewest choices without room
        for request in sorted(self._requests.values(), key=self._order):
            if request.has_begun or request.refusing(now):
                yield request
                self._keep_room(request, now)
                continue
            kind, n, gives_way = _kind(request, contexts), request.submission.n, request.gives_way
            looked = tried.get((kind, False))
            if looked is None or looked[0] > n:
                looked = tried.get((kind, gives_way))
            if looked is not None and looked[0] <= n:
                self.not_tried.append((request, looked[1]))
            else:
                yield request
                if request.request_id not in self._requests:
                    continue
                tried[kind, gives_way] = n, self._errors[request.request_id]
            self._keep_room(request, now)
        self._passed.clear()

    def _keep_room(self, request: RequestState, now: float) -> None:
        """Keep room from those whose turns come later, if a request waits on after its turn and is held for long."""
        if request.request_id in self._requests and _is_due(request, now):
            self._passed.append(request)

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
            request.waits_since = now
        self._errors[request.request_id] = error
        if is_only_busy:
            request.waits_since = now
        patience_s = self._restarts.patience_s(_ROLES_THAT_GO_ON)
        if now < request.waits_since + patience_s:
            return None
        why = request.attempt.previous_error.message if request.attempt.previous_error else error.message
        return NoWorker(
            f"{why}; no worker could continue the request for {patience_s:g} s",
            retry_after_s=self._restarts.retry_after_s(now),
        )

    def exclude_pause(self, lateness_s: float, now: float) -> None:
        """Exclude a pause of the router of this many seconds that ends now from the waits."""
        for request in self._requests.values():
            request.waits_since = min(now, request.waits_since + lateness_s)


def _is_due(request: RequestState, now: float) -> bool:
    """Return True if a request is held for so long that the room it needs is kept for it."""
    return request.is_held and now >= request.arrival + PASS_S


def _contexts(workers: Iterable[GenerationWorker]) -> list[int]:
    return sorted({worker.facts.max_model_len for worker in workers})


def _kind(request: RequestState, contexts: Sequence[int]) -> _Kind:
    wanted = request.submission
    index = bisect_left(contexts, wanted.num_tokens)
    return _Kind(contexts[index] if index < len(contexts) else sys.maxsize, wanted.model_fingerprint)
