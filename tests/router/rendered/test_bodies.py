"""Which bodies go to the engines, as what, and what is left of them for the router and for the engine."""

import json

import pytest

from core.errors import InvalidRequest
from router.rendered.bodies import CHAT, COMPLETIONS, MESSAGES, engine_body

TOOLS = [{"type": "function", "function": {"name": "f"}}]
SCHEMA = {"type": "json_object"}


def read(path=CHAT, splits_output=False, **fields):
    whole = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"model": "m", "prompt": "hi"}
    return engine_body(path, json.dumps(whole | fields).encode(), "m", splits_output=splits_output)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.5, "stop": ["x"], "logprobs": True},
        {"tools": []},
        {"tools": None, "response_format": {"type": "text"}},
        {"tool_choice": "auto"},
        {"unknown": 1},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
    ],
)
def test_what_the_router_serves_is_not_for_an_engine(fields):
    assert read(**fields) is None


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"7", b'"x"', b"\xff"])
def test_a_body_that_is_no_object_is_left_to_the_routers_own_reading(body):
    assert engine_body(CHAT, body, "m", splits_output=True) is None


@pytest.mark.parametrize(
    ("fields", "is_split"),
    [
        ({"tools": TOOLS}, True),
        ({"tools": TOOLS, "tool_choice": "none"}, False),
        ({"response_format": SCHEMA}, False),
        ({"structured_outputs": {"regex": "a"}}, False),
        ({"model": "adapter"}, False),
        ({"reasoning_effort": "low"}, False),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, False),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]}, False),
    ],
)
def test_what_only_an_engine_serves_is_rendered(fields, is_split):
    body = read(**fields)
    assert (body.is_whole, body.is_split) == (False, is_split)


def test_every_chat_is_split_where_engines_separate_reasoning():
    assert read(splits_output=True).is_split
    assert read(COMPLETIONS, splits_output=True) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"use_beam_search": True},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"tools": TOOLS, "stop": "x"},
        {"tools": TOOLS, "prompt_logprobs": 0},
        {"tools": TOOLS, "return_token_ids": True},
    ],
)
def test_what_cannot_be_rendered_goes_whole(fields):
    assert read(**fields).is_whole


@pytest.mark.parametrize(
    ("fields", "is_whole"),
    [({"logprobs": True, "stream": True}, True), ({"logprobs": False, "stream": True}, False), ({"logprobs": True}, False)],
)
@pytest.mark.parametrize("splits_output", [True, False], ids=["reasoning", "tools"])
def test_a_stream_with_logprobs_is_not_split(fields, is_whole, splits_output):
    """vLLM 0.32 leaves them out of what it splits part by part."""
    assert read(splits_output=splits_output, tools=[] if splits_output else TOOLS, **fields).is_whole == is_whole


@pytest.mark.parametrize("model", [7, ["m"], {}, True])
@pytest.mark.parametrize("fields", [{"tools": TOOLS}, {"use_beam_search": True}], ids=["rendered", "whole"])
def test_a_model_that_is_no_string_is_refused(fields, model):
    with pytest.raises(InvalidRequest, match="must be a string") as refusal:
        read(model=model, **fields)
    assert refusal.value.param == "model"
    assert read(model=None, **fields).adapter == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [("json", {"type": "object"}), ("regex", "a"), ("choice", ["a"]), ("grammar", "root ::= x"), ("json_object", True)],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_the_older_names_of_forms_reach_the_engine_by_the_name_it_reads(path, name, value):
    body = read(path, **{f"guided_{name}": value, "guided_json": value if name == "json" else None})
    found = body.for_engine()
    assert found["structured_outputs"] == {name: value}
    assert not any(field.startswith("guided_") for field in found)
    assert read(path, use_beam_search=True, **{f"guided_{name}": value}).for_engine()["structured_outputs"] == {name: value}


def test_an_older_form_that_is_not_used_is_none():
    assert read(guided_json_object=False) is None
    assert "structured_outputs" not in read(tools=TOOLS, guided_json_object=False, guided_json=None).for_engine()


@pytest.mark.parametrize("other", [{"guided_json": {}}, {"structured_outputs": {"regex": "b"}}, {"response_format": SCHEMA}])
def test_two_forms_are_refused_if_one_has_an_older_name(other):
    with pytest.raises(InvalidRequest, match="both give the form of the output") as refusal:
        read(guided_regex="a", **other)
    assert refusal.value.param.startswith("guided_")


@pytest.mark.parametrize("fields", [{"functions": [{"name": "f"}]}, {"function_call": {"name": "f"}}])
@pytest.mark.parametrize("more", [{"tools": TOOLS}, {"use_beam_search": True}], ids=["rendered", "whole"])
def test_functions_are_refused_beside_what_an_engine_serves(fields, more):
    assert read(**fields) is None, "the router refuses them alone"
    with pytest.raises(InvalidRequest, match="not supported yet: leave it out") as refusal:
        read(**fields, **more)
    assert refusal.value.param in fields


@pytest.mark.parametrize("fields", [{"functions": []}, {"function_call": "none"}])
def test_functions_that_are_not_used_are_no_fields_of_the_router(fields):
    assert read(COMPLETIONS, structured_outputs={"regex": "h"}, **fields).of_router().n is None


def test_anthropics_form_goes_whole():
    assert engine_body(MESSAGES, b'{"messages": []}', "m", splits_output=False).is_whole


def test_the_router_reads_its_own_fields_strictly():
    request = read(tools=TOOLS, n=2, seed=4, stream=True, model="adapter").of_router()
    assert (request.n, request.seed, request.stream, request.tools, request.model) == (2, 4, True, None, None)
    assert read(tools=TOOLS, n=2, newer=None).of_router() == read(tools=TOOLS, n=2).of_router()
    with pytest.raises(InvalidRequest, match="max_tokns"):
        read(tools=TOOLS, max_tokns=5).of_router()
    with pytest.raises(InvalidRequest, match="temperature"):
        read(tools=TOOLS, temperature="hot").of_router()


def test_the_engine_gets_neither_the_routers_fields_nor_its_name_for_the_model():
    body = read(tools=TOOLS, timeout_s=3, session_id="s", request_id="r", kv_transfer_params={})
    assert body.for_engine(stream=False, tools=None) == {"messages": [{"role": "user", "content": "hi"}], "stream": False}
    assert read(tools=TOOLS, model="adapter").for_engine()["model"] == "adapter"
    assert engine_body(MESSAGES, b'{"model": "m"}', "m", splits_output=False).for_engine() == {"model": "m"}
