"""The last ten minutes of a router, in intervals of five seconds.

Owns the ring of intervals. Nothing is recorded per token: at the end of an interval the history takes the counters of
``router.metrics`` and keeps the differences to the interval before; percentiles of the time between tokens come from the
buckets of that histogram. Memory is bounded by the number of intervals and of labels.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import msgspec
from prometheus_client import CollectorRegistry

from router.metrics import CACHED, CLIENT_ERRORS
from router.records.readings import Readings
from router.records.sketch import Sketch, percentile

K = TypeVar("K", str, float)

INTERVAL_S = 5.0
NUM_INTERVALS = 120
OTHER = "other"
_MAX_LABELS = 16  # of handoffs and of placements in one interval; rarer ones are counted as ``OTHER``
_INTER_TOKEN = "inter_token_latency_seconds"
_NAMES = (
    f"{_INTER_TOKEN}_bucket",
    "kv_handoffs_total",
    "routing_placements_total",
    "answered_prompt_tokens_total",
    "request_failure_total",
    "request_success_total",
)


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """The KV use of the workers of one role, shares of 1: the mean, and that of the fullest worker."""

    mean: float
    highest: float


@dataclass(frozen=True, slots=True)
class Gauges:
    """What a router reads now: output tokens since its start, running requests included, and the KV use by role."""

    num_output_tokens: int
    num_requests: int
    kv_usage: Mapping[str, PoolLoad]


@dataclass(frozen=True, slots=True)
class _Totals:
    """Counters since the start of the router."""

    inter_token: Mapping[float, int]
    handoffs: Mapping[str, int]
    placements: Mapping[str, int]
    prompt_tokens: Mapping[str, int]
    errors: Mapping[str, int]
    num_answers: int
    num_output_tokens: int

    @classmethod
    def read(cls, registry: CollectorRegistry, num_output_tokens: int) -> _Totals:
        found = Readings(registry, _NAMES)
        return cls(
            inter_token=found.buckets(_INTER_TOKEN),
            handoffs=found.events("kv_handoffs_total", "outcome"),
            placements=found.events("routing_placements_total", "reason"),
            prompt_tokens=found.events("answered_prompt_tokens_total", "source"),
            errors=found.events("request_failure_total", "code"),
            num_answers=found.total("request_success_total"),
            num_output_tokens=num_output_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """One interval that ended at ``end``, in seconds of the router's clock. Times are in ms; None without a measurement."""

    end: float
    seconds: float
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    itl_p50_ms: float | None
    itl_p99_ms: float | None
    num_output_tokens: int
    num_prompt_tokens: int  # of prompts that a worker has answered
    num_cached_tokens: int  # of them, found in a cache
    num_answers: int
    num_failures: int  # without errors of clients
    num_refusals: int  # errors of clients, and requests that they gave up
    num_requests: int  # in flight at the end
    handoffs: Mapping[str, int]  # by outcome
    placements: Mapping[str, int]  # by reason
    kv_usage: Mapping[str, PoolLoad]  # by role, at the end


class HistoryReport(msgspec.Struct, kw_only=True):
    """The history by column, the oldest interval first; None where nothing was measured."""

    interval_s: float
    num_intervals: int  # that a full history has
    ages_s: list[float]  # since the end of each interval
    ttft_p50_ms: list[float | None]
    ttft_p99_ms: list[float | None]
    itl_p50_ms: list[float | None]
    itl_p99_ms: list[float | None]
    output_tokens_per_s: list[float]
    prompt_tokens_per_s: list[float]
    hit_rate: list[float | None]  # share of the prompt tokens that were found in a cache
    answers_per_s: list[float]
    failures_per_s: list[float]
    refusals_per_s: list[float]
    num_requests: list[int]
    handoffs_per_s: dict[str, list[float]]
    kv_usage_mean: dict[str, list[float | None]]
    kv_usage_highest: dict[str, list[float | None]]
    placements: dict[str, int]  # of all intervals, by reason
    num_prompt_tokens: int
    num_cached_tokens: int
    num_failures: int
    num_refusals: int


