"""LiteLLM, which sends its own message objects back in the next turn, with fields of other providers."""

from __future__ import annotations

import json

import litellm
from checks import API_KEY, BASE_URL, FIRST_TURN, MODEL, SECOND_TURN, WEATHER_PARAMETERS, Ticket, run

COMMON = {"model": f"openai/{MODEL}", "api_base": BASE_URL, "api_key": API_KEY, "num_retries": 0, "temperature": 0}
USER = {"role": "user", "content": FIRST_TURN}
AGAIN = {"role": "user", "content": SECOND_TURN}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER_PARAMETERS}}]
NAMED = {"type": "function", "function": {"name": "weather"}}


def check_three_turns() -> None:
    messages = [USER]
    for _ in range(3):
        found = litellm.completion(messages=messages, max_tokens=6, **COMMON)
        messages = [*messages, found.choices[0].message, AGAIN]
    assert found.usage.prompt_tokens > 30


def check_turn_of_dumped_messages() -> None:
    first = litellm.completion(messages=[USER], max_tokens=6, **COMMON)
    messages = [USER, first.choices[0].message.model_dump(), AGAIN]
    assert litellm.completion(messages=messages, max_tokens=6, **COMMON).choices[0].finish_reason == "length"


def check_message_of_another_provider() -> None:
    answer = {
        "role": "assistant",
        "content": "A ferry.",
        "thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "x"}],
        "provider_specific_fields": {"citations": None},
        "annotations": [],
    }
    text = {"type": "text", "text": SECOND_TURN, "cache_control": {"type": "ephemeral"}}
    messages = [USER, answer, {"role": "user", "content": [text]}]
    assert litellm.completion(messages=messages, max_tokens=6, **COMMON).choices[0].message.content


def check_stream() -> None:
    chunks = list(
        litellm.completion(messages=[USER], max_tokens=6, stream=True, stream_options={"include_usage": True}, **COMMON)
    )
    whole = litellm.stream_chunk_builder(chunks, messages=[USER])
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 6


def check_call_and_its_result() -> None:
    first = litellm.completion(messages=[USER], tools=TOOLS, tool_choice=NAMED, max_tokens=300, **COMMON)
    message = first.choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Bergen")
    result = {"role": "tool", "tool_call_id": call.id, "name": "weather", "content": "rain"}
    litellm.completion(messages=[USER, message, result], tools=TOOLS, max_tokens=6, **COMMON)


def check_streamed_call() -> None:
    chunks = list(
        litellm.completion(messages=[USER], tools=TOOLS, tool_choice="required", max_tokens=300, stream=True, **COMMON)
    )
    call = litellm.stream_chunk_builder(chunks, messages=[USER]).choices[0].message.tool_calls[0]
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Bergen")


def check_structured_output() -> None:
    found = litellm.completion(messages=[USER], response_format=Ticket, max_tokens=300, **COMMON)
    Ticket.model_validate_json(found.choices[0].message.content)


def check_responses() -> None:
    found = litellm.responses(input=FIRST_TURN, max_output_tokens=6, **COMMON)
    assert found.output[0].content[0].text
    events = [event.type for event in litellm.responses(input=FIRST_TURN, max_output_tokens=6, stream=True, **COMMON)]
    assert "response.output_text.delta" in events


def check_text_completion() -> None:
    assert litellm.text_completion(prompt="The ferry", max_tokens=6, **COMMON).choices[0].text


async def check_async_stream() -> None:
    stream = await litellm.acompletion(messages=[USER], max_tokens=6, stream=True, **COMMON)
    assert [chunk async for chunk in stream]


run(globals())
