"""Requests that only the workers' engines can render or read: what the router asks of them, and what the client gets."""

import asyncio
import json

import pytest

from core.testing.clock import FakeClock
from core.tracing import TraceContext
from core.wire.engine_calls import EngineCall
from core.wire.messages import ErrorInfo, Generate

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
COUNT = f"{MESSAGES}/count_tokens"
RENDER, SPLIT = f"{CHAT}/render", f"{CHAT}/derender"
EOS = 256
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
CALL = {"index": 0, "id": "1", "function": {"name": "f", "arguments": "{}"}}
GONE = ErrorInfo(code="engine_dead", message="gone", http_status=503, retryable=True)
PARAMS = {"do_remote_prefill": True, "kvferry": "x"}


def rendered(body):
    return 200, {"token_ids": [5, 6, 7], "sampling_params": {"structured_outputs": {"regex": "h.*"}, "n": 3, "stop": ["no"]}}


def split(body):
    """Return all text as the arguments of one call, part by part."""
    if not body.get("stream"):
        found = body["generate_response"]["choices"]
        message = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
        }
        return 200, {"choices": [{"index": each["index"], "message": message, "finish_reason": "stop"} for each in found]}
    (choice,) = body["generate_chunk"]["choices"]
    state = body["stream_state"] or {"seen": []}
    state = {"seen": state["seen"] + choice["token_ids"]}
    delta = {"tool_calls": [{"index": 0, "function": {"arguments": str(len(state["seen"]))}}]}
    chunk = {"choices": [{"index": choice["index"], "delta": delta, "finish_reason": choice["finish_reason"]}]}
    return 200, {"chunk": chunk, "stream_state": state}


@pytest.fixture
async def engines(start_router):
    """A router with a prefill and a decode worker whose engines have an API."""
    under_test = await start_router(has_http=False)
    calls = {RENDER: rendered, SPLIT: split, f"{COMPLETIONS}/render": lambda body: (200, [rendered(body)[1]] * 2)}
    for role in ("prefill", "decode"):
        await under_test.add(role, takes_calls=True, script=under_test.script(calls=dict(calls)))
    return under_test


def chat(**fields):
    return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20} | fields


def calls_of(under_test, path):
    messages = [message for worker in under_test.workers for message in worker.messages(EngineCall)]
    return [json.loads(message.body) for message in messages if message.path == path]


async def ask(under_test, body, path=CHAT, status=200):
    async with under_test.client() as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json() if "json" in answer.headers["content-type"] else answer.text


async def test_a_rendered_prompt_is_served_as_token_ids_by_both_workers(engines):
    answer = await ask(engines, chat(response_format={"type": "json_object"}, model=None))
    assert answer["choices"][0]["message"]["content"] == "hello world"
    assert answer["usage"]["prompt_tokens"] == 3
    (body,) = calls_of(engines, RENDER)
    assert (body["response_format"], body["stream"]) == ({"type": "json_object"}, False)
    for worker in engines.workers:
        (message,) = worker.messages(Generate)
        assert message.prompt_token_ids == (5, 6, 7)
        assert json.loads(message.engine_request)["sampling_params"] == {"structured_outputs": {"regex": "h.*"}, "n": 3}


async def test_an_adapter_is_named_to_the_engine_and_in_the_request(engines):
    await ask(engines, chat(model="adapter"))
    (body,) = calls_of(engines, RENDER)
    assert body["model"] == "adapter"
    (message,) = engines.workers[0].messages(Generate)
    assert json.loads(message.engine_request)["model"] == "adapter"


async def test_tool_calls_are_split_by_the_engine_and_the_router_counts(engines):
    answer = await ask(engines, chat(tools=TOOLS, n=2))
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"tool_calls"}
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "f"
    assert answer["usage"]["completion_tokens"] == 2 * (len(engines.tokenizer.encode("hello world")) + 1)
    (body,) = calls_of(engines, SPLIT)
    first = body["generate_response"]["choices"][0]
    assert first["token_ids"] == list(engines.tokenizer.encode("hello world"))  # without the end of the text
    assert (body["prompt_token_ids"], body["chat_request"]["tools"]) == ([5, 6, 7], TOOLS)


