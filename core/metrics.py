"""What a worker counts, under vLLM's metric names with the prefix ``kvferry_``.

Owns names, units and labels. Knows nothing about who counts: gauges are read by callables when ``/metrics`` is asked, so that
an idle worker does nothing; counters are moved by ``core.worker.state``. The registry is injected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from core.errors import error_codes

PREFIX = "kvferry_"
_LATENCY_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

# name → documentation; read at scrape time. What connectors hold is counted by them, see ``connectors``.
WORKER_GAUGES: Mapping[str, str] = {
    "num_requests_running": "Requests in the running batch.",
    "num_requests_waiting": "Requests that wait for admission.",
    "num_requests_loading": "Requests whose KV cache is being loaded (WAITING_FOR_REMOTE_KVS).",
    "kv_cache_usage_perc": "Share of KV blocks in use, 0 to 1; cached blocks that may be evicted do not count.",
    "encoder_cache_usage_perc": "Share of the encoder cache that requests refer to, 0 to 1.",
    "encoder_prepared_bytes": "Pixels of images that are decoded and wait to be embedded.",
    "kv_parked_blocks": "Blocks of ended requests whose release is delayed, for a reader or by a transfer.",
    "kv_quarantined_blocks": "Blocks that nobody has, since a transfer that was given up may still write them.",
    "kv_leaked_blocks": "Blocks in use although no request, reader or transfer is left; anything but 0 is a bug.",
    "engine_stalled_seconds": "Time since the engine's last progress while it has work; 0 without work.",
    "draining": "1 while the worker takes no new requests.",
    "registered_routers": "Routers that have this worker in their membership.",
}

# name → documentation; kept by the engine, read at scrape time
WORKER_COUNTERS: Mapping[str, str] = {
    "engine_steps": "Steps of the engine.",
    "num_preemptions": "Running requests that were put back for lack of blocks.",
    "prefix_cache_queries": "Tokens that were looked up in the prefix cache.",
    "prefix_cache_hits": "Tokens that were found there.",
    "external_prefix_cache_queries": "Tokens that the connector was asked for, beyond what the prefix cache had.",
    "external_prefix_cache_hits": "Tokens that it offered to load.",
    "encoder_inputs_computed": "Images whose embeddings were computed for requests of this worker.",
    "encoder_inputs_loaded": "Images whose embeddings came by the EC connector.",
    "encoder_inputs_cached": "Images whose embeddings were in the encoder cache.",
    "encoder_deferrals": "Times that a request was passed over in a step, as embeddings or pixels were not there yet.",
    "ignored_transfer_reports": "A connector's reports about transfers or blocks that nobody waits for: late, or told twice.",
}


def read_gauge(registry: CollectorRegistry, name: str, documentation: str, read: Callable[[], float]) -> None:
    """Register a gauge whose value is ``read()`` at the moment of a scrape."""
    Gauge(PREFIX + name, documentation, registry=registry).set_function(read)


def start_at_zero(counter: Counter, *label_values: tuple[str, ...]) -> None:
    """Make series exist before their first event: Prometheus sees no increase where a series begins at 1."""
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
    """Counters of one worker, and its gauges.

    ``readings`` maps names of ``WORKER_GAUGES`` and ``WORKER_COUNTERS`` to what reads them; an unknown name is our own bug.
    """

    def __init__(self, registry: CollectorRegistry, readings: Mapping[str, Callable[[], float]]) -> None:
        for name, read in readings.items():
            if name in WORKER_COUNTERS:
                read_counter(registry, name, WORKER_COUNTERS[name], read)
            else:
                read_gauge(registry, name, WORKER_GAUGES[name], read)
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
        """Count tokens put out."""
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

    def observe_latency(self, seconds: float) -> None:
        """Record the time a request spent here, when it has ended well."""
        self._latency_s.observe(seconds)
