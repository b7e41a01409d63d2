"""The OpenAPI document: closed top levels, open messages, ranges, errors, streams, and the key."""

from __future__ import annotations

import jsonschema
import pytest

REFUSALS = {"400", "401", "404", "408", "413", "415", "429", "431", "500", "502", "503", "504"}
GENERATION = ("/v1/completions", "/v1/chat/completions", "/v1/responses")


async def document_of(under_test, **headers) -> dict:
    async with under_test.client() as client:
        answer = await client.get("/openapi.json", headers=headers)
    assert answer.headers["content-type"].startswith("application/json")
    return answer.json()


@pytest.fixture
async def document(start_router):
    return await document_of(await start_router(has_http=False))


def accepts(document: dict, name: str, body: dict) -> bool:
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    return jsonschema.Draft202012Validator(schema).is_valid(body)


def chat(message: dict | None = None, **fields) -> dict:
    return {"messages": [{"role": "user", "content": "x", **(message or {})}], **fields}


def test_top_levels_are_closed_and_messages_are_open(document):
    assert accepts(document, "ChatCompletionRequest", chat())
    assert accepts(document, "ChatCompletionRequest", chat({"prefix": True}))
    assert accepts(document, "ChatCompletionRequest", chat({"content": [{"type": "text", "text": "x", "cache_control": {}}]}))
    assert not accepts(document, "ChatCompletionRequest", chat(colour=1))
    assert not accepts(document, "ChatCompletionRequest", chat(stream_options={"flush": True}))
    assert not accepts(document, "CompletionRequest", {"prompt": "x", "colour": 1})


@pytest.mark.parametrize(
    ("good", "wrong"),
    [
        ({"temperature": 2}, {"temperature": 2.1}),
        ({"top_p": 0}, {"top_p": 1.1}),
        ({"n": 128}, {"n": 129}),
        ({"max_tokens": 1}, {"max_tokens": 0}),
        ({"top_logprobs": 20}, {"top_logprobs": 21}),
        ({"session_id": "x" * 128}, {"session_id": "x" * 129}),
        ({"service_tier": "auto"}, {"service_tier": "golden"}),
        ({"echo": False}, {"echo": True}),
        ({"n": None}, {"n": "1"}),
        ({"stop": ["x"] * 16}, {"stop": ["x"] * 17}),
        ({"stop": "x"}, {"stop": ""}),
        ({"logit_bias": {"1": 100}}, {"logit_bias": {"1": 101}}),
        ({"logit_bias": None}, {"logit_bias": {"one": 1}}),
        ({"truncate_prompt_tokens": -1}, {"truncate_prompt_tokens": 0}),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, {"tools": {}}),
        ({"tool_choice": "required"}, {"tool_choice": "always"}),
        ({"response_format": {"type": "text"}}, {"response_format": "text"}),
    ],
)
def test_ranges_are_those_of_the_router(document, good, wrong):
    assert accepts(document, "ChatCompletionRequest", chat(**good))
    assert not accepts(document, "ChatCompletionRequest", chat(**wrong))


@pytest.mark.parametrize("path", GENERATION)
def test_every_refusal_has_the_error_body_and_streams_their_media_type(document, path):
    operation = document["paths"][path]["post"]
    assert operation["responses"].keys() == {"200"} | REFUSALS
    for status in REFUSALS:
        body = operation["responses"][status]["content"]["application/json"]["schema"]
        assert body == {"$ref": "#/components/schemas/ErrorBody"}
    assert operation["responses"]["200"]["content"].keys() == {"application/json", "text/event-stream"}
    assert "Retry-After" in operation["responses"]["429"]["headers"]


def test_examples_are_valid(document):
    for item in document["paths"].values():
        for operation in item.values():
            for content in operation.get("requestBody", {}).get("content", {}).values():
                assert accepts(document, content["schema"]["$ref"].rpartition("/")[2], content["example"])


async def test_key_is_a_security_scheme_and_probes_need_none(start_router):
    under_test = await start_router(has_http=False, api_key="secret")
    document = await document_of(under_test, authorization="Bearer secret")
    assert document["components"]["securitySchemes"] == {"bearer": {"type": "http", "scheme": "bearer"}}
    assert document["security"] == [{"bearer": []}]
    assert document["paths"]["/health"]["get"]["security"] == []
    assert "security" not in document["paths"]["/v1/models"]["get"]


async def test_paths_of_the_operations_port_are_not_in_it(start_router):
    document = await document_of(await start_router(has_http=False, ops_port=0))
    assert "/metrics" not in document["paths"]
    assert "/health" in document["paths"]