@pytest.mark.parametrize(
    ("fields", "has_logprobs"),
    [({}, True), ({"include_reasoning": None}, True), ({"include_reasoning": False}, False)],
)
async def test_logprobs_of_reasoning_that_the_client_does_not_want_are_no_way_to_read_it(engines, fields, has_logprobs):
    await ask(engines, chat(tools=TOOLS, logprobs=True, **fields))
    (body,) = calls_of(engines, SPLIT)
    (choice,) = body["generate_response"]["choices"]
    assert ("logprobs" in choice) == has_logprobs


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
@pytest.mark.parametrize("timeout_s", [2e9, 1e20, 1e306])
async def test_the_time_of_a_client_is_bounded_for_the_split_as_well(engines, timeout_s, fields):
    await ask(engines, chat(tools=TOOLS, timeout_s=timeout_s, **fields))
    limits = [message.deadline_ms for worker in engines.workers for message in worker.messages(EngineCall)]
    assert max(limits) <= 600_000
    assert all(worker.messages(EngineCall) or worker.messages(Generate) for worker in engines.workers)


async def test_a_stream_of_tool_calls_carries_the_engines_state_from_part_to_part(engines, sse_events):
    text = await ask(engines, chat(tools=TOOLS, stream=True, stream_options={"include_usage": True}))
    *chunks, usage, end = sse_events(text)
    counts = [int(chunk["choices"][0]["delta"]["tool_calls"][0]["function"]["arguments"]) for chunk in chunks]
    assert counts == sorted(set(counts))
    assert counts[-1] == len(engines.tokenizer.encode("hello world"))
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert (usage["usage"]["prompt_tokens"], usage["choices"], end) == (3, [], "[DONE]")
    (body,) = calls_of(engines, RENDER)
    assert "stream_options" not in body, "an engine refuses them without stream"


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
async def test_a_stop_token_of_the_client_is_no_part_of_what_is_split(engines, fields):
    for worker in engines.workers:
        worker.script.stop_reason = EOS
    await ask(engines, chat(tools=TOOLS, stop_token_ids=[EOS], **fields))
    outputs = [body.get("generate_response") or body["generate_chunk"] for body in calls_of(engines, SPLIT)]
    seen = [choice for output in outputs for choice in output["choices"]]
    assert seen[-1]["stop_reason"] == EOS
    assert [token for choice in seen for token in choice["token_ids"]] == list(engines.tokenizer.encode("hello world"))


@pytest.mark.parametrize(("fields", "num_calls"), [({}, 2), ({"parallel_tool_calls": False}, 1)])
async def test_a_stream_has_one_call_only_if_they_may_not_be_parallel(engines, sse_events, fields, num_calls):
    def split_in_two(body):
        (choice,) = body["generate_chunk"]["choices"]
        calls = [{"index": index, "function": {"name": "f", "arguments": "{}"}} for index in (0, 1)]
        chunk = {"choices": [{"index": 0, "delta": {"tool_calls": calls}, "finish_reason": choice["finish_reason"]}]}
        return 200, {"chunk": chunk, "stream_state": None}

    for worker in engines.workers:
        worker.script.calls[SPLIT] = split_in_two
    *chunks, _ = sse_events(await ask(engines, chat(tools=TOOLS, stream=True, **fields)))
    assert {call["index"] for chunk in chunks for call in chunk["choices"][0]["delta"]["tool_calls"]} == set(range(num_calls))


async def test_calls_that_max_tokens_has_cut_end_with_length_whole_and_streamed(engines, sse_events):
    def split_as_vllm(body):
        status, answer = split(body)
        if body.get("stream"):
            (choice,) = answer["chunk"]["choices"]
            choice["finish_reason"] = choice["finish_reason"] and "tool_calls"
        else:
            answer["choices"][0]["finish_reason"] = body["generate_response"]["choices"][0]["finish_reason"]
        return status, answer

    for worker in engines.workers:
        worker.script.calls[SPLIT] = split_as_vllm
    for max_tokens, reason in ((3, "length"), (20, "tool_calls")):
        fields = {"tools": TOOLS, "max_tokens": max_tokens}
        whole = await ask(engines, chat(**fields))
        *_, last, _ = sse_events(await ask(engines, chat(**fields, stream=True)))
        assert [answer["choices"][0]["finish_reason"] for answer in (whole, last)] == [reason, reason]


