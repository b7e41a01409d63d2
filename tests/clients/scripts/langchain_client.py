"""langchain-openai: conversations, bound tools, structured output by each method, and the responses endpoint."""

from __future__ import annotations

from checks import API_KEY, BASE_URL, FIRST_TURN, MODEL, SECOND_TURN, Ticket, run
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI


def chat(**fields: object) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL, base_url=BASE_URL, api_key=API_KEY, max_retries=0, **{"max_tokens": 300, "temperature": 0, **fields}
    )


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def check_conversation() -> None:
    model = chat(max_tokens=6)
    messages = [SystemMessage("Be short."), HumanMessage(FIRST_TURN)]
    answer = model.invoke(messages)
    assert model.invoke([*messages, answer, HumanMessage(SECOND_TURN)]).usage_metadata["input_tokens"] > 20


def check_stream() -> None:
    chunks = list(chat(max_tokens=6, stream_usage=True).stream(FIRST_TURN))
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) == 6


def check_batch() -> None:
    assert len(chat(max_tokens=4).batch([FIRST_TURN, SECOND_TURN])) == 2


def tool_turn(model: ChatOpenAI) -> None:
    forced = model.bind_tools([add], tool_choice="add", parallel_tool_calls=False)
    message = forced.invoke([HumanMessage("What is 2 + 3?")])
    (call,) = message.tool_calls
    assert call["name"] == "add"
    assert set(call["args"]) == {"a", "b"}
    result = ToolMessage("5", tool_call_id=call["id"])
    model.bind_tools([add], tool_choice="none").invoke([HumanMessage("What is 2 + 3?"), message, result])


def check_bound_tools() -> None:
    tool_turn(chat())


def check_bound_tools_that_the_model_may_choose() -> None:
    chat(max_tokens=12).bind_tools([add]).invoke(FIRST_TURN)


def check_streamed_call() -> None:
    whole = None
    for chunk in chat().bind_tools([add], tool_choice="any").stream("What is 2 + 3?"):
        whole = chunk if whole is None else whole + chunk
    assert whole.tool_calls[0]["name"] == "add"


def check_structured_output_by_schema() -> None:
    assert isinstance(chat().with_structured_output(Ticket).invoke(FIRST_TURN), Ticket)


def check_structured_output_by_strict_schema() -> None:
    model = chat().with_structured_output(Ticket, method="json_schema", strict=True)
    assert isinstance(model.invoke(FIRST_TURN), Ticket)


def check_structured_output_by_function() -> None:
    assert isinstance(chat().with_structured_output(Ticket, method="function_calling").invoke(FIRST_TURN), Ticket)


def check_structured_output_by_json_mode() -> None:
    """A small model does not come to the end of an object by itself, so the object's beginning must do."""
    end = {"stop": ["{"], "include_stop_str_in_output": True}
    model = chat(extra_body=end).with_structured_output(Ticket, method="json_mode", include_raw=True)
    assert model.invoke("Answer in JSON.")["raw"].content.lstrip().startswith("{")


def check_responses_endpoint() -> None:
    model = chat(use_responses_api=True)
    answer = model.invoke([HumanMessage(FIRST_TURN)])
    assert model.invoke([HumanMessage(FIRST_TURN), answer, HumanMessage(SECOND_TURN)]).text
    assert list(model.stream(FIRST_TURN))
    assert isinstance(model.with_structured_output(Ticket).invoke(FIRST_TURN), Ticket)
    tool_turn(model)


def check_completions() -> None:
    model = OpenAI(model=MODEL, base_url=BASE_URL, api_key=API_KEY, max_tokens=6, max_retries=0)
    assert model.invoke("The ferry")


async def check_async() -> None:
    assert [chunk async for chunk in chat(max_tokens=4).astream(FIRST_TURN)]


run(globals())
