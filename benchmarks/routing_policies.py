"""The routers that ``routing.py`` compares: published policies, and the functions that kvferry's router calls.

Every router knows the same: the exact contents of all caches, and the blocks of prompts that it has placed and that are not
computed yet. ``Q`` counts the uncached tokens of these prompts at a worker, ``n`` the prompts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from routing_simulation import Contents, Job, PrefillMs, PrefillWorker, count_hits

from kvferry.advise.trace import TraceRequest
from router.routing.accuracy import HitAccuracy
from router.routing.backlog import Backlog, QueuedPrompt
from router.routing.cost import PATIENCE, REUSE_WEIGHT, dislike_of, patience_ms, score
from router.routing.fit import PrefillFit


class BaseRouter:
    """What all routers count. Subclasses choose the worker."""

    def __init__(self, num_workers: int, prefill_ms: PrefillMs, seed: int) -> None:
        self.num_workers = num_workers
        self.prefill_ms = prefill_ms
        self.random = random.Random(seed)
        self.contents = Contents(num_workers)
        self.expected = Contents(num_workers)
        self.num_expected: list[dict[int, int]] = [{} for _ in range(num_workers)]
        self.n = [0] * num_workers
        self.q = [0] * num_workers  # uncached tokens
        self.last_chosen = [-1] * num_workers
        self._uncached: dict[int, int] = {}

    def place(self, request: TraceRequest, number: int, now_ms: float) -> tuple[int, int, float]:
        hits = count_hits(request.blocks, self.num_workers, self.contents, self.expected)
        worker = self.choose(request, hits, now_ms)
        self.n[worker] += 1
        new = request.num_tokens - hits[worker]
        self.q[worker] += new
        self._uncached[number] = new
        self.last_chosen[worker] = number
        counts = self.num_expected[worker]
        for block in request.blocks:
            count = counts.get(block, 0)
            counts[block] = count + 1
            if not count:
                self.expected.add(worker, block)
        return worker, hits[worker], self.note_placed(worker, number, request, hits[worker], now_ms)

    def on_done(self, job: Job, now_ms: float) -> None:
        worker = job.worker
        if job.number not in self._uncached:
            return  # placed before a restart
        self.n[worker] -= 1
        self.q[worker] -= self._uncached.pop(job.number)
        counts = self.num_expected[worker]
        for block in job.request.blocks:
            count = counts.get(block, 0) - 1
            if count > 0:
                counts[block] = count
            elif count == 0:
                del counts[block]
                self.expected.discard(worker, block)

    def on_contents(self, worker: int, added: Sequence[int], evicted: Sequence[int]) -> None:
        for block in added:
            self.contents.add(worker, block)
        for block in evicted:
            self.contents.discard(worker, block)

    def on_report(self, router: int, worker: PrefillWorker, now_ms: float) -> None:
        """Ignore it: one router knows its own placements."""

    def choose(self, request: TraceRequest, hits: list[int], now_ms: float) -> int:
        raise NotImplementedError

    def note_placed(self, worker: int, number: int, request: TraceRequest, hit: int, now_ms: float) -> float:
        """Return the order in the worker's queue: by default that of arrival."""
        return now_ms

    def least_loaded(self) -> int:
        return min(range(self.num_workers), key=lambda w: (self.n[w], self.last_chosen[w]))

    def lowest(self, costs: Sequence[float]) -> int:
        """Return the worker with the lowest cost, one of the equals at random."""
        best = min(costs)
        return self.random.choice([worker for worker, cost in enumerate(costs) if cost == best])


class RoundRobin(BaseRouter):
    def choose(self, request: TraceRequest, hits: list[int], now_ms: float) -> int:
        return min(range(self.num_workers), key=self.last_chosen.__getitem__)


class RandomTwo(BaseRouter):
    def choose(self, request: TraceRequest, hits: list[int], now_ms: float) -> int:
        return min(self.random.sample(range(self.num_workers), 2), key=self.n.__getitem__)


class LeastLoaded(BaseRouter):
    def choose(self, request: TraceRequest, hits: list[int], now_ms: float) -> int:
        return self.least_loaded()


class CacheAware(BaseRouter):
    """SGLang's gateway with the defaults of its command line."""

    def choose(self, request: TraceRequest, hits: list[int], now_ms: float) -> int:
        most, least = max(self.n), min(self.n)
        if most - least > 64 and most > 1.5 * least:
            return self.least_loaded()
        best = max(hits)
        if best / request.num_tokens > 0.3:
            return min((w for w in range(self.num_workers) if hits[w] == best), key=self.n.__getitem__)
        return self.least_loaded()