@pytest.mark.parametrize(
    ("delta", "fields", "reason"),
    [
        (None, {}, "stop"),
        ({}, {}, "stop"),
        ({"content": "x"}, {}, "stop"),
        ({"tool_calls": [CALL]}, {}, "tool_calls"),
        ({"tool_calls": [CALL]}, {"max_tokens": 3}, "length"),
        ({"tool_calls": [CALL]}, {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "stop"),
    ],
)
async def test_a_stream_ends_with_its_reason_also_if_the_engine_says_none(engines, sse_events, delta, fields, reason):
    choices = [] if delta is None else [{"index": 0, "delta": delta}]
    for worker in engines.workers:
        worker.script.calls[SPLIT] = lambda body: (200, {"chunk": {"choices": choices}, "stream_state": None})
    *_, last, end = sse_events(await asyncio.wait_for(ask(engines, chat(tools=TOOLS, stream=True, **fields)), 20))
    assert (last["choices"], end) == ([{"index": 0, "delta": delta or {}, "finish_reason": reason}], "[DONE]")


async def test_a_stream_whose_last_part_has_no_call_ends_by_the_calls_before(engines, sse_events):
    def split_first(body):
        delta = {} if body["stream_state"] else {"tool_calls": [CALL]}
        return 200, {"chunk": {"choices": [{"index": 0, "delta": delta}]}, "stream_state": {"has_call": True}}

    for worker in engines.workers:
        worker.script.calls[SPLIT] = split_first
    *_, last, _ = sse_events(await ask(engines, chat(tools=TOOLS, stream=True)))
    assert last["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_list_of_prompts_is_rendered_at_once(engines):
    body = {"prompt": ["a", "b"], "structured_outputs": {"regex": "h.*"}, "max_tokens": 20}
    answer = await ask(engines, body, COMPLETIONS)
    assert [choice["text"] for choice in answer["choices"]] == ["hello world", "hello world"]


@pytest.mark.parametrize(("num_prompts", "n", "param"), [(129, 1, "prompt"), (128, 9, "n")])
async def test_too_many_prompts_or_choices_are_refused_before_they_are_rendered(engines, num_prompts, n, param):
    body = {"prompt": ["a"] * num_prompts, "n": n, "model": "adapter"}
    assert (await ask(engines, body, COMPLETIONS, status=400))["error"]["param"] == param
    assert calls_of(engines, f"{COMPLETIONS}/render") == []


@pytest.mark.parametrize(("found", "param"), [([[5]] * 129, "prompt"), ([[5]] * 9, "n"), ([[5] * (1 << 19)] * 3, "prompt")])
async def test_what_an_engine_has_rendered_is_counted_as_well(engines, found, param):
    for worker in engines.workers:
        worker.script.calls[f"{COMPLETIONS}/render"] = lambda body: (200, [{"token_ids": token_ids} for token_ids in found])
    error = (await ask(engines, {"prompt": "a", "n": 128, "model": "adapter"}, COMPLETIONS, status=400))["error"]
    assert (error["code"], error["param"]) == ("invalid_request", param)


async def test_the_memory_of_rendered_tokens_counts_with_the_bodies(start_router):
    served = await start_router(has_http=False, max_upload_bytes=1 << 16, max_body_bytes=1 << 16)
    calls = {f"{COMPLETIONS}/render": lambda body: (200, [{"token_ids": [5] * 4000}])}
    await served.add("aggregated", takes_calls=True, max_model_len=8192, script=served.script(calls=calls))
    error = (await ask(served, {"prompt": "a", "model": "adapter"}, COMPLETIONS, status=400))["error"]
    assert error["code"] == "invalid_request"  # no other try would succeed
    assert "max_upload_bytes" in error["message"]


async def test_the_echo_of_a_rendered_prompt_is_its_text(engines):
    token_ids = list(engines.tokenizer.encode("héé"))
    for worker in engines.workers:
        worker.script.calls[f"{COMPLETIONS}/render"] = lambda body: (200, [{"token_ids": token_ids}])
    body = {"prompt": "héé", "structured_outputs": {"regex": "h.*"}, "max_tokens": 2, "echo": True, "logprobs": 0}
    (choice,) = (await ask(engines, body, COMPLETIONS))["choices"]
    assert choice["text"] == "hééhe"
    assert choice["logprobs"]["text_offset"][-2:] == [3, 4]


@pytest.mark.parametrize("status", [400, 404])
async def test_what_the_engine_refuses_the_client_hears(engines, status):
    refusal = {"error": {"message": "no such type", "param": "response_format"}}
    for worker in engines.workers:
        worker.script.calls[RENDER] = lambda body: (status, refusal)
    answer = await ask(engines, chat(response_format={"type": "json_object"}), status=status)
    assert (answer["error"]["message"], answer["error"]["param"]) == ("vLLM: no such type", "response_format")
    assert len(calls_of(engines, RENDER)) == 1


@pytest.mark.parametrize("failure", [GONE, (500, {}), (401, {}), (403, {}), (200, {"token_ids": "?"})])
async def test_another_engine_renders_if_one_fails(engines, failure):
    engines.workers[0].script.calls[RENDER] = lambda body: failure
    engines.workers[0].script.calls[SPLIT] = lambda body: failure
    for _ in range(2):
        await ask(engines, chat(tools=TOOLS))


@pytest.mark.parametrize(("path", "answer"), [(RENDER, []), (SPLIT, {}), (SPLIT, {"choices": [{"index": 0}]})])
async def test_an_answer_that_cannot_be_read_is_an_error_of_the_engine(engines, path, answer):
    for worker in engines.workers:
        worker.script.calls[path] = lambda body: (200, answer)
    error = (await ask(engines, chat(tools=TOOLS), status=502))["error"]
    assert error["code"] == "engine_error"


async def test_an_agents_wrong_key_is_no_fault_of_the_client(engines):
    for worker in engines.workers:
        worker.script.calls[RENDER] = worker.script.calls[CHAT] = lambda body: (401, {"error": {"message": "Unauthorized"}})
    for fields in ({"tools": TOOLS}, {"use_beam_search": True}):
        error = (await ask(engines, chat(**fields), status=502))["error"]
        assert "agent.api_key_file" in error["message"]


async def test_no_engine_is_one_error(engines):
    for worker in engines.workers:
        worker.sends_heartbeats = False  # which would open it again
        worker.script.calls[RENDER] = lambda body: GONE
    answer = await ask(engines, chat(tools=TOOLS), status=503)
    assert answer["error"]["code"] == "no_worker"  # one after the other has said that it is dead


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat(model="adapter")),
        (CHAT, chat(tools=TOOLS)),
        (COMPLETIONS, {"prompt": "x", "model": "adapter"}),
        (COMPLETIONS, {"prompt": "x", "bad_words": ["y"]}),
        ("/v1/responses", {"input": "hi", "model": "adapter"}),
    ],
)
async def test_without_any_worker_what_an_engine_may_serve_is_worth_another_try(start_router, path, body):
    served = await start_router(has_http=False)
    assert (await ask(served, body, path, status=503))["error"]["code"] == "no_worker"


