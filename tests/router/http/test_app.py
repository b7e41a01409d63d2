from __future__ import annotations

import asyncio
import json

import pytest

from core.wire.messages import ErrorInfo, Generate, TransferUsage

HELLO = "hello world"
USER = [{"role": "user", "content": "hi"}]


async def post(under_test, path: str, **body):
    async with under_test.client() as client:
        return await client.post(path, json=body)


def error_of(response, status: int) -> dict:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


# ---- completions -----------------------------------------------------------------------------------------------------------


async def test_a_completion_has_openai_s_shape(served):
    response = await post(served, "/v1/completions", model="tiny", prompt="say it", max_tokens=50)
    assert response.status_code == 200
    body = response.json()
    assert body.pop("id").startswith("cmpl-")
    assert body.pop("created") > 1_700_000_000
    assert body.pop("system_fingerprint") == f"fp_{b'weights'.hex()[:12]}"
    timing = body["usage"]["kv_transfer"].pop("timing")
    (routing,) = body["usage"]["kv_transfer"].pop("routing")
    assert (routing["reason"], routing["candidates"], routing["hit_tokens"]) == ("load", 1, 4)
    assert body == {
        "object": "text_completion",
        "model": "tiny",
        "choices": [{"index": 0, "text": HELLO, "logprobs": None, "finish_reason": "stop", "stop_reason": None}],
        "usage": {
            "prompt_tokens": 6,
            "completion_tokens": 12,
            "total_tokens": 18,
            "prompt_tokens_details": {"cached_tokens": 4},
            "kv_transfer": {
                "transport": "tcp",
                "transferred_tokens": 6,
                "transferred_bytes": 4096,
                "transfer_ms": 0.0,
                "verified_blocks": 0,
                "early_tokens": 0,
                "early_bytes": 0,
                "exposed_ms": 0.0,
                "recomputed_tokens": 0,
                "fallback_reason": "",
                "retries": 0,
                "replays": 0,
                "refusals": 0,
            },
        },
    }
    assert timing["first_token"].keys() == {"total_ms", "queue_ms", "prefill_ms", "relay_ms"}
    second = {"total_ms", "relay_ms", "queue_ms", "transfer_ms", "verify_ms", "first_step_ms"}
    assert timing["second_token"].keys() == second
    for parts in timing.values():
        assert parts.pop("total_ms") == pytest.approx(sum(parts.values()))


async def test_an_aggregated_worker_reports_what_its_tier_has_lost(start_router, caplog):
    caplog.set_level("INFO", logger="router.dispatch.observer")
    under_test = await start_router()
    worker = await under_test.add("aggregated")
    worker.script.cost = TransferUsage(transport="offload", transferred_tokens=2, recomputed_tokens=3, fallback_reason="digest")
    transfer = (await post(under_test, "/v1/completions", prompt="abcdef", max_tokens=2)).json()["usage"]["kv_transfer"]
    told = ("transport", "transferred_tokens", "recomputed_tokens", "fallback_reason", "retries")
    assert [transfer[name] for name in told] == ["offload", 2, 3, "digest", 0]
    assert "timing" not in transfer
    assert {under_test.metric("kvferry_kv_handoffs_total", outcome=outcome) for outcome in ("loaded", "digest")} == {0}
    (line,) = [record.msg.fields for record in caplog.records if str(record.msg).startswith("event=finished")]
    assert (line["fallback_reason"], line["recomputed_tokens"]) == ("digest", 3)


async def test_an_aggregated_worker_gives_the_same_answer_without_transfer(start_router):
    under_test = await start_router(has_http=False)
    await under_test.add("aggregated")
    body = (await post(under_test, "/v1/completions", prompt="say it", max_tokens=50)).json()
    assert body["choices"][0]["text"] == HELLO
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert "kv_transfer" not in body["usage"]


async def test_sixteen_tokens_are_the_default(start_router):
    under_test = await start_router(has_http=False)
    await under_test.pair(text="x" * 40)
    body = (await post(under_test, "/v1/completions", prompt="p")).json()
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("x" * 16, "length")


async def test_several_prompts_and_choices_are_numbered_prompt_by_prompt(served):
    response = await post(served, "/v1/completions", prompt=["one", "three"], n=2, max_tokens=50)
    body = response.json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(index, HELLO) for index in range(4)]
    assert body["usage"]["prompt_tokens"] == 8
    assert body["usage"]["completion_tokens"] == 48
    assert body["usage"]["kv_transfer"]["transferred_tokens"] == 16, "each choice has loaded its prompt"


