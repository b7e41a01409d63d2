"""Traces of requests: W3C trace contexts, spans, and the OpenTelemetry collector that receives them.

Owns the one use of the OpenTelemetry SDK (extra ``otel``), which is imported only if an endpoint is set. Knows nothing of
requests: ``router.dispatch.traces`` and ``core.worker.traces`` define the spans. Without an endpoint there is no ``Tracer``,
and no work. The SDK collects ended spans in a bounded queue and sends them from its own thread; spans that a collector does not
accept in time are dropped.

Times are seconds of the process's monotonic clock, as everywhere; a span also carries the wall-clock time.
Sources: W3C Trace Context, OpenTelemetry's trace API and OTLP/HTTP.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal
from urllib.parse import urlsplit

import msgspec

from core.clock import Clock
from core.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry import trace as otel
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider

    from core.config_router import TracingSection

Kind = Literal["server", "client", "internal"]
Attributes = Mapping[str, str | int | float | bool]

TRACES_PATH = "/v1/traces"  # of OTLP/HTTP
MAX_TRACESTATE_CHARACTERS = 512

_ZERO = re.compile("0+")
_TRACEPARENT = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(-.*)?"
)


class TraceContext(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The span of another process that is the parent of this process's spans, in W3C's form."""

    traceparent: Annotated[str, msgspec.Meta(pattern=r"^00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$")]
    tracestate: Annotated[str, msgspec.Meta(max_length=MAX_TRACESTATE_CHARACTERS)] = ""

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits."""
        return self.traceparent[3:35]

    @property
    def headers(self) -> dict[str, str]:
        """The headers that pass it on by HTTP."""
        state = {"tracestate": self.tracestate} if self.tracestate else {}
        return {"traceparent": self.traceparent, **state}


def parse_trace_context(traceparent: str, tracestate: str = "") -> TraceContext | None:
    """Parse the trace context of a client's headers; None if there is none, or an invalid one: then a trace begins here."""
    found = _TRACEPARENT.fullmatch(traceparent.strip())
    if found is None or found["version"] == "ff" or (found["version"] == "00" and found[5]):
        return None
    if _ZERO.fullmatch(found["trace"]) or _ZERO.fullmatch(found["span"]):
        return None
    state = tracestate.strip()
    is_state = len(state) <= MAX_TRACESTATE_CHARACTERS and state.isascii() and state.isprintable()
    return TraceContext(
        traceparent=f"00-{found['trace']}-{found['span']}-{found['flags']}", tracestate=state if is_state else ""
    )


@dataclass(slots=True)
class Span:
    """A running span. ``context`` is None if it is not recorded: then no context is passed to other processes."""

    context: TraceContext | None
    _span: otel.Span
    _wall_ns: Callable[[float], int]

    def add(self, attributes: Attributes) -> None:
        """Add attributes."""
        self._span.set_attributes(attributes)

    def note(self, name: str, at: float, attributes: Attributes | None = None) -> None:
        """Add an event."""
        self._span.add_event(name, attributes, self._wall_ns(at))

    def end(self, at: float, error: str = "") -> None:
        """End the span; ``error`` marks its work as failed."""
        if error:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(self._wall_ns(at))


class Tracer:
    """Makes spans. Calls may come from any thread."""

    def __init__(self, provider: TracerProvider, clock: Clock, wall_clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("kvferry")
        self._clock = clock
        self._wall_clock_ns = wall_clock_ns

    def start(
        self,
        name: str,
        at: float,
        parent: TraceContext | None = None,
        attributes: Attributes | None = None,
        kind: Kind = "internal",
    ) -> Span:
        """Begin a span below ``parent``, or a new trace."""
        from opentelemetry.trace import SpanKind

        span = self._tracer.start_span(
            name, _otel_context(parent), SpanKind[kind.upper()], attributes, start_time=self._wall_ns(at)
        )
        return Span(_context_of(span), span, self._wall_ns)

    def record(self, name: str, start: float, end: float, parent: TraceContext | None, attributes: Attributes) -> None:
        """Add a span that is over."""
        self.start(name, start, parent, attributes).end(end)

    def close(self) -> None:
        """Send the remaining spans, within the exporter's time limit, and end its thread."""
        self._provider.shutdown()

    def _wall_ns(self, at: float) -> int:
        return self._wall_clock_ns() + round((at - self._clock.now()) * 1e9)


def open_tracer(section: TracingSection, role: str, instance: str, clock: Clock) -> Tracer | None:
    """Return this process's tracer; None if no collector is set.

    Raises:
        ConfigError: the extra ``otel`` is not installed.
    """
    if not section.endpoint:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    except ImportError as error:
        raise ConfigError(
            f"tracing.endpoint is set, but OpenTelemetry is not installed ({error}): pip install 'kvferry[otel]'",
            param="tracing.endpoint",
        ) from None
    resource = Resource.create({"service.name": section.service_name, "service.instance.id": instance, "kvferry.role": role})
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(section.sample_ratio)), resource=resource, shutdown_on_exit=False
    )
    logging.getLogger("opentelemetry.exporter").setLevel(logging.ERROR)  # log a lost batch, not each attempt to send it
    exporter = OTLPSpanExporter(traces_url(section.endpoint), timeout=section.timeout_s)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=section.export_interval_s * 1e3))
    return Tracer(provider, clock)


def traces_url(endpoint: str) -> str:
    """Return the address for spans: OTLP's path at the collector, unless the endpoint names another."""
    return endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + TRACES_PATH


def _otel_context(parent: TraceContext | None) -> Context:
    """Return the SDK's form of a parent; never the current span that other code of the process may have set."""
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState, set_span_in_context

    if parent is None:
        return Context()
    _, trace_id, span_id, flags = parent.traceparent.split("-")
    state = TraceState.from_header([parent.tracestate]) if parent.tracestate else None
    remote = SpanContext(int(trace_id, 16), int(span_id, 16), True, TraceFlags(int(flags, 16)), state)
    return set_span_in_context(NonRecordingSpan(remote), Context())


def _context_of(span: otel.Span) -> TraceContext | None:
    found = span.get_span_context()
    if not found.trace_flags.sampled:
        return None
    traceparent = f"00-{found.trace_id:032x}-{found.span_id:016x}-{int(found.trace_flags):02x}"
    return TraceContext(traceparent=traceparent, tracestate=found.trace_state.to_header()[:MAX_TRACESTATE_CHARACTERS])