@pytest.fixture
async def just_paused(start_router, monkeypatch):
    """A router without workers that was paused until now, its clock, and a list with an entry for each wait for a route."""
    clock, waits = FakeClock(), []
    served = await start_router(has_http=False, clock=clock)
    gateway = served.router.gateway
    wait_for_route = gateway.wait_for_route

    async def noted():
        waits.append(1)
        await wait_for_route()

    monkeypatch.setattr(gateway, "wait_for_route", noted)
    await served.until(lambda: gateway.core.membership.pauses._last_tick is not None)
    clock.advance(30.0)
    return served, clock, waits


@pytest.mark.parametrize(("takes_calls", "status", "num_calls"), [(True, 200, 1), (False, 404, 0)])
async def test_after_a_pause_a_body_waits_for_workers(just_paused, takes_calls, status, num_calls):
    served, _, waits = just_paused
    asked = asyncio.create_task(ask(served, chat(model="adapter"), status=status))
    await served.until(lambda: waits)
    await served.add("aggregated", takes_calls=takes_calls, script=served.script(calls={RENDER: rendered}))
    await asked
    assert len(calls_of(served, RENDER)) == num_calls


@pytest.mark.parametrize(
    ("path", "fields", "number"),
    [(COUNT, {}, 1), (CHAT, {}, 1), (CHAT, {}, 2), (CHAT, {"stream": True}, 2)],
    ids=["count", "render", "split", "split a part"],
)
async def test_a_call_whose_engines_are_found_cut_off_after_a_pause_waits_for_them(just_paused, path, fields, number):
    served, _, _ = just_paused
    calls = {RENDER: rendered, SPLIT: split, COUNT: lambda body: (200, {"input_tokens": 7})}
    worker = await served.add("aggregated", takes_calls=True, script=served.script(calls=calls))
    api, chosen, is_cut_off = served.router.gateway.engine_api, [], asyncio.Event()
    choose = api.choose

    def cut_off_and_choose(*args):
        chosen.append(args)
        if len(chosen) == number:
            served.find_cut_off()
            is_cut_off.set()
        return choose(*args)

    api.choose = cut_off_and_choose
    asked = asyncio.create_task(ask(served, chat(tools=TOOLS) | fields, path))
    await is_cut_off.wait()
    await served.reconnect(worker)
    answer = await asked
    assert "error" not in answer, answer


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, "/v1/responses"])
async def test_the_wait_for_workers_after_a_pause_ends_at_the_clients_deadline(just_paused, path):
    served, clock, waits = just_paused
    body = {"input": "hi"} if path == "/v1/responses" else chat(prompt="x")
    asked = asyncio.create_task(ask(served, body | {"timeout_s": 0.2}, path, status=504))
    await served.until(lambda: waits)
    clock.advance(0.3)
    await asyncio.wait_for(asked, 20)
    assert served.router.gateway.core.is_route_expected(clock.now())  # the router has not settled


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"timeout_s": "x"}'])
async def test_a_body_that_cannot_be_read_does_not_wait_for_workers_after_a_pause(just_paused, path, content):
    served, _, waits = just_paused
    async with served.client() as client:
        answer = await asyncio.wait_for(client.post(path, content=content), 20)
    assert (answer.status_code, waits) == (400, [])


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
async def test_workers_without_an_api_leave_everything_to_the_router(served, path):
    answer = await ask(served, {"model": "x", "max_tokens": 5}, path, status=404)
    assert f"{path} is served by vLLM engines only" in answer["error"]["message"]
    assert calls_of(served, RENDER) == []


