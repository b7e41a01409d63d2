"""The router's answers other than completions: models, tokens, probes, metrics."""

from __future__ import annotations

import json
import threading

import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.openai.served_model import NEUTRAL_SAMPLING, ServedModel

USER = [{"role": "user", "content": "hi"}]


async def post(under_test, path: str, **body):
    async with under_test.client() as client:
        return await client.post(path, json=body)


def error_of(response, status: int) -> dict:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def test_models_are_listed(served):
    async with served.client() as client:
        listed = (await client.get("/v1/models")).json()
        assert listed["object"] == "list"
        (card,) = listed["data"]
        assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 512)
        assert (await client.get("/v1/models/tiny")).json() == card
        error_of(await client.get("/v1/models/acme/other"), 404)


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["/data/m", "%2Fdata%2Fm", "data/m"])
async def test_a_model_whose_name_is_a_path_is_described(start_router, tiny_tokenizer, asked):
    under_test = await start_router(model=ServedModel(name="/data/m", tokenizer=tiny_tokenizer, defaults=NEUTRAL_SAMPLING))
    async with under_test.client() as client:
        answer = await client.get(f"/v1/models/{asked}")
        error_of(await client.get("/v1/models/data/other"), 404)
    assert (answer.status_code, answer.json().get("id")) == (200, "/data/m")


async def test_many_tokens_are_detokenized_off_the_event_loop(served, monkeypatch):
    threads = []
    original = type(served.tokenizer).decode

    def spy(self, token_ids, **options):
        threads.append(threading.current_thread())
        return original(self, token_ids, **options)

    monkeypatch.setattr(type(served.tokenizer), "decode", spy)
    (letter,) = served.tokenizer.encode("a")
    assert (await post(served, "/detokenize", tokens=[letter] * 10_000)).json() == {"prompt": "a" * 10_000}
    assert threads != [threading.main_thread()]
    assert len(threads) == 1


async def test_tokenize_and_detokenize_are_inverse(served):
    async with served.client() as client:
        done = (await client.post("/tokenize", json={"prompt": "héé", "return_token_strs": True})).json()
        assert done["count"] == len(done["tokens"]) == len(done["token_strs"]) == 5
        assert done["max_model_len"] == 512
        assert (await client.post("/detokenize", json={"tokens": done["tokens"]})).json() == {"prompt": "héé"}


async def test_tokenize_tells_the_same_context_as_the_models(served):
    larger = await served.add("aggregated", max_model_len=1000)
    await larger.leave()
    await served.until(lambda: served.router.gateway.core.max_model_len == 512)
    async with served.client() as client:
        (card,) = (await client.get("/v1/models")).json()["data"]
        done = (await client.post("/tokenize", json={"prompt": "h"})).json()
    assert (card["max_model_len"], done["max_model_len"]) == (1000, 1000)


async def test_tokenize_renders_conversations(served):
    async with served.client() as client:
        chat = (await client.post("/tokenize", json={"messages": USER})).json()
        text = (await client.post("/detokenize", json={"tokens": chat["tokens"]})).json()["prompt"]
        assert text == "<user>hi<assistant>"
        error_of(await client.post("/tokenize", json={"messages": USER, "prompt": "x"}), 400)
        error_of(await client.post("/tokenize", json={}), 400)


async def test_health_and_readiness_are_different_things(start_router):
    under_test = await start_router(has_http=False)
    async with under_test.client() as client:
        assert (await client.get("/health")).status_code == 200
        waiting = await client.get("/ready")
        assert (waiting.status_code, waiting.json()["reason"]) == (503, "no worker has registered")
        await under_test.pair()
        assert (await client.get("/ready")).status_code == 200


@pytest.mark.parametrize(("path", "alias"), [("/health", "/ping"), ("/ready", "/readyz")])
async def test_probes_may_use_the_usual_other_names_without_a_key(start_router, path, alias):
    under_test = await start_router(has_http=False, api_key="secret")
    async with under_test.client() as client:
        first, second = await client.get(path), await client.get(alias)
    assert (first.status_code, first.json()) == (second.status_code, second.json())
    assert "status" in second.json()


async def test_version_load_and_schema(served):
    async with served.client() as client:
        assert (await client.get("/version")).json()["version"]
        assert (await client.get("/load")).json() == {"server_load": 0}
        schema = (await client.get("/openapi.json")).json()
        assert schema["openapi"].startswith("3.1")
        body = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body == {"$ref": "#/components/schemas/ChatCompletionRequest"}
        assert "top_logprobs" in schema["components"]["schemas"]["ChatCompletionRequest"]["properties"]


async def test_metrics_count_what_happened(served):
    await post(served, "/v1/completions", prompt="abc", max_tokens=2)
    await post(served, "/v1/completions", prompt="abc", temperature=9)
    async with served.client() as client:
        text = (await client.get("/metrics")).text
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["kvferry_request_success_total", ("finished_reason", "length")] == 1
    assert samples["kvferry_request_failure_total", ("code", "invalid_request")] == 1
    assert samples["kvferry_prompt_tokens_total",] == 3
    assert samples["kvferry_generation_tokens_total",] == 2
    assert samples["kvferry_time_to_first_token_seconds_count",] == 1
    assert samples["kvferry_inter_token_latency_seconds_count",] == 1
    assert samples["kvferry_e2e_request_latency_seconds_count",] == 1
    assert samples["kvferry_request_prefill_time_seconds_sum",] == pytest.approx(0.00002)
    assert samples["kvferry_num_requests_running",] == 0
    assert samples["kvferry_workers", ("role", "prefill")] == 1
    assert samples["kvferry_workers", ("role", "aggregated")] == 0
    assert samples["kvferry_ready",] == 1
    assert samples["kvferry_http_requests_total", ("path", "/v1/completions"), ("status", "400")] == 1


async def test_unknown_paths_do_not_grow_the_metrics(served):
    async with served.client() as client:
        for number in range(5):
            await client.get(f"/scan/{number}")
    assert served.metric("kvferry_http_requests_total", path="other", status="404") == 5


async def test_every_answer_is_json_that_parses_strictly(served):
    body = (await post(served, "/v1/completions", prompt="p", logprobs=1)).content
    json.loads(body, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


async def test_answers_name_the_ignored_fields_of_messages(served):
    answer = await post(served, "/v1/chat/completions", messages=[{**USER[0], "mood": "good", "id": "m1"}], max_tokens=1)
    assert answer.status_code == 200
    assert answer.headers["x-kvferry-ignored-fields"] == "1; messages.mood"
    plain = await post(served, "/v1/chat/completions", messages=USER, max_tokens=1)
    assert "x-kvferry-ignored-fields" not in plain.headers
    assert served.metric("kvferry_ignored_fields_total") == 1


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping", "/readyz", "/version", "/metrics", "/v1/models"])
async def test_head_is_answered_as_get_without_the_body(served, path):
    async with served.client() as client:
        head, whole = await client.head(path), await client.get(path)
    assert (head.status_code, head.content) == (whole.status_code, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"), [("GET", "/tokenize", "OPTIONS, POST"), ("POST", "/health", "GET, HEAD, OPTIONS")]
)
async def test_wrong_method_is_told_the_allowed_ones(served, method, path, allowed):
    async with served.client() as client:
        answer = await client.request(method, path)
    assert error_of(answer, 405)["code"] == "method_not_allowed"
    assert answer.headers["allow"] == allowed
