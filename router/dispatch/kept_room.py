"""Which workers' room is kept from other requests, and for whom. No I/O.

Lives as long as nothing changes at the workers but how full they are: for one look at all that wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from router.dispatch.members import GenerationWorker, WorkerKey
from router.dispatch.policy import Demand, computing, could_hold, usable


class Need(NamedTuple):
    """Which workers requests can use: those with so much context, these weights (empty = any), and room for so many choices."""

    max_model_len: int
    model_fingerprint: bytes
    num_choices: int

    def demand(self, refusing: frozenset[WorkerKey] = frozenset()) -> Demand:
        """Return what such a request needs that these workers refuse."""
        return Demand(
            num_tokens=self.max_model_len,
            model_fingerprint=self.model_fingerprint,
            num_choices=self.num_choices,
            refusing=refusing,
        )


class KeptRoom:
    """The room that is kept, and which requests can find any beside it."""

    def __init__(self, workers: Iterable[GenerationWorker]) -> None:
        self._workers = list(workers)
        self._pending: set[tuple[Need, frozenset[WorkerKey]]] = set()  # of these it is not yet looked up which workers they use
        self._done: set[tuple[Need, frozenset[WorkerKey]]] = set()
        self._needed: dict[WorkerKey, tuple[GenerationWorker, int]] = {}  # for the most choices of any request
        self._left: dict[Need, set[WorkerKey]] = {}  # workers that more of these requests may add
        self._with_room: dict[Need, list[GenerationWorker]] = {}
        self._is_possible: dict[Need, bool] = {}
        self._computing: frozenset[WorkerKey] | None = None

    def keep(self, need: Need, refusing: frozenset[WorkerKey]) -> None:
        """Keep room for a request at all workers that it can use. It is of no use where a partner is missing (``usable``)."""
        if (need, refusing) not in self._done:
            self._pending.add((need, refusing))

    def _look_up(self) -> None:
        """Look up what the pending ones use; those first that leave the least to look up for the others."""
        for need, refusing in sorted(self._pending, key=lambda item: (-item[0].num_choices, len(item[1]))):
            self._add(need, refusing)
        self._done |= self._pending
        self._pending.clear()

    def _add(self, need: Need, refusing: frozenset[WorkerKey]) -> None:
        left = self._left.get(need)
        if left is None:
            able = could_hold(self._workers, need.demand())
            is_new = any(self._num_needed(worker.key) < need.num_choices for worker in able)
            found = usable(self._workers, need.demand()) if is_new else []
            left = self._left[need] = {worker.key for worker in found}
            if not refusing:
                self._note(found, need)
        if not left <= refusing:
            left -= {key for key in left if self._num_needed(key) >= need.num_choices}
        if left <= refusing:  # as for most of those that are alike but for what refuses them
            return
        self._note(usable(self._workers, need.demand(refusing)), need)

    def _note(self, workers: Iterable[GenerationWorker], need: Need) -> None:
        for worker in workers:
            self._needed[worker.key] = worker, max(need.num_choices, self._num_needed(worker.key))

    def _num_needed(self, key: WorkerKey) -> int:
        return self._needed[key][1] if key in self._needed else 0

    def workers(self) -> frozenset[WorkerKey]:
        """Return the workers without room to spare: where there is enough, none is kept."""
        self._look_up()
        return frozenset(key for key, (worker, num_needed) in self._needed.items() if not worker.has_room(num_needed))

    def is_possible(self, need: Need) -> bool:
        """Return True if the workers that are open could serve such a request, were they empty."""
        if need not in self._is_possible:
            self._is_possible[need] = bool(usable(self._workers, need.demand()))
        return self._is_possible[need]

    def may_begin(self, need: Need, refusing: frozenset[WorkerKey], *, gives_way: bool) -> bool:
        """Return False if such a request would find no room, without a look at routes: True is no promise."""
        if self._computing is None:
            self._computing = frozenset(worker.key for worker in computing(self._workers))
        if need not in self._with_room:
            able = could_hold(self._workers, need.demand())
            self._with_room[need] = [worker for worker in able if worker.has_room(need.num_choices)]
        free = [worker for worker in self._with_room[need] if worker.has_room(need.num_choices) and worker.key not in refusing]
        if free and gives_way:
            kept = self.workers()
            free = [worker for worker in free if worker.key not in kept]
        return any(worker.key in self._computing for worker in free) and any(worker.role != "prefill" for worker in free)
