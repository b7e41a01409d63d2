"""The router's spans: one trace from the client's span over the legs to the workers, for every outcome."""

import asyncio

import pytest

from core.clock import SystemClock
from core.testing.clock import FakeClock
from core.wire.messages import EncodeRequest, ErrorInfo, Generate
from core.wire.sampling import SamplingParams
from router.dispatch.members import WorkerKey
from router.dispatch.request_state import EncodeEnded, Moved
from router.dispatch.traces import RequestTraces
from router.dispatch.types import Submission
from tests.support.trace_collector import memory_tracer

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
BODY = {"prompt": "p", "max_tokens": 50}


@pytest.fixture
async def traced(start_router):
    """Return a router with tracing on, one pair of workers, and what reads the ended spans."""
    under_test = await start_router(has_http=False)
    tracer, spans = memory_tracer(SystemClock())
    under_test.router.gateway.trace_with(tracer)
    return under_test, await under_test.pair(), spans


async def complete(under_test, body=BODY, **headers):
    async with under_test.client() as client:
        return await client.post("/v1/completions", json=body, headers=headers)


def span_ids(spans, *names):
    return {f"{spans[name].context.span_id:016x}" for name in names}


async def test_one_trace_from_the_client_over_both_legs_to_the_workers(traced, caplog):
    caplog.set_level("INFO")
    under_test, (prefill, decode), spans = traced
    response = await complete(under_test, traceparent=f"00-{TRACE}-{SPAN}-01", tracestate="vendor=1")
    assert response.status_code == 200
    found = spans()
    assert set(found) == {"kvferry.request", "kvferry.leg.prefill", "kvferry.leg.decode"}
    assert {f"{span.context.trace_id:032x}" for span in found.values()} == {TRACE}
    request = found["kvferry.request"]
    assert f"{request.parent.span_id:016x}" == SPAN
    assert {found[name].parent.span_id for name in found if "leg" in name} == {request.context.span_id}
    for worker, leg in ((prefill, "kvferry.leg.prefill"), (decode, "kvferry.leg.decode")):
        (message,) = worker.messages(Generate)
        assert message.trace.traceparent.split("-")[1:3] == [TRACE, f"{found[leg].context.span_id:016x}"]
        assert message.trace.tracestate == "vendor=1"
    assert request.attributes["gen_ai.usage.output_tokens"] == 12
    assert request.attributes["kvferry.outcome"] == "stop"
    assert [event.name for event in request.events] == ["first_token"]
    assert f"trace_id={TRACE}" in caplog.text


async def test_a_client_that_does_not_record_is_not_recorded(traced):
    under_test, (prefill, _), spans = traced
    assert (await complete(under_test, traceparent=f"00-{TRACE}-{SPAN}-00")).status_code == 200
    assert spans() == {}
    assert prefill.messages(Generate)[0].trace is None


@pytest.mark.parametrize("header", [{}, {"traceparent": "garbage"}])
async def test_without_a_context_a_trace_begins_here_and_holds_all_prompts(traced, header):
    under_test, (prefill, _), spans = traced
    await complete(under_test, {"prompt": ["a", "b"], "max_tokens": 3}, **header)
    assert spans()["kvferry.request"].context.trace_id
    assert len({message.trace.trace_id for message in prefill.messages(Generate)}) == 1


async def test_a_retry_is_a_leg_of_its_own_and_is_reported(start_router):
    under_test = await start_router(has_http=False)
    tracer, spans = memory_tracer(SystemClock())
    under_test.router.gateway.trace_with(tracer)
    error = ErrorInfo(code="engine_dead", message="?", http_status=503, retryable=True)
    await under_test.add("prefill", script=under_test.script(error=error))
    await under_test.add("decode", script=under_test.script())
    good = await under_test.add("prefill", script=under_test.script())
    assert (await complete(under_test)).status_code == 200
    request = spans()["kvferry.request"]
    retry = next(event for event in request.events if event.name == "retry")
    assert retry.attributes["kvferry.retry.code"] == "engine_dead"
    assert retry.attributes["kvferry.retry.successor"] == good.engine_id
    assert request.status.is_ok


