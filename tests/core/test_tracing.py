"""Contexts are W3C's, spans arrive at a collector with the right times, and without a collector nothing happens."""

import subprocess
import sys

import msgspec
import pytest

from core.config import load_config
from core.config_router import TracingSection
from core.errors import ConfigError
from core.testing.clock import FakeClock
from core.tracing import TraceContext, Tracer, open_tracer, parse_trace_context, traces_url
from tests.support.trace_collector import TraceCollector, memory_tracer

pytestmark = pytest.mark.slow

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CONTEXT = TraceContext(traceparent=f"00-{TRACE}-{SPAN}-01")
UNSAMPLED = TraceContext(traceparent=f"00-{TRACE}-{SPAN}-00")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "garbage",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-0x",
    ],
)
def test_what_w3c_does_not_allow_is_no_context(text):
    assert parse_trace_context(text, "a=b") is None


def test_context_of_a_client_is_taken_with_its_state():
    assert parse_trace_context(f" 00-{TRACE}-{SPAN}-01 ", "vendor=1,other=2") == TraceContext(
        traceparent=CONTEXT.traceparent, tracestate="vendor=1,other=2"
    )
    assert CONTEXT.trace_id == TRACE


def test_a_later_version_is_read_as_far_as_it_is_known():
    assert parse_trace_context(f"01-{TRACE}-{SPAN}-01-more") == CONTEXT


@pytest.mark.parametrize("state", ["x" * 513, "a=\x01", "a=ü"])
def test_a_state_that_cannot_be_passed_on_is_left_out_and_the_trace_continues(state):
    assert parse_trace_context(CONTEXT.traceparent, state) == CONTEXT


def test_a_malformed_context_of_a_peer_is_refused_by_the_decoder():
    for bad in ("00-x-y-01", f"01-{TRACE}-{SPAN}-01"):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(msgspec.json.encode({"traceparent": bad}), type=TraceContext)


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("http://collector:4318/", "http://collector:4318/v1/traces"),
        ("https://example.org/otlp/traces", "https://example.org/otlp/traces"),
    ],
)
def test_endpoint_is_the_collector_s_base_or_the_whole_address(endpoint, url):
    assert traces_url(endpoint) == url


@pytest.mark.parametrize("endpoint", ["collector:4318", "grpc://collector:4317"])
def test_endpoint_that_is_no_http_address_is_refused(endpoint):
    with pytest.raises(ConfigError, match=r"tracing\.endpoint"):
        load_config(assignments=[f"tracing.endpoint={endpoint}"])


# ---- without a collector ---------------------------------------------------------------------------------------------------


def test_without_an_endpoint_there_is_no_tracer_and_nothing_is_imported():
    program = (
        "import sys, router.dispatch.worker_gateway, core.tracing as t, core.config_router as c, core.clock as k;"
        "assert t.open_tracer(c.TracingSection(), 'router', 'r', k.SystemClock()) is None;"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_an_endpoint_without_the_library_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"kvferry\[otel\]"):
        open_tracer(TracingSection(endpoint="http://127.0.0.1:1"), "router", "r", FakeClock())


# ---- with one --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def collector():
    with TraceCollector() as running:
        yield running


def traced(collector, use, **settings):
    """Open a tracer, use it, close it, and return what has arrived, by name."""
    section = TracingSection(endpoint=collector.endpoint, service_name="ferry", **settings)
    tracer = open_tracer(section, "router", "router-1", FakeClock())
    try:
        use(tracer)
    finally:
        tracer.close()
    return {span.name: span for span in collector.spans}


def test_spans_arrive_below_their_parents_with_what_was_said_of_them(collector):
    def use(tracer):
        outer = tracer.start("outer", 1000.0, CONTEXT, {"tokens": 7}, "server")
        tracer.record("inner", 1000.5, 1001.0, outer.context, {"transport": "shm"})
        outer.note("first_token", 1001.0)
        outer.add({"outcome": "stop"})
        outer.end(1002.0)

    spans = traced(collector, use)
    outer, inner = spans["outer"], spans["inner"]
    assert (outer.trace_id, outer.parent_id) == (TRACE, SPAN)
    assert (inner.trace_id, inner.parent_id) == (TRACE, outer.span_id)
    assert (outer.attributes, inner.attributes) == ({"tokens": 7, "outcome": "stop"}, {"transport": "shm"})
    assert (outer.events, outer.error) == (("first_token",), "")
    assert outer.process["service.name"] == "ferry"
    assert (outer.process["service.instance.id"], outer.process["kvferry.role"]) == ("router-1", "router")


def test_a_failed_span_gives_the_reason(collector):
    spans = traced(collector, lambda tracer: tracer.start("s", 1000.0).end(1001.0, "peer_lost"))
    assert spans["s"].error == "peer_lost"


def test_state_of_a_client_is_passed_on(collector):
    found = []
    parent = TraceContext(traceparent=CONTEXT.traceparent, tracestate="vendor=1")
    traced(collector, lambda tracer: found.append(tracer.start("s", 1000.0, parent).context))
    assert found[0].tracestate == "vendor=1"
    assert found[0].trace_id == TRACE


@pytest.mark.parametrize(
    ("parent", "ratio", "is_recorded"), [(UNSAMPLED, 1.0, False), (CONTEXT, 0.0, True), (None, 0.0, False), (None, 1.0, True)]
)
def test_the_client_decides_about_its_traces_and_the_ratio_about_ours(collector, parent, ratio, is_recorded):
    contexts = []

    def use(tracer):
        span = tracer.start("s", 1000.0, parent)
        contexts.append(span.context)
        span.end(1001.0)

    assert ("s" in traced(collector, use, sample_ratio=ratio)) == is_recorded
    assert (contexts[0] is not None) == is_recorded


def test_times_are_those_of_the_wall_clock_that_go_with_the_process_s_own():
    clock = FakeClock(50.0)
    tracer, spans = memory_tracer(clock)
    tracer = Tracer(tracer._provider, clock, wall_clock_ns=lambda: 9_000_000_000)
    tracer.record("past", 48.0, 49.5, None, {})
    assert (spans()["past"].start_time, spans()["past"].end_time) == (7_000_000_000, 8_500_000_000)


def test_a_missing_collector_delays_no_request_and_is_logged_once(collector, caplog):
    section = TracingSection(endpoint="http://127.0.0.1:9", timeout_s=0.1)
    tracer = open_tracer(section, "router", "r", FakeClock())
    tracer.start("s", 1000.0).end(1001.0)
    tracer.close()  # within the test's time limit
    assert [record.levelname for record in caplog.records if record.name.startswith("opentelemetry")] == ["ERROR"]
    assert collector.spans == []
