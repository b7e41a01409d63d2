from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import get_args

import pytest
from openai.types.shared import ReasoningEffort

from core.errors import ContextTooLong, InvalidRequest
from core.model.tokenizer import Tokenizer
from router.openai.chat_template import ChatTemplate
from router.openai.preprocess import PromptReader
from router.openai.requests import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    ImagePart,
    ImageURL,
    RefusalPart,
    TextPart,
)
from router.openai.sampling import ModelLimits
from router.openai.text_pool import INLINE_CHARACTERS, TextPool
from tests.support.sampling_params import sampling_params

LIMITS = ModelLimits(max_model_len=20_000, vocab_size=257)
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.fixture
def template(tiny_tokenizer):
    return ChatTemplate(tiny_tokenizer, "template", has_images=False)


@pytest.fixture
def reader(tiny_tokenizer) -> Iterator[PromptReader]:
    pool = TextPool(tiny_tokenizer, 1)
    yield PromptReader(tiny_tokenizer, pool)
    pool.close()


@pytest.fixture
def spell(tiny_tokenizer):
    return lambda text: tuple(tiny_tokenizer.encode(text))


def said(*messages: ChatMessage, **fields) -> ChatCompletionRequest:
    return ChatCompletionRequest(messages=list(messages), **fields)


USER = ChatMessage(role="user", content="hi")


async def test_reads_the_four_forms_of_a_prompt(reader, spell):
    a, b = spell("ab"), spell("cd")
    for prompt, expected in (("ab", [a]), (["ab", "cd"], [a, b]), (list(a), [a]), ([list(a), list(b)], [a, b])):
        prompts = await reader.read_completion(CompletionRequest(prompt=prompt), LIMITS)
        assert [item.token_ids for item in prompts] == expected
        assert prompts[0].text == "ab"


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("", "prompt 0 is empty"),
        ([], "empty list"),
        (["a", ""], "prompt 1 is empty"),
        ([[]], "prompt 0 is empty"),
        (["a", [1]], "mixes"),
        ([1, "a"], "mixes"),
        ([257], "257"),
        ([[1], [-1]], "-1"),
        (["a"] * 129, "at most 128"),
    ],
)
async def test_refuses_prompts_that_make_no_sense(reader, prompt, reason):
    with pytest.raises(InvalidRequest, match=reason) as refused:
        await reader.read_completion(CompletionRequest(prompt=prompt), LIMITS)
    assert refused.value.param == "prompt"


async def test_prompts_times_n_is_limited_before_anything_is_tokenized(reader, tiny_tokenizer, monkeypatch):
    assert len(await reader.read_completion(CompletionRequest(prompt=["a"] * 8, n=128), LIMITS)) == 8

    def never(*args, **kwargs):
        raise AssertionError("tokenized")

    monkeypatch.setattr(type(tiny_tokenizer), "encode", never)
    with pytest.raises(InvalidRequest, match="9 prompts with n = 128 are 1152 choices, at most 1024") as refused:
        await reader.read_completion(CompletionRequest(prompt=["a"] * 9, n=128), LIMITS)
    assert refused.value.param == "n"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (ChatMessage(role="user"), "messages[1].content"),
        (ChatMessage(role="user", content=[]), "messages[1].content"),
        (ChatMessage(role="tool", content="rain"), "messages[1].tool_call_id"),
    ],
)
async def test_messages_without_what_makes_them_one_are_refused(reader, message, param):
    with pytest.raises(InvalidRequest, match="is required in a message of the") as refused:
        await reader.read_chat(said(USER, message), LIMITS)
    assert refused.value.param == param


@pytest.mark.parametrize("role", ["user", "system", "tool"])
async def test_calls_outside_messages_of_the_assistant_are_refused(reader, role):
    message = ChatMessage(role=role, content="x", tool_calls=[CALL], tool_call_id="a")
    with pytest.raises(InvalidRequest, match="belongs to a message of the assistant: leave it out") as refused:
        await reader.read_chat(said(USER, message), LIMITS)
    assert refused.value.param == "messages[1].tool_calls"


@pytest.mark.parametrize(
    ("fields", "seen"),
    [
        ({"reasoning_content": "a"}, "a"),
        ({"reasoning": "b"}, "b"),
        ({"reasoning_content": "a", "reasoning": "b"}, "a"),
        ({"reasoning_content": "", "reasoning": "b"}, ""),
        ({"reasoning": {"effort": "low"}}, None),
        ({}, None),
    ],
)
def test_templates_get_reasoning_by_the_name_that_they_know(template, monkeypatch, fields, seen):
    rendered = []
    monkeypatch.setattr(Tokenizer, "apply_chat_template", lambda self, messages, **options: rendered.extend(messages) or "")
    template.render(said(USER, ChatMessage(role="assistant", content="x", **fields), ChatMessage(role="user", content="y")))
    assert [message.get("reasoning_content") for message in rendered] == [None, seen, None]
    assert "reasoning" not in rendered[1]


