"""Workers that die under a request, seen from the client: real sockets, scripted workers."""

from __future__ import annotations

import asyncio
import json
import logging
import time

import pytest

from core.testing.clock import FakeClock
from core.wire.messages import ErrorInfo, Generate

pytestmark = pytest.mark.slow

FULL = ErrorInfo(code="overloaded", message="no room", http_status=429, retryable=True)
TEXT = "hello wonderful world"


async def kill_in_mid_stream(under_test, shown: str, **body) -> list[dict]:
    """Stream from a first decode worker until ``shown``, kill it, and return all events of the stream."""
    await under_test.add("prefill", script=under_test.script(text=TEXT))
    first = await under_test.add("decode", script=under_test.script(text=TEXT, pause_after=8))
    events: list[dict] = []
    request = {"prompt": "p", "stream": True, "max_tokens": 50, **body}
    async with under_test.client() as client, client.stream("POST", "/v1/completions", json=request) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if not line or line == "data: [DONE]":
                continue
            events.append(json.loads(line.removeprefix("data: ")))
            if texts_of(events, 0) == shown and first in under_test.workers:
                under_test.workers.remove(first)
                await first.kill()
                await under_test.add("decode", script=under_test.script(text=TEXT))
    return events


def texts_of(events: list[dict], index: int) -> str:
    return "".join(choice["text"] for event in events for choice in event.get("choices", ()) if choice["index"] == index)


def reasons_of(events: list[dict]) -> list[str]:
    return [choice["finish_reason"] for event in events for choice in event["choices"] if choice["finish_reason"]]


async def test_a_stream_survives_its_decode_worker_without_a_break(start_router):
    under_test = await start_router()
    options = {"include_usage": True}
    events = await kill_in_mid_stream(under_test, TEXT[:8], logprobs=1, return_token_ids=True, stream_options=options)
    *chunks, last = events
    assert texts_of(chunks, 0) == TEXT
    assert reasons_of(chunks) == ["stop"]
    token_ids = [token for event in chunks for token in event["choices"][0]["token_ids"]]
    assert len(token_ids) == len(TEXT) + 1, "one token per letter, none twice, and the end"
    logprobs = [entry for event in chunks for entry in event["choices"][0]["logprobs"]["token_logprobs"]]
    assert logprobs == [-0.25] * len(token_ids)
    assert (last["usage"]["kv_transfer"]["retries"], last["usage"]["kv_transfer"]["replays"]) == (1, 1)
    assert under_test.metric("kvferry_workers_lost_total", role="decode") == 1
    assert under_test.metric("kvferry_request_retries_total", kind="replay", code="peer_lost") == 1
    assert under_test.metric("kvferry_requests_retried_total", kind="replay", outcome="served") == 1


async def test_the_choices_of_a_request_survive_together(start_router):
    under_test = await start_router()
    events = await kill_in_mid_stream(under_test, TEXT[:8], n=2)
    assert [texts_of(events, index) for index in range(2)] == [TEXT, TEXT]
    assert reasons_of(events) == ["stop", "stop"]


async def test_a_stop_string_may_lie_across_the_break(start_router):
    under_test = await start_router()
    events = await kill_in_mid_stream(under_test, "hello w", stop="onder")  # "o" is held back: it may begin the stop string
    assert texts_of(events, 0) == "hello w"
    assert reasons_of(events) == ["stop"]


async def test_a_stream_whose_only_decode_worker_dies_ends_with_the_reason(start_router):
    under_test = await start_router(worker_wait_s=0.2)
    _, decode = await under_test.pair(pause_after=3)
    body = {"prompt": "p", "stream": True, "max_tokens": 9}
    async with under_test.client() as client, client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.aiter_lines()
        events: list[dict] = []
        while texts_of(events, 0) != "hel":  # the first token is the prefill worker's
            if line := await anext(lines):
                events.append(json.loads(line.removeprefix("data: ")))
        await decode.kill()
        rest = [line async for line in lines if line]
    assert '"code":"no_worker"' in rest[-1]
    assert "was lost" in rest[-1]
    assert under_test.metric("kvferry_requests_retried_total", kind="replay", outcome="no_worker") == 1


async def test_a_restarted_decode_worker_takes_its_predecessor_s_requests_over(start_router):
    under_test = await start_router(has_http=False)
    _, decode = await under_test.pair(pause_after=2)
    async with under_test.client() as client:
        call = asyncio.create_task(client.post("/v1/completions", json={"prompt": "p", "max_tokens": 50}))
        await decode.generated()
        await decode.kill()
        await under_test.add("decode", engine_id=decode.engine_id)
        response = await call
    assert (response.status_code, response.json()["choices"][0]["text"]) == (200, "hello world")


