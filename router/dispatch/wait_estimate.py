"""How long a new prompt would wait at each worker, so that a request that would be too late is refused at once.

Owns, for each worker that begins requests, the prompts that this router has given it and whose first token is to come, and the
pace at which those before were done. The wait is what is queued at that pace, less what has passed since the last of them: the
prompt's own time is not counted, so an idle worker is never too late, and neither is one of which nothing is known. Few tokens
take a step as many do: what short prompts took tells little of long ones, so it is extrapolated only so far. Sees what
``router.dispatch.core`` sends and gets; no I/O, times come in.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from core.errors import DeadlineUnreachable
from core.wire.messages import Abort, Generate, RouterMessage
from router.dispatch.members import Worker, WorkerKey
from router.dispatch.policy import Demand, starters

_MEMORY = 0.9  # weight of all earlier prompts at the next one: the pace is that of the last ten or so
_MOST_TIMES = 5  # as long as those before, that a prompt is thought to take


@dataclass(slots=True)
class _Queue:
    """The prompts at one worker. ``since`` is when it began with the oldest of them, as far as is known here."""

    prompts: dict[str, int] = field(default_factory=dict)  # tokens by the id on the wire
    num_tokens: int = 0
    since: float = 0.0
    done_tokens: float = 0.0  # with what follows, the pace
    done_prompts: float = 0.0
    done_s: float = 0.0

    def wait_s(self, now: float) -> float:
        if not self.done_tokens:
            return 0.0
        times = min(self.num_tokens / self.done_tokens, _MOST_TIMES * len(self.prompts) / self.done_prompts)
        return max(0.0, times * self.done_s - (now - self.since))


class WaitEstimates:
    """The queues of all workers, as this router knows them."""

    def __init__(self) -> None:
        self._queues: dict[WorkerKey, _Queue] = {}
        self._places: dict[str, WorkerKey] = {}

    def on_sent(self, worker: WorkerKey, message: RouterMessage, now: float) -> None:
        """Look at what a worker is sent: a prompt, or that one is no longer wanted."""
        match message:
            case Generate() if not message.choices:  # with choices, others have computed the prompt
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
        """A prompt is done; unknown ids, and those whose first token is known, are ignored."""
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
        """A prompt has left its worker in some other way, and what was spent on it says nothing. Unknown ids are ignored."""
        worker = self._places.pop(request_id, None)
        if worker is not None:
            queue = self._queues[worker]
            queue.num_tokens -= queue.prompts.pop(request_id)
            queue.since = now

    def forget(self, worker: WorkerKey) -> None:
        """A worker has left."""
        queue = self._queues.pop(worker, None)
        for request_id in queue.prompts if queue is not None else ():
            del self._places[request_id]

    def on_pause(self, lateness_s: float) -> None:
        """The router stood still for so long, which says nothing of the workers' pace."""
        for queue in self._queues.values():
            queue.since += lateness_s

    def wait_s(self, worker: WorkerKey, now: float) -> float:
        """Return how long a prompt would wait there before it is begun with; 0 if nothing says that it would."""
        queue = self._queues.get(worker)
        return queue.wait_s(now) if queue is not None else 0.0

    def too_late(self, workers: Iterable[Worker], demand: Demand, budget_s: float, now: float) -> frozenset[WorkerKey]:
        """Return the workers at which a request with so much time would still wait when it is over.

        Raises:
            DeadlineUnreachable: that is so at every worker that could begin it.
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

    def shortest_wait_s(self, workers: Iterable[Worker], now: float) -> float:
        """Return how long a new prompt would wait where it is begun with first; 0 without workers."""
        able = starters(workers, Demand(num_tokens=0))
        return min((self.wait_s(worker.key, now) for worker in able), default=0.0)
