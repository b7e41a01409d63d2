"""Estimates how long a new prompt would wait at each worker, so that requests that would miss their deadline are refused.

Owns, for each worker, the prompts that this router sent it and that have no first token yet, and the pace of earlier prompts.
The wait is the time of the queued prompts at that pace, less the time since the last one ended. The new prompt's own time does
not count, so idle workers and workers without history never cause a rejection. A short prompt takes a whole engine step too, so
its time per token overestimates long prompts, and the extrapolation is limited. No I/O; callers pass the time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from core.errors import DeadlineUnreachable
from core.wire.messages import Abort, Generate, RouterMessage
from router.dispatch.members import GenerationWorker, WorkerKey
from router.dispatch.policy import Demand, starters

_MEMORY = 0.9  # factor on all earlier prompts at each new one: the pace covers about the last ten
_MOST_TIMES = 5  # a prompt is expected to take at most this multiple of the average before it


@dataclass(slots=True)
class _Queue:
    """The prompts at one worker. ``since`` is when it began the oldest of them, as far as this router knows."""

    prompts: dict[str, int] = field(default_factory=dict)  # number of tokens by wire id
    tenants: dict[str, int] = field(default_factory=dict)  # by wire id, those that have one
    num_tokens: int = 0
    since: float = 0.0
    done_tokens: float = 0.0  # this and the two below give the pace
    done_prompts: float = 0.0
    done_s: float = 0.0

    def wait_s(self, now: float, tenant: int | None) -> float:
        if not self.done_tokens:
            return 0.0
        return max(0.0, self._time_s(*self._before(tenant)) - (now - self.since))

    def work_s(self, now: float, tenant: int | None = None) -> float:
        return max(0.0, self._time_s(*self._before(tenant)) - self._spent_s(now))

    def left_s(self, request_id: str, now: float) -> float:
        """Return the time until one of the prompts is computed, if they are computed in the order in which they came."""
        names = list(self.prompts)
        num_prompts = names.index(request_id) + 1
        num_tokens = self.num_tokens - sum(self.prompts[name] for name in names[num_prompts:])
        return max(0.0, self._time_s(num_tokens, num_prompts) - self._spent_s(now))

    def own_s(self, request_id: str) -> float:
        return self._time_s(self.prompts[request_id], 1)

    def _spent_s(self, now: float) -> float:
        """Return how much of its prompts' time has passed: what the oldest one takes longer is not spent on the others."""
        oldest = next(iter(self.prompts), None)
        return min(now - self.since, self.own_s(oldest)) if oldest is not None else 0.0

    def _time_s(self, num_tokens: float, num_prompts: float) -> float:
        if not self.done_tokens:
            return 0.0
        return min(num_tokens / self.done_tokens, _MOST_TIMES * num_prompts / self.done_prompts) * self.done_s

    def _before(self, tenant: int | None) -> tuple[float, float]:
        """Return how many tokens, and prompts, are computed before a new one; with a ``tenant`` the worker is fair to it."""
        if tenant is None or not self.tenants:
            return self.num_tokens, len(self.prompts)
        by_tenant: Counter[int] = Counter()
        for request_id, num_tokens in self.prompts.items():
            by_tenant[self.tenants.get(request_id, 0)] += num_tokens
        turn = by_tenant[tenant] + self.num_tokens / len(self.prompts)
        num_before = by_tenant[tenant] + sum(min(turn, others) for name, others in by_tenant.items() if name != tenant)
        return num_before, len(self.prompts) * num_before / max(1, self.num_tokens)


