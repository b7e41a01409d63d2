"""Estimates how long a new prompt would wait at each worker, so that requests that would miss their deadline are refused.

Owns, for each worker, the prompts that this router sent it and that have no first token yet, and the pace of earlier prompts.
The wait is the time of the queued prompts at that pace, less the time since the last one ended. The new prompt's own time does
not count, so idle workers and workers without history never cause a rejection. A short prompt takes a whole engine step too, so
its time per token overestimates long prompts, and the extrapolation is limited. No I/O; callers pass the time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
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
    num_tokens: int = 0
    since: float = 0.0
    done_tokens: float = 0.0  # this and the two below give the pace
    done_prompts: float = 0.0
    done_s: float = 0.0

    def wait_s(self, now: float) -> float:
        if not self.done_tokens:
            return 0.0
        times = min(self.num_tokens / self.done_tokens, _MOST_TIMES * len(self.prompts) / self.done_prompts)
        return max(0.0, times * self.done_s - (now - self.since))


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
                queue.num_tokens += len(message.prompt_token_ids)
                self._places[message.request_id] = worker
            case Abort():
                for request_id in message.request_ids:
                    self.drop(request_id, now)

    def on_first_token(self, request_id: str, now: float) -> None:
        """Record that a prompt is computed. Unknown ids and repeated calls are ignored."""
        worker = self._places.get(request_id)
        if worker is None:
            return
        queue = self._queues[worker]
        num_tokens, seconds = queue.prompts[request_id], now - queue.since
        self.drop(request_id, now)
        queue.done_tokens = queue.done_tokens * _MEMORY + num_tokens
        queue.done_prompts = queue.done_prompts * _MEMORY + 1
        queue.done_s = queue.done_s * _MEMORY + seconds

    def drop(self, request_id: str, now: float) -> None:
        """Remove a prompt that ended otherwise; the time spent on it does not count for the pace. Unknown ids are ignored."""
        worker = self._places.pop(request_id, None)
        if worker is not None:
            queue = self._queues[worker]
            queue.num_tokens -= queue.prompts.pop(request_id)
            queue.since = now

    def forget(self, worker: WorkerKey) -> None:
        """Forget a worker that has left."""
        queue = self._queues.pop(worker, None)
        for request_id in queue.prompts if queue is not None else ():
            del self._places[request_id]

    def on_pause(self, lateness_s: float, now: float) -> None:
        """Exclude a pause of the router of this many seconds that ends now from the workers' pace."""
        for queue in self._queues.values():
            queue.since = min(now, queue.since + lateness_s)

    def wait_s(self, worker: WorkerKey, now: float) -> float:
        """Return how many seconds a new prompt would wait at a worker; 0 without history."""
        queue = self._queues.get(worker)
        return queue.wait_s(now) if queue is not None else 0.0

    def too_late(
        self, workers: Iterable[GenerationWorker], demand: Demand, budget_s: float, now: float
    ) -> frozenset[WorkerKey]:
        """Return the workers at which a request would wait longer than ``budget_s``.

        Raises:
            DeadlineUnreachable: it would wait longer at every worker that could begin it.
        """
        members = list(workers)
        late = frozenset(worker.key for worker in members if self.wait_s(worker.key, now) > budget_s)
        able = starters(members, demand) if late else []
        if able and all(worker.key in late for worker in able):
            soonest_s = min(self.wait_s(worker.key, now) for worker in able)
            raise DeadlineUnreachable(
                f"the request may take {budget_s:g} s, but the prompts before it take about {soonest_s:.1f} s more: "
                f"try again later, or give it more time",
                param="timeout_s",
                retry_after_s=math.ceil(soonest_s - budget_s),
            )
        return late

    def shortest_wait_s(self, workers: Iterable[GenerationWorker], now: float) -> float:
        """Return the shortest wait of a new prompt at any worker, seconds; 0 without workers."""
        able = starters(workers, Demand(num_tokens=0))
        return min((self.wait_s(worker.key, now) for worker in able), default=0.0)