async def test_truncation_keeps_the_end(reader, spell):
    for prompt in ("abcdef", list(spell("abcdef"))):
        (kept,) = await reader.read_completion(CompletionRequest(prompt=prompt, truncate_prompt_tokens=2), LIMITS)
        assert (kept.token_ids, kept.text) == (spell("ef"), "ef")


@pytest.mark.parametrize(
    ("fields", "most", "num_kept"),
    [
        ({"max_tokens": 10}, 0, 90),
        ({"max_tokens": 1}, 0, 99),
        ({}, 0, 84),
        ({"max_tokens": 10}, 50, 50),
        ({"max_tokens": 200}, 0, 1),
    ],
)
async def test_truncation_to_what_fits_leaves_room_for_the_output(reader, fields, most, num_kept):
    limits = ModelLimits(max_model_len=100, vocab_size=257, max_prompt_tokens=most)
    request = CompletionRequest(prompt="ab" * 80, truncate_prompt_tokens=-1, **fields)
    (kept,) = await reader.read_completion(request, limits)
    assert kept.text == ("ab" * 80)[-num_kept:]
    if fields != {"max_tokens": 200}:
        assert sampling_params(request, num_kept, 5, limits).max_tokens == fields.get("max_tokens", 16)


async def test_a_chats_own_limit_of_tokens_counts_when_it_is_truncated(reader):
    limits = ModelLimits(max_model_len=100, vocab_size=257)
    request = said(USER, truncate_prompt_tokens=-1, max_tokens=1, max_completion_tokens=98)
    assert len((await reader.read_chat(request, limits)).token_ids) == 2


@pytest.mark.parametrize("limit", [0, -2])
async def test_refuses_senseless_truncation(reader, limit):
    with pytest.raises(InvalidRequest) as refused:
        await reader.read_completion(CompletionRequest(prompt="abc", truncate_prompt_tokens=limit), LIMITS)
    assert refused.value.param == "truncate_prompt_tokens"


