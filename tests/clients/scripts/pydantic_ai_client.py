"""pydantic-ai over both endpoints: texts, output by tool, by schema and by prompt, a tool, streams, and a second turn."""

from __future__ import annotations

from checks import API_KEY, BASE_URL, FIRST_TURN, MODEL, SECOND_TURN, Ticket, run
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


def agent(endpoint: type, **fields: object) -> Agent:
    model = endpoint(MODEL, provider=OpenAIProvider(base_url=BASE_URL, api_key=API_KEY))
    settings = {"max_tokens": 300, "temperature": 0, "extra_body": {"stop": ["."]}}
    return Agent(model, retries=0, model_settings=settings, **fields)


def two_turns(endpoint: type) -> None:
    ferryman = agent(endpoint)
    first = ferryman.run_sync(FIRST_TURN)
    second = ferryman.run_sync(SECOND_TURN, message_history=first.all_messages())
    assert isinstance(second.output, str)


def output_by_tool(endpoint: type) -> None:
    assert isinstance(agent(endpoint, output_type=ToolOutput(Ticket)).run_sync(FIRST_TURN).output, Ticket)


def output_by_schema(endpoint: type) -> None:
    assert isinstance(agent(endpoint, output_type=NativeOutput(Ticket)).run_sync(FIRST_TURN).output, Ticket)


async def stream(endpoint: type) -> None:
    async with agent(endpoint).run_stream(FIRST_TURN) as found:
        pieces = [piece async for piece in found.stream_text(delta=True)]
    assert pieces


async def streamed_output_by_tool(endpoint: type) -> None:
    async with agent(endpoint, output_type=ToolOutput(Ticket)).run_stream(FIRST_TURN) as found:
        assert isinstance(await found.get_output(), Ticket)


CASES = (two_turns, output_by_tool, output_by_schema, stream, streamed_output_by_tool)
KINDS = (OpenAIChatModel, OpenAIResponsesModel)
run({f"check_{case.__name__}_{kind.__name__}": lambda case=case, kind=kind: case(kind) for kind in KINDS for case in CASES})
