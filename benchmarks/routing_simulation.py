"""Simulates the prefill workers of a cluster under a request trace, for ``routing.py``.

Owns the model of a prefill worker (one prompt at a time, a prefix cache of 512-token blocks), the cost models, and the metrics.
The policy is an argument. Times are ms of simulated time.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from common import quantile

from kvferry.advise.trace import BLOCK_TOKENS, TraceRequest

PrefillMs = Callable[[int, int], float]  # (new, hit) tokens -> ms


def qwen_prefill_ms(new: int, hit: int) -> float:
    """Return the time of a Qwen3-32B class model on two GPUs."""
    return 12 + new * (0.05337 + 2.30e-6 * (hit + new / 2))


def mocker_prefill_ms(new: int, hit: int) -> float:
    """Return the time of Dynamo's mocker, which depends on the new tokens only."""
    del hit
    return 16.5 + new * (0.01518 + 4.21e-7 * new)


class Contents:
    """Which of at most 64 workers holds which block: one bit set per block."""

    def __init__(self, num_workers: int) -> None:
        self.everyone = (1 << num_workers) - 1
        self.holders: dict[int, int] = {}

    def add(self, worker: int, block: int) -> None:
        self.holders[block] = self.holders.get(block, 0) | 1 << worker

    def discard(self, worker: int, block: int) -> None:
        left = self.holders.get(block, 0) & ~(1 << worker)
        if left:
            self.holders[block] = left
        else:
            self.holders.pop(block, None)


def count_hits(blocks: Sequence[int], num_workers: int, *indexes: Contents) -> list[int]:
    """Return how many leading blocks each worker holds in one of the indexes, in tokens."""
    hits = [0] * num_workers
    alive = (1 << num_workers) - 1
    first = indexes[0].holders
    others = [index.holders for index in indexes[1:]]
    depth = 0
    for depth, block in enumerate(blocks):
        mask = first.get(block, 0)
        for other in others:
            mask |= other.get(block, 0)
        lost = alive & ~mask
        if lost:
            alive &= mask
            while lost:
                low = lost & -lost
                hits[low.bit_length() - 1] = depth * BLOCK_TOKENS
                lost ^= low
            if not alive:
                return hits
    while alive:
        low = alive & -alive
        hits[low.bit_length() - 1] = len(blocks) * BLOCK_TOKENS
        alive ^= low
    return hits


@dataclass(slots=True)
class Job:
    """A request at a prefill worker. ``order`` is its place in the worker's queue: smallest first."""

    request: TraceRequest
    number: int
    router: int
    worker: int
    arrival_ms: float
    predicted_hit: int
    order: float
    hit: int = 0
    start_ms: float = 0.0
    work_ms: float = 0.0


class PrefillWorker:
    """Computes one prompt at a time; caches blocks, evicting the least recently used, the ends of prompts first."""

    def __init__(self, number: int, capacity: int) -> None:
        self.number = number
        self.capacity = capacity
        self.cached: dict[int, None] = {}  # least recently used first
        self.queue: list[tuple[float, int, Job]] = []
        self.running: Job | None = None
        self.busy_ms = 0.0

    def hit_tokens(self, blocks: Sequence[int]) -> int:
        cached = self.cached
        for depth, block in enumerate(blocks):
            if block not in cached:
                return depth * BLOCK_TOKENS
        return len(blocks) * BLOCK_TOKENS

    def touch(self, blocks: Sequence[int]) -> None:
        cached = self.cached
        for block in reversed(blocks):
            if block in cached:
                del cached[block]
                cached[block] = None

    def store(self, blocks: Sequence[int]) -> tuple[list[int], list[int]]:
        """Cache the blocks of a prompt; return those added and those evicted."""
        cached = self.cached
        kept = blocks[: self.capacity]
        added = []
        for block in reversed(kept):
            if block in cached:
                del cached[block]
            else:
                added.append(block)
            cached[block] = None
        evicted = []
        while len(cached) > self.capacity:
            block = next(iter(cached))
            del cached[block]
            evicted.append(block)
        return added, evicted


class Router(Protocol):
    """A router of the simulation: chooses a worker for each request and hears what becomes of it."""

    def place(self, request: TraceRequest, number: int, now_ms: float) -> tuple[int, int, float]:
        """Return the worker, the predicted hit in tokens, and the order in the worker's queue."""

    def on_done(self, job: Job, now_ms: float) -> None:
        """Hear that a prompt placed by this router is computed."""

    def on_contents(self, worker: int, added: Sequence[int], evicted: Sequence[int]) -> None:
        """Hear how the contents of a worker have changed."""

    def on_report(self, router: int, worker: PrefillWorker, now_ms: float) -> None:
        """Hear how loaded a worker is; ``router`` is the own number."""


