"""A worker's spans: which there are, where they lie, what they say, and when they end."""

import sys

import pytest

from core.testing.clock import FakeClock
from core.tracing import TraceContext
from core.wire.kv import GroupBlocks, KVHandoff, KVLayoutInfo
from core.wire.media import ECSeal, ECSource, MMFeature
from core.wire.messages import (
    Abort,
    ChoiceStart,
    EncodeDone,
    EncodeFailed,
    EncodeRequest,
    ErrorInfo,
    Generate,
    PrefillChoice,
    PrefillDone,
    RequestFailed,
    Tokens,
    TransferUsage,
    Usage,
)
from core.wire.sampling import SamplingParams
from core.worker.traces import MAX_OPEN, WorkerTraces
from tests.support.trace_collector import memory_tracer

LEG = TraceContext(traceparent=f"00-{'a' * 32}-{'b' * 16}-01")
LAYOUT = KVLayoutInfo(dtype="float32", order="HND", block_size=64, num_layers=1, num_kv_heads=1, head_dim=4, block_bytes=2048)
HANDOFF = KVHandoff(
    transfer_id="t",
    engine_id="p0",
    incarnation=1,
    control_address="tcp://127.0.0.1:1",
    model_fingerprint=b"w",
    layout=LAYOUT,
    groups=(GroupBlocks(group_id=0, block_ids=(1, 2), generations=(1, 1), block_hashes=(bytes(16), bytes(16))),),
    num_tokens=100,
    lease_ms=30_000,
)
COST = TransferUsage(
    transport="shm", transferred_tokens=99, transferred_bytes=4096, transfer_ms=30.0, verify_ms=10.0, first_step_ms=20.0
)


class Bench:
    """A worker's traces at 1000 s, and what they have recorded."""

    def __init__(self):
        self.tracer, self.spans = memory_tracer(FakeClock(1000.0))
        self.traces = WorkerTraces(self.tracer, "w0")

    def generate(self, request_id="r", at=1000.0, trace=LEG, **fields):
        message = Generate(request_id=request_id, prompt_token_ids=(1,) * 100, sampling=SamplingParams(), trace=trace, **fields)
        self.traces.on_message(message, at, is_taken=True)

    def continue_(self, *indices):
        choices = tuple(ChoiceStart(index=index, output_token_ids=(5,)) for index in indices)
        self.generate(kv_handoff=HANDOFF, choices=choices)

    def tokens(self, at, index=0, finish_reason=None, usage=None):
        self.traces.on_reply([Tokens("r", index, 1, (6,), finish_reason, None, None, usage)], at)

    def interval_ms(self, name):
        span = self.spans()[name]
        return round(span.start_time / 1e6 - 1_000_000), round(span.end_time / 1e6 - 1_000_000)


@pytest.fixture
def bench():
    return Bench()


def test_a_prefill_is_divided_into_wait_and_computation_below_the_router_s_leg(bench):
    bench.generate(handoff=True)
    choice = PrefillChoice(index=0, token_id=5)
    bench.traces.on_reply(PrefillDone(request_id="r", choices=(choice,), kv_handoff=HANDOFF, queue_ms=40.0), 1000.1)
    spans = bench.spans()
    assert set(spans) == {"kvferry.prefill", "kvferry.queue", "kvferry.compute"}
    assert spans["kvferry.prefill"].parent.span_id == int("b" * 16, 16)
    assert {span.context.trace_id for span in spans.values()} == {int("a" * 32, 16)}
    assert bench.interval_ms("kvferry.prefill") == (0, 100)
    assert (bench.interval_ms("kvferry.queue"), bench.interval_ms("kvferry.compute")) == ((0, 40), (40, 100))
    assert spans["kvferry.prefill"].attributes["kvferry.num_blocks"] == 2
    assert spans["kvferry.prefill"].attributes["gen_ai.usage.input_tokens"] == 100


