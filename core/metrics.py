"""Metrics of a worker, under vLLM's names with the prefix ``kvferry_``.

Owns names, units and labels. Gauges are functions that are called at each scrape, so that an idle worker does nothing;
``core.worker`` increments the counters. The registry is injected.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from core.errors import error_codes

PREFIX = "kvferry_"
_LATENCY_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TRANSFER_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """A gauge or a counter without labels that is read at scrape time. ``name`` is without prefix and suffix."""

    name: str
    kind: Literal["gauge", "counter"]
    documentation: str


def read_gauge(registry: CollectorRegistry, name: str, documentation: str, read: Callable[[], float]) -> None:
    """Register a gauge whose value is ``read()`` at the moment of a scrape."""
    Gauge(PREFIX + name, documentation, registry=registry).set_function(read)


def start_at_zero(counter: Counter, *label_values: tuple[str, ...]) -> None:
    """Create series before their first event: Prometheus sees no increase if a series begins at 1."""
    for values in label_values:
        counter.labels(*values)


def read_counter(registry: CollectorRegistry, name: str, documentation: str, read: Callable[[], float]) -> None:
    """Register a counter that is kept elsewhere, whose value is ``read()`` at the moment of a scrape."""
    registry.register(_ReadCounter(name, documentation, read))


def read_labelled_counter(
    registry: CollectorRegistry,
    name: str,
    documentation: str,
    labels: tuple[str, ...],
    read: Callable[[], Iterable[tuple[Sequence[str], float]]],
) -> None:
    """Register a counter that is kept elsewhere, whose label values and values are ``read()`` at the moment of a scrape."""
    registry.register(_ReadLabelledCounter(name, documentation, labels, read))


class EventHistogram(Collector):
    """A histogram without labels for what happens at every token: an observation costs a third of ``Histogram.observe``.

    One thread observes; another one may scrape. ``buckets`` are the upper bounds in ascending order, without infinity.
    """

    def __init__(self, registry: CollectorRegistry, name: str, documentation: str, buckets: Sequence[float]) -> None:
        self._name = PREFIX + name
        self._documentation = documentation
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        """Add one observation."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def describe(self) -> Iterable[HistogramMetricFamily]:
        """Return what names the samples: a reader of a few names (``RestrictedRegistry``) finds only described ones."""
        return self.collect()

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """Return the cumulative counts."""
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._documentation, buckets=buckets, sum_value=self._sum)


class _ReadLabelledCounter(Collector):
    """A counter with labels and a function for its values."""

    def __init__(
        self,
        name: str,
        documentation: str,
        labels: tuple[str, ...],
        read: Callable[[], Iterable[tuple[Sequence[str], float]]],
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = labels
        self._read = read

    def collect(self) -> Iterable[CounterMetricFamily]:
        family = CounterMetricFamily(PREFIX + self._name, self._documentation, labels=self._labels)
        for values, count in self._read():
            family.add_metric(values, count)
        yield family


class _ReadCounter(Collector):
    """A counter with a function for a value."""

    def __init__(self, name: str, documentation: str, read: Callable[[], float]) -> None:
        self._name = name
        self._documentation = documentation
        self._read = read

    def collect(self) -> Iterable[CounterMetricFamily]:
        yield CounterMetricFamily(PREFIX + self._name, self._documentation, value=self._read())


class WorkerMetrics:
    """Counters and gauges of one worker. ``readings`` has a function for each metric that is read at scrape time."""

    def __init__(self, registry: CollectorRegistry, readings: Mapping[Metric, Callable[[], float]]) -> None:
        for metric, read in readings.items():
            register = read_counter if metric.kind == "counter" else read_gauge
            register(registry, metric.name, metric.documentation, read)
        self._prompt_tokens = Counter(f"{PREFIX}prompt_tokens", "Prompt tokens of admitted choices.", registry=registry)
        self._cached_tokens = Counter(
            f"{PREFIX}prompt_tokens_cached", "Prompt tokens that were not computed here.", ["source"], registry=registry
        )
        self._generation_tokens = Counter(f"{PREFIX}generation_tokens", "Tokens put out.", registry=registry)
        self._finished = Counter(
            f"{PREFIX}request_success", "Choices that ended well, by reason.", ["finished_reason"], registry=registry
        )
        self._failed = Counter(
            f"{PREFIX}request_failure", "Requests that ended in an error, by its code.", ["code"], registry=registry
        )
        start_at_zero(self._failed, *((code,) for code in error_codes()))
        self._rejected = Counter(f"{PREFIX}rejected_frames", "Frames that could not be understood.", registry=registry)
        self._first_token_s = Histogram(
            f"{PREFIX}time_to_first_token_seconds",
            "From the arrival at this worker to the first token.",
            buckets=_LATENCY_BUCKETS_S,
            registry=registry,
        )
        self._exposed_s = Histogram(
            f"{PREFIX}kv_exposed_transfer_seconds",
            "From the arrival of a request with a handoff until all its KV was verified, or its load had failed.",
            buckets=_TRANSFER_BUCKETS_S,
            registry=registry,
        )
        self._latency_s = Histogram(
            f"{PREFIX}e2e_request_latency_seconds",
            "From the arrival at this worker to the last token of the last choice.",
            buckets=_LATENCY_BUCKETS_S,
            registry=registry,
        )

    def count_prompt(self, num_prompt_tokens: int, num_local_cached_tokens: int, num_external_cached_tokens: int) -> None:
        """Count the prompt of a choice at its first output."""
        self._prompt_tokens.inc(num_prompt_tokens)
        self._cached_tokens.labels("local").inc(num_local_cached_tokens)
        self._cached_tokens.labels("external").inc(num_external_cached_tokens)

    def count_generated(self, num_tokens: int) -> None:
        """Count generated tokens."""
        self._generation_tokens.inc(num_tokens)

    def count_finished(self, finish_reason: str) -> None:
        """Count a choice that ended by ``finish_reason``."""
        self._finished.labels(finish_reason).inc()

    def count_failed(self, code: str) -> None:
        """Count a request that ended in the error ``code``."""
        self._failed.labels(code).inc()

    def count_rejected(self) -> None:
        """Count a frame that was answered by ``Rejected``."""
        self._rejected.inc()

    def observe_first_token(self, seconds: float) -> None:
        """Record the time to the first token of a request."""
        self._first_token_s.observe(seconds)

    def observe_exposed_transfer(self, seconds: float) -> None:
        """Record how long a request whose prompt was computed elsewhere waited for its KV."""
        self._exposed_s.observe(seconds)

    def observe_latency(self, seconds: float) -> None:
        """Record the time that a successful request spent here."""
        self._latency_s.observe(seconds)