class WaitEstimates:
    """Estimates for all workers, from this router's own messages."""

    def __init__(self) -> None:
        self._queues: dict[WorkerKey, _Queue] = {}
        self._places: dict[str, WorkerKey] = {}

    def on_sent(self, worker: WorkerKey, message: RouterMessage, now: float) -> None:
        """Record a message to a worker: a prompt joins the queue, and an abort removes it."""
        match message:
            case Generate() if not message.choices:  # with choices, the prompt was computed before
                queue = self._queues.setdefault(worker, _Queue())
                if not queue.prompts:
                    queue.since = now
                queue.prompts[message.request_id] = len(message.prompt_token_ids)
                if message.tenant:
                    queue.tenants[message.request_id] = message.tenant
                queue.num_tokens += len(message.prompt_token_ids)
                self._places[message.request_id] = worker
            case Abort():
                for request_id in message.request_ids:
                    if self._places.get(request_id) == worker:  # else it ends an early pull, not the prompt
                        self.drop(request_id, now)

    def on_first_token(self, request_id: str, now: float) -> None:
        """Record that a prompt is computed. Unknown ids and repeated calls are ignored."""
        worker = self._places.get(request_id)
        if worker is None:
            return
        queue = self._queues[worker]
        num_tokens, seconds = queue.prompts[request_id], now - queue.since
        self.drop(request_id, now)
        queue.since = now
        queue.done_tokens = queue.done_tokens * _MEMORY + num_tokens
        queue.done_prompts = queue.done_prompts * _MEMORY + 1
        queue.done_s = queue.done_s * _MEMORY + seconds

    def drop(self, request_id: str, now: float) -> None:
        """Remove a prompt that ended otherwise; the time spent on it does not count for the pace. Unknown ids are ignored.

        None was spent on one that waited behind others.
        """
        worker = self._places.pop(request_id, None)
        if worker is not None:
            queue = self._queues[worker]
            queue.since = now if request_id == next(iter(queue.prompts)) else queue.since
            queue.num_tokens -= queue.prompts.pop(request_id)
            queue.tenants.pop(request_id, None)

    def forget(self, worker: WorkerKey) -> None:
        """Forget a worker that has left."""
        queue = self._queues.pop(worker, None)
        for request_id in queue.prompts if queue is not None else ():
            del self._places[request_id]

    def on_pause(self, lateness_s: float, now: float) -> None:
        """Exclude a pause of the router of this many seconds that ends now from the workers' pace."""
        for queue in self._queues.values():
            queue.since = min(now, queue.since + lateness_s)

    def wait_s(self, worker: WorkerKey, now: float, tenant: int | None = None) -> float:
        """Return how many seconds a new prompt would wait at a worker; 0 without history.

        With a ``tenant`` the worker is fair to it, else the prompt waits for all others.
        """
        queue = self._queues.get(worker)
        return queue.wait_s(now, tenant) if queue is not None else 0.0

    def work_s(self, worker: WorkerKey, now: float) -> float:
        """Return how many seconds a worker needs for its prompts, of which a late one has begun alone; 0 without history.

        ``wait_s`` is 0 behind a prompt that is late by an unknown time: no request is refused because of that.
        """
        queue = self._queues.get(worker)
        return queue.work_s(now) if queue is not None else 0.0

    def last_first(self, worker: WorkerKey) -> Iterator[str]:
        """Return the wire ids of a worker's prompts, the one that it got last first."""
        queue = self._queues.get(worker)
        return reversed(list(queue.prompts)) if queue is not None else iter(())

    def num_prompts(self, worker: WorkerKey) -> int:
        """Return how many prompts of this router a worker has, that have no first token yet."""
        queue = self._queues.get(worker)
        return len(queue.prompts) if queue is not None else 0

    def is_unknown(self, worker: WorkerKey) -> bool:
        """Return True if a worker has prompts, and nothing is known of its pace."""
        queue = self._queues.get(worker)
        return queue is not None and bool(queue.prompts) and not queue.done_tokens

    def left_s(self, request_id: str, now: float, tenant: int | None = None) -> float:
        """Return how many seconds a prompt waits yet until it is computed; as ``work_s``, and 0 if it is unknown."""
        worker = self._places.get(request_id)
        if worker is None:
            return 0.0
        left_s = self._queues[worker].left_s(request_id, now)
        return left_s if tenant is None else min(left_s, self._queues[worker].work_s(now, tenant))

    def own_s(self, request_id: str) -> float:
        """Return how many seconds a prompt takes at its worker; 0 without history."""
        worker = self._places.get(request_id)
        return self._queues[worker].own_s(request_id) if worker is not None else 0.0

    def too_late(
        self, workers: Iterable[GenerationWorker], demand: Demand, budget_s: float, now: float, tenant: int = 0
    ) -> frozenset[WorkerKey]:
        """Return the workers at which a request would wait longer than ``budget_s``.

        Raises:
            DeadlineUnreachable: it would wait longer at every worker that could begin it.
        """
        members = list(workers)
        waits_s = {
            worker.key: self.wait_s(worker.key, now, tenant if worker.facts.has_fair_shares else None) for worker in members
        }
        late = frozenset(key for key, wait_s in waits_s.items() if wait_s > budget_s)
        able = starters(members, demand) if late else []
        if able and all(worker.key in late for worker in able):
            soonest_s = min(waits_s[worker.key] for worker in able)
            raise DeadlineUnreachable(
                f"the request may take {round(budget_s, 2):g} s, but the prompts before it take about {soonest_s:.1f} s more: "
                f"try again later, or give it more time",
                param="timeout_s",
                retry_after_s=math.ceil(soonest_s - budget_s),
            )
        return late

    def shortest_wait_s(self, workers: Iterable[GenerationWorker], now: float) -> float:
        """Return the shortest wait of a new prompt at any worker, seconds; 0 without workers."""
        able = starters(workers, Demand(num_tokens=0))
        return min((self.wait_s(worker.key, now) for worker in able), default=0.0)