class EndpointPicker(BaseRouter):
    """The Gateway API inference extension: a weighted sum of prefix, queue and token load."""

    def __init__(self, num_workers: int, prefill_ms: PrefillMs, seed: int, weights: tuple[float, float, float]) -> None:
        super().__init__(num_workers, prefill_ms, seed)
        self.weights = weights

    def choose(self, request: TraceRequest, hits: list[int], now_ms: float) -> int:
        prefix, queue, load = self.weights
        waiting = [max(0, count - 1) for count in self.n]
        most, least = max(waiting), min(waiting)
        span = most - least
        return self.lowest(
            [
                -(
                    prefix * hits[w] / request.num_tokens
                    + queue * ((most - waiting[w]) / span if span else 1.0)
                    + load * (1 - min(1.0, self.q[w] / 300_000))
                )
                for w in range(self.num_workers)
            ]
        )


class LlmdFilter(BaseRouter):
    """llm-d's optimised baseline: workers with 80 % of the prompt unless they are 18 s busier, then fewest tokens."""

    def choose(self, request: TraceRequest, hits: list[int], now_ms: float) -> int:
        everyone = range(self.num_workers)
        sticky = [w for w in everyone if hits[w] / request.num_tokens >= 0.8]
        others = [w for w in everyone if w not in sticky]
        candidates: Sequence[int] = everyone
        if sticky:
            busier = min(self.q[w] for w in sticky) - min((self.q[w] for w in others), default=0)
            if not others or busier / 15.928 <= 18_000:
                candidates = sticky
        fewest = min(self.q[w] for w in candidates)
        return self.random.choice([w for w in candidates if self.q[w] == fewest])


class Dynamo(BaseRouter):
    def choose(self, request: TraceRequest, hits: list[int], now_ms: float) -> int:
        return self.lowest([max(0, self.q[w] + request.num_tokens - hits[w]) for w in range(self.num_workers)])


class DynamoDecay(BaseRouter):
    def choose(self, request: TraceRequest, hits: list[int], now_ms: float) -> int:
        length, least = request.num_tokens, min(self.q)
        return self.lowest(
            [max(0.0, self.q[w] + length - hits[w] / (1 + (self.q[w] - least) / length)) for w in range(self.num_workers)]
        )


class LMetric(BaseRouter):
    def choose(self, request: TraceRequest, hits: list[int], now_ms: float) -> int:
        return self.lowest([(self.q[w] + request.num_tokens - hits[w]) * (self.n[w] + 1) for w in range(self.num_workers)])


class PredictedTime(BaseRouter):
    """kvferry: the functions of ``router.routing``. With ``patience`` 0 the workers serve in order of arrival.

    With ``learns`` the prefill time is fitted to completed prompts, from nothing; otherwise it is the model's. ``rank``: which
    router it is, of how many.
    """

    def __init__(
        self,
        num_workers: int,
        prefill_ms: PrefillMs,
        seed: int,
        *,
        reuse_weight: float = REUSE_WEIGHT,
        patience: float = PATIENCE,
        learns: bool = False,
        rank: tuple[int, int] = (0, 1),
    ) -> None:
        super().__init__(num_workers, prefill_ms, seed)
        self.reuse_weight = reuse_weight
        self.patience = patience
        self.fit = PrefillFit() if learns else None
        self.dislikes = [dislike_of(worker, *rank) for worker in range(num_workers)]
        self.backlogs = [Backlog() for _ in range(num_workers)]
        self.others_until_ms = [0.0] * num_workers  # when each has computed the prompts of other routers
        self.accuracy = [HitAccuracy() for _ in range(num_workers)]

    def own_ms(self, num_tokens: int, hit: int) -> float:
        if self.fit is not None:
            return self.fit.time.ms(num_tokens - hit, hit)
        return self.prefill_ms(num_tokens - hit, hit)

    def choose(self, request: TraceRequest, hits: list[int], now_ms: float) -> int:
        costs = []
        for worker, backlog in enumerate(self.backlogs):
            own = self.own_ms(request.num_tokens, self.accuracy[worker].credit(hits[worker]))
            wait, num_delayed = backlog.place_of(self._due(own, now_ms), now_ms)
            wait += max(0.0, self.others_until_ms[worker] - now_ms)
            costs.append(score(wait, own, num_delayed, self.dislikes[worker], self.reuse_weight))
        return costs.index(min(costs))

    def note_placed(self, worker: int, number: int, request: TraceRequest, hit: int, now_ms: float) -> float:
        hit = self.accuracy[worker].credit(hit)
        own = self.own_ms(request.num_tokens, hit)
        due = self._due(own, now_ms)
        self.backlogs[worker].add(str(number), QueuedPrompt(request.num_tokens - hit, own, due), now_ms)
        return due

    def on_done(self, job: Job, now_ms: float) -> None:
        super().on_done(job, now_ms)
        if self.backlogs[job.worker].remove(str(job.number), now_ms) is None:
            return  # placed before a restart
        self.accuracy[job.worker].observe(job.predicted_hit, job.hit)
        if self.fit is not None:
            self.fit.observe(job.request.num_tokens - job.hit, job.hit, job.work_ms)

    def on_report(self, router: int, worker: PrefillWorker, now_ms: float) -> None:
        """Hear the worker's heartbeat, which says how many tokens the prompts of other routers have there."""
        jobs = [job for _, _, job in worker.queue] + ([worker.running] if worker.running is not None else [])
        num_tokens = sum(job.request.num_tokens for job in jobs if job.router != router)
        self.others_until_ms[worker.number] = now_ms + self.own_ms(num_tokens, 0) if num_tokens else 0.0

    def _due(self, own_ms: float, now_ms: float) -> float:
        return now_ms + patience_ms(own_ms, self.patience)


