from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from core.wire.messages import Abort, ErrorInfo, Generate, Release, RequestFailed, TokenLogprobs, Tokens

USER = [{"role": "user", "content": "hi"}]


async def stream(under_test, path: str, parse, **body):
    async with under_test.client() as client:
        response = await client.post(path, json={"stream": True, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = parse(response.text)
    assert events.pop() == "[DONE]"
    return events


async def read_until(lines, text: str) -> None:
    """Read events until their texts add up to ``text``."""
    shown = ""
    while shown != text:
        line = await anext(lines)
        if line:
            choice = json.loads(line.removeprefix("data: "))["choices"][0]
            shown += choice["delta"].get("content", "") if "delta" in choice else choice["text"]


# ---- shapes ------------------------------------------------------------------------------------------------------------------


async def test_a_chat_stream_starts_with_the_role_and_ends_with_the_reason(served, sse_events):
    events = await stream(served, "/v1/chat/completions", sse_events, messages=USER)
    assert {(event["object"], event["model"]) for event in events} == {("chat.completion.chunk", "tiny")}
    assert len({event["id"] for event in events}) == 1
    first, *rest = [event["choices"][0] for event in events]
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert first["finish_reason"] is None
    assert all("role" not in choice["delta"] for choice in rest)
    assert "".join(choice["delta"].get("content", "") for choice in rest) == "hello world"
    assert [choice["finish_reason"] for choice in rest] == [None] * (len(rest) - 1) + ["stop"]
    assert all("usage" not in event for event in events)


async def test_a_completion_stream_adds_up_to_the_text(served, sse_events):
    events = await stream(served, "/v1/completions", sse_events, prompt="p", max_tokens=5)
    assert {event["object"] for event in events} == {"text_completion"}
    assert "".join(event["choices"][0]["text"] for event in events) == "hello"
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["length"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_usage_comes_in_a_last_event_without_choices(served, sse_events, path):
    body = {"prompt": "hi"} if path == "/v1/completions" else {"messages": USER}
    events = await stream(served, path, sse_events, max_tokens=3, stream_options={"include_usage": True}, **body)
    assert all(event["usage"] is None for event in events[:-1])
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 3
    assert events[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert events[-1]["usage"]["kv_transfer"]["transport"] == "tcp"


async def test_continuous_usage_counts_as_it_goes(served, sse_events):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await stream(served, "/v1/completions", sse_events, prompt="hi", max_tokens=3, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[0] >= 1
    assert counts[-1] == 3


async def test_choices_are_interleaved_by_index(served, sse_events):
    events = await stream(served, "/v1/chat/completions", sse_events, messages=USER, n=2, max_tokens=4)
    for index in (0, 1):
        deltas = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert deltas[0]["delta"]["role"] == "assistant"
        assert "".join(delta["delta"].get("content", "") for delta in deltas) == "hell"
        assert deltas[-1]["finish_reason"] == "length"


async def test_streamed_logprobs_cover_every_token_once(served, sse_events):
    events = await stream(served, "/v1/chat/completions", sse_events, messages=USER, max_tokens=4, logprobs=True)
    shown = [event["choices"][0]["logprobs"] for event in events]
    tokens = [entry["token"] for logprobs in shown if logprobs for entry in logprobs["content"]]
    assert tokens == list("hell")


async def test_streamed_completion_logprobs_have_running_offsets(served, sse_events):
    events = await stream(served, "/v1/completions", sse_events, prompt="abc", max_tokens=3, logprobs=1, echo=True)
    assert events[0]["choices"][0]["text"].startswith("abc")
    logprobs = [event["choices"][0]["logprobs"] for event in events]
    assert [token for part in logprobs for token in part["tokens"]] == list("abchel")
    assert [offset for part in logprobs for offset in part["text_offset"]] == list(range(6))


async def test_no_tokens_with_echo_stream_the_prompt(served, sse_events):
    events = await stream(served, "/v1/completions", sse_events, prompt="abc", max_tokens=0, logprobs=1, echo=True)
    (choice,) = [event["choices"][0] for event in events]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]["text_offset"]) == ("abc", "length", [0, 1, 2])


async def test_streamed_token_ids(served, sse_events):
    events = await stream(served, "/v1/completions", sse_events, prompt=[1, 2], max_tokens=3, return_token_ids=True)
    assert events[0]["choices"][0]["prompt_token_ids"] == [1, 2]
    assert all("prompt_token_ids" not in event["choices"][0] for event in events[1:])
    ids = [token for event in events for token in event["choices"][0]["token_ids"]]
    assert ids == served.tokenizer.encode("hel")


async def test_no_event_is_sent_for_half_a_character(start_router, sse_events):
    under_test = await start_router()
    await under_test.pair(text="a€")
    events = await stream(under_test, "/v1/completions", sse_events, prompt="p", max_tokens=50)
    assert "".join(event["choices"][0]["text"] for event in events) == "a€"
    assert all("\ufffd" not in event["choices"][0]["text"] for event in events)


async def test_a_stop_string_is_never_streamed(served, sse_events):
    events = await stream(served, "/v1/completions", sse_events, prompt="p", max_tokens=50, stop="o w")
    assert "".join(event["choices"][0]["text"] for event in events) == "hell"
    assert events[-1]["choices"][0]["stop_reason"] == "o w"


async def test_the_first_token_is_streamed_before_decode_answers(start_router):
    under_test = await start_router()
    _, decode = await under_test.pair(pause_after=1)
    async with (
        under_test.client() as client,
        client.stream("POST", "/v1/completions", json={"prompt": "p", "stream": True, "max_tokens": 9}) as response,
    ):
        lines = response.aiter_lines()
        assert '"text":"h"' in await anext(lines)
        decode.script.resume.set()
        rest = [line async for line in lines]
    assert rest[-2] == "data: [DONE]"


# ---- one event per token -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"stop": "zzz"}, {"logprobs": 1}, {"stream_options": {"include_usage": True}}])
async def test_each_token_is_an_event_also_if_they_come_at_once(start_router, sse_events, fields):
    under_test = await start_router()
    worker = await under_test.add("aggregated")
    worker.script.is_silent = True
    async with under_test.client() as client:
        body = {"prompt": "p", "stream": True, "max_tokens": 6, **fields}
        call = asyncio.create_task(client.post("/v1/completions", json=body))
        request_id, core = (await worker.generated()).request_id, under_test.router.gateway.core
        letters = under_test.tokenizer.encode("abcdef")
        entry = (TokenLogprobs((97, 98), (-0.5, -1.0), 1),) if "logprobs" in fields else None
        (member,) = core.membership.workers
        for position, letter in enumerate(letters):  # before the task of the stream gets a turn
            reason = "length" if position == len(letters) - 1 else None
            item = Tokens(request_id, 0, position, (letter,), reason, logprobs=entry)
            under_test.router.gateway._perform(core.on_message(member.peer, [item], under_test.router.gateway.now))
        events = sse_events((await call).text)[:-1]
    texts = [event["choices"][0]["text"] for event in events if event["choices"]]
    assert [text for text in texts if text] == list("abcdef")


@pytest.mark.slow
async def test_tokens_are_written_without_waking_the_stream_task(start_router):
    under_test = await start_router()
    worker = await under_test.add("aggregated")
    worker.script.is_silent = True
    async with begun_stream(under_test, worker) as (lines, send, generation):
        send(1, "b")
        assert generation._updates == []
        await read_until(lines, "b")


async def test_a_client_that_does_not_read_gets_every_token_later(start_router):
    """While its connection is full, nothing is written past the task, which waits for it."""
    under_test = await start_router()
    worker = await under_test.add("aggregated")
    worker.script.is_silent = True
    async with begun_stream(under_test, worker) as (lines, send, generation):
        (connection,) = under_test.router.http.clients._group_of
        connection.pause_writing()
        for position, letter in enumerate("bcd", 1):
            send(position, letter)
            await asyncio.sleep(0)
        assert generation._updates
        connection.resume_writing()
        send(4, "e")
        await read_until(lines, "bcde")


async def test_a_bug_in_one_answer_is_its_last_event_and_ends_only_that_one(start_router, monkeypatch, caplog):
    under_test = await start_router()
    worker = await under_test.add("aggregated")
    worker.script.is_silent = True
    async with begun_stream(under_test, worker) as (lines, send, _):
        monkeypatch.setattr("router.openai.postprocess.ChoiceText.push_plain", None)
        send(1, "b")
        (failure,) = [line async for line in lines if line]
    assert json.loads(failure.removeprefix("data: "))["error"]["code"] == "internal_error"
    (record,) = [record for record in caplog.records if record.name == "router.http.streaming"]
    assert record.exc_info[0] is TypeError
    assert under_test.metric("kvferry_request_failure_total", code="internal_error") == 1
    await worker.aborts((await worker.generated()).request_id)
    assert under_test.router.gateway.is_alive


@contextlib.asynccontextmanager
async def begun_stream(under_test, worker):
    """Start a stream with the token "a"; yield its lines, a function that makes the router handle a token, and its updates."""
    gateway = under_test.router.gateway
    core = gateway.core

    async def send_first() -> str:
        request_id = (await worker.generated()).request_id
        send(request_id, 0, "a")
        return request_id

    def send(request_id: str, position: int, letter: str) -> None:
        (member,) = core.membership.workers
        item = Tokens(request_id, 0, position, tuple(under_test.tokenizer.encode(letter)))
        gateway._perform(core.on_message(member.peer, [item], gateway.now))

    beginning = asyncio.create_task(send_first())
    async with (
        under_test.client() as client,
        client.stream("POST", "/v1/completions", json={"prompt": "p", "stream": True, "max_tokens": 9}) as response,
    ):
        request_id, lines = await beginning, response.aiter_lines()
        await read_until(lines, "a")
        generation = gateway._listeners[request_id].generation
        await under_test.until(lambda: generation._taker is not None)
        yield lines, functools.partial(send, request_id), generation


# ---- failures ----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_failure_in_mid_stream_is_an_event_and_no_clean_end(start_router):
    under_test = await start_router()
    _, decode = await under_test.pair(pause_after=3)
    async with (
        under_test.client() as client,
        client.stream("POST", "/v1/completions", json={"prompt": "p", "stream": True, "max_tokens": 9}) as response,
    ):
        lines = response.aiter_lines()
        await read_until(lines, "hel")
        failure = ErrorInfo(code="digest", message="corrupt block", http_status=502)
        await decode.send(RequestFailed(request_id=(await decode.generated()).request_id, error=failure))
        rest = [line async for line in lines if line]
    assert len(rest) == 1
    assert '"code":"digest"' in rest[0]
    assert '"type":"server_error"' in rest[0]


async def test_a_stream_for_which_no_thread_can_be_started_ends_as_overloaded(start_router, monkeypatch, caplog):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    under_test = await start_router()
    script = under_test.script(pause_after=1)
    await under_test.add("aggregated", script=script)
    body = {"prompt": "p", "stream": True, "echo": True, "logprobs": 0}
    async with under_test.client() as client, client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.aiter_lines()
        assert (await anext(lines)).startswith("data: ")
        monkeypatch.setattr(under_test.router.endpoints._pool, "_threads", ThreadPoolExecutor(1))
        monkeypatch.setattr("threading.Thread.start", refuse)
        script.resume.set()
        *_, failure = [line async for line in lines if line]
    assert json.loads(failure.removeprefix("data: "))["error"]["code"] == "overloaded"
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    assert under_test.metric("kvferry_request_failure_total", code="overloaded") == 1


@pytest.mark.slow
async def test_tokens_that_come_with_a_failure_are_shown_before_it(start_router, sse_events):
    under_test = await start_router()
    worker = await under_test.add("aggregated")
    worker.script.is_silent = True
    async with under_test.client() as client:
        call = asyncio.create_task(client.post("/v1/completions", json={"prompt": "p", "stream": True, "max_tokens": 9}))
        request_id = (await worker.generated()).request_id
        wrong = Tokens(request_id, 7, 1, (72,))  # there is no such choice
        generation = under_test.router.gateway._listeners[request_id].generation
        (member,) = under_test.router.gateway.core.membership.workers
        for item in (Tokens(request_id, 0, 0, (71,)), wrong):  # both before the handler gets its turn
            under_test.router.gateway._perform(under_test.router.gateway.core.on_message(member.peer, [item], 0.0))
        assert len(generation._updates) == 2
        events = sse_events((await call).text)
    assert [("choices" in event, "error" in event) for event in events] == [(True, False), (False, True)]


# ---- clients that leave ------------------------------------------------------------------------------------------------------


async def leave_during(under_test, reached, path: str, **body) -> None:
    """Start a request, wait until ``reached()`` is true, and drop the connection."""
    async with under_test.client() as client:
        call = asyncio.create_task(client.post(path, json=body))
        await reached()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)


@pytest.mark.slow
@pytest.mark.parametrize("is_stream", [False, True])
async def test_leaving_before_the_first_token_aborts_prefill(start_router, is_stream):
    under_test = await start_router()
    prefill, decode = await under_test.pair(is_silent=True)
    await leave_during(under_test, prefill.generated, "/v1/completions", prompt="p", stream=is_stream)
    await prefill.aborts((await prefill.generated()).request_id)
    await under_test.until(lambda: under_test.router.gateway.num_requests == 0)
    assert decode.messages(Generate) == decode.messages(Abort) == []
    await under_test.until(lambda: under_test.metric("kvferry_request_failure_total", code="cancelled") == 1)


@pytest.mark.slow
@pytest.mark.parametrize("is_stream", [False, True])
async def test_leaving_during_the_handoff_aborts_decode_and_releases_the_lease(start_router, is_stream):
    under_test = await start_router()
    prefill, decode = await under_test.pair(pause_after=1)
    await leave_during(under_test, decode.generated, "/v1/completions", prompt="p", stream=is_stream)
    request_id = (await decode.generated()).request_id
    await decode.aborts(request_id)
    await prefill.wait_for(lambda message: message == Release(transfer_ids=(f"transfer-{request_id}",)))
    await under_test.until(lambda: under_test.router.gateway.num_requests == 0)


@pytest.mark.slow
async def test_leaving_in_mid_stream_aborts_decode(start_router):
    under_test = await start_router()
    _, decode = await under_test.pair(pause_after=3)
    async with (
        under_test.client() as client,
        client.stream("POST", "/v1/chat/completions", json={"messages": USER, "stream": True}) as response,
    ):
        lines = response.aiter_lines()
        await read_until(lines, "hel")
    await decode.aborts((await decode.generated()).request_id)
    await under_test.until(lambda: under_test.router.gateway.num_requests == 0)


@pytest.mark.slow
async def test_leaving_aborts_every_prompt_of_the_request(start_router):
    under_test = await start_router()
    prefill, _ = await under_test.pair(is_silent=True)

    async def both_started():
        await prefill.wait_for(lambda message: len(prefill.messages(Generate)) == 2)

    await leave_during(under_test, both_started, "/v1/completions", prompt=["a", "b"])
    for message in prefill.messages(Generate):
        await prefill.aborts(message.request_id)


@pytest.mark.slow
async def test_one_failing_prompt_stops_the_others(start_router):
    under_test = await start_router()
    prefill, _ = await under_test.pair(is_silent=True)
    async with under_test.client() as client:
        call = asyncio.create_task(client.post("/v1/completions", json={"prompt": ["a", "b"]}))
        await prefill.wait_for(lambda message: len(prefill.messages(Generate)) == 2)
        first, second = prefill.messages(Generate)
        await prefill.send(RequestFailed(request_id=first.request_id, error=ErrorInfo(code="digest", message="bad")))
        assert (await call).status_code == 500
    await prefill.aborts(second.request_id)


@pytest.mark.slow
async def test_a_client_that_stays_gets_its_answer_while_others_leave(start_router):
    under_test = await start_router()
    _, decode = await under_test.pair(pause_after=1)
    async with under_test.client() as client:
        staying = asyncio.create_task(client.post("/v1/completions", json={"prompt": "stay"}))
        await decode.generated()
        async with httpx.AsyncClient(base_url=under_test.url) as other:
            leaving = asyncio.create_task(other.post("/v1/completions", json={"prompt": "leave"}))
            await decode.wait_for(lambda message: len(decode.messages(Generate)) == 2)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
        await decode.aborts(decode.messages(Generate)[1].request_id)
        decode.script.resume.set()
        assert (await staying).json()["choices"][0]["text"] == "hello world"


@pytest.mark.slow
async def test_many_streams_at_once_each_get_their_own_text(start_router, sse_events):
    under_test = await start_router()
    await under_test.pair(tokens_per_frame=2)
    await under_test.pair(tokens_per_frame=3)

    async def one(client, number: int) -> str:
        body = {"prompt": "p", "stream": True, "max_tokens": 1 + number % 12}
        events = sse_events((await client.post("/v1/completions", json=body)).text)[:-1]
        return "".join(event["choices"][0]["text"] for event in events)

    async with httpx.AsyncClient(base_url=under_test.url, limits=httpx.Limits(max_connections=64), timeout=20) as client:
        texts = await asyncio.gather(*[one(client, number) for number in range(64)])
    assert texts == ["hello world"[: 1 + number % 12] for number in range(64)]
    assert under_test.router.gateway.num_requests == 0