async def test_without_any_worker_anthropics_form_is_worth_another_try(start_router):
    served = await start_router(has_http=False)
    answer = await ask(served, {"model": "x", "max_tokens": 5}, MESSAGES, status=503)
    assert answer["type"] == "error"


async def test_tokens_of_anthropics_form_are_counted_by_one_engine(engines):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    for worker in engines.workers:
        worker.script.calls[COUNT] = lambda body: (200, {"input_tokens": 7})
    assert await ask(engines, body, COUNT) == {"input_tokens": 7}
    assert calls_of(engines, COUNT) == [body]


async def test_another_engine_counts_if_one_fails_and_what_it_refuses_the_client_hears(engines):
    engines.workers[0].script.calls[COUNT] = lambda body: GONE
    engines.workers[1].script.calls[COUNT] = lambda body: (400, {"error": {"message": "no messages"}})
    for _ in range(2):
        answer = await ask(engines, {"model": "tiny"}, COUNT, status=400)
        assert answer == {"type": "error", "error": {"type": "invalid_request_error", "message": "vLLM: no messages"}}


@pytest.mark.parametrize(("method", "path", "status"), [("POST", f"{MESSAGES}/batches", 404), ("GET", f"{MESSAGES}/", 405)])
async def test_errors_of_all_paths_below_messages_have_anthropics_shape(engines, method, path, status):
    async with engines.client() as client:
        answer = await client.request(method, path)
    assert (answer.status_code, answer.json()["type"]) == (status, "error")


@pytest.mark.parametrize("content", [b"{", b"[]", b"", b'{"model":"\xff"}', b'{"a":1e999}'])
async def test_a_body_in_anthropics_form_that_is_no_object_is_a_400(engines, content):
    async with engines.client() as client:
        answer = await client.post(MESSAGES, content=content)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert any(word in answer.json()["error"]["message"] for word in ("JSON", "out of range"))


@pytest.mark.parametrize("place", ["on_reply", "give_up"])
async def test_a_bug_in_a_call_s_step_is_its_answer(engines, monkeypatch, place):
    def boom(*args):
        raise RuntimeError("bug")

    for worker in engines.workers:
        worker.script.calls[MESSAGES] = lambda body: (200, {"content": []})
    for name in {"on_reply", place}:
        monkeypatch.setattr(engines.router.gateway.core.calls, name, boom)
    answer = await ask(engines, {"model": "tiny", "max_tokens": 5}, MESSAGES, status=500)
    assert answer["error"]["type"] == "api_error"


