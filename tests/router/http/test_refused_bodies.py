"""What clients are told about bodies that are refused, and what of a body is read although it is unusual."""

import json

import pytest

USER = [{"role": "user", "content": "hi"}]
BODIES = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/chat/completions": {"messages": USER, "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [97]},
}


async def post(under_test, path, content, **headers):
    async with under_test.client() as client:
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        return await client.post(path, content=content, headers={"content-type": "application/json", **headers})


@pytest.mark.parametrize("path", BODIES)
async def test_a_byte_order_mark_before_the_json_is_skipped(served, path):
    response = await post(served, path, b"\xef\xbb\xbf" + json.dumps(BODIES[path]).encode())
    assert response.status_code == 200, response.text
    response = await post(served, path, b"\xef\xbb\xbf")
    assert (response.status_code, response.json()["error"]["message"]) == (400, "the body is empty")


@pytest.mark.parametrize("path", BODIES)
async def test_a_field_that_is_not_known_yet_may_be_null(served, path):
    response = await post(served, path, BODIES[path] | {"moderation": None})
    assert response.status_code == 200, response.text
    response = await post(served, path, BODIES[path] | {"moderation": {}})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "moderation")


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": "x" * 300_000}, "prompt"),
        ("/v1/completions", {"prompt": "x" * 300_000, "truncate_prompt_tokens": 4}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 300_000}]}, "messages"),
        ("/v1/responses", {"input": "x" * 300_000}, "input"),
        ("/tokenize", {"prompt": "x" * 300_000}, "prompt"),
        ("/tokenize", {"prompt": None, "messages": [{"role": "user", "content": "x" * 300_000}]}, "messages"),
    ],
)
async def test_a_text_whose_beginning_has_too_many_tokens_is_refused_by_its_field(served, monkeypatch, path, fields, param):
    reader = served.router.endpoints._reader
    monkeypatch.setattr(reader, "_longest_token", 1000)  # a vocabulary in which the number of characters tells nothing
    error = (await post(served, path, BODIES[path] | fields)).json()["error"]
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    assert f"{param} is too long" in error["message"]
    is_prompt = path.startswith("/v1") and "truncate_prompt_tokens" not in fields
    assert ("maximum context length is 512 tokens" in error["message"]) == is_prompt


async def test_an_answer_that_cannot_fit_is_refused_by_the_field_that_asks_for_it(served):
    error = (await post(served, "/v1/responses", {"input": "hi", "max_output_tokens": 10**9})).json()["error"]
    assert (error["param"], "max_output_tokens may be at most" in error["message"]) == ("max_output_tokens", True)
