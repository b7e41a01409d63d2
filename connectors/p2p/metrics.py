"""Metrics of the p2p connector, on the registry of its worker. Units are in the names, labels are bounded."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from connectors.p2p.prefixes.messages import PREFIX_REFUSALS, PrefixRefusal
from connectors.reports import LoadEnded
from core.errors import FALLBACK_REASONS, fallback_reason
from core.metrics import PREFIX, read_gauge, start_at_zero
from core.wire.messages import TransferUsage

_SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class P2PMetrics:
    """Counters of loads. Gauges and the counts of the state machines are read at scrape time.

    ``kind`` says what is transferred, and starts all names.
    """

    def __init__(self, registry: CollectorRegistry, kind: str = "kv") -> None:
        self.kind = kind
        self._registry = registry
        prefix = PREFIX + kind
        self._transport = Gauge(
            f"{prefix}_transport_info",
            "1 if a peer is read by this transport, or once a reader has chosen it.",
            ["transport"],
            registry=registry,
        )
        self._transfers = Counter(f"{prefix}_transfers", "Loads that succeeded.", ["transport"], registry=registry)
        self._bytes = Counter(f"{prefix}_transfer_bytes", "Bytes of loads that succeeded.", ["transport"], registry=registry)
        self._seconds = Histogram(
            f"{prefix}_transfer_seconds",
            "From the request of a load to its last byte.",
            ["transport"],
            buckets=_SECONDS_BUCKETS,
            registry=registry,
        )
        self._verify_seconds = Histogram(
            f"{prefix}_verify_seconds",
            "From the last byte of a load to its verdict: seals, digests, and what had to be read again.",
            ["transport"],
            buckets=_SECONDS_BUCKETS,
            registry=registry,
        )
        self._verified = Counter(
            f"{prefix}_verified_blocks", "Blocks whose seals, and digests if demanded, were right.", registry=registry
        )
        self._failures = Counter(
            f"{prefix}_transfer_failures",
            "Loads of which nothing, or not everything, could be used, by reason.",
            ["reason"],
            registry=registry,
        )
        start_at_zero(self._failures, *((reason,) for reason in FALLBACK_REASONS))

    def start_transports(self, transports: Sequence[str], in_use: Callable[[], Container[str]]) -> None:
        """Publish which of the transports that are usable here are in use (1) or not (0)."""

        def reading(name: str) -> Callable[[], float]:
            return lambda: name in in_use()

        for name in transports:
            self._transport.labels(name).set_function(reading(name))
            start_at_zero(self._transfers, (name,))

    def count_load(self, ended: LoadEnded) -> None:
        """Count a finished load; an aborted one is neither a success nor a failure."""
        if ended.usage is not None:
            self._verified.inc(ended.usage.verified_blocks)
        if ended.error is not None:
            self._failures.labels(fallback_reason(ended.error.code)).inc()
        elif ended.usage is not None:
            self._count_success(ended.usage)

    def _count_success(self, usage: TransferUsage) -> None:
        self._transfers.labels(usage.transport).inc()
        self._bytes.labels(usage.transport).inc(usage.transferred_bytes)
        self._seconds.labels(usage.transport).observe(usage.transfer_ms / 1000)
        self._verify_seconds.labels(usage.transport).observe(usage.verify_ms / 1000)

    def start_prefixes(self, num_pinned_blocks: Callable[[], float]) -> None:
        """Publish the metrics of pulls of prefixes."""
        prefix = f"{PREFIX}{self.kind}_prefix"
        self._prefix_pulls = Counter(
            f"{prefix}_pulls",
            "Questions for beginnings of prompts at other workers, by outcome: loaded, failed, or why nothing was loaded.",
            ["outcome"],
            registry=self._registry,
        )
        start_at_zero(self._prefix_pulls, ("loaded",), ("failed",), *((refusal,) for refusal in PREFIX_REFUSALS))
        self._prefix_tokens = Counter(
            f"{prefix}_pulled_tokens", "Tokens loaded from other workers instead of computed.", registry=self._registry
        )
        self._prefix_bytes = Counter(f"{prefix}_pulled_bytes", "Bytes of these tokens.", registry=self._registry)
        description = "Blocks that this worker keeps for readers of beginnings of prompts."
        read_gauge(self._registry, f"{self.kind}_prefix_pinned_blocks", description, num_pinned_blocks)

    def count_prefix_refusal(self, refusal: PrefixRefusal) -> None:
        """Count a question that ended without a load."""
        self._prefix_pulls.labels(refusal).inc()

    def count_prefix_load(self, ended: LoadEnded) -> None:
        """Count the load that followed an answer; of a failed one, what was verified. An aborted one does not count."""
        if ended.usage is None:
            return
        self._prefix_pulls.labels("loaded" if ended.error is None else "failed").inc()
        self._prefix_tokens.inc(ended.usage.transferred_tokens)
        self._prefix_bytes.inc(ended.usage.transferred_bytes)

    def read_at_scrape(
        self,
        num_leased_blocks: Callable[[], float],
        num_loading_blocks: Callable[[], float],
        events: Callable[[], dict[str, int]],
    ) -> None:
        """Publish the gauges, and the counts of the state machines as ``kvferry_<kind>_handoff_events_total``."""
        kind = self.kind
        read_gauge(self._registry, f"{kind}_leased_blocks", "Blocks that this worker holds for readers.", num_leased_blocks)
        read_gauge(self._registry, f"{kind}_loading_blocks", "Blocks of loads that are not over.", num_loading_blocks)
        self._registry.register(_EventCounts(kind, events))

    def read_broken_transports(self, transports: Sequence[str], read: Callable[[], Mapping[str, int]]) -> None:
        """Publish the number of peers to which each of these transports is broken."""
        self._registry.register(_BrokenTransports(self.kind, transports, read))


class _BrokenTransports(Collector):
    """The number of peers to which each transport is broken."""

    def __init__(self, kind: str, transports: Sequence[str], read: Callable[[], Mapping[str, int]]) -> None:
        self._name = f"{PREFIX}{kind}_broken_transports"
        self._transports = transports
        self._read = read

    def collect(self) -> Iterable[GaugeMetricFamily]:
        description = "Peers that are not read by this transport until a probe finds that it works."
        family = GaugeMetricFamily(self._name, description, labels=["transport"])
        counts = self._read()
        for transport in self._transports:
            family.add_metric([transport], counts.get(transport, 0))
        yield family


class _EventCounts(Collector):
    """Counters whose values are kept by the state machines."""

    def __init__(self, kind: str, read: Callable[[], dict[str, int]]) -> None:
        self._name = f"{PREFIX}{kind}_handoff_events"
        self._read = read

    def collect(self) -> Iterable[CounterMetricFamily]:
        family = CounterMetricFamily(self._name, "Events of leases, handshakes and peers.", labels=["event"])
        for name, count in self._read().items():
            family.add_metric([name], count)
        yield family