async def test_errors_of_anthropics_endpoint_have_its_shape(engines):
    for worker in engines.workers:
        worker.script.calls[MESSAGES] = lambda body: (500, {"error": {"message": "it broke"}})
    answer = await ask(engines, {"model": "tiny", "max_tokens": 5}, MESSAGES, status=500)
    assert answer == {"type": "error", "error": {"type": "api_error", "message": "vLLM: it broke"}}


async def test_a_stream_of_anthropics_endpoint_that_breaks_ends_with_its_error_event(engines):
    for worker in engines.workers:
        worker.script.calls[MESSAGES] = lambda body: (200, "event: ping\ndata: 1\n\n", GONE)
    text = await ask(engines, {"model": "tiny", "max_tokens": 5, "stream": True}, MESSAGES)
    _, failure, rest = text.split("\n\n")
    name, content = failure.split("\n")
    assert (name, rest) == ("event: error", "")
    assert json.loads(content[6:]) == {"type": "error", "error": {"type": "api_error", "message": "gone"}}


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        (MESSAGES, {"x-api-key": "secret"}, 200),
        (MESSAGES, {"authorization": "Bearer secret"}, 200),
        (MESSAGES, {"authorization": "Bearer wrong", "x-api-key": "secret"}, 401),
        (MESSAGES, {"x-api-key": "wrong"}, 401),
        (f"{MESSAGES}/", {"x-api-key": "wrong"}, 401),
        (COUNT, {"x-api-key": "secret"}, 200),
        (COUNT, {}, 401),
        (CHAT, {"x-api-key": "secret"}, 401),
    ],
)
async def test_anthropics_header_has_the_key_at_its_endpoint_only(start_router, path, headers, status):
    served = await start_router(has_http=False, api_key="secret")
    calls = dict.fromkeys((MESSAGES, COUNT), lambda body: (200, {"type": "message"}))
    await served.add("aggregated", takes_calls=True, script=served.script(calls=calls))
    async with served.client() as client:
        answer = await client.post(path, json=chat(), headers=headers)
    assert answer.status_code == status
    if status == 401:
        assert answer.json()["error"]["type"] == "authentication_error"


async def test_a_key_has_one_bound_whichever_header_it_comes_in(start_router):
    served = await start_router(has_http=False, api_key="busy", max_requests_per_key=1)
    worker = await served.add("aggregated", takes_calls=True, script=served.script(is_silent=True))
    async with served.client() as client:
        first = asyncio.create_task(client.post(MESSAGES, json=chat(), headers={"x-api-key": "busy"}))
        await served.until(lambda: worker.messages(EngineCall))
        second = await client.post(CHAT, json=chat(), headers={"authorization": "Bearer busy"})
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
    assert second.status_code == 429


# ---- whole bodies --------------------------------------------------------------------------------------------------------


def whole(engines, prefill, decode):
    engines.workers[0].script.calls[CHAT] = prefill
    engines.workers[1].script.calls[CHAT] = decode


def ends_of(under_test):
    """Return how many requests have ended in which way."""
    metrics = under_test.router.endpoints.metrics.registry.collect()
    samples = [sample for metric in metrics for sample in metric.samples if sample.value]
    names = {"kvferry_request_success_total": "finished_reason", "kvferry_request_failure_total": "code"}
    return {sample.labels[names[sample.name]]: sample.value for sample in samples if sample.name in names}


async def test_a_whole_body_goes_to_both_engines_with_the_place_of_the_blocks(engines):
    whole(engines, lambda body: (200, {"kv_transfer_params": PARAMS}), lambda body: (200, {"id": "theirs"}))
    assert await ask(engines, chat(use_beam_search=True, n=2)) == {"id": "theirs"}
    prompt, answer = calls_of(engines, CHAT)
    assert (prompt["max_tokens"], prompt["stream"], prompt["kv_transfer_params"]["do_remote_decode"]) == (1, False, True)
    assert "n" not in prompt
    assert (answer["max_tokens"], answer["n"], answer["kv_transfer_params"]) == (20, 2, PARAMS)


