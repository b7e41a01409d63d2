"""Chats with tools through the router, answered by scripted workers."""

import json
import threading
from dataclasses import replace

import pytest

from core.errors import ConfigError
from core.model.tokenizer import Tokenizer
from core.wire.messages import Generate
from router.openai.chat_output import ChatOutput
from router.openai.served_model import ServedModel

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}{% endfor %}"
    "{% if reasoning_effort %}[{{ reasoning_effort }}]{% endif %}<assistant>{{ '</think>' if false }}"
)
USER = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
EARLIER = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
TOLD = {"role": "tool", "tool_call_id": "call_1", "content": "rain"}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'


@pytest.fixture
def tiny_router_of(start_router, write_tiny_files, tmp_path):
    async def start(template, tool_template=None, **settings):
        files = replace(write_tiny_files(tmp_path), chat_template=template, tool_template=tool_template)
        model = ServedModel(name="tiny", tokenizer=Tokenizer(files))
        return await start_router(has_http=False, model=model, **settings)

    return start


@pytest.fixture
async def with_tools(tiny_router_of):
    under_test = await tiny_router_of(TEMPLATE)
    await under_test.pair()

    async def ask(text, **fields):
        for worker in under_test.workers:
            worker.script.text = text
        body = {"messages": USER, "max_tokens": 150, **fields}
        async with under_test.client() as client:
            return await client.post("/v1/chat/completions", json=body)

    ask.under_test = under_test
    return ask


def joined(events):
    """Return what an OpenAI client makes of a stream: content, reasoning, calls, and the finish reason."""
    content, reasoning, calls, reason = "", "", {}, None
    for event in events:
        if event == "[DONE]":
            continue
        (choice,) = event["choices"]
        delta = choice["delta"]
        content += delta.get("content", "")
        reasoning += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", ()):
            known = calls.setdefault(
                call["index"], {"id": call.get("id"), "type": call.get("type"), "name": "", "arguments": ""}
            )
            known["name"] += call["function"].get("name", "")
            known["arguments"] += call["function"]["arguments"]
        reason = choice["finish_reason"] or reason
    return content, reasoning, list(calls.values()), reason