async def test_every_request_has_a_seed_and_prompts_have_different_ones(served):
    await post(served, "/v1/completions", prompt=["a", "b"], max_tokens=2)
    seeds = [message.sampling.seed for message in served.workers[0].messages(Generate)]
    assert len(set(seeds)) == 2
    await post(served, "/v1/completions", prompt=["a", "b"], max_tokens=2, seed=77)
    assert [message.sampling.seed for message in served.workers[0].messages(Generate)][2:] == [77, 77]


async def test_token_ids_in_and_out(served):
    body = (await post(served, "/v1/completions", prompt=[1, 2, 3], max_tokens=3, return_token_ids=True)).json()
    choice = body["choices"][0]
    assert choice["prompt_token_ids"] == [1, 2, 3]
    assert choice["token_ids"] == served.tokenizer.encode("hel")
    assert served.workers[0].messages(Generate)[0].prompt_token_ids == (1, 2, 3)


async def test_a_stop_string_ends_the_text_and_the_workers_work(served):
    body = (await post(served, "/v1/completions", prompt="p", max_tokens=50, stop=["o w", "zzz"])).json()
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("hell", "stop", "o w")
    assert body["usage"]["completion_tokens"] == 7
    await served.until(lambda: served.router.gateway.num_requests == 0)


async def test_a_stop_string_aborts_decode(start_router):
    under_test = await start_router(has_http=False)
    _, decode = await under_test.pair(pause_after=8)
    body = (await post(under_test, "/v1/completions", prompt="p", max_tokens=50, stop="o w")).json()
    assert body["choices"][0]["text"] == "hell"
    await decode.aborts((await decode.generated()).request_id)


async def test_a_stop_string_in_the_first_token_still_answers(served):
    body = (await post(served, "/v1/completions", prompt="p", max_tokens=50, stop="h")).json()
    assert (body["choices"][0]["text"], body["choices"][0]["stop_reason"]) == ("", "h")


async def test_a_request_of_one_token_never_reaches_decode(served):
    body = (await post(served, "/v1/completions", prompt="p", max_tokens=1)).json()
    assert body["choices"][0]["text"] == "h"
    assert served.workers[1].messages(Generate) == []
    assert "kv_transfer" not in body["usage"]


@pytest.mark.parametrize("part", ["RequestOutput", "Envelope", "CompletionShaper"])
async def test_an_answer_that_cannot_be_prepared_leaves_nothing_running(served, monkeypatch, part):
    def boom(*args, **kwargs):
        raise RuntimeError("bug")

    monkeypatch.setattr(f"router.http.endpoints.{part}", boom)
    error_of(await post(served, "/v1/completions", prompt="p"), 500)
    assert served.router.gateway.num_requests == 0
    assert served.workers[0].messages(Generate) == []


async def test_priority_and_salt_travel(served):
    await post(served, "/v1/completions", prompt="p", max_tokens=2, priority=-3, cache_salt="tenant")
    for worker in served.workers:
        message = worker.messages(Generate)[0]
        assert (message.priority, message.cache_salt) == (-3, "tenant")


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_an_answer_names_the_weights_that_it_comes_from(start_router, role, path):
    under_test = await start_router(has_http=False)
    await under_test.add(role, model_fingerprint=b"other weights")  # the first worker, without a partner
    await under_test.pair()
    question = {"messages": USER} if "chat" in path else {"prompt": ["a", "b"]}
    body = (await post(under_test, path, model="tiny", **question)).json()
    assert body["system_fingerprint"] == f"fp_{b'weights'.hex()[:12]}"
    streamed = await post(under_test, path, model="tiny", stream=True, **question)
    chunks = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert {chunk["system_fingerprint"] for chunk in chunks} == {body["system_fingerprint"]}


async def test_prompts_that_met_different_weights_name_both(start_router):
    under_test = await start_router(has_http=False)
    names = [b"weights of one", b"other weights"]
    for weights in names:
        await under_test.add("aggregated", model_fingerprint=weights)
    body = (await post(under_test, "/v1/completions", model="tiny", prompt=["a", "b"])).json()
    assert sorted(body["system_fingerprint"].split("+")) == sorted(f"fp_{weights.hex()[:12]}" for weights in names)


