"""A body of the responses endpoint as a chat, and what is refused of it."""

import json
import re

import msgspec
import pytest

from core.errors import EncoderInputMissing, InvalidRequest
from core.wire.messages import ErrorInfo
from router.openai.unknown_fields import parse_lenient_body
from router.responses_api.requests import ResponsesRequest, check_responses_supported
from router.responses_api.translation import chat_request, failure_in_words_of_responses, in_words_of_responses

CALL = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Oslo"}'}
CHAT_CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
FUNCTION_OF_CHATS = {"type": "function", "function": {"name": "weather"}}


def parsed(**fields) -> ResponsesRequest:
    request, _ = parse_lenient_body(json.dumps({"input": "hi", **fields}).encode(), ResponsesRequest)
    check_responses_supported(request)
    return request


def chat(**fields) -> dict:
    found = msgspec.to_builtins(chat_request(parsed(**fields)))
    return {name: value for name, value in found.items() if value is not None}


def messages(*items, **fields) -> list[dict]:
    return chat(input=list(items), **fields)["messages"]


def test_a_text_is_a_message_of_the_user():
    assert chat() == {"messages": [{"role": "user", "content": "hi"}]}


def test_instructions_are_the_first_message():
    assert chat(instructions="be short")["messages"][0] == {"role": "system", "content": "be short"}


def test_messages_go_with_and_without_type():
    text = {"type": "input_text", "text": "a"}
    answer = {"type": "output_text", "text": "b", "annotations": [], "logprobs": []}
    found = messages(
        {"role": "user", "content": "hi"},
        {"type": "message", "role": "user", "content": [text]},
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [answer]},
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:x", "detail": "auto"}]},
    )
    assert found == [
        {"role": "user", "content": "hi"},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "b"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x", "detail": None}}]},
    ]


def test_the_name_of_a_message_stays_with_it():
    assert messages({"role": "user", "content": "hi", "name": "bob"}) == [{"role": "user", "content": "hi", "name": "bob"}]


