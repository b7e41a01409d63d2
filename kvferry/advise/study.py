"""Compares the best aggregated cluster with the best one of prefill and decode workers, on parts of a trace.

Goodput is the largest rate at which a share of the requests is within the SLO, by bisection of the trace's speed. Each part of
the trace gives one figure of each side and their ratio; the interval is that of the parts (Student's t). A part begins with
empty caches.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.advise.cluster import Layout, Outcome, Slo, run
from kvferry.advise.costs import Costs
from kvferry.advise.trace import Trace, TraceRequest, spread_arrivals

CHUNKS = (128, 256, 512, 1024, 2048)  # of aggregated workers
MAX_WORKERS = 64
_NUM_PARTS = 5
_MOST_PER_PART = 800
_FEWEST_PER_PART = 40
_PRECISION = 1.02  # of goodput
_SPEEDS = (1 / 256, 256.0)  # of the trace: beyond these nothing is tried
_T_QUANTILE = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # 95 %, two-sided, by the number of parts


@dataclass(frozen=True, slots=True)
class ConfidenceInterval:
    """A mean, and half the width of its 95 % confidence interval; infinite with a single value."""

    mean: float
    half_width: float

    @classmethod
    def of(cls, values: Sequence[float]) -> ConfidenceInterval:
        """Return the interval of independent values."""
        if len(values) < 2:
            return cls(values[0], math.inf)
        return cls(statistics.mean(values), _T_QUANTILE[len(values)] * statistics.stdev(values) / math.sqrt(len(values)))

    @property
    def low(self) -> float:
        """The lower end."""
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        """The upper end."""
        return self.mean + self.half_width


@dataclass(frozen=True, slots=True)
class StudySide:
    """One way to run the workers: its best layout, its goodput in requests/s of each part, and its life at the trace's rate.

    ``num_needed`` workers serve the trace within the SLO; None = more than 64 of them would be needed.
    """

    layout: Layout
    goodputs: tuple[float, ...]
    at_rate: Outcome
    num_needed: int | None
    needed_layout: Layout | None

    @property
    def goodput(self) -> ConfidenceInterval:
        """The goodput in requests per second."""
        return ConfidenceInterval.of(self.goodputs)


@dataclass(frozen=True, slots=True)
class Study:
    """Both sides with the same number of workers."""

    num_workers: int
    aggregated: StudySide
    disaggregated: StudySide

    @property
    def ratio(self) -> ConfidenceInterval:
        """The goodput of prefill and decode workers as a multiple of that of aggregated ones."""
        pairs = zip(self.disaggregated.goodputs, self.aggregated.goodputs, strict=True)
        return ConfidenceInterval.of([one / other if other else float(bool(one)) * _SPEEDS[1] for one, other in pairs])


def parts_of(trace: Trace) -> list[list[TraceRequest]]:
    """Cut a trace into equal parts, fewer if it is short, and return the first requests of each, jittered."""
    total = len(trace.requests)
    num_parts = max(1, min(_NUM_PARTS, total // _FEWEST_PER_PART))
    size = total // num_parts
    spread = spread_arrivals(trace.requests, seed=1)
    parts = [spread[index * size : (index + 1) * size][:_MOST_PER_PART] for index in range(num_parts)]
    return [part for part in parts if part[-1].arrival_ms > part[0].arrival_ms] or [spread]


class Comparison:
    """Searches layouts for one trace, costs and SLO. ``share`` of the requests have to be good."""

    def __init__(self, trace: Trace, costs: Costs, slo: Slo, share: float) -> None:
        self._parts = parts_of(trace)
        self._costs = costs
        self._slo = slo
        self._share = share
        self._goodputs: dict[tuple[Layout, int], float] = {}
        self._suffices: dict[Layout, bool] = {}

    def study(self, num_workers: int = 0) -> Study:
        """Compare both sides with this many workers; 0 = as many as the thriftier side needs, 2 at least."""
        first = num_workers or 8
        split, chunk = self._best_split(max(2, first)), self._best_chunk(first)
        needed_split, needed_aggregated = self._fewest_of_split(split), self._fewest_aggregated(chunk)
        if not num_workers:
            needs = [layout.num_workers for layout in (needed_split, needed_aggregated) if layout is not None]
            num_workers = min(needs, default=first)
        total = max(2, num_workers)
        aggregated = Layout(num_aggregated=total, chunk=self._best_chunk(total))
        return Study(total, self._side(aggregated, needed_aggregated), self._side(self._best_split(total), needed_split))

    def goodput(self, layout: Layout, part: int) -> float:
        """Return the largest rate of one part, in requests/s, at which the share is good; 0 if there is none."""
        if (layout, part) not in self._goodputs:
            requests = self._parts[part]
            rate = (len(requests) - 1) / (requests[-1].arrival_ms - requests[0].arrival_ms) * 1e3
            self._goodputs[layout, part] = rate * self._largest_speed(lambda speed: self._holds(layout, part, speed))
        return self._goodputs[layout, part]

    def shares(self, layout: Layout, speeds: Sequence[float]) -> list[float]:
        """Return the mean share of good requests at multiples of the trace's rate."""
        return [
            statistics.mean(run(part, self._costs, layout, self._slo, speed).good_share for part in self._parts[:2])
            for speed in speeds
        ]

    def _side(self, layout: Layout, needed: Layout | None) -> StudySide:
        goodputs = tuple(self.goodput(layout, part) for part in range(len(self._parts)))
        at_rate = run(self._parts[0], self._costs, layout, self._slo)
        return StudySide(layout, goodputs, at_rate, needed.num_workers if needed else None, needed)

    def _holds(self, layout: Layout, part: int, speed: float) -> bool:
        return run(self._parts[part], self._costs, layout, self._slo, speed, self._share).good_share >= self._share

    @staticmethod
    def _largest_speed(holds: Callable[[float], bool]) -> float:
        low = high = 1.0
        if holds(1.0):
            while holds(high := low * 2):
                low = high
                if low >= _SPEEDS[1]:
                    return low
        else:
            while not holds(low := high / 2):
                high = low
                if high <= _SPEEDS[0]:
                    return 0.0
        while high / low > _PRECISION:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if holds(middle) else (low, middle)
        return low

    def _best_chunk(self, num_workers: int) -> int:
        return max(CHUNKS, key=lambda chunk: self.goodput(Layout(num_aggregated=num_workers, chunk=chunk), 0))

    def _best_split(self, num_workers: int) -> Layout:
        """Climb from a guess to the best number of prefill workers for the first part."""

        def goodput(num_prefill: int) -> float:
            return self.goodput(Layout(num_prefill, num_workers - num_prefill), 0)

        best = self._guessed_prefills(num_workers)
        while True:
            near = [number for number in (best - 1, best + 1) if 0 < number < num_workers]
            better = max(near, key=goodput, default=best)
            if goodput(better) <= goodput(best):
                return Layout(best, num_workers - best)
            best = better

    def _guessed_prefills(self, num_workers: int) -> int:
        requests = self._parts[0]
        prefill_ms = sum(self._costs.prefill_time.ms(one.num_tokens, 0) for one in requests)
        batch = 16  # a usual one
        kv_tokens = batch * sum(one.num_tokens for one in requests) / len(requests)
        decode_ms = sum(one.num_output_tokens for one in requests) * self._costs.step_ms(batch, kv_tokens) / batch
        return min(num_workers - 1, max(1, round(num_workers * prefill_ms / (prefill_ms + decode_ms))))

    def _fewest_aggregated(self, chunk: int) -> Layout | None:
        chunks = (chunk, *(other for other in CHUNKS if other != chunk))
        return self._fewest(lambda number: [Layout(num_aggregated=number, chunk=one) for one in chunks])

    def _fewest_of_split(self, split: Layout) -> Layout | None:
        share = split.num_prefill / split.num_workers
        return self._fewest(lambda number: _splits_near(number, round(number * share)))

    def _fewest(self, layouts: Callable[[int], Sequence[Layout]]) -> Layout | None:
        """Return the smallest layout that serves all parts at their rate, by doubling and bisection; None if none does."""

        def first_that_suffices(number: int) -> Layout | None:
            return next((layout for layout in layouts(number) if self._is_enough(layout)), None)

        low, high = 0, 1
        found = first_that_suffices(high)
        while found is None:
            if high >= MAX_WORKERS:
                return None
            low, high = high, high * 2
            found = first_that_suffices(high)
        while high - low > 1:
            middle = (low + high) // 2
            smaller = first_that_suffices(middle)
            if smaller is None:
                low = middle
            else:
                found, high = smaller, middle
        return found

    def _is_enough(self, layout: Layout) -> bool:
        """Return True if the share is good over all parts together."""
        if layout not in self._suffices:
            num_good = num_requests = 0
            for part in self._parts:
                num_good += run(part, self._costs, layout, self._slo, until_share=self._share / 2).num_good
                num_requests += len(part)
            self._suffices[layout] = num_good >= self._share * num_requests
        return self._suffices[layout]


def _splits_near(num_workers: int, num_prefill: int) -> list[Layout]:
    numbers = [number for number in (num_prefill, num_prefill + 1, num_prefill - 1) if 0 < number < num_workers]
    return [Layout(number, num_workers - number) for number in numbers]