async def test_a_text_that_cannot_fit_is_refused_without_tokenizing_it(reader, tiny_tokenizer, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("tokenized")

    monkeypatch.setattr(type(tiny_tokenizer), "encode", never)
    text = "x" * (100 * len("<eos>") + 1)
    with pytest.raises(ContextTooLong):
        await reader.read_completion(CompletionRequest(prompt=text), ModelLimits(max_model_len=100, vocab_size=257))


@pytest.mark.parametrize("fields", [{}, {"truncate_prompt_tokens": 100}])
async def test_token_ids_that_cannot_fit_are_refused_before_they_are_looked_at(reader, tiny_tokenizer, monkeypatch, fields):
    def never(*args, **kwargs):
        raise AssertionError("it was decoded")

    monkeypatch.setattr(type(tiny_tokenizer), "decode", never)
    limits = ModelLimits(max_model_len=100, vocab_size=257)
    prompt = [1] * 100 + [-1]  # the last one is wrong as well, and unchecked
    with pytest.raises(ContextTooLong, match="maximum context length is 100 tokens") as refused:
        await reader.read_completion(CompletionRequest(prompt=prompt, **fields), limits)
    assert refused.value.param == "prompt"


async def test_long_token_prompts_are_cut_to_what_was_asked_for(reader):
    request = CompletionRequest(prompt=[1] * 100_000 + [2, 3], truncate_prompt_tokens=2)
    (prompt,) = await reader.read_completion(request, ModelLimits(max_model_len=100, vocab_size=257))
    assert prompt.token_ids == (2, 3)


async def test_long_texts_are_tokenized_off_the_event_loop(reader, tiny_tokenizer, monkeypatch):
    threads = []
    original = type(tiny_tokenizer).encode

    def spy(self, text, **options):
        threads.append(threading.current_thread())
        return original(self, text, **options)

    monkeypatch.setattr(type(tiny_tokenizer), "encode", spy)
    await reader.read_completion(CompletionRequest(prompt="x" * INLINE_CHARACTERS), LIMITS)
    (long,) = await reader.read_completion(CompletionRequest(prompt="x" * (INLINE_CHARACTERS + 1)), LIMITS)
    assert threads[0] is threading.main_thread()
    assert threads[1] is not threading.main_thread()
    assert len(long.token_ids) == INLINE_CHARACTERS + 1


async def test_short_texts_that_are_long_together_are_tokenized_off_the_event_loop(reader, tiny_tokenizer, monkeypatch):
    threads = set()
    original = type(tiny_tokenizer).encode

    def spy(self, text, **options):
        threads.add(threading.current_thread())
        return original(self, text, **options)

    monkeypatch.setattr(type(tiny_tokenizer), "encode", spy)
    half = "x" * (INLINE_CHARACTERS // 2)
    await reader.read_completion(CompletionRequest(prompt=[half, half]), LIMITS)
    assert threads == {threading.main_thread()}
    threads.clear()
    await reader.read_completion(CompletionRequest(prompt=[half, half, "x"]), LIMITS)
    assert threading.main_thread() not in threads


@pytest.mark.parametrize(
    ("fields", "is_inline"),
    [
        ({"content": "x"}, True),
        ({"tool_calls": [CALL]}, False),
        ({"content": "x", "reasoning_content": "hm"}, False),
        ({"content": "x", "reasoning": "hm"}, False),
    ],
)
async def test_earlier_calls_and_reasoning_are_rendered_off_the_event_loop(reader, monkeypatch, fields, is_inline):
    threads = []
    monkeypatch.setattr(ChatTemplate, "render", lambda self, request, *limit: threads.append(threading.current_thread()) or "x")
    await reader.render_in_time(ChatCompletionRequest(messages=[ChatMessage(role="assistant", **fields)]))
    assert (threads == [threading.main_thread()]) == is_inline


@pytest.mark.parametrize("item", ["a", [1]])
async def test_others_get_their_turn_between_prompts(reader, item):
    turns = []

    async def other() -> None:
        while True:
            turns.append(1)
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    await reader.read_completion(CompletionRequest(prompt=[item] * 50), LIMITS)
    task.cancel()
    assert len(turns) >= 49


async def test_renders_a_conversation(reader):
    prompt = await reader.read_chat(said(ChatMessage(role="system", content="be nice"), USER), LIMITS)
    assert prompt.text == "<system>be nice\n<user>hi<assistant>"


async def test_the_developer_role_is_the_system_role(template):
    assert template.render(said(ChatMessage(role="developer", content="x"), USER)).startswith("<system>x")


async def test_text_parts_are_joined_by_line_breaks(template):
    parts = ChatMessage(role="user", content=[TextPart(text="a"), TextPart(text="b"), RefusalPart(refusal="c")])
    assert template.render(said(parts)) == "<user>a\nb\nc<assistant>"


async def test_missing_content_is_empty(template):
    assert template.render(said(ChatMessage(role="assistant"), USER)).startswith("<assistant>\n")


async def test_the_last_message_can_be_continued(template):
    request = said(USER, ChatMessage(role="assistant", content="well"), continue_final_message=True)
    assert template.render(request) == "<user>hi\n<assistant>well"


async def test_the_generation_prompt_can_be_left_out(template):
    assert template.render(said(USER, add_generation_prompt=False)) == "<user>hi"


async def test_continuing_and_a_generation_prompt_exclude_each_other(template):
    with pytest.raises(InvalidRequest) as refused:
        template.render(said(USER, continue_final_message=True, add_generation_prompt=True))
    assert refused.value.param == "continue_final_message"


async def test_images_are_refused_by_their_place(template):
    with pytest.raises(InvalidRequest, match="image_url") as refused:
        template.render(said(USER, ChatMessage(role="user", content=[TextPart(text="a"), ImagePart(ImageURL("data:,"))])))
    assert refused.value.param == "messages[1].content[1]"


@pytest.mark.parametrize("field", ["tool_calls", "function_call", "audio"])
async def test_messages_with_tools_are_refused_by_their_place(template, field):
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    with pytest.raises(InvalidRequest, match=r"not supported|does not use tools") as refused:
        template.render(said(ChatMessage(role="assistant", content="x", **{field: calls})))
    assert refused.value.param == f"messages[0].{field}"


@pytest.mark.parametrize("effort", get_args(get_args(ReasoningEffort)[0]))
async def test_every_effort_that_openai_has_is_known(template, effort):
    assert "hi" in template.render(said(USER, reasoning_effort=effort))


async def test_an_effort_that_nobody_has_is_refused(template):
    with pytest.raises(InvalidRequest, match="none, minimal, low, medium, high, xhigh, max") as refused:
        template.render(said(USER, reasoning_effort="huge"))
    assert refused.value.param == "reasoning_effort"


async def test_an_empty_conversation_is_refused(template):
    with pytest.raises(InvalidRequest) as refused:
        template.render(said())
    assert refused.value.param == "messages"


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "self"])
async def test_template_arguments_cannot_replace_the_request_s_own(template, name):
    with pytest.raises(InvalidRequest) as refused:
        template.render(said(USER, chat_template_kwargs={name: []}))
    assert refused.value.param == "chat_template_kwargs"