@dataclass(slots=True)
class Results:
    """What one run has measured, one item per request in order of completion."""

    ttft_ms: list[float] = field(default_factory=list)
    slowdown: list[float] = field(default_factory=list)
    arrival_ms: list[float] = field(default_factory=list)
    hit_tokens: list[int] = field(default_factory=list)
    predicted_hit_tokens: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    num_ok: int = 0

    @property
    def mean_ttft_ms(self) -> float:
        return sum(self.ttft_ms) / len(self.ttft_ms)

    @property
    def ok_share(self) -> float:
        """Share of the requests with a first token within max(2 s, 1.5 times the own cold prefill)."""
        return self.num_ok / len(self.ttft_ms)

    @property
    def hit_rate(self) -> float:
        return sum(self.hit_tokens) / sum(self.num_tokens)

    def ttft_quantile(self, share: float) -> float:
        return quantile(self.ttft_ms, share)

    def slowdown_quantile(self, share: float) -> float:
        return quantile(self.slowdown, share)

    def hit_rate_between(self, begin_ms: float, end_ms: float) -> float:
        """Return the hit rate of the requests that arrived in an interval."""
        chosen = [index for index, arrival in enumerate(self.arrival_ms) if begin_ms <= arrival < end_ms]
        total = sum(self.num_tokens[index] for index in chosen)
        return sum(self.hit_tokens[index] for index in chosen) / total if total else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What is simulated. ``time_error`` e: real prefill times are the model's times a factor of 1 - e to 1 + e.

    ``report_ms``: the workers tell their contents to the routers so often; 0 = at once. ``until_ok``: the run may stop as
    soon as the share of requests in time can no longer reach this.
    """

    requests: Sequence[TraceRequest]
    prefill_ms: PrefillMs
    num_workers: int = 6
    num_blocks: int = 6000
    speed: float = 1.0
    time_error: float = 0.0
    report_ms: float = 0.0
    seed: int = 0
    until_ok: float = 0.0


class Run:
    """One scenario with its routers. Subclasses change how long a prompt takes."""

    def __init__(self, scenario: Scenario, routers: Sequence[Router]) -> None:
        self.scenario = scenario
        self.routers = routers
        self.workers = [PrefillWorker(number, scenario.num_blocks) for number in range(scenario.num_workers)]
        self.results = Results()
        self.running: list[tuple[float, int]] = []  # (end, worker)
        self.unreported: dict[int, dict[int, bool]] = defaultdict(dict)  # worker -> block -> it is cached
        self.noise = random.Random(scenario.seed * 7919 + 1)
        most = int((1 - scenario.until_ok) * len(scenario.requests)) if scenario.until_ok else len(scenario.requests)
        self.num_late_allowed = most

    def run(self) -> Results:
        scenario = self.scenario
        noise = scenario.time_error
        next_report = scenario.report_ms / scenario.num_workers if scenario.report_ms else float("inf")
        reporter = 0
        for number, request in enumerate(scenario.requests):
            now = request.arrival_ms / scenario.speed
            while next_report <= now:
                self._finish_until(next_report)
                self._report(reporter, next_report)
                reporter = (reporter + 1) % scenario.num_workers
                next_report += scenario.report_ms / scenario.num_workers
            self._finish_until(now)
            if len(self.results.ttft_ms) - self.results.num_ok > self.num_late_allowed:
                break
            which = number % len(self.routers)
            worker, predicted_hit, order = self.routers[which].place(request, number, now)
            factor = 1 + noise * (2 * self.noise.random() - 1) if noise else 1.0
            job = Job(request, number, which, worker, now, predicted_hit, order, work_ms=factor)
            place = self.workers[worker]
            if place.running is None:
                self._start(place, job, now)
            else:
                heapq.heappush(place.queue, (order, number, job))
        self._finish_until(float("inf"))
        return self.results

    def _start(self, worker: PrefillWorker, job: Job, now: float) -> None:
        job.hit = worker.hit_tokens(job.request.blocks)
        worker.touch(job.request.blocks)
        job.start_ms = now
        job.work_ms *= self.own_ms(job)
        worker.running = job
        worker.busy_ms += job.work_ms
        heapq.heappush(self.running, (now + job.work_ms, worker.number))

    def own_ms(self, job: Job) -> float:
        """Return how long a prompt takes at a worker that holds ``job.hit`` tokens of it."""
        return self.scenario.prefill_ms(job.request.num_tokens - job.hit, job.hit)

    def _finish_until(self, time: float) -> None:
        running = self.running
        while running and running[0][0] <= time:
            now, number = heapq.heappop(running)
            worker = self.workers[number]
            job = worker.running
            assert job is not None
            self._note(job, now)
            added, evicted = worker.store(job.request.blocks)
            if self.scenario.report_ms:
                news = self.unreported[number]
                news.update(dict.fromkeys(added, True))
                news.update(dict.fromkeys(evicted, False))
            else:
                for router in self.routers:
                    router.on_contents(number, added, evicted)
            self.routers[job.router].on_done(job, now)
            worker.running = None
            if worker.queue:
                self._start(worker, heapq.heappop(worker.queue)[2], now)

    def _report(self, number: int, now: float) -> None:
        news = self.unreported.pop(number, {})
        added = [block for block, is_cached in news.items() if is_cached]
        evicted = [block for block, is_cached in news.items() if not is_cached]
        for index, router in enumerate(self.routers):
            router.on_contents(number, added, evicted)
            router.on_report(index, self.workers[number], now)

    def _note(self, job: Job, now: float) -> None:
        results, request = self.results, job.request
        cold = self.scenario.prefill_ms(request.num_tokens, 0)
        ttft = now - job.arrival_ms
        results.ttft_ms.append(ttft)
        results.slowdown.append(ttft / cold)
        results.arrival_ms.append(job.arrival_ms)
        results.hit_tokens.append(job.hit)
        results.predicted_hit_tokens.append(job.predicted_hit)
        results.num_tokens.append(request.num_tokens)
        results.num_ok += ttft <= max(2000.0, 1.5 * cold)


def simulate(scenario: Scenario, routers: Sequence[Router]) -> Results:
    """Run all requests of a scenario through its routers, which take turns, and return what was measured."""
    return Run(scenario, routers).run()