async def both(ask, sse_events, text, **fields):
    """Return the whole answer and the joined stream in one form; they must agree."""
    response = await ask(text, **fields)
    assert response.status_code == 200, response.text
    whole = response.json()
    (choice,) = whole["choices"]
    message = choice["message"]
    calls = [
        {"id": call["id"], "type": call["type"], "name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        for call in message.get("tool_calls", ())
    ]
    streamed = joined(sse_events((await ask(text, stream=True, **fields)).text))
    found = (message["content"] or "", message.get("reasoning_content", ""), calls, choice["finish_reason"])
    for call in (*calls, *streamed[2]):
        assert call.pop("id").startswith("call_")
    assert streamed == found
    return found


async def test_a_call_is_split_off_and_ends_the_choice(with_tools, sse_events):
    content, reasoning, calls, reason = await both(with_tools, sse_events, f"<think>hm</think>I look.\n{CALL}", tools=TOOLS)
    assert (content, reasoning, reason) == ("I look.", "hm", "tool_calls")
    assert calls == [{"type": "function", "name": "weather", "arguments": '{"city": "Oslo"}'}]


async def test_an_answer_without_a_call_is_text(with_tools, sse_events):
    assert await both(with_tools, sse_events, "hello < you", tools=TOOLS) == ("hello < you", "", [], "stop")


async def test_without_tools_a_call_is_text(with_tools, sse_events):
    assert (await both(with_tools, sse_events, CALL))[0] == CALL
    assert (await both(with_tools, sse_events, CALL, tools=TOOLS, tool_choice="none"))[0] == CALL


async def test_one_call_only_if_they_may_not_be_parallel(with_tools, sse_events):
    assert len((await both(with_tools, sse_events, CALL + CALL, tools=TOOLS))[2]) == 2
    assert len((await both(with_tools, sse_events, CALL + CALL, tools=TOOLS, parallel_tool_calls=False))[2]) == 1


@pytest.mark.slow
async def test_a_named_call_is_forced_by_a_grammar(with_tools, sse_events):
    named = {"type": "function", "function": {"name": "weather"}}
    found = await both(with_tools, sse_events, '{"city": "Oslo"}', tools=TOOLS, tool_choice=named)
    assert found == ("", "", [{"type": "function", "name": "weather", "arguments": '{"city": "Oslo"}'}], "stop")
    generate = next(item for item in with_tools.under_test.workers[0].received if isinstance(item, Generate))
    assert json.loads(generate.sampling.structured_output.value) == PARAMETERS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("choice", "text", "reason"),
    [
        ({"type": "function", "function": {"name": "weather"}}, '{"city": "Oslo"}', "stop"),
        ("required", '[{"name": "weather", "arguments": {"city": "Oslo"}}]', "tool_calls"),
    ],
)
async def test_forced_calls_of_several_choices_have_ids_of_their_own(with_tools, sse_events, choice, text, reason):
    found = (await with_tools(text, tools=TOOLS, tool_choice=choice, n=3)).json()["choices"]
    assert {one["finish_reason"] for one in found} == {reason}
    calls = [call for one in found for call in one["message"]["tool_calls"]]
    assert [call["function"]["arguments"] for call in calls] == ['{"city": "Oslo"}'] * 3
    assert len({call["id"] for call in calls}) == 3
    events = sse_events((await with_tools(text, tools=TOOLS, tool_choice=choice, n=3, stream=True)).text)
    for index in range(3):
        mine = [event for event in events[:-1] if event["choices"][0]["index"] == index]
        assert joined(mine)[2][0]["arguments"] == '{"city": "Oslo"}'


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "weather"}}])
async def test_calls_have_log_probabilities_and_end_at_stop_strings(with_tools, choice):
    text = {"auto": CALL, "required": '[{"name": "weather", "arguments": {"city": "Oslo"}}]'}.get(
        str(choice), '{"city": "Oslo"}'
    )
    fields = {"tools": TOOLS, "tool_choice": choice, "logprobs": True, "top_logprobs": 1}
    (whole,) = (await with_tools(text, **fields)).json()["choices"]
    (cut,) = (await with_tools(text, stop="slo", **fields)).json()["choices"]
    assert "".join(token["token"] for token in whole["logprobs"]["content"]) == f"{text}<eos>"
    assert whole["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Oslo"}'
    assert cut["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "O'
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", "slo")
    assert whole["finish_reason"] == ("stop" if isinstance(choice, dict) else "tool_calls")


CUT = CALL[: CALL.index("slo")]


@pytest.mark.parametrize(
    ("text", "fields", "reason"),
    [
        (CUT, {}, "stop"),
        (CALL + CUT, {}, "stop"),
        (CALL + CUT, {"parallel_tool_calls": False}, "tool_calls"),
        (CALL.removesuffix("}</tool_call>"), {}, "tool_calls"),
        (CALL, {"stop": "}"}, "stop"),
        (CALL, {"stop": "</tool_call>"}, "tool_calls"),
        (CALL + "Observation", {"stop": "Observation"}, "tool_calls"),
    ],
)
async def test_only_whole_calls_end_with_tool_calls(with_tools, sse_events, text, fields, reason):
    _, _, calls, found = await both(with_tools, sse_events, text, tools=TOOLS, **fields)
    assert (found, calls[0]["name"]) == (reason, "weather")


CUT_BEFORE_ITS_NAME = CALL + '\n<tool_call>\n{"name": "wea'


@pytest.mark.slow
@pytest.mark.parametrize("form", ["response_format", "guided_regex"])
@pytest.mark.parametrize(
    ("text", "num_calls"), [(CUT_BEFORE_ITS_NAME, 1), (CUT_BEFORE_ITS_NAME.removeprefix(CALL).strip(), 0), (f"{CALL}<tool", 1)]
)
async def test_beside_a_form_a_call_cut_before_its_name_is_no_text(with_tools, sse_events, text, num_calls, form):
    fields = {form: {"type": "json_object"} if form == "response_format" else "a+", "max_tokens": len(text)}
    content, _, calls, reason = await both(with_tools, sse_events, f"{text}.", tools=TOOLS, **fields)
    assert (content, len(calls), reason) == ("", num_calls, "length")


async def test_where_one_call_is_allowed_a_second_one_that_is_cut_is_dropped(with_tools, sse_events):
    fields = {"tools": TOOLS, "max_tokens": len(CUT_BEFORE_ITS_NAME)}
    text = CUT_BEFORE_ITS_NAME + "ther"
    content, _, calls, reason = await both(with_tools, sse_events, text, parallel_tool_calls=False, **fields)
    assert (content, len(calls), reason) == ("", 1, "length")
    assert (await both(with_tools, sse_events, text, **fields))[0] == CUT_BEFORE_ITS_NAME.removeprefix(CALL)


@pytest.mark.parametrize(("text", "content"), [(CALL[:-5], ""), (f"{CALL} a <", " a <")])
async def test_the_end_of_a_call_may_be_cut(with_tools, sse_events, text, content):
    found, _, calls, reason = await both(with_tools, sse_events, f"{text}.", tools=TOOLS, max_tokens=len(text))
    assert (found, len(calls), reason) == (content, 1, "length")


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "continue_final_message", "self"])
async def test_template_arguments_cannot_replace_the_conversation(with_tools, name):
    response = await with_tools("x", chat_template_kwargs={name: []})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "chat_template_kwargs")