def test_a_decode_tells_transfer_and_verification_before_its_first_token(bench):
    bench.continue_(0)
    bench.tokens(1000.1, usage=Usage(num_cached_tokens=99, kv_transfer=COST))
    assert bench.spans() == {}  # the request continues
    bench.tokens(1000.3, finish_reason="length")
    spans = bench.spans()
    assert bench.interval_ms("kvferry.decode") == (0, 300)
    parts = ("kvferry.queue", "kvferry.kv_transfer", "kvferry.kv_verify", "kvferry.first_step")
    assert [bench.interval_ms(name) for name in parts] == [(0, 40), (40, 70), (70, 80), (80, 100)]
    assert {spans[name].parent.span_id for name in parts} == {spans["kvferry.decode"].context.span_id}
    assert spans["kvferry.kv_transfer"].attributes["kvferry.transferred_bytes"] == 4096
    attributes = spans["kvferry.decode"].attributes
    assert (attributes["kvferry.prefill_engine_id"], attributes["gen_ai.usage.output_tokens"]) == ("p0", 2)


def test_parts_that_a_clock_s_drift_has_made_too_long_stay_inside(bench):
    bench.continue_(0)
    bench.tokens(1000.025, finish_reason="stop", usage=Usage(kv_transfer=COST))
    assert bench.interval_ms("kvferry.kv_verify") == (0, 5)
    assert bench.interval_ms("kvferry.kv_transfer") == (0, 0)


def test_a_load_that_failed_gives_the_reason_and_has_no_transfer(bench):
    bench.continue_(0)
    cost = TransferUsage(recomputed_tokens=99, fallback_reason="stale")
    bench.tokens(1000.1, finish_reason="stop", usage=Usage(kv_transfer=cost))
    spans = bench.spans()
    assert spans["kvferry.decode"].attributes["kvferry.fallback_reason"] == "stale"
    assert "kvferry.kv_transfer" not in spans


def test_a_decode_tells_what_was_read_early_and_what_was_waited_for(bench):
    bench.continue_(0)
    cost = TransferUsage(early_tokens=64, early_bytes=4096, exposed_ms=2.5)
    bench.tokens(1000.1, finish_reason="stop", usage=Usage(kv_transfer=cost))
    attributes = bench.spans()["kvferry.decode"].attributes
    names = ("kvferry.early_tokens", "kvferry.early_bytes", "kvferry.exposed_us")
    assert [attributes[name] for name in names] == [64, 4096, 2500]


def test_a_prefill_gives_the_reason_for_blocks_lost_by_a_tier(bench):
    bench.generate(handoff=True)
    choice = PrefillChoice(index=0, token_id=5)
    bench.traces.on_reply(PrefillDone(request_id="r", choices=(choice,), recomputed_tokens=9, fallback_reason="digest"), 1000.1)
    attributes = bench.spans()["kvferry.prefill"].attributes
    assert (attributes["kvferry.fallback_reason"], attributes["kvferry.recomputed_tokens"]) == ("digest", 9)


def test_a_request_ends_with_the_last_of_its_choices(bench):
    bench.continue_(0, 2)
    bench.tokens(1000.1, index=2, finish_reason="stop")
    assert bench.spans() == {}
    bench.traces.on_message(Abort(request_ids=("r/0",), reason="stop"), 1000.2, is_taken=True)
    assert bench.interval_ms("kvferry.decode") == (0, 200)
    assert bench.spans()["kvferry.decode"].status.is_ok


def test_an_aggregated_worker_s_request_is_one_span(bench):
    bench.generate()
    bench.tokens(1000.1, finish_reason="stop", usage=Usage(num_cached_tokens=64))
    assert set(bench.spans()) == {"kvferry.decode"}
    assert bench.spans()["kvferry.decode"].attributes["kvferry.cached_tokens"] == 64


@pytest.mark.parametrize(("fields", "name"), [({"handoff": True}, "kvferry.prefill"), ({}, "kvferry.decode")])
def test_a_failure_and_an_abort_end_a_span_as_failed(bench, fields, name):
    bench.generate(**fields)
    error = ErrorInfo(code="engine_dead", message="?")
    bench.traces.on_reply(RequestFailed(request_id="r", error=error), 1000.1)
    assert bench.spans()[name].status.description == "engine_dead"
    bench.generate("s", **fields)
    bench.traces.on_message(Abort(request_ids=("s",), reason="client"), 1000.2, is_taken=True)
    assert bench.spans()[name].status.description == "aborted:client"


