"""Runs requests through a modelled cluster: the router's cost function places them, and the answers are held against the SLO.

Times are ms.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.advise.costs import Costs
from kvferry.advise.trace import TraceRequest
from kvferry.advise.worker import Job, Worker
from router.routing.cost import score


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """When a request counts as good.

    Its first token comes within ``ttft_ms``, or within 1.5 times its own prefill on an idle worker if that is longer. It joins
    a decode batch at most ``tpot_ms`` later. There the mean time between its tokens is at most ``tpot_ms``, and at least
    99 % of them come within ``itl_ms``.
    """

    ttft_ms: float = 2000.0
    tpot_ms: float = 50.0
    itl_ms: float = math.inf

    def limit_ms(self, cold_ms: float) -> float:
        """Return the time to the first token that a request with this prefill time on an idle worker may take."""
        return max(self.ttft_ms, 1.5 * cold_ms)

    def holds(self, job: Job, cold_ms: float) -> bool:
        """Return True if a finished request was served within the limits."""
        num_gaps = job.request.num_output_tokens - 1
        is_steady = job.mean_gap_ms <= self.tpot_ms and job.num_slow <= num_gaps / 100
        limit_ms = job.arrival_ms + self.limit_ms(cold_ms)
        return is_steady and job.first_ms <= limit_ms and job.decode_ms <= limit_ms + self.tpot_ms


@dataclass(frozen=True, slots=True)
class Layout:
    """The workers of a cluster: some for prefill and some for decode, or aggregated ones with chunks of so many tokens."""

    num_prefill: int = 0
    num_decode: int = 0
    num_aggregated: int = 0
    chunk: int = 2048

    @property
    def num_workers(self) -> int:
        """All workers."""
        return self.num_prefill + self.num_decode + self.num_aggregated

    @property
    def name(self) -> str:
        """The layout in words, such as ``3P + 5D``."""
        if self.num_aggregated:
            return f"{self.num_aggregated} aggregated, chunks of {self.chunk}"
        return f"{self.num_prefill}P + {self.num_decode}D"


@dataclass(slots=True)
class Outcome:
    """What became of the requests. ``gaps`` are the times between tokens with their number, without those of handoffs."""

    jobs: list[Job]
    num_good: int
    gaps: list[tuple[float, int]] = field(default_factory=list)

    @property
    def good_share(self) -> float:
        """Share of the requests within the SLO."""
        return self.num_good / len(self.jobs)

    @property
    def mean_ttft_ms(self) -> float:
        """Mean time to the first token."""
        return sum(job.first_ms - job.arrival_ms for job in self.jobs) / len(self.jobs)

    def ttft_ms(self, share: float) -> float:
        """Return a quantile of the time to the first token."""
        times = sorted(job.first_ms - job.arrival_ms for job in self.jobs)
        return times[min(len(times) - 1, int(share * len(times)))]

    def itl_ms(self, share: float) -> float:
        """Return a quantile of the time between two tokens; 0 if all answers have one token."""
        left = share * sum(number for _, number in self.gaps)
        for gap_ms, number in sorted(self.gaps):
            left -= number
            if left < 0:
                return gap_ms
        return max((gap_ms for gap_ms, _ in self.gaps), default=0.0)


class Cluster:
    """The workers of one run."""

    def __init__(self, costs: Costs, layout: Layout, slo: Slo) -> None:
        self._costs = costs
        whole = costs.kv_tokens  # a prefill worker computes a prompt in one step
        starters = [whole] * layout.num_prefill + [layout.chunk] * layout.num_aggregated
        self.starters = [Worker(costs, chunk, slo.itl_ms) for chunk in starters]
        self.decoders = [Worker(costs, layout.chunk, slo.itl_ms) for _ in range(layout.num_decode)]
        self._promised = [0] * layout.num_decode  # KV tokens of requests placed and not ended
        self._open: list[list[Job]] = [[] for _ in self.decoders]

    def advance(self, until: float) -> None:
        """Run all workers until this time; prefill workers first, since they feed the decode workers."""
        for worker in (*self.starters, *self.decoders):
            worker.advance(until)

    def place(self, job: Job) -> None:
        """Choose the workers of a request that arrives now."""
        request = job.request
        if self.decoders:
            job.decode = self._least_promised(job)
        best, least, best_ms = self.starters[0], math.inf, 0.0
        for worker in self.starters:
            hit = worker.promised_tokens(request.blocks)
            own_ms = worker.prompt_ms(request.num_tokens - hit, hit)
            cost = score(worker.wait_ms(job.arrival_ms), own_ms, 0)
            if cost < least:
                best, least, best_ms = worker, cost, own_ms
        best.submit(job, best_ms)

    def gaps(self) -> list[tuple[float, int]]:
        """Return all times between tokens with their numbers."""
        return [gap for worker in (*self.starters, *self.decoders) for gap in worker.gaps]

    def _least_promised(self, job: Job) -> Worker:
        for index, open_jobs in enumerate(self._open):
            still = [other for other in open_jobs if other.end_ms > job.arrival_ms]
            self._promised[index] -= sum(other.num_total for other in open_jobs if other.end_ms <= job.arrival_ms)
            self._open[index] = still
        chosen = min(range(len(self.decoders)), key=lambda index: self._promised[index])
        self._promised[chosen] += job.num_total
        self._open[chosen].append(job)
        return self.decoders[chosen]


def run(
    requests: Sequence[TraceRequest], costs: Costs, layout: Layout, slo: Slo, speed: float = 1.0, until_share: float = 0.0
) -> Outcome:
    """Serve the requests at a multiple of their rate and return what became of them.

    With ``until_share`` the run stops once so many are late that no larger share can be good; the others count as late then.
    """
    cluster = Cluster(costs, layout, slo)
    begin = requests[0].arrival_ms
    jobs = [Job(request, (request.arrival_ms - begin) / speed) for request in requests]
    num_late_allowed = int((1 - until_share) * len(jobs))
    num_late, undecided = 0, deque[tuple[float, Job]]()
    for job in jobs:
        now = job.arrival_ms
        cluster.advance(now)
        while undecided and undecided[0][0] < now:
            num_late += undecided.popleft()[1].first_ms > now
        if num_late > num_late_allowed:
            return Outcome(jobs, 0)
        cluster.place(job)
        limit_ms = slo.limit_ms(costs.prefill_time.ms(job.request.num_tokens, 0))
        last_ms = max(now + limit_ms, undecided[-1][0] if undecided else 0.0)  # in order; later than the limit is late too
        undecided.append((last_ms, job))
    cluster.advance(math.inf)
    num_good = sum(slo.holds(job, costs.prefill_time.ms(job.request.num_tokens, 0)) for job in jobs)
    return Outcome(jobs, num_good, cluster.gaps())