def test_calls_join_the_message_before_them_and_outputs_are_tool_messages():
    output = {"type": "function_call_output", "call_id": "call_1", "output": "rain"}
    found = messages({"role": "assistant", "content": "I look."}, CALL, CALL | {"call_id": "call_2"}, output)
    assert found == [
        {"role": "assistant", "content": "I look.", "tool_calls": [CHAT_CALL, CHAT_CALL | {"id": "call_2"}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]


def test_reasoning_goes_to_the_assistants_message_after_it_and_summaries_nowhere():
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    secret = {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": "x"}
    assert messages(reasoning, CALL) == [{"role": "assistant", "tool_calls": [CHAT_CALL], "reasoning_content": "hm"}]
    assert messages(reasoning, {"role": "assistant", "content": "a"})[0]["reasoning_content"] == "hm"
    assert messages(secret, {"role": "user", "content": "a"}) == [{"role": "user", "content": "a"}]


def test_tools_choice_form_and_effort_have_the_form_of_chats():
    tool = {"type": "function", "name": "weather", "description": "d", "parameters": {"type": "object"}, "strict": True}
    schema = {"type": "object"}
    found = chat(
        tools=[tool],
        tool_choice={"type": "function", "name": "weather"},
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}, "verbosity": "low"},
        reasoning={"effort": "low", "summary": "auto"},
        max_output_tokens=5,
        temperature=0.5,
        parallel_tool_calls=False,
    )
    function = {"name": "weather", "description": "d", "parameters": {"type": "object"}, "strict": True}
    assert found["tools"] == [{"type": "function", "function": function}]
    assert found["tool_choice"] == {"type": "function", "function": {"name": "weather"}}
    described = {"name": "n", "schema": schema, "strict": True}
    assert found["response_format"] == {"type": "json_schema", "json_schema": described}
    assert (found["reasoning_effort"], found["verbosity"], found["max_completion_tokens"]) == ("low", "low", 5)
    assert (found["temperature"], found["parallel_tool_calls"]) == (0.5, False)


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"store": True}, "store", "not kept"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the earlier items"),
        ({"conversation": "c"}, "conversation", "send the earlier items"),
        ({"background": True}, "background", "set stream"),
        ({"truncation": "auto"}, "truncation", "send fewer items"),
        ({"top_logprobs": 2}, "top_logprobs", "chat/completions"),
        ({"include": ["message.output_text.logprobs"]}, "include", "chat/completions"),
        ({"prompt": {"id": "p"}}, "prompt", "instructions"),
        ({"input": []}, "input", "empty"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "not kept here: send the item itself"),
        ({"input": [{"content": "x"}]}, "input[0].role", "required"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id", "required"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output", "required"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]", "input_file"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url", "files"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "web_search"),
        ({"tools": [FUNCTION_OF_CHATS]}, "tools[0]", '{"type": "function", "name": ..., "parameters": ...}'),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "allowed_tools"),
        ({"tool_choice": FUNCTION_OF_CHATS}, "tool_choice", '{"type": "function", "name": ...}'),
        ({"tool_choice": "weather"}, "tool_choice", '{"type": "function", "name": ...}'),
        ({"text": {"format": {"type": "grammar"}}}, "text.format", "json_schema"),
        ({"colour": 1}, "colour", "unknown"),
        ({"input": [{"role": "user"}]}, "input[0].content", "required"),
        ({"input": [{"role": "user", "content": []}]}, "input[0].content", "required"),
        ({"input": [{"role": "user", "content": "x", "arguments": "{}"}]}, "input[0].arguments", "no field of a message"),
        ({"input": [{"role": "user", "content": "x", "output": "z"}]}, "input[0].output", "no field of a message"),
        ({"max_tool_calls": -4}, "max_tool_calls", ">= 0"),
        ({"include": ["nonsense"]}, "include[0]", "openapi.json"),
        ({"reasoning": {"summary": "zzz"}}, "reasoning.summary", "openapi.json"),
    ],
)
def test_what_is_not_supported_is_named_with_its_reason(fields, param, reason):
    with pytest.raises(InvalidRequest, match=re.escape(reason)) as refusal:
        chat(**fields)
    assert refusal.value.param == param


def test_unknown_fields_of_items_are_ignored():
    body = {"input": [{"role": "user", "content": "x", "phase": "final", "colour": 1}]}
    request, ignored = parse_lenient_body(json.dumps(body).encode(), ResponsesRequest)
    assert chat_request(request).messages[0].content == "x"
    assert ignored == ["input.colour"]


@pytest.mark.parametrize(
    ("param", "text", "renamed", "new_text"),
    [
        ("messages[1].tool_calls", "messages[1].tool_calls: not so", "input", "input: not so"),
        ("response_format", "response_format and tools", "text.format", "text.format and tools"),
        ("max_completion_tokens", "max_completion_tokens must be", "max_output_tokens", "max_output_tokens must be"),
        ("tools[1]", "tools[1].function.name must be", "tools[1]", "tools[1].name must be"),
        ("tools[0]", "tools[0].function.parameters must be", "tools[0]", "tools[0].parameters must be"),
        ("response_format", "response_format.json_schema.schema must be", "text.format", "text.format.schema must be"),
        ("temperature", "temperature must be", "temperature", "temperature must be"),
        (None, "no field", None, "no field"),
    ],
)
def test_errors_of_the_chat_name_the_fields_of_this_endpoint(param, text, renamed, new_text):
    for kind in (InvalidRequest, EncoderInputMissing):
        error = in_words_of_responses(kind(text, param=param))
        assert (type(error), error.param, str(error)) == (kind, renamed, new_text)
    info = failure_in_words_of_responses(ErrorInfo.of(InvalidRequest(text, param=param)))
    assert info == ErrorInfo.of(InvalidRequest(new_text, param=renamed))