async def test_long_answers_are_split_off_the_loop(with_tools, monkeypatch):
    monkeypatch.setattr("router.openai.responses._SPLIT_AT_ONCE", 5)
    threads = []
    part = ChatOutput.part
    monkeypatch.setattr(ChatOutput, "part", lambda self, delta: threads.append(threading.current_thread()) or part(self, delta))
    response = await with_tools(f"I look.{CALL}", tools=TOOLS)
    assert response.json()["choices"][0]["message"]["tool_calls"]
    assert threading.main_thread() not in threads


@pytest.mark.slow
async def test_an_answer_is_of_its_form_or_calls_tools(with_tools, sse_events):
    fields = {"tools": TOOLS, "response_format": {"type": "json_object"}}
    form = '{"text": "<tool_call>{\\"name\\": 1}</tool_call>"}'
    assert await both(with_tools, sse_events, form, **fields) == (form, "", [], "stop")
    found = await both(with_tools, sse_events, CALL, **fields)
    assert found == ("", "", [{"type": "function", "name": "weather", "arguments": '{"city": "Oslo"}'}], "tool_calls")
    generate = next(item for item in with_tools.under_test.workers[0].received if isinstance(item, Generate))
    assert generate.sampling.structured_output.kind == "grammar"


async def test_a_function_that_cannot_be_enforced_is_named_also_beside_a_form(with_tools):
    parameters = {"type": "object", "properties": {"days": {"type": "array", "uniqueItems": True}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    error = (await with_tools("x", tools=tools, response_format={"type": "json_object"})).json()["error"]
    assert (error["param"], "uniqueItems" in error["message"]) == ("tools[0]", True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "time"}}},
        {"response_format": {"type": "json_object"}},
    ],
)
async def test_a_reference_of_a_tool_to_nothing_is_told_as_the_client_wrote_it(with_tools, fields):
    parameters = {"type": "object", "properties": {"at": {"$ref": "#/$defs/B"}}}
    tools = [*TOOLS, {"type": "function", "function": {"name": "time", "parameters": parameters}}]
    error = (await with_tools("x", tools=tools, **fields)).json()["error"]
    assert error["param"] == "tools[1]"
    assert error["message"].startswith("tools[1].function.parameters: ")
    assert error["message"].endswith("Pointer '/$defs/B' does not exist")


ENDLESS = {"type": "object", "$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
TIME = {"type": "function", "function": {"name": "time"}}
WITHOUT_END = "refers to itself without end, or through too many references"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tools", "fields", "param", "place"),
    [
        (TOOLS, {"tool_choice": "required"}, "tools[1]", "tools[1].function.parameters"),
        (TOOLS, {"tool_choice": TIME}, "tools[1]", "tools[1].function.parameters"),
        (TOOLS, {"response_format": {"type": "json_object"}}, "tools[1]", "tools[1].function.parameters"),
        ([], {"tool_choice": "required"}, "tools[0]", "tools[0].function.parameters"),
        ([], {"response_format": {"type": "json_object"}}, "tools[0]", "tools[0].function.parameters"),
    ],
)
async def test_a_tool_whose_schema_refers_to_itself_without_end_is_told_so(with_tools, tools, fields, param, place):
    tools = [*tools, {"type": "function", "function": {"name": "time", "parameters": ENDLESS}}]
    error = (await with_tools("x", tools=tools, **fields)).json()["error"]
    assert error["message"] == f"the schema of {place} {WITHOUT_END}"
    assert error["param"] == param


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields", [{"tool_choice": TIME}, {"tool_choice": "required"}, {"response_format": {"type": "json_object"}}]
)
async def test_what_cannot_be_enforced_of_a_function_is_told_with_its_place(with_tools, fields):
    parameters = {"type": "object", "properties": {"days": {"type": "array", "uniqueItems": True}}}
    tools = [*TOOLS, {"type": "function", "function": {"name": "time", "parameters": parameters}}]
    error = (await with_tools("x", tools=tools, **fields)).json()["error"]
    assert error["message"] == 'tools[1].function.parameters: not supported as it is: Unimplemented keys: ["uniqueItems"]'
    assert error["param"] == "tools[1]"