@dataclass(slots=True)
class History:
    """The intervals of one router."""

    registry: CollectorRegistry
    read_gauges: Callable[[], Gauges]
    _first_tokens_s: Sketch = field(default_factory=Sketch)  # of the interval that has begun
    _intervals: deque[Interval] = field(default_factory=lambda: deque(maxlen=NUM_INTERVALS))
    _totals: _Totals | None = None
    _began: float = 0.0

    def on_first_token(self, seconds: float) -> None:
        """Record the time to the first token of a request, seconds."""
        self._first_tokens_s.add(seconds)

    def tick(self, now: float) -> bool:
        """End the interval if it is over, at router time ``now`` in seconds; return True if it was.

        An interval in which the router was paused is longer. The first call only begins one.
        """
        if self._totals is not None and now - self._began < INTERVAL_S:
            return False
        gauges = self.read_gauges()
        totals, last = _Totals.read(self.registry, gauges.num_output_tokens), self._totals
        if last is not None:
            self._intervals.append(_interval(last, totals, gauges, self._first_tokens_s, (self._began, now)))
            self._first_tokens_s = Sketch()
        self._totals, self._began = totals, now
        return last is not None

    def report(self, now: float) -> HistoryReport:
        """Return all intervals of the last ten minutes."""
        found = [each for each in self._intervals if now - each.end < INTERVAL_S * NUM_INTERVALS]
        roles = sorted({role for each in found for role in each.kv_usage})
        prompt, cached = sum(each.num_prompt_tokens for each in found), sum(each.num_cached_tokens for each in found)
        return HistoryReport(
            interval_s=INTERVAL_S,
            num_intervals=NUM_INTERVALS,
            ages_s=[round(now - each.end, 1) for each in found],
            ttft_p50_ms=[each.ttft_p50_ms for each in found],
            ttft_p99_ms=[each.ttft_p99_ms for each in found],
            itl_p50_ms=[each.itl_p50_ms for each in found],
            itl_p99_ms=[each.itl_p99_ms for each in found],
            output_tokens_per_s=[_rate(each.num_output_tokens, each) for each in found],
            prompt_tokens_per_s=[_rate(each.num_prompt_tokens, each) for each in found],
            hit_rate=[
                round(each.num_cached_tokens / each.num_prompt_tokens, 4) if each.num_prompt_tokens else None for each in found
            ],
            answers_per_s=[_rate(each.num_answers, each) for each in found],
            failures_per_s=[_rate(each.num_failures, each) for each in found],
            refusals_per_s=[_rate(each.num_refusals, each) for each in found],
            num_requests=[each.num_requests for each in found],
            handoffs_per_s={
                outcome: [_rate(each.handoffs.get(outcome, 0), each) for each in found]
                for outcome in sorted(_sum(each.handoffs for each in found))
            },
            kv_usage_mean={role: [_share(each, role, "mean") for each in found] for role in roles},
            kv_usage_highest={role: [_share(each, role, "highest") for each in found] for role in roles},
            placements=_sum(each.placements for each in found),
            num_prompt_tokens=prompt,
            num_cached_tokens=cached,
            num_failures=sum(each.num_failures for each in found),
            num_refusals=sum(each.num_refusals for each in found),
        )


def _interval(last: _Totals, totals: _Totals, gauges: Gauges, first_tokens_s: Sketch, period: tuple[float, float]) -> Interval:
    began, now = period
    inter_token = _difference(totals.inter_token, last.inter_token)
    prompt = _difference(totals.prompt_tokens, last.prompt_tokens)
    errors = _difference(totals.errors, last.errors)
    num_refusals = sum(count for code, count in errors.items() if code in CLIENT_ERRORS)
    return Interval(
        end=now,
        seconds=now - began,
        ttft_p50_ms=_milliseconds(first_tokens_s.percentile(0.5)),
        ttft_p99_ms=_milliseconds(first_tokens_s.percentile(0.99)),
        itl_p50_ms=_milliseconds(percentile(inter_token, 0.5)),
        itl_p99_ms=_milliseconds(percentile(inter_token, 0.99)),
        num_output_tokens=max(0, totals.num_output_tokens - last.num_output_tokens),
        num_prompt_tokens=sum(prompt.values()),
        num_cached_tokens=prompt.get(CACHED, 0),
        num_answers=totals.num_answers - last.num_answers,
        num_failures=sum(errors.values()) - num_refusals,
        num_refusals=num_refusals,
        num_requests=gauges.num_requests,
        handoffs=_most_frequent(_difference(totals.handoffs, last.handoffs)),
        placements=_most_frequent(_difference(totals.placements, last.placements)),
        kv_usage=gauges.kv_usage,
    )


def _difference(now: Mapping[K, int], before: Mapping[K, int]) -> dict[K, int]:
    return {key: count - before.get(key, 0) for key, count in now.items()}


def _most_frequent(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the counts that are not 0, with the rarest of too many added up."""
    found = sorted(((count, name) for name, count in counts.items() if count), reverse=True)
    kept = {name: count for count, name in found[:_MAX_LABELS]}
    if rest := sum(count for count, _ in found[_MAX_LABELS:]):
        kept[OTHER] = kept.get(OTHER, 0) + rest
    return kept


def _sum(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(total)


def _rate(count: int, interval: Interval) -> float:
    return round(count / interval.seconds, 3)


def _share(interval: Interval, role: str, name: Literal["mean", "highest"]) -> float | None:
    load = interval.kv_usage.get(role)
    return None if load is None else round(load.mean if name == "mean" else load.highest, 4)


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