async def test_a_move_ends_the_leg_that_waited_without_an_error(start_router):
    under_test = await start_router(has_http=False)
    tracer, spans = memory_tracer(SystemClock())
    under_test.router.gateway.trace_with(tracer)
    prefill = await under_test.add("prefill", script=under_test.script(is_silent=True))
    await under_test.add("decode", script=under_test.script())
    asking = asyncio.create_task(complete(under_test))
    message = await prefill.generated()
    former = WorkerKey(prefill.engine_id, prefill.incarnation)
    under_test.router.gateway._perform([Moved(message.request_id, former, WorkerKey("other", 1), 4.0)])
    await prefill._prefill(message)
    assert (await asking).status_code == 200
    request, leg = spans()["kvferry.request"], spans()["kvferry.leg.prefill"]
    move = next(event for event in request.events if event.name == "move")
    assert move.attributes == {"kvferry.move.former": prefill.engine_id, "kvferry.move.successor": "other"}
    assert (leg.status.is_ok, leg.status.description) == (True, None)


async def test_a_refused_request_and_one_that_fails_end_their_spans_with_the_reason(start_router):
    under_test = await start_router(has_http=False, max_requests=1)
    tracer, spans = memory_tracer(SystemClock())
    under_test.router.gateway.trace_with(tracer)
    error = ErrorInfo(code="internal_error", message="a bug", http_status=500)
    await under_test.pair(error=error)
    assert (await complete(under_test, {"prompt": ["a", "b"]})).status_code == 429
    assert "overloaded" in spans()["kvferry.request"].status.description
    assert (await complete(under_test)).status_code == 500
    found = spans()
    assert found["kvferry.request"].status.description == "internal_error: a bug"
    assert found["kvferry.leg.prefill"].status.description == "internal_error"
    assert under_test.router.gateway.observer.traces._open == {}


async def test_without_tracing_the_workers_are_told_nothing(served):
    assert (await complete(served, traceparent=f"00-{TRACE}-{SPAN}-01")).status_code == 200
    assert all(message.trace is None for worker in served.workers for message in worker.messages(Generate))


def test_images_have_legs_beside_each_other_before_the_prompt_s():
    tracer, spans = memory_tracer(FakeClock(1000.0))
    traces = RequestTraces(tracer, "tiny")
    sampling = SamplingParams()
    traces.begin([Submission(request_id="r", prompt_token_ids=(1,), sampling=sampling)], None, 1000.0)
    first, second = (WorkerKey(name, 1) for name in ("e0", "e1"))
    sent = [
        traces.begin_leg("r", EncodeRequest(request_id="r", mm_features=(), media=()), worker, 1000.0)
        for worker in (first, second)
    ]
    assert sent[0].trace.trace_id == sent[1].trace.trace_id
    assert sent[0].trace != sent[1].trace
    traces.end_encode_leg(EncodeEnded("r", first, "done", num_images=2, num_cached=1), 1000.1)
    leg = spans()["kvferry.leg.encode"]
    assert (leg.attributes["kvferry.engine_id"], leg.attributes["kvferry.num_cached_images"]) == ("e0", 1)
    assert leg.status.is_ok
    traces.end_encode_leg(EncodeEnded("r", second, "peer_lost", num_images=1), 1000.2)
    assert spans()["kvferry.leg.encode"].status.description == "peer_lost"
    traces.end_encode_leg(EncodeEnded("r", second, "peer_lost", num_images=1), 1000.2)  # reported twice
    generate = Generate(request_id="r", prompt_token_ids=(1,), sampling=sampling, handoff=True)
    assert traces.begin_leg("r", generate, WorkerKey("p0", 1), 1000.2).trace.trace_id == sent[0].trace.trace_id
    traces.fail("r", ErrorInfo(code="peer_lost", message="?"), 1000.3)
    assert set(spans()) == {"kvferry.leg.encode", "kvferry.leg.prefill", "kvferry.request"}
