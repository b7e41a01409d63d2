"""Unknown fields inside messages are ignored and, if they may have had a meaning, named; elsewhere they are errors."""

from __future__ import annotations

import json

import pytest

from core.errors import InvalidRequest
from router.openai.preprocess import MAX_MESSAGES
from router.openai.requests import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    DetokenizeRequest,
    TextPart,
    TokenizeRequest,
)
from router.openai.sampling import check_supported
from router.openai.unknown_fields import HARMLESS, MAX_ITEMS, ignored_header, parse_lenient_body
from router.responses_api.requests import ResponsesRequest


def read(message: dict, kind: type = ChatCompletionRequest, **fields):
    return parse_lenient_body(json.dumps({"messages": [message], **fields}).encode(), kind)


@pytest.mark.parametrize("kind", [ChatCompletionRequest, TokenizeRequest])
@pytest.mark.parametrize("name", sorted(HARMLESS - set(ChatMessage.__struct_fields__)))
def test_harmless_fields_of_messages_are_ignored_in_silence(kind, name):
    request, ignored = read({"role": "assistant", "content": "x", name: {"any": ["thing"]}}, kind)
    assert request.messages == [ChatMessage(role="assistant", content="x")]
    assert list(ignored) == []


def test_null_fields_of_messages_are_ignored_in_silence():
    request, ignored = read({"role": "user", "content": "x", "mood": None})
    assert request.messages == [ChatMessage(role="user", content="x")]
    assert list(ignored) == []


def test_other_fields_of_messages_and_parts_are_named():
    part = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}, "colour": "red"}
    request, ignored = read({"role": "user", "content": [part], "prefix": True})
    assert request.messages == [ChatMessage(role="user", content=[TextPart(text="x")])]
    assert ignored == ["messages.content.colour", "messages.prefix"]


def test_second_turn_of_litellm_is_read():
    answer = {
        "content": "Hello",
        "role": "assistant",
        "tool_calls": None,
        "function_call": None,
        "provider_specific_fields": {"refusal": None},
        "annotations": [],
        "thinking_blocks": None,
        "audio": None,
    }
    request, ignored = read(answer)
    assert (request.messages[0].content, list(ignored)) == ("Hello", [])


@pytest.mark.parametrize("fields", [{"colour": 1}, {"stream_options": {"flush": True}}])
def test_unknown_fields_outside_messages_are_errors_also_beside_ignored_ones(fields):
    with pytest.raises(InvalidRequest) as refused:
        read({"role": "user", "content": "x", "prefix": True}, **fields)
    assert refused.value.param == next(iter(fields)) + (".flush" if "stream_options" in fields else "")


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "pope", "content": "x", "prefix": True}, "messages[0].role"),
        ({"content": "x", "prefix": True}, "messages[0].role"),
        ({"role": "user", "prefix": True, "content": [{"type": "video"}]}, "messages[0].content[0].type"),
        ({"role": "user", "prefix": True, "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "prefix": True, "content": [7]}, "messages[0].content"),
    ],
)
def test_errors_beside_ignored_fields_are_named_as_ever(message, param):
    with pytest.raises(InvalidRequest) as refused:
        read(message)
    assert (refused.value.param or "").startswith(param)


@pytest.mark.parametrize(
    "kind", [ChatCompletionRequest, CompletionRequest, ResponsesRequest, TokenizeRequest, DetokenizeRequest]
)
def test_unknown_fields_outside_messages_that_are_null_are_no_fields(kind):
    known = {"prompt": "x"} if kind is CompletionRequest else {"tokens": [1]} if kind is DetokenizeRequest else {}
    known |= {"messages": [{"role": "user", "content": "x"}]} if kind is ChatCompletionRequest else {}
    known |= {"input": "x"} if kind is ResponsesRequest else {}
    request, ignored = parse_lenient_body(json.dumps({"moderation": None, **known, "newer": None}).encode(), kind)
    assert (request, list(ignored)) == (parse_lenient_body(json.dumps(known).encode(), kind)[0], [])
    with pytest.raises(InvalidRequest, match="unknown field") as refused:
        parse_lenient_body(json.dumps({"moderation": None, **known, "newer": 0}).encode(), kind)
    assert refused.value.param == "newer"


def test_bodies_without_messages_are_as_strict_as_ever():
    with pytest.raises(InvalidRequest, match="colour"):
        parse_lenient_body(b'{"prompt": "x", "colour": 1}', CompletionRequest)


def test_header_counts_all_fields_and_names_few_and_only_plain_ones():
    assert ignored_header(["messages.a", "messages.a", "messages.b\r\nx: y"]) == "3; messages.a"
    assert ignored_header(["messages.é"]) == "1"
    many = [f"messages.f{number}" for number in range(100)]
    assert ignored_header(many).startswith("100; messages.f0, ")
    assert ignored_header(many).count("messages.") == 8


@pytest.mark.parametrize(
    "fields",
    [
        {"prediction": {"type": "content", "content": "x"}},
        {"verbosity": "low"},
        {"verbosity": "high"},
        {"service_tier": "flex"},
        {"modalities": ["text"]},
        {"store": False},
        {"metadata": {"a": "b"}},
        {"parallel_tool_calls": True},
    ],
)
def test_fields_that_cannot_change_the_meaning_are_accepted(fields):
    request, _ = read({"role": "user", "content": "x"}, **fields)
    check_supported(request)


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": [{"role": "user", "contgnt": "hi"}], "max_\x83": -1}',
        b'{"nope": 1, "messages": [{"rol\xba": "user"}]}',
        b'{"nope": 1, "messages": [{"role": "user", "content": "x"}]',
        b'{"nope": 1, "x": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
    ids=["name that is no text", "bytes that are no text", "no end", "too deep"],
)
def test_what_is_malformed_behind_an_unknown_field_is_refused(body):
    """The first decoding stops at the unknown field."""
    with pytest.raises(InvalidRequest):
        parse_lenient_body(body, ChatCompletionRequest)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "x", "mood": 1}] * (MAX_ITEMS + 1),
        [{"mood": 1, "role": "user", "content": [{"type": "text", "text": "x"}] * MAX_ITEMS}],
        [{"mood": 1, "role": "user", "content": [0] * 100_000}],
    ],
)
def test_more_items_than_any_conversation_has_are_not_searched_for_unknown_fields(messages):
    with pytest.raises(InvalidRequest, match="more than 8192 items") as refused:
        parse_lenient_body(json.dumps({"messages": messages}).encode(), ChatCompletionRequest)
    assert refused.value.param == "messages"


def test_as_many_items_as_a_conversation_may_have_are_read_beside_unknown_fields():
    messages = [{"role": "user", "content": [{"type": "text", "text": "x", "mood": 1}]}] * MAX_MESSAGES
    request, ignored = parse_lenient_body(json.dumps({"messages": messages}).encode(), ChatCompletionRequest)
    assert len(request.messages) == len(ignored) == MAX_MESSAGES