@pytest.mark.slow
async def test_a_form_whose_schema_refers_to_itself_without_end_is_told_so(with_tools):
    schema = {"type": "json_schema", "json_schema": {"name": "f", "schema": ENDLESS}}
    error = (await with_tools("x", response_format=schema)).json()["error"]
    assert error["message"] == f"json_schema is not supported as it is: the schema {WITHOUT_END}"


@pytest.mark.slow
async def test_a_form_that_allows_no_text_is_refused_without_words_of_the_library(with_tools):
    schema = {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}
    error = (await with_tools("x", response_format=schema)).json()["error"]
    assert error["param"] == "response_format"
    assert error["message"].startswith("json_schema is not supported: nothing can follow: ")
    assert "NoExtensionBias" not in error["message"]


@pytest.mark.slow
async def test_required_calls_are_a_list(with_tools, sse_events):
    text = '[{"name": "weather", "arguments": {"city": "Oslo"}}]'
    found = await both(with_tools, sse_events, text, tools=TOOLS, tool_choice="required")
    assert found == ("", "", [{"type": "function", "name": "weather", "arguments": '{"city": "Oslo"}'}], "tool_calls")


@pytest.mark.parametrize("fields", [{}, {"tool_choice": "none"}, {"reasoning_effort": "high"}])
async def test_a_conversation_with_tools_is_tokenized_as_the_chat_is(with_tools, fields):
    body = {"messages": USER, "tools": TOOLS, **fields}
    chat = (await with_tools("ok", **body, return_token_ids=True)).json()
    async with with_tools.under_test.client() as client:
        alone = (await client.post("/tokenize", json=body)).json()
    assert alone["tokens"] == chat["prompt_token_ids"]


async def test_an_answer_cut_in_a_call_is_taken_back_in_the_next_turn(with_tools):
    answer = (await with_tools(CALL, tools=TOOLS, max_tokens=55)).json()["choices"][0]["message"]
    (call,) = answer["tool_calls"]
    assert not call["function"]["arguments"].endswith("}")
    told = {"role": "tool", "tool_call_id": call["id"], "content": "the arguments are no JSON"}
    response = await with_tools("ok", messages=[*USER, answer, told], tools=TOOLS)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("template", "tool_format", "is_said"),
    [
        ("{{ tools }}{{ messages }}", "auto", True),
        ("{{ tools }}{{ messages }}", "hermes", False),
        ("{{ messages }}", "auto", False),
        (TEMPLATE, "auto", False),
    ],
)
async def test_a_template_of_unknown_calls_is_a_warning(tiny_router_of, caplog, template, tool_format, is_said):
    await tiny_router_of(template, tool_format=tool_format)
    assert ("router.tool_format" in caplog.text) == is_said


async def test_tools_earlier_calls_and_effort_are_rendered(with_tools):
    history = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [EARLIER]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    response = await with_tools("ok", messages=history, tools=TOOLS, reasoning_effort="high", return_token_ids=True)
    async with with_tools.under_test.client() as client:
        text = await client.post("/detokenize", json={"tokens": response.json()["prompt_token_ids"]})
    prompt = text.json()["prompt"]
    assert prompt.startswith('<tools>[{"type": "function", "function": {"name": "weather"')
    assert '<assistant><tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call><tool>rain[high]' in prompt


async def test_a_template_without_tools_refuses_them(served):
    async with served.client() as client:
        response = await client.post("/v1/chat/completions", json={"messages": USER, "tools": TOOLS})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"
    assert "does not use tools" in response.json()["error"]["message"]


async def prompt_of(under_test, **fields):
    """Return the prompt of a chat as text."""
    async with under_test.client() as client:
        response = await client.post("/v1/chat/completions", json={"max_tokens": 9, "return_token_ids": True, **fields})
        assert response.status_code == 200, response.text
        text = await client.post("/detokenize", json={"tokens": response.json()["prompt_token_ids"]})
    return text.json()["prompt"]


async def test_a_template_without_tools_has_them_described_if_the_settings_say_so(start_router):
    under_test = await start_router(has_http=False, tools_in_prompt="hermes")
    for role in ("prefill", "decode"):
        await under_test.add(role, max_model_len=2048)
    history = [*USER, {"role": "assistant", "tool_calls": [EARLIER]}, TOLD]
    prompt = await prompt_of(under_test, messages=history, tools=TOOLS)
    assert '<tools>\n{"type":"function","function":{"name":"weather"' in prompt
    assert '<tool_call>\n{"name":"weather","arguments":{"city":"Oslo"}}\n</tool_call>' in prompt
    assert "<tool_response>\nrain\n</tool_response>" in prompt
    assert "<tools>" not in await prompt_of(under_test, messages=USER, tools=TOOLS, tool_choice="none")


