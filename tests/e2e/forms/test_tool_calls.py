"""Forced tool calls over the handoff: whole, streamed, and with the decode worker killed in mid-stream."""

from __future__ import annotations

import json

import jsonschema
import openai
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {
            "type": "array",
            "items": {"type": "integer", "minimum": 1000, "maximum": 9999},
            "minItems": 40,
            "maxItems": 40,
        },
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
SHORT = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Bonn"]}},
    "required": ["city"],
    "additionalProperties": False,
}
ANSWER = {"type": "object", "properties": {"rain": {"type": "boolean"}}, "required": ["rain"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
NAMED = {"type": "function", "function": {"name": "weather"}}
CHAT = {
    "messages": [{"role": "user", "content": "The ferry"}],
    "tools": TOOLS,
    "seed": 7,
    "max_tokens": 900,
    "temperature": 1.0,
}


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=f"{served.cluster.base_url}/v1", api_key="none", max_retries=0) as found:
        found.model = next(iter(found.models.list())).id
        yield found


def streamed(events, after_pieces=None):
    """Return name, arguments and finish reason of a stream's only call; ``after_pieces`` = (number, what to do then)."""
    name, pieces, reason = "", [], None
    for event in events:
        (choice,) = event.choices
        for call in choice.delta.tool_calls or ():
            assert call.index == 0
            name += call.function.name or ""
            pieces.append(call.function.arguments)
        reason = choice.finish_reason or reason
        if after_pieces is not None and len(pieces) >= after_pieces[0]:
            after_pieces[1]()
            after_pieces = None
    assert after_pieces is None, "the stream ended too soon"
    return name, "".join(pieces), reason


def test_a_named_call_always_parses_whole_and_streamed(client):
    answer = client.chat.completions.create(model=client.model, tool_choice=NAMED, **CHAT)
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content, call.function.name) == ("stop", None, "weather")
    jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)
    assert answer.usage.model_extra["kv_transfer"]["transferred_tokens"] > 0
    events = client.chat.completions.create(model=client.model, tool_choice=NAMED, stream=True, **CHAT)
    assert streamed(events) == ("weather", call.function.arguments, "stop")


def test_required_calls_always_parse(client):
    fields = CHAT | {"parallel_tool_calls": False}
    (choice,) = client.chat.completions.create(model=client.model, tool_choice="required", **fields).choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)


def check_form_or_call(choice):
    """Check that a choice is of the form or calls the function; return which."""
    calls = choice.message.tool_calls
    if not calls:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), ANSWER)
        return "form"
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    for call in calls:
        assert call.function.name == "weather"
        jsonschema.validate(json.loads(call.function.arguments), SHORT)
    return "call"


@pytest.mark.parametrize(("bias", "expected"), [(100, "call"), (-100, "form")])
def test_the_model_chooses_between_a_form_and_calls(client, served, bias, expected):
    tools = [{"type": "function", "function": {"name": "weather", "parameters": SHORT}}]
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}}
    (marker,) = served.client.post("/tokenize", json={"prompt": "<", "add_special_tokens": False}).json()["tokens"]
    fields = CHAT | {"tools": tools, "response_format": form, "logit_bias": {str(marker): bias}, "n": 3}
    fields |= {"parallel_tool_calls": False, "logprobs": True}
    answer = client.chat.completions.create(model=client.model, **fields)
    assert {check_form_or_call(choice) for choice in answer.choices} == {expected}
    assert answer.usage.model_extra["kv_transfer"]["transferred_tokens"] > 0
    parts = {}
    for event in client.chat.completions.create(model=client.model, stream=True, **fields):
        for choice in event.choices:
            content, arguments = parts.setdefault(choice.index, ([], []))
            content.append(choice.delta.content or "")
            arguments += [call.function.arguments for call in choice.delta.tool_calls or ()]
    for choice in answer.choices:
        content, arguments = map("".join, parts[choice.index])
        calls = choice.message.tool_calls
        assert (content, arguments) == (choice.message.content or "", calls[0].function.arguments if calls else "")


def test_a_stream_of_a_call_goes_on_after_its_decode_worker_is_killed(client, kill_busy_decode_worker):
    expected = streamed(client.chat.completions.create(model=client.model, tool_choice=NAMED, stream=True, **CHAT))
    events = client.chat.completions.create(model=client.model, tool_choice=NAMED, stream=True, **CHAT)
    assert streamed(events, after_pieces=(20, kill_busy_decode_worker)) == expected


def test_a_response_goes_on_after_its_decode_worker_is_killed_in_mid_stream(client, kill_busy_decode_worker):
    fields = {
        "model": client.model,
        "input": "The ferry",
        "tools": [{"type": "function", "name": "weather", "parameters": PARAMETERS}],
        "tool_choice": {"type": "function", "name": "weather"},
        "temperature": 1.0,
        "max_output_tokens": 900,
        "extra_body": {"seed": 7},
    }
    whole = client.responses.create(**fields)
    (call,) = whole.output
    jsonschema.validate(json.loads(call.arguments), PARAMETERS)
    assert (whole.status, call.name) == ("completed", "weather")
    assert whole.usage.model_extra["kv_transfer"]["transferred_tokens"] > 0
    deltas = []
    for event in client.responses.create(stream=True, **fields):
        if event.type == "response.function_call_arguments.delta":
            deltas.append(event.delta)
            if len(deltas) == 20:
                kill_busy_decode_worker()
    assert event.type == "response.completed"
    assert "".join(deltas) == call.arguments == event.response.output[0].arguments