async def test_a_request_that_comes_as_the_router_thaws_waits_for_its_workers(start_router):
    under_test = await start_router(has_http=False)
    workers = await under_test.pair()
    await asyncio.sleep(0.5)  # the router has ticked
    for worker in workers:
        worker.sends_heartbeats = False
        worker.disconnect()  # as workers do while the router is silent
    time.sleep(1.5)  # noqa: ASYNC251 - the router stands still
    async with under_test.client() as client:
        call = asyncio.create_task(client.post("/v1/completions", json={"prompt": "p", "max_tokens": 50}))
        gateway = under_test.router.gateway
        await under_test.until(lambda: gateway.core.not_ready_reason is not None)
        for worker in workers:
            worker.connect()
            await worker.send(worker.registration)
        response = await call
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["text"] == "hello world"


@pytest.fixture
async def start_thawing(start_router):
    """Start a router that was paused until now."""

    async def start(*workers: dict):
        clock = FakeClock()
        under_test = await start_router(has_http=False, clock=clock)
        for facts in workers:
            await under_test.add(**facts)
        await under_test.until(lambda: under_test.router.gateway.core.membership.pauses._last_tick is not None)
        clock.advance(30.0)
        return under_test

    return start


def call_at_prompt(under_test, monkeypatch, number: int, call) -> None:
    """Call ``call`` as the router submits the prompt of this number for the first time."""
    core, submitted = under_test.router.gateway.core, []
    submit = core.submit

    def submit_after(submission, now):
        if submission.request_id not in submitted:
            submitted.append(submission.request_id)
            if len(submitted) == number:
                call()
        return submit(submission, now)

    monkeypatch.setattr(core, "submit", submit_after)


@pytest.mark.parametrize("number", [1, 9])
async def test_a_prompt_whose_workers_are_found_cut_off_as_it_is_submitted_waits(start_thawing, monkeypatch, number):
    under_test = await start_thawing({"role": "prefill"}, {"role": "decode"})
    is_cut_off = asyncio.Event()
    call_at_prompt(under_test, monkeypatch, number, lambda: (under_test.find_cut_off(), is_cut_off.set()))
    async with under_test.client() as client:
        call = asyncio.create_task(client.post("/v1/completions", json={"prompt": ["p"] * number, "max_tokens": 50}))
        await is_cut_off.wait()
        for worker in under_test.workers:
            await under_test.reconnect(worker)
        response = await call
    assert response.status_code == 200, response.text
    assert [choice["text"] for choice in response.json()["choices"]] == ["hello world"] * number


async def test_after_a_pause_a_request_waits_for_the_only_worker_that_holds_it(start_thawing, monkeypatch):
    under_test = await start_thawing({"role": "aggregated", "max_model_len": 64}, {"role": "aggregated"})
    under_test.find_cut_off()
    is_submitted = asyncio.Event()
    call_at_prompt(under_test, monkeypatch, 1, is_submitted.set)
    async with under_test.client() as client:
        call = asyncio.create_task(client.post("/v1/completions", json={"prompt": "p" * 99, "max_tokens": 50}))
        await under_test.reconnect(under_test.workers[0])
        await is_submitted.wait()
        await under_test.reconnect(under_test.workers[1])
        response = await call
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(("timeout_s", "status"), [(1.0, 504), (None, 503)])
async def test_the_wait_for_workers_that_are_cut_off_has_an_end(start_thawing, monkeypatch, timeout_s, status):
    under_test = await start_thawing({"role": "aggregated"})
    gateway, is_cut_off = under_test.router.gateway, asyncio.Event()
    call_at_prompt(under_test, monkeypatch, 1, lambda: (under_test.find_cut_off(), is_cut_off.set()))
    async with under_test.client() as client:
        call = asyncio.create_task(client.post("/v1/completions", json={"prompt": "p", "timeout_s": timeout_s}))
        await is_cut_off.wait()
        while not call.done():
            gateway._clock.advance(0.25)
            await asyncio.sleep(0.02)
        response = await call
    assert response.status_code == status, response.text
    assert (gateway.num_requests, len(gateway.core.dispatcher)) == (0, 0)


async def test_a_prefill_worker_that_dies_before_the_first_token_costs_the_client_nothing(start_router):
    under_test = await start_router(has_http=False)
    prefill, _ = await under_test.pair()
    prefill.script.is_silent = True
    async with under_test.client() as client:
        call = asyncio.create_task(client.post("/v1/completions", json={"prompt": "p", "max_tokens": 50}))
        await prefill.generated()
        await under_test.add("prefill")
        await prefill.kill()
        response = await call
    body = response.json()
    assert body["choices"][0]["text"] == "hello world"
    timing = body["usage"]["kv_transfer"]["timing"]["first_token"]
    assert timing["relay_ms"] == pytest.approx(timing["total_ms"] - 0.03)
    assert under_test.metric("kvferry_requests_retried_total", kind="prefill", outcome="served") == 1