# ---- chats -------------------------------------------------------------------------------------------------------------------


async def test_a_chat_completion_has_openai_s_shape(served):
    response = await post(served, "/v1/chat/completions", model="tiny", messages=USER)
    body = response.json()
    assert body.pop("id").startswith("chatcmpl-")
    assert body.pop("created")
    assert body.pop("system_fingerprint")
    assert body.pop("usage")["prompt_tokens"] == len("<user>hi<assistant>")
    assert body == {
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": HELLO, "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
    }


@pytest.mark.slow
async def test_logprobs_of_a_chat(served):
    body = (await post(served, "/v1/chat/completions", messages=USER, max_tokens=2, logprobs=True, top_logprobs=2)).json()
    first = body["choices"][0]["logprobs"]["content"][0]
    assert (first["token"], first["bytes"], first["logprob"]) == ("h", [104], -0.25)
    assert len(first["top_logprobs"]) == 2
    assert body["choices"][0]["logprobs"]["refusal"] is None


async def test_chat_choices_and_token_ids(served):
    body = (
        await post(served, "/v1/chat/completions", messages=USER, n=2, max_completion_tokens=2, return_token_ids=True)
    ).json()
    assert [choice["message"]["content"] for choice in body["choices"]] == ["he", "he"]
    assert body["choices"][1]["token_ids"] == served.tokenizer.encode("he")
    assert body["prompt_token_ids"] == served.tokenizer.encode("<user>hi<assistant>")


# ---- refusals ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "x", "colour": 1}, "colour"),
        ({}, "prompt"),
        ({"prompt": "x", "temperature": 3}, "temperature"),
        ({"prompt": "x", "tools": []}, "tools"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": [300]}, "prompt"),
        ({"prompt": "x", "stop_token_ids": [300]}, "stop_token_ids"),
    ],
)
async def test_a_wrong_body_is_a_400_that_names_the_field(served, body, param):
    error = error_of(await post(served, "/v1/completions", **body), 400)
    assert error["param"] == param
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_request")
    assert param in error["message"]


