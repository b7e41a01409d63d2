"""An OpenTelemetry collector in miniature: takes spans by OTLP/HTTP on loopback and keeps them. For tests.

Owns the HTTP server and the decoding of what arrives; real processes send to it. Needs the extra ``otel``.
"""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import TYPE_CHECKING

from core.clock import Clock
from core.tracing import Tracer

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

TRACES_PATH = "/v1/traces"


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """A span as it arrived; ids are hexadecimal, times nanoseconds of the wall clock."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str  # empty = none
    start_ns: int
    end_ns: int
    error: str  # empty = it ended well
    attributes: dict[str, str | int | float | bool]
    events: tuple[str, ...]
    process: dict[str, str | int | float | bool]  # of the resource that sent it


class TraceCollector:
    """Listens while it is entered."""

    def __init__(self) -> None:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                is_known = self.path == TRACES_PATH
                if is_known:
                    collector.take(body)
                self.send_response(HTTPStatus.OK if is_known else HTTPStatus.NOT_FOUND)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args: object) -> None:
                """Say nothing."""

        self._lock = threading.Lock()
        self._spans: list[ReceivedSpan] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="trace-collector", daemon=True)

    @property
    def endpoint(self) -> str:
        """The base address for ``tracing.endpoint``."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def spans(self) -> list[ReceivedSpan]:
        """The spans that have arrived by now."""
        with self._lock:
            return list(self._spans)

    def take(self, body: bytes) -> None:
        """Keep the spans of one OTLP request."""
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        request = ExportTraceServiceRequest.FromString(body)
        found = [
            ReceivedSpan(
                name=span.name,
                trace_id=span.trace_id.hex(),
                span_id=span.span_id.hex(),
                parent_id=span.parent_span_id.hex(),
                start_ns=span.start_time_unix_nano,
                end_ns=span.end_time_unix_nano,
                error=span.status.message if span.status.code == span.status.STATUS_CODE_ERROR else "",
                attributes=_values(span.attributes),
                events=tuple(happening.name for happening in span.events),
                process=_values(group.resource.attributes),
            )
            for group in request.resource_spans
            for scope in group.scope_spans
            for span in scope.spans
        ]
        with self._lock:
            self._spans += found

    def __enter__(self) -> TraceCollector:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _values(attributes) -> dict[str, str | int | float | bool]:  # type: ignore[no-untyped-def]
    return {entry.key: getattr(entry.value, entry.value.WhichOneof("value")) for entry in attributes}


def memory_tracer(clock: Clock) -> tuple[Tracer, Callable[[], dict[str, ReadableSpan]]]:
    """Return a tracer that records every trace in memory, and what reads the ended spans by name."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = Tracer(provider, clock, wall_clock_ns=lambda: round(clock.now() * 1e9))
    return tracer, lambda: {span.name: span for span in exporter.get_finished_spans()}