async def test_a_decode_worker_without_room_is_not_the_client_s_business(start_router):
    under_test = await start_router(has_http=False)
    _, decode = await under_test.pair(error=None)
    decode.script.error = FULL
    async with under_test.client() as client:
        call = asyncio.create_task(client.post("/v1/completions", json={"prompt": "p", "max_tokens": 50}))
        await under_test.until(lambda: under_test.router.gateway.core.dispatcher.num_waiting == 1)
        decode.script.error = None
        response = await call
    assert response.json()["choices"][0]["text"] == "hello world"
    assert len(decode.messages(Generate)) >= 2
    assert response.json()["usage"]["kv_transfer"]["replays"] == 0


async def test_a_request_is_refused_with_429_before_anything_is_computed(start_router):
    under_test = await start_router(has_http=False)
    prefill = await under_test.add("prefill", script=under_test.script(is_silent=True))
    await under_test.add("decode", max_num_choices=2)
    async with under_test.client() as client:
        first = asyncio.create_task(client.post("/v1/completions", json={"prompt": "p", "n": 2}))
        await prefill.generated()
        response = await client.post("/v1/completions", json={"prompt": "p"})
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
    assert (response.status_code, response.json()["error"]["code"]) == (429, "overloaded")
    assert len(prefill.messages(Generate)) == 1


async def test_more_choices_than_any_worker_ever_holds_are_a_400_that_names_them(start_router):
    under_test = await start_router(has_http=False)
    prefill = await under_test.add("prefill")
    await under_test.add("decode", max_num_choices=2)
    async with under_test.client() as client:
        response = await client.post("/v1/completions", json={"prompt": "p", "n": 3})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "invalid_request", "n")
    assert "n = 3" in error["message"]
    assert prefill.messages(Generate) == []


async def test_incompatible_workers_are_refused_with_both_values_counted_and_logged_once(start_router, caplog):
    under_test = await start_router(has_http=False)
    with caplog.at_level(logging.WARNING, logger="router.dispatch.worker_gateway"):
        await under_test.add("prefill", engine_id="p0")
        await under_test.add("decode", engine_id="d0", model_fingerprint=b"other")
        await under_test.add("aggregated", engine_id="a0", model="tiny")
    async with under_test.client() as client:
        assert (await client.get("/ready")).status_code == 200, "the aggregated worker serves"
    warned = [record.message for record in caplog.records if "unpaired_worker" in record.message]
    assert [message.split("engine_id=")[1].split()[0] for message in warned] == ["p0", "d0"]
    assert under_test.metric("kvferry_workers_unpaired") == 2


async def test_without_a_compatible_pair_the_client_is_told_why(start_router):
    under_test = await start_router(has_http=False)
    await under_test.add("prefill", engine_id="p0")
    await under_test.add("decode", engine_id="d0", model_fingerprint=b"other")
    async with under_test.client() as client:
        response = await client.post("/v1/completions", json={"prompt": "p"})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "no_worker")
    assert all(part in response.text for part in ("p0", "d0", b"weights".hex()[:12], b"other".hex()))


async def test_the_load_failure_policy_reaches_both_workers(start_router):
    under_test = await start_router(has_http=False)
    prefill, decode = await under_test.pair()
    params = {"kv_load_failure_policy": "fail"}
    async with under_test.client() as client:
        await client.post("/v1/completions", json={"prompt": "p", "kv_transfer_params": params})
        refused = await client.post(
            "/v1/completions", json={"prompt": "p", "kv_transfer_params": {"kv_load_failure_policy": "x"}}
        )
    assert [(await worker.generated()).kv_load_failure_policy for worker in (prefill, decode)] == ["fail", "fail"]
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "kv_transfer_params.kv_load_failure_policy"


async def test_where_the_time_went_is_measured_for_every_request(start_router):
    under_test = await start_router(has_http=False)
    await under_test.pair()
    async with under_test.client() as client:
        for _ in range(2):
            await client.post("/v1/completions", json={"prompt": "p", "max_tokens": 5})
    for part in ("queue", "prefill", "relay"):
        assert under_test.metric("kvferry_time_to_first_token_part_seconds_count", part=part) == 2
    for part in ("relay", "queue", "transfer", "verify", "first_step"):
        assert under_test.metric("kvferry_time_to_second_token_part_seconds_count", part=part) == 2
    assert under_test.metric("kvferry_time_to_second_token_seconds_count") == 2
    assert under_test.metric("kvferry_kv_handoffs_total", outcome="loaded") == 2