@pytest.mark.parametrize("content", [b"", b"{", b"null", b"\xff\xfe", b"[1]"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
async def test_a_body_that_is_no_json_object_is_a_400(served, content, path):
    async with served.client() as client:
        error_of(await client.post(path, content=content), 400)


async def test_wrong_fields_are_refused_even_without_workers(start_router):
    under_test = await start_router(has_http=False)
    error_of(await post(under_test, "/v1/completions", prompt="x", temperature=9), 400)


async def test_a_prompt_beyond_the_context_is_a_400(served):
    error = error_of(await post(served, "/v1/completions", prompt="x" * 600), 400)
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 512 tokens" in error["message"]


async def test_an_unknown_model_is_a_404(served):
    error = error_of(await post(served, "/v1/completions", model="gpt-9", prompt="x"), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


async def test_without_workers_it_is_a_503_with_the_reason_and_when_to_retry(start_router):
    under_test = await start_router(has_http=False)
    response = await post(under_test, "/v1/completions", prompt="x")
    error = error_of(response, 503)
    assert error["message"] == "no worker has registered"
    assert 1 <= int(response.headers["retry-after"]) <= 5, "workers that live register within seconds"


async def test_incompatible_workers_are_a_503_with_both_values(start_router):
    under_test = await start_router(has_http=False)
    await under_test.add("prefill")
    await under_test.add("decode", model_fingerprint=b"other")
    message = error_of(await post(under_test, "/v1/completions", prompt="x"), 503)["message"]
    assert b"weights".hex()[:12] in message
    assert b"other".hex() in message


async def test_too_many_requests_are_a_429(start_router):
    under_test = await start_router(has_http=False, max_requests=2)
    await under_test.pair()
    response = await post(under_test, "/v1/completions", prompt=["a", "b", "c"])
    assert error_of(response, 429)["type"] == "rate_limit_error"
    assert response.headers["retry-after"] == "1"
    await under_test.until(lambda: under_test.router.gateway.num_requests == 0)


async def test_a_worker_s_refusal_keeps_its_status_and_code(served):
    served.workers[0].script.error = ErrorInfo(code="overloaded", message="full", http_status=429, retryable=True)
    response = await post(served, "/v1/completions", prompt="x")
    assert error_of(response, 429)["code"] == "overloaded"
    assert "retry-after" in response.headers


async def test_a_failed_stream_that_has_not_begun_has_its_own_status(served):
    served.workers[0].script.error = ErrorInfo(code="internal_error", message="boom")
    response = await post(served, "/v1/chat/completions", messages=USER, stream=True)
    assert error_of(response, 500)["type"] == "server_error"


async def test_a_body_above_the_cap_is_a_413(start_router):
    under_test = await start_router(has_http=False, max_body_bytes=1000)
    await under_test.pair()
    error = error_of(await post(under_test, "/v1/completions", prompt="x" * 1000), 413)
    assert error["code"] == "body_too_large"
    assert (await post(under_test, "/v1/completions", prompt="x" * 100)).status_code == 200


async def test_a_chunked_body_above_the_cap_is_a_413(start_router):
    under_test = await start_router(has_http=False, max_body_bytes=1000)

    async def chunks():
        for _ in range(10):
            yield b"x" * 200

    async with under_test.client() as client:
        error_of(await client.post("/v1/completions", content=chunks()), 413)


async def test_the_api_key_is_asked_for_where_it_matters(start_router):
    under_test = await start_router(has_http=False, api_key="secret")
    await under_test.pair()
    async with under_test.client() as client:
        wrong = ("Bearer wrong", "secret", "Basic secret", "Bearer", "Bearersecret")
        for headers in ({}, *({"authorization": value} for value in wrong)):
            refused = await client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
            assert error_of(refused, 401)["type"] == "authentication_error"
            assert refused.headers["www-authenticate"] == "Bearer"
        assert (await client.get("/v1/models")).status_code == 401
        accepted = await client.post("/v1/completions", json={"prompt": "x"}, headers={"authorization": "Bearer secret"})
        assert accepted.status_code == 200
        for path in ("/health", "/ready", "/metrics", "/version"):
            assert (await client.get(path)).status_code == 200


@pytest.mark.parametrize("scheme", ["bearer", "BEARER", "Bearer "])
async def test_scheme_of_the_api_key_may_be_in_any_case(start_router, scheme):
    under_test = await start_router(has_http=False, api_key="secret")
    async with under_test.client() as client:
        answer = await client.get("/v1/models", headers={"authorization": f"{scheme} secret"})
    assert answer.status_code == 200


async def test_any_of_several_api_keys_will_do(start_router):
    under_test = await start_router(has_http=False, api_key="first, second,")
    async with under_test.client() as client:
        for key, status in (("first", 200), ("second", 200), ("first, second,", 401), ("", 401), (",", 401)):
            answer = await client.get("/v1/models", headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == status, key


async def test_unknown_paths_and_methods_have_the_same_error_shape(served):
    async with served.client() as client:
        assert error_of(await client.get("/v2/completions"), 404)["code"] == "not_found"
        assert error_of(await client.get("/v1/completions"), 405)["code"] == "method_not_allowed"


async def test_a_bug_is_a_500_without_details(served, monkeypatch):
    def boom(*args):
        raise RuntimeError("secret detail")

    monkeypatch.setattr(served.router.gateway, "open", boom)
    response = await post(served, "/v1/completions", prompt="x")
    assert error_of(response, 500)["code"] == "internal_error"
    assert "secret" not in response.text


async def test_a_client_that_leaves_while_it_uploads_is_no_error_of_ours(served, caplog):
    parts = iter([{"type": "http.request", "body": b'{"pro', "more_body": True}])
    sent = []

    async def receive():
        return next(parts, {"type": "http.disconnect"})

    async def send(message):
        sent.append(message)

    headers = [(b"content-type", b"application/json"), (b"content-length", b"100")]
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http"}
    place = {
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "root_path": "",
        "headers": headers,
    }
    await served.router.app({**scope, **place, "client": ("127.0.0.1", 1), "server": ("router", 80)}, receive, send)
    assert sent[0]["status"] == 499
    assert "internal_error" not in caplog.text
    assert served.metric("kvferry_request_failure_total", code="cancelled") == 1
    assert served.metric("kvferry_request_failure_total", code="internal_error") == 0.0


@pytest.mark.parametrize(("retryable", "status", "header"), [(True, 503, "1"), (False, 502, None)])
async def test_an_error_that_may_pass_says_when_to_come_back(start_router, retryable, status, header):
    under_test = await start_router(has_http=False)
    await under_test.pair(error=ErrorInfo(code="digest", message="corrupt block", http_status=502, retryable=retryable))
    response = await post(under_test, "/v1/completions", prompt="p")
    assert (response.status_code, response.headers.get("retry-after")) == (status, header)


@pytest.mark.slow
async def test_a_lost_worker_without_a_successor_is_a_503_that_says_when_to_come_back(start_router):
    under_test = await start_router(has_http=False, worker_wait_s=0.1)
    worker = await under_test.add("aggregated", script=under_test.script(is_silent=True), start_ms=12_000)
    call = asyncio.create_task(post(under_test, "/v1/completions", prompt="p"))
    await worker.generated()
    await worker.kill()
    response = await call
    assert (response.status_code, response.json()["error"]["code"]) == (503, "no_worker")
    assert 30 <= int(response.headers["retry-after"]) <= 34, "twice the start, and the time to notice, less what has passed"
    again = await post(under_test, "/v1/completions", prompt="p")
    assert (again.status_code, int(again.headers["retry-after"]) >= 30) == (503, True)


@pytest.mark.slow
async def test_without_its_prefill_worker_the_decode_worker_serves_and_usage_reports_it(start_router):
    under_test = await start_router(has_http=False)
    prefill = await under_test.add("prefill", script=under_test.script(is_silent=True))
    await under_test.add("decode")
    call = asyncio.create_task(post(under_test, "/v1/completions", prompt="p" * 9))
    await prefill.generated()
    await prefill.kill()
    for response in (await call, await post(under_test, "/v1/completions", prompt="p" * 9)):
        assert response.status_code == 200
        transfer = response.json()["usage"]["kv_transfer"]
        assert (transfer["fallback_reason"], transfer["recomputed_tokens"], transfer["transport"]) == ("no_prefill", 5, "")
        assert "timing" not in transfer
    assert under_test.metric("kvferry_kv_handoffs_total", outcome="no_prefill") == 2
    assert under_test.router.endpoints.not_ready_reason is None


# ---- request ids -------------------------------------------------------------------------------------------------------------


async def test_a_request_id_is_echoed_on_success_and_on_errors(served):
    async with served.client() as client:
        for body in ({"prompt": "x"}, {"prompt": ""}):
            response = await client.post("/v1/completions", json=body, headers={"x-request-id": "mine-1"})
            assert response.headers["x-request-id"] == "mine-1"


@pytest.mark.parametrize("bad", ["", "a b", "x" * 200])
async def test_an_unusable_request_id_is_replaced(served, bad):
    async with served.client() as client:
        response = await client.get("/health", headers={"x-request-id": bad})
        assert response.headers["x-request-id"].startswith("req-")


async def test_the_id_on_the_wire_is_never_the_client_s(served):
    async with served.client() as client:
        for _ in range(2):
            await client.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "same"})
    ids = {message.request_id for message in served.workers[0].messages(Generate)}
    assert len(ids) == 2
    assert "same" not in ids


async def test_the_log_line_of_a_request_holds_the_client_s_id(served, caplog):
    caplog.set_level("INFO", logger="router.dispatch.observer")
    async with served.client() as client:
        await client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2}, headers={"x-request-id": "mine"})
    (line,) = [str(record.msg) for record in caplog.records if str(record.msg).startswith("event=finished")]
    for part in ("client_id=mine", "outcome=length", "prompt_tokens=3", "output_tokens=2", "ttft_ms=", "prefill=prefill-"):
        assert part in line
    assert "fallback_reason" not in line


async def test_the_log_line_of_a_request_has_reason_and_number_of_recomputed_tokens(served, caplog):
    caplog.set_level("INFO", logger="router.dispatch.observer")
    for worker in served.workers:
        worker.script.cost = TransferUsage(transport="tcp", recomputed_tokens=3, fallback_reason="digest")
    assert (await post(served, "/v1/completions", prompt="abc", max_tokens=2)).status_code == 200
    (line,) = [record.msg.fields for record in caplog.records if str(record.msg).startswith("event=finished")]
    assert (line["fallback_reason"], line["recomputed_tokens"]) == ("digest", 3)
