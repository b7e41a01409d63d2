"""The official client: chats, tools, parsed outputs, streams, responses, completions, errors."""

from __future__ import annotations

import json
from collections.abc import Callable

import openai
from checks import API_KEY, BASE_URL, FIRST_TURN, MODEL, SECOND_TURN, WEATHER_PARAMETERS, Ticket, run

client = openai.OpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0)
USER = {"role": "user", "content": FIRST_TURN}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER_PARAMETERS, "strict": True}}]
NAMED = {"type": "function", "function": {"name": "weather"}}
FLAT_TOOLS = [{"type": "function", "name": "weather", "parameters": WEATHER_PARAMETERS, "strict": True}]


def check_models() -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def check_conversation() -> None:
    first = client.chat.completions.create(model=MODEL, messages=[USER], max_completion_tokens=8, temperature=0)
    messages = [USER, first.choices[0].message, {"role": "user", "content": SECOND_TURN}]
    second = client.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=8, temperature=0)
    assert second.choices[0].message.content
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


def check_stream_with_usage() -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=[USER], max_tokens=8, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[-1].usage.completion_tokens == 8
    assert chunks[-2].choices[0].finish_reason == "length"


def check_logprobs_and_n() -> None:
    found = client.chat.completions.create(
        model=MODEL, messages=[USER], max_tokens=3, n=2, logprobs=True, top_logprobs=3, temperature=1.0, seed=3
    )
    assert [len(choice.logprobs.content) for choice in found.choices] == [3, 3]
    assert len(found.choices[0].logprobs.content[0].top_logprobs) == 3


def check_parsed_output() -> None:
    found = client.chat.completions.parse(model=MODEL, messages=[USER], response_format=Ticket, max_tokens=300, temperature=0)
    assert isinstance(found.choices[0].message.parsed, Ticket)


def check_json_mode() -> None:
    found = client.chat.completions.create(
        model=MODEL, messages=[USER], response_format={"type": "json_object"}, max_tokens=200, temperature=0
    )
    if found.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(found.choices[0].message.content), dict)


def check_call_and_its_result() -> None:
    first = client.chat.completions.create(
        model=MODEL, messages=[USER], tools=TOOLS, tool_choice=NAMED, max_tokens=300, temperature=0
    )
    (call,) = first.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Bergen")
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    second = client.chat.completions.create(
        model=MODEL, messages=[USER, first.choices[0].message, result], tools=TOOLS, max_tokens=8, temperature=0
    )
    assert second.choices[0].finish_reason in ("stop", "length", "tool_calls")


def check_streamed_calls_by_the_helper() -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=[USER], tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=300
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    assert final.choices[0].message.tool_calls[0].function.parsed_arguments["city"] in ("Oslo", "Bergen")


def check_responses_in_two_turns() -> None:
    first = client.responses.create(model=MODEL, input=FIRST_TURN, instructions="Be short.", max_output_tokens=8, temperature=0)
    turns = [USER, *first.output, {"role": "user", "content": SECOND_TURN}]
    second = client.responses.create(model=MODEL, input=turns, max_output_tokens=8, temperature=0)
    assert second.output_text
    assert (second.status, second.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def check_responses_stream() -> None:
    with client.responses.stream(model=MODEL, input=FIRST_TURN, max_output_tokens=8, temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text


def check_responses_parsed() -> None:
    found = client.responses.parse(model=MODEL, input=FIRST_TURN, text_format=Ticket, max_output_tokens=300, temperature=0)
    assert isinstance(found.output_parsed, Ticket)


def check_responses_call_and_its_result() -> None:
    named = {"type": "function", "name": "weather"}
    first = client.responses.create(
        model=MODEL, input=FIRST_TURN, tools=FLAT_TOOLS, tool_choice=named, max_output_tokens=300, temperature=0
    )
    (call,) = first.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    second = client.responses.create(
        model=MODEL, input=[USER, call, result], tools=FLAT_TOOLS, tool_choice="none", max_output_tokens=8, temperature=0
    )
    assert second.output_text


def check_completions() -> None:
    found = client.completions.create(model=MODEL, prompt="The ferry", max_tokens=4, echo=True, logprobs=1)
    assert found.choices[0].text.startswith("The ferry")
    assert found.choices[0].logprobs.token_logprobs[0] is None


def refused_field(ask: Callable[..., object], **fields: object) -> str | None:
    try:
        ask(model=MODEL, **fields)
    except openai.BadRequestError as error:
        return error.param
    raise AssertionError("it was served")


def check_errors() -> None:
    chat = client.chat.completions.create
    assert refused_field(chat, messages=[USER], temperature=9) == "temperature"
    assert refused_field(chat, messages=[USER], extra_body={"colour": 1}) == "colour"
    assert refused_field(client.responses.create, input="x", previous_response_id="resp_1") == "previous_response_id"


async def check_async() -> None:
    async with openai.AsyncOpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0) as asynchronous:
        stream = await asynchronous.chat.completions.create(model=MODEL, messages=[USER], max_tokens=4, stream=True)
        assert [chunk async for chunk in stream][-1].choices[0].finish_reason


run(globals())
