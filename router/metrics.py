"""The router's metrics, under vLLM's names with the prefix ``kvferry_``.

Owns names, units and labels. Gauges are read when ``/metrics`` is scraped. Latencies are those that clients see, and include
queueing, both legs and the handoff.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from core.errors import FALLBACK_REASONS, error_codes
from core.metrics import EventHistogram, start_at_zero
from router.dispatch.request_state import LOCAL_PREFILL, NO_PREFILL
from router.dispatch.timing import FirstTokenTiming, SecondTokenTiming

PREFIX = "kvferry_"
# Errors and cancellations by clients; the service has not failed.
CLIENT_ERRORS = frozenset(
    {
        "invalid_request",
        "context_length_exceeded",
        "invalid_api_key",
        "model_not_found",
        "not_found",
        "method_not_allowed",
        "body_too_large",
        "unsupported_encoding",
        "cancelled",
    }
)
CACHED, COMPUTED = "cache", "computed"  # where prompt tokens came from
PASSED_ON = "passed_on"  # in the place of a reason to finish
BY_LOAD = "by_load"  # the reason of a placement that no prediction was made for
PLACEMENT_REASONS = ("prefix", "source", "wait", "load", "session", "availability", "local", BY_LOAD)

_LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
INFERENCE_PATHS = ("/v1/chat/completions", "/v1/completions")
_TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0)


class _LabelledGauge(Collector):
    """A gauge with one label, whose samples are read at every scrape."""

    def __init__(self, name: str, documentation: str, label: str, reads: Mapping[str, Callable[[], float | None]]) -> None:
        self._name = name
        self._documentation = documentation
        self._label = label
        self._reads = reads

    def describe(self) -> list[GaugeMetricFamily]:
        """Return the gauge without samples."""
        return [GaugeMetricFamily(self._name, self._documentation, labels=[self._label])]

    def collect(self) -> list[GaugeMetricFamily]:
        """Return the gauge with a sample for each value of the label that has one now."""
        (family,) = self.describe()
        for value, read in self._reads.items():
            number = read()
            if number is not None:
                family.add_metric([value], number)
        return [family]


class RouterMetrics:
    """Counters, histograms and gauges of one router."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._first_token_s = self._histogram("time_to_first_token_seconds", "From submission to the first token.")
        self.inter_token_s = EventHistogram(
            registry, "inter_token_latency_seconds", "Between two arrivals of tokens of one request.", _TOKEN_BUCKETS_S
        )
        self._latency_s = self._histogram("e2e_request_latency_seconds", "From submission to the last token.")
        self._queue_s = self._histogram("request_queue_time_seconds", "Wait on the prefill worker, as it reports.")
        self._prefill_s = self._histogram("request_prefill_time_seconds", "Computation of the prompt, as reported.")
        self._transfer_s = self._histogram("kv_transfer_time_seconds", "Transfer of a prompt's KV cache, as reported.")
        self._first_token_part_s = self._histogram(
            "time_to_first_token_part_seconds", "Where the time to a prefill worker's token went.", label="part"
        )
        self._second_token_s = self._histogram("time_to_second_token_seconds", "From the first token to the second.")
        self._second_token_part_s = self._histogram(
            "time_to_second_token_part_seconds", "Where the time to a decode worker's first token went.", label="part"
        )
        self._add_request_counters(registry)
        self._add_connection_counters(registry)
        self._start_at_zero()

    def _add_request_counters(self, registry: CollectorRegistry) -> None:
        self._handoffs = Counter(
            f"{PREFIX}kv_handoffs", "Handoffs by what became of them: loaded, or why not.", ["outcome"], registry=registry
        )
        self._retries = Counter(
            f"{PREFIX}request_retries",
            "Failures of workers after which a request went on.",
            ["kind", "code"],
            registry=registry,
        )
        self._moves = Counter(
            f"{PREFIX}prompts_moved",
            "Prompts that left the queue of a worker for another one that was nearly idle.",
            registry=registry,
        )
        self._retried = Counter(
            f"{PREFIX}requests_retried",
            "Ended requests that were retried, by how they ended.",
            ["kind", "outcome"],
            registry=registry,
        )
        self._encodes = Counter(
            f"{PREFIX}image_encodes",
            "Images given to encode workers by what became of it: done, cached there, or why not.",
            ["outcome"],
            registry=registry,
        )
        self._placements = Counter(
            f"{PREFIX}routing_placements",
            "Placements of prompts by the reason for the worker; see docs/routing.md.",
            ["reason"],
            registry=registry,
        )
        self._answered_prompt_tokens = Counter(
            f"{PREFIX}answered_prompt_tokens",
            "Tokens of prompts that a worker has answered, by their source: its prefix cache, or computed.",
            ["source"],
            registry=registry,
        )
        self._predicted_s = Counter(
            f"{PREFIX}routing_ttft_seconds", "Times to first tokens that were predicted, as they came.", registry=registry
        )
        self._prediction_error_s = Counter(
            f"{PREFIX}routing_ttft_error_seconds", "By how much they were shorter or longer than predicted.", registry=registry
        )
        self._prompt_tokens = Counter(f"{PREFIX}prompt_tokens", "Prompt tokens of ended requests.", registry=registry)
        self._generation_tokens = Counter(
            f"{PREFIX}generation_tokens", "Generated tokens of ended requests.", registry=registry
        )
        self._success = Counter(
            f"{PREFIX}request_success", "Choices that ended well, by reason.", ["finished_reason"], registry=registry
        )
        self._failure = Counter(
            f"{PREFIX}request_failure", "Requests that ended in an error, by its code.", ["code"], registry=registry
        )

    def _add_connection_counters(self, registry: CollectorRegistry) -> None:
        self._http = Counter(f"{PREFIX}http_requests", "HTTP responses.", ["path", "status"], registry=registry)
        self._cut = Counter(
            f"{PREFIX}http_connections_cut", "Connections ended by a limit, by its kind.", ["reason"], registry=registry
        )
        self._ignored = Counter(
            f"{PREFIX}ignored_fields",
            "Unknown fields of messages that were ignored and may have had a meaning.",
            registry=registry,
        )
        self._malformed = Counter(f"{PREFIX}rejected_frames", "Worker frames that could not be understood.", registry=registry)
        self._refused_handshakes = Counter(
            f"{PREFIX}refused_handshakes", "Connections to the workers' port without the cluster key.", registry=registry
        )
        self._count_workers()

    def _count_workers(self) -> None:
        """Make the counters of what happens to workers."""
        registry = self.registry
        self._lost = Counter(f"{PREFIX}workers_lost", "Workers that left without a goodbye.", ["role"], registry=registry)
        self._stalls = Counter(
            f"{PREFIX}worker_stalls", "Times that a worker's engine made no progress.", ["role"], registry=registry
        )
        self._switches = Counter(
            f"{PREFIX}role_switches", "Workers that took another role, by the new one.", ["role"], registry=registry
        )

    def _start_at_zero(self) -> None:
        for counter in (self._lost, self._stalls):
            start_at_zero(counter, *((role,) for role in ("prefill", "decode", "aggregated", "encode")))
        start_at_zero(self._switches, *((role,) for role in ("prefill", "decode", "aggregated")))
        start_at_zero(self._handoffs, *((outcome,) for outcome in ("loaded", LOCAL_PREFILL, NO_PREFILL, *FALLBACK_REASONS)))
        start_at_zero(self._placements, *((reason,) for reason in PLACEMENT_REASONS))
        start_at_zero(self._answered_prompt_tokens, (CACHED,), (COMPUTED,))
        start_at_zero(self._failure, *((code,) for code in error_codes()))
        start_at_zero(self._http, *((path, "429") for path in INFERENCE_PATHS))

    def watch(self, name: str, documentation: str, read: Callable[[], float], **labels: str) -> None:
        """Add a gauge that is read at scrape time."""
        gauge = Gauge(PREFIX + name, documentation, list(labels), registry=self.registry)
        (gauge.labels(**labels) if labels else gauge).set_function(read)

    def watch_each(self, name: str, documentation: str, label: str, reads: Mapping[str, Callable[[], float | None]]) -> None:
        """Add a gauge with one label, one callable per value of it; there is no sample while a callable returns None."""
        self.registry.register(_LabelledGauge(PREFIX + name, documentation, label, reads))

    def observe_first_token(self, seconds: float) -> None:
        """Record the time to the first token of a request, seconds."""
        self._first_token_s.observe(seconds)

    def observe_first_token_parts(self, timing: FirstTokenTiming) -> None:
        """Record the parts of the time to the first token."""
        self._queue_s.observe(timing.queue_ms / 1e3)
        self._prefill_s.observe(timing.prefill_ms / 1e3)
        _observe_parts(self._first_token_part_s, timing)

    def observe_handoff(self, timing: SecondTokenTiming | None, outcome: str) -> None:
        """Record a handoff: the parts of the time to the second token, and the outcome of the transfer.

        ``timing`` is None if there was no handoff because a decode worker served alone.
        """
        self._handoffs.labels(outcome).inc()
        if timing is None:
            return
        self._transfer_s.observe(timing.transfer_ms / 1e3)
        self._second_token_s.observe(timing.total_ms / 1e3)
        _observe_parts(self._second_token_part_s, timing)

    def count_placement(self, reason: str) -> None:
        """Count a placement of a prompt at the workers that begin it."""
        self._placements.labels(reason).inc()

    def observe_prediction(self, predicted_ms: float, real_ms: float) -> None:
        """Record the predicted and the real time to the first token of a placement."""
        self._predicted_s.inc(real_ms / 1e3)
        self._prediction_error_s.inc(abs(real_ms - predicted_ms) / 1e3)

    def count_hit(self, num_tokens: int, num_cached: int) -> None:
        """Count the tokens of a prompt that a worker has answered; it found ``num_cached`` of them in its cache."""
        self._answered_prompt_tokens.labels(CACHED).inc(num_cached)
        self._answered_prompt_tokens.labels(COMPUTED).inc(max(0, num_tokens - num_cached))

    def count_encodes(self, outcome: str, num_images: int, num_cached: int) -> None:
        """Count the images of one encode leg; ``num_cached`` of them were embedded before."""
        self._encodes.labels("cached").inc(num_cached)
        self._encodes.labels(outcome).inc(num_images - num_cached)

    def count_retry(self, kind: str, code: str) -> None:
        """Count a failure of a worker after which the request continued."""
        self._retries.labels(kind, code).inc()

    def count_move(self) -> None:
        """Count a prompt that left the queue of a worker for another one."""
        self._moves.inc()

    def count_retried(self, kind: str, outcome: str) -> None:
        """Count an ended request that was retried; ``outcome`` is "served" or an error code."""
        self._retried.labels(kind, outcome).inc()

    def observe_success(self, seconds: float, finish_reasons: list[str]) -> None:
        """Record a successful request."""
        self._latency_s.observe(seconds)
        for reason in finish_reasons:
            self._success.labels(reason).inc()

    def count_passed_on(self) -> None:
        """Count an answer of an engine that was passed on to its end; the router does not read why its choices ended."""
        self._success.labels(PASSED_ON).inc()

    def count_tokens(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Count the tokens of an ended request, successful or not."""
        self._prompt_tokens.inc(num_prompt_tokens)
        self._generation_tokens.inc(num_output_tokens)

    def count_failed(self, code: str) -> None:
        """Count a request that ended in the error ``code``."""
        self._failure.labels(code).inc()

    def count_http(self, path: str, status: int) -> None:
        """Count a response; ``path`` is the route's template."""
        self._http.labels(path, str(status)).inc()

    def count_cut(self, reason: str) -> None:
        """Count a client's connection that a limit ended."""
        self._cut.labels(reason).inc()

    def count_ignored_fields(self, num_fields: int) -> None:
        """Count unknown fields inside messages of a request."""
        self._ignored.inc(num_fields)

    def count_malformed(self) -> None:
        """Count a malformed frame."""
        self._malformed.inc()

    def count_refused_handshake(self) -> None:
        """Count a failed handshake."""
        self._refused_handshakes.inc()

    def count_lost(self, role: str) -> None:
        """Count a worker that left without a goodbye."""
        self._lost.labels(role).inc()

    def count_stalled(self, role: str) -> None:
        """Count a stall of a worker's engine."""
        self._stalls.labels(role).inc()

    def count_switched(self, role: str) -> None:
        """Count a worker that has taken this role."""
        self._switches.labels(role).inc()

    def _histogram(self, name: str, documentation: str, label: str = "") -> Histogram:
        labels = [label] if label else []
        return Histogram(PREFIX + name, documentation, labels, buckets=_LATENCY_BUCKETS_S, registry=self.registry)


def _observe_parts(histogram: Histogram, timing: FirstTokenTiming | SecondTokenTiming) -> None:
    for name, milliseconds in msgspec.structs.asdict(timing).items():
        if name != "total_ms" and milliseconds is not None:
            histogram.labels(name.removesuffix("_ms")).observe(milliseconds / 1e3)