class RestartedRouter(PredictedTime):
    """Loses all it knows at a time, and learns the contents of each worker by a snapshot at the worker's next report."""

    def __init__(self, num_workers: int, prefill_ms: PrefillMs, seed: int, restart_ms: float) -> None:
        super().__init__(num_workers, prefill_ms, seed)
        self.restart_ms = restart_ms
        self.awaits_snapshot: set[int] = set()

    def place(self, request: TraceRequest, number: int, now_ms: float) -> tuple[int, int, float]:
        if now_ms >= self.restart_ms:
            super().__init__(self.num_workers, self.prefill_ms, number)
            self.restart_ms = float("inf")
            self.awaits_snapshot = set(range(self.num_workers))
        return super().place(request, number, now_ms)

    def on_contents(self, worker: int, added: Sequence[int], evicted: Sequence[int]) -> None:
        if worker not in self.awaits_snapshot:
            super().on_contents(worker, added, evicted)

    def on_report(self, router: int, worker: PrefillWorker, now_ms: float) -> None:
        super().on_report(router, worker, now_ms)
        if worker.number in self.awaits_snapshot:
            self.awaits_snapshot.discard(worker.number)
            self.on_contents(worker.number, list(worker.cached), ())


class BlindRouter(PredictedTime):
    """Hears nothing of the contents of worker 0."""

    def on_contents(self, worker: int, added: Sequence[int], evicted: Sequence[int]) -> None:
        if worker != 0:
            super().on_contents(worker, added, evicted)


class LiedToRouter(PredictedTime):
    """Worker 0 claims to hold every prompt."""

    def place(self, request: TraceRequest, number: int, now_ms: float) -> tuple[int, int, float]:
        for block in request.blocks:
            self.contents.add(0, block)
        return super().place(request, number, now_ms)


def arrival_order(num_workers: int, prefill_ms: PrefillMs, seed: int) -> BaseRouter:
    """Return kvferry's router without its order: workers serve in order of arrival."""
    return PredictedTime(num_workers, prefill_ms, seed, patience=0.0)


def learning(num_workers: int, prefill_ms: PrefillMs, seed: int) -> BaseRouter:
    """Return kvferry's router with a prefill time that it learns."""
    return PredictedTime(num_workers, prefill_ms, seed, learns=True)


MakeRouter = Callable[[int, PrefillMs, int], BaseRouter]

BASELINES: dict[str, MakeRouter] = {
    "round robin": RoundRobin,
    "random-2": RandomTwo,
    "least-loaded": LeastLoaded,
    "cache_aware": CacheAware,
    "EPP 2:1": lambda count, model, seed: EndpointPicker(count, model, seed, (2, 1, 0)),
    "EPP 3:2:2": lambda count, model, seed: EndpointPicker(count, model, seed, (3, 2, 2)),
    "llm-d filter": LlmdFilter,
    "dynamo": Dynamo,
    "dynamo decay": DynamoDecay,
    "lmetric": LMetric,
}
OURS: dict[str, MakeRouter] = {
    "kvferry": PredictedTime,
    "kvferry, in order of arrival": arrival_order,
    "kvferry, learned times": learning,
    "kvferry, blind to a worker": BlindRouter,
    "kvferry, lied to by a worker": LiedToRouter,
}
ROUTERS = BASELINES | OURS