PLAIN = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"


async def test_a_model_may_have_a_template_for_requests_with_tools(tiny_router_of):
    under_test = await tiny_router_of(PLAIN, TEMPLATE)
    for role in ("prefill", "decode"):
        await under_test.add(role, max_model_len=2048)
    history = [*USER, {"role": "assistant", "tool_calls": [EARLIER]}, TOLD]
    assert await prompt_of(under_test, messages=USER) == "<user>hi<assistant>"
    assert await prompt_of(under_test, messages=USER, reasoning_effort="high") == "<user>hi<assistant>"
    prompt = await prompt_of(under_test, messages=history, tools=TOOLS, reasoning_effort="high")
    assert prompt.startswith('<tools>[{"type": "function", "function": {"name": "weather"')
    assert prompt.endswith("</tool_call><tool>rain[high]<assistant>")
    for without_tools in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        prompt = await prompt_of(under_test, messages=history, **without_tools)
        assert prompt.startswith("<user>hi<assistant>")
        assert prompt.endswith("</tool_call><tool>rain<assistant>")


async def test_calls_without_tools_are_described_where_the_template_reads_none(tiny_router_of):
    under_test = await tiny_router_of(PLAIN, TEMPLATE, tools_in_prompt="hermes")
    for role in ("prefill", "decode"):
        await under_test.add(role, max_model_len=2048)
    history = [*USER, {"role": "assistant", "tool_calls": [EARLIER]}, TOLD]
    assert "<tool_response>\nrain\n</tool_response>" in await prompt_of(under_test, messages=history)
    assert "<tool_response>" not in await prompt_of(under_test, messages=history, tools=TOOLS)


async def test_a_special_token_that_no_file_names_is_told_at_the_start(tiny_router_of, caplog):
    await tiny_router_of("{{ bos_token }}{{ eos_token }}" + PLAIN)
    assert "event=template_token_unknown names=bos_token reason=" in caplog.text


@pytest.mark.slow
async def test_the_format_of_calls_is_a_setting(start_router, write_tiny_files, tmp_path):
    files = write_tiny_files(tmp_path)
    object.__setattr__(files, "chat_template", TEMPLATE)
    model = ServedModel(name="tiny", tokenizer=Tokenizer(files))
    under_test = await start_router(has_http=False, model=model, tool_format="pythonic")
    for worker in await under_test.pair():
        worker.script.text = "[weather(city='Oslo')]"
    async with under_test.client() as client:
        response = await client.post("/v1/chat/completions", json={"messages": USER, "max_tokens": 150, "tools": TOOLS})
        body = {"messages": USER, "tools": TOOLS, "response_format": {"type": "json_object"}}
        refused = (await client.post("/v1/chat/completions", json=body)).json()["error"]
    (call,) = response.json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}
    assert (refused["code"], refused["param"]) == ("invalid_request", "response_format")
    assert "no grammar has its format of calls" in refused["message"]


async def test_an_unknown_format_of_calls_ends_the_start(start_router):
    with pytest.raises(ConfigError, match=r"router\.tool_format = 'nope': no such format; known: auto, .*hermes"):
        await start_router(has_http=False, tool_format="nope")


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ("<think>\nLet me", ("yes", "hm")),
        ([{"type": "text", "text": "<think>"}, {"type": "text", "text": "Let me"}], ("yes", "hm")),
        ("<think>so</think>It", ("hm</think>yes", "")),
        ("I <think> that", ("hm</think>yes", "")),
    ],
)
async def test_reasoning_goes_on_where_the_last_message_leaves_it_open(with_tools, sse_events, last, expected):
    messages = [*USER, {"role": "assistant", "content": last}]
    found = await both(with_tools, sse_events, "hm</think>yes", messages=messages, continue_final_message=True)
    assert found[:2] == expected
    closed = await both(with_tools, sse_events, "hm</think>yes", messages=messages)
    assert closed[:2] == ("hm</think>yes", "")


async def test_hidden_reasoning_is_left_out(with_tools, sse_events):
    found = await both(with_tools, sse_events, "<think>hm</think>yes", include_reasoning=False)
    assert found == ("yes", "", [], "stop")