def test_images_that_are_embedded_are_a_span_of_their_own(bench):
    feature = MMFeature(identifier=bytes(16), offset=0, length=1, num_embeds=1, media_index=0)
    seal = ECSeal(identifier=bytes(16), num_embeds=1, hidden_size=4, dtype="float32", digest=1)
    source = ECSource(seal=seal, connector="p2p", engine_id="e0", incarnation=1, lease_ms=1, payload=b"")
    for name in ("r", "s"):
        message = EncodeRequest(request_id=name, mm_features=(feature,), media=(b"file",), trace=LEG)
        bench.traces.on_message(message, 1000.0, is_taken=True)
    bench.traces.on_reply(EncodeDone(request_id="r", ec_sources=(source,), queue_ms=20.0), 1000.05)
    spans = bench.spans()
    assert bench.interval_ms("kvferry.encode") == (0, 50)
    assert bench.interval_ms("kvferry.compute") == (20, 50)
    assert spans["kvferry.encode"].attributes["kvferry.num_images"] == 1
    assert spans["kvferry.encode"].parent.span_id == int("b" * 16, 16)
    error = ErrorInfo(code="invalid_request", message="no image")
    bench.traces.on_reply(EncodeFailed(request_id="s", error=error), 1000.1)
    assert bench.spans()["kvferry.encode"].status.description == "invalid_request"


def test_what_is_not_traced_leaves_nothing(bench):
    bench.generate(trace=None)
    bench.tokens(1000.1, finish_reason="stop")
    off = WorkerTraces(None, "w0")
    off.on_message(Generate(request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(), trace=LEG), 1000.0, is_taken=True)
    off.on_reply([Tokens("r", 0, 0, (6,), "stop")], 1000.1)
    assert bench.spans() == {}


def test_a_request_that_gets_no_reply_ends_as_failed(bench):
    bench.generate()
    bench.traces.on_unanswered(("r", "of a call"), "aborted:router_lost", 1000.2)
    assert bench.interval_ms("kvferry.decode") == (0, 200)
    assert bench.spans()["kvferry.decode"].status.description == "aborted:router_lost"


def test_request_that_was_not_taken_has_no_span(bench):
    message = Generate(request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(), trace=LEG)
    bench.traces.on_message(message, 1000.0, is_taken=False)
    bench.tokens(1000.1, finish_reason="stop")
    assert bench.spans() == {}


@pytest.mark.parametrize("trace", [LEG, None])
def test_second_request_of_an_id_leaves_the_span_of_the_first(bench, trace):
    bench.generate()
    bench.generate(at=1000.1, trace=trace)
    error = ErrorInfo(code="invalid_request", message="the id is in use")
    bench.traces.on_reply(RequestFailed(request_id="r", error=error), 1000.1)
    assert bench.spans() == {}
    bench.tokens(1000.2, finish_reason="stop")
    assert bench.interval_ms("kvferry.decode") == (0, 200)
    assert bench.spans()["kvferry.decode"].status.is_ok


def test_a_failure_after_the_refusal_of_a_second_request_is_of_the_first(bench):
    bench.generate()
    bench.generate()
    for code in ("invalid_request", "engine_dead"):
        bench.traces.on_reply(RequestFailed(request_id="r", error=ErrorInfo(code=code, message="?")), 1000.1)
    assert bench.spans()["kvferry.decode"].status.description == "engine_dead"


def test_neither_prompts_nor_images_are_kept_for_spans(bench):
    prompt, image = tuple(range(1000)), bytes(1000)
    before = sys.getrefcount(prompt), sys.getrefcount(image)
    bench.traces.on_message(
        Generate(request_id="r", prompt_token_ids=prompt, sampling=SamplingParams(), trace=LEG), 1000.0, is_taken=True
    )
    bench.traces.on_message(EncodeRequest(request_id="s", mm_features=(), media=(image,), trace=LEG), 1000.0, is_taken=True)
    assert (sys.getrefcount(prompt), sys.getrefcount(image)) == before


def test_no_more_than_a_bounded_number_of_requests_is_followed(bench):
    for number in range(MAX_OPEN + 1):
        bench.generate(f"r{number}")
    bench.traces.on_message(Abort(request_ids=("r0",)), 1000.1, is_taken=True)
    assert bench.spans() == {}
    bench.traces.on_message(Abort(request_ids=("r1",)), 1000.1, is_taken=True)
    assert "kvferry.decode" in bench.spans()
