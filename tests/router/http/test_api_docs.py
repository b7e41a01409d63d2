"""docs/api.md has every endpoint, says rightly which of them ask for the key, and places every field of a request."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from core.errors import InvalidRequest
from router.openai.body_parser import parse_body
from router.openai.requests import (
    NEUTRAL,
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from router.openai.sampling import check_supported
from router.responses_api.requests import RESPONSES_NEUTRAL, ResponsesRequest

PAGE = (Path(__file__).parents[3] / "docs/api.md").read_text()
ENDPOINT = re.compile(r"^\| (`[A-Z]+ /[^|]+`) \| (needed|not needed) \|", re.MULTILINE)
REFUSED = re.compile(r"^\| (?:(?:chats|completions): )?`(\w+)` \| (.*?) ?\|$", re.MULTILINE)


def section(title: str) -> str:
    (found,) = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return found


def endpoints() -> dict[tuple[str, str], bool]:
    """Method and path → whether the page says that it needs the key."""
    rows = [(re.findall(r"`([A-Z]+) (\S+)`", names), needed == "needed") for names, needed in ENDPOINT.findall(PAGE)]
    return {endpoint: is_guarded for names, is_guarded in rows for endpoint in names}


def fields_of(*kinds: type[msgspec.Struct]) -> set[str]:
    return {field.name for kind in kinds for field in msgspec.structs.fields(kind)}


async def test_every_endpoint_is_there_and_asks_for_the_key_as_the_page_says(start_router):
    under_test = await start_router(has_http=False, api_key="secret")
    async with under_test.client() as client:
        schema = (await client.get("/openapi.json", headers={"authorization": "Bearer secret"})).json()
        served = {(method.upper(), path) for path, methods in schema["paths"].items() for method in methods}
        of_engines = {("POST", "/v1/messages"), ("POST", "/v1/messages/count_tokens")}
        undescribed = {("GET", "/openapi.json"), *of_engines}
        assert endpoints().keys() == served | undescribed
        for (method, path), is_guarded in endpoints().items():
            answer = await client.request(method, path.replace("{name}", "tiny"))
            assert (answer.status_code == 401) == is_guarded, path


def test_every_field_of_a_request_has_its_place():
    named = set(re.findall(r"`(?:\w+\.)?(\w+)`", PAGE))
    assert fields_of(CompletionRequest, ChatCompletionRequest, ResponsesRequest) - named == set()
    assert fields_of(ChatMessage) - {"role", "content", "name", "tool_call_id"} - named == set()


def test_what_is_refused_is_in_its_table():
    refused = {name for name, _ in REFUSED.findall(section("Refused fields"))}
    without_effect = {"include_reasoning"}  # all of its values are neutral
    assert refused == (NEUTRAL.keys() - without_effect) | {"best_of", "echo"}


@pytest.mark.parametrize(("field", "values"), REFUSED.findall(section("Refused fields")))
def test_neutral_values_pass_and_others_do_not(field, values):
    kind, head = (
        (ChatCompletionRequest, {"messages": []})
        if hasattr(ChatCompletionRequest, field)
        else (CompletionRequest, {"prompt": ""})
    )
    neutral = [1] if field == "best_of" else [json.loads(value) for value in re.findall(r"`([^`]+)`", values)]

    def check(value: object) -> None:
        check_supported(parse_body(json.dumps(head | {field: value}).encode(), kind))

    for value in neutral:
        check(value)
    other = {"best_of": 2, "echo": True, "suffix": "x"}.get(field, ["other"])
    with pytest.raises(InvalidRequest) as refusal:
        check(other)
    assert refusal.value.param == field


def test_fields_without_effect_are_accepted():
    names = set(re.findall(r"`(\w+)`", section("Fields without effect"))) & fields_of(CompletionRequest, ChatCompletionRequest)
    assert "metadata" in names
    values = {"metadata": {}, "store": True, "parallel_tool_calls": True, "include_reasoning": True, "prediction": {}}
    body = {"messages": [{"role": "developer", "content": "x"}]} | {name: values.get(name, "x") for name in names}
    check_supported(parse_body(json.dumps(body).encode(), ChatCompletionRequest))


def test_comparison_says_of_every_field_what_becomes_of_it():
    rows = re.findall(
        r"^\| (?:(chats|completions|responses|(?:de)?tokenize): )?`(\w+)` \| (served|refused|ignored) \| (?:taken|ignored) \|",
        PAGE,
        re.MULTILINE,
    )
    ignored = set(re.findall(r"`(\w+)`", section("Fields without effect")))
    for endpoint, kind in (("chats", ChatCompletionRequest), ("completions", CompletionRequest)):
        said = {name: outcome for where, name, outcome in rows if where in ("", endpoint)}
        assert said.keys() == fields_of(kind)
        refused = {"best_of", *NEUTRAL} | ({"echo"} if endpoint == "chats" else set())
        expected = {name: "ignored" if name in ignored else "refused" if name in refused else "served" for name in said}
        assert said == expected
    for endpoint, kind in (("tokenize", TokenizeRequest), ("detokenize", DetokenizeRequest)):
        assert {name: outcome for where, name, outcome in rows if where == endpoint} == dict.fromkeys(fields_of(kind), "served")
    said = {name: outcome for where, name, outcome in rows if where == "responses"}
    ignored = ignored - {"reasoning", "store"} | {"include", "max_tool_calls", "stream_options"}
    assert said == {
        name: "ignored" if name in ignored else "refused" if name in RESPONSES_NEUTRAL else "served"
        for name in fields_of(ResponsesRequest)
    }