async def test_both_legs_of_a_whole_body_continue_the_clients_trace(engines):
    whole(engines, lambda body: (200, {}), lambda body: (200, {}))
    trace = TraceContext(traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", tracestate="a=1")
    async with engines.client() as client:
        await client.post(CHAT, json=chat(use_beam_search=True), headers=trace.headers)
    assert [worker.messages(EngineCall)[0].trace for worker in engines.workers] == [trace, trace]


@pytest.mark.parametrize(
    ("answer", "status", "ends"),
    [
        ((200, {"ok": 1}), 200, {"passed_on": 1}),
        ((200, "data: 1\n\n", "data: 2\n\n"), 200, {"passed_on": 1}),
        ((200, "data: 1\n\n", GONE), 200, {"engine_dead": 1}),
        ((400, {"error": {"message": "no"}}), 400, {"invalid_request": 1}),
    ],
    ids=["whole", "stream", "broken stream", "refused"],
)
async def test_each_whole_body_is_counted_once_by_how_it_ended(engines, answer, status, ends):
    whole(engines, lambda body: (200, {}), lambda body: answer)
    await ask(engines, chat(use_beam_search=True), status=status)
    assert ends_of(engines) == ends


async def test_a_whole_stream_is_passed_on_as_it_comes(engines):
    whole(engines, lambda body: (200, {"kv_transfer_params": PARAMS}), lambda body: (200, "data: 1\n\n", "data: 2\n\n"))
    assert await ask(engines, chat(use_beam_search=True, stream=True)) == "data: 1\n\ndata: 2\n\n"


async def test_without_a_prefill_engine_the_decode_engine_computes_all(engines):
    whole(engines, lambda body: GONE, lambda body: (200, {"got": body.get("kv_transfer_params")}))
    assert await ask(engines, chat(use_beam_search=True)) == {"got": None}


async def test_another_decode_engine_is_tried_before_the_first_byte(engines):
    whole(engines, lambda body: (200, {"kv_transfer_params": PARAMS}), lambda body: GONE)
    second = await engines.add("decode", takes_calls=True, script=engines.script(calls={CHAT: lambda body: (200, {"ok": 1})}))
    for _ in range(3):
        assert await ask(engines, chat(use_beam_search=True)) == {"ok": 1}
    assert second.messages(EngineCall)


async def test_a_stream_that_breaks_ends_with_an_error_and_no_end_mark(engines):
    whole(engines, lambda body: (200, {}), lambda body: (200, "data: 1\n\n", GONE))
    text = await ask(engines, chat(use_beam_search=True, stream=True))
    first, failure, rest = text.split("\n\n")
    assert (first, rest) == ("data: 1", "")
    assert json.loads(failure[6:])["error"]["code"] == "engine_dead"


async def test_a_client_that_leaves_ends_the_call(start_router):
    served = await start_router()
    calls = {CHAT: lambda body: (200, "data: 1\n\n", None)}
    worker = await served.add("aggregated", takes_calls=True, script=served.script(calls=calls))
    async with served.client() as client, asyncio.timeout(20):
        async with client.stream("POST", CHAT, json=chat(use_beam_search=True, stream=True)) as answer:
            assert await anext(answer.aiter_bytes()) == b"data: 1\n\n"
        (call,) = worker.messages(EngineCall)
        await worker.aborts(call.request_id)
    await served.until(lambda: not served.router.gateway.core.calls)
    await served.until(lambda: ends_of(served) == {"cancelled": 1})


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"use_beam_search": True}, {"tools": TOOLS}], ids=["whole", "rendered"])
async def test_a_client_that_leaves_before_the_engine_answers_ends_the_call(start_router, fields):
    served = await start_router()
    calls = {path: lambda body: (200, None) for path in (CHAT, RENDER)}
    worker = await served.add("aggregated", takes_calls=True, script=served.script(calls=calls))
    async with served.client() as client, asyncio.timeout(20):
        asking = asyncio.create_task(client.post(CHAT, json=chat(**fields)))
        await served.until(lambda: worker.messages(EngineCall))
        asking.cancel()
        (call,) = worker.messages(EngineCall)
        await worker.aborts(call.request_id)
    await served.until(lambda: not served.router.gateway.core.calls)


async def test_what_all_engines_say_of_their_failure_the_client_hears(engines):
    broken = (500, {"error": {"message": "it broke"}})
    whole(engines, lambda body: (200, {}), lambda body: broken)
    error = (await ask(engines, chat(use_beam_search=True), status=500))["error"]
    assert (error["code"], error["message"]) == ("engine_error", "vLLM: it broke")


async def test_a_prefill_engine_that_fails_is_not_asked_for_the_next_try(engines):
    whole(engines, lambda body: (500, {}), lambda body: (500, {}))
    calls = {CHAT: lambda body: (200, {"kv_transfer_params": PARAMS})}
    second, _ = [
        await engines.add(role, takes_calls=True, script=engines.script(calls=calls)) for role in ("prefill", "decode")
    ]
    for _ in range(4):
        await ask(engines, chat(use_beam_search=True))
        assert len(engines.workers[0].messages(EngineCall)) <= len(second.messages(EngineCall))
    assert engines.workers[0].messages(EngineCall)


@pytest.mark.slow
async def test_a_whole_body_ends_at_the_time_that_its_client_gives_it(engines):
    whole(engines, lambda body: (200, None), lambda body: (200, None))
    error = (await ask(engines, chat(use_beam_search=True, timeout_s=0.2), status=504))["error"]
    assert error["code"] == "deadline_exceeded"
    error = (await ask(engines, chat(use_beam_search=True, timeout_s=-1), status=400))["error"]
    assert error["param"] == "timeout_s"


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"use_beam_search": True}, {"tools": TOOLS}], ids=["whole", "rendered"])
async def test_more_bodies_for_engines_than_the_limit_are_refused(start_router, fields):
    served = await start_router(has_http=False, max_requests=1)
    calls = {path: lambda body: (200, None) for path in (CHAT, RENDER)}
    worker = await served.add("aggregated", takes_calls=True, script=served.script(calls=calls))
    first = asyncio.create_task(ask(served, chat(**fields, timeout_s=0.5), status=504))
    await served.until(lambda: worker.messages(EngineCall))
    assert (await ask(served, chat(**fields), status=429))["error"]["code"] == "overloaded"
    await first


@pytest.mark.parametrize("path", [MESSAGES, COUNT, CHAT])
async def test_the_limit_holds_for_bodies_for_engines_that_begin_together(start_router, path):
    served = await start_router(has_http=False, max_requests=1)
    calls = {name: lambda body: (200, None) for name in (path, RENDER)}
    await served.add("aggregated", takes_calls=True, script=served.script(calls=calls))
    async with served.client() as client:
        answers = await asyncio.gather(*(client.post(path, json=chat(tools=TOOLS, timeout_s=1.0)) for _ in range(3)))
    assert sorted(answer.status_code for answer in answers) == [429, 429, 504]


@pytest.mark.slow
async def test_both_legs_have_one_deadline_and_no_second_try_after_it(start_router):
    served = await start_router(has_http=False, request_timeout_s=1.0)
    for role in ("prefill", "decode", "decode"):
        await served.add(role, takes_calls=True, script=served.script(calls={CHAT: lambda body: (200, None)}))
    error = (await ask(served, chat(use_beam_search=True), status=504))["error"]
    assert error["code"] == "deadline_exceeded"
    assert [call["max_tokens"] for call in calls_of(served, CHAT)] in ([1], [1, 20])


async def test_responses_are_texts_only(engines):
    found = await ask(engines, {"input": "hi", "max_output_tokens": 20}, path="/v1/responses")
    assert found["output"][0]["content"][0]["text"] == "hello world"
    tool = {"type": "function", "name": "f"}
    for fields in ({"tools": [tool]}, {"text": {"format": {"type": "json_object"}}}, {"reasoning": {"effort": "low"}}):
        refused = await ask(engines, {"input": "hi", **fields}, path="/v1/responses", status=400)
        assert "/v1/chat/completions" in refused["error"]["message"]


async def test_a_reasoning_parser_of_an_engine_leaves_no_responses(start_router):
    served = await start_router(has_http=False)
    await served.add("aggregated", takes_calls=True, splits_output=True)
    for fields, message in (({}, "reasoning parser"), ({"stop": "x"}, "reasoning parser"), ({"model": "other"}, "adapters")):
        refused = await ask(served, {"input": "hi", **fields}, path="/v1/responses", status=400)
        assert message in refused["error"]["message"]
