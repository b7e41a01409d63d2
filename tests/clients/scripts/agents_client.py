"""openai-agents over both endpoints: a forced tool with its result, typed output, streams, and a second turn."""

from __future__ import annotations

from typing import Literal

import agents
import openai
from checks import API_KEY, BASE_URL, FIRST_TURN, MODEL, SECOND_TURN, Ticket, run

agents.set_tracing_disabled(True)


STOP = {"stop": ["."]}  # an answer that max_tokens cuts is an error to this client


@agents.function_tool
def weather(city: Literal["Oslo", "Bergen"]) -> str:
    """Tell the weather of a city."""
    return f"rain in {city}"


def agent(endpoint: type, **fields: object) -> agents.Agent:
    client = openai.AsyncOpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0)
    settings = {"max_tokens": 300, "temperature": 0, "extra_body": STOP, **fields.pop("settings", {})}
    return agents.Agent(
        name="ferryman",
        instructions="Be short.",
        model=endpoint(model=MODEL, openai_client=client),
        model_settings=agents.ModelSettings(**settings),
        **fields,
    )


async def two_turns(endpoint: type) -> None:
    ferryman = agent(endpoint)
    first = await agents.Runner.run(ferryman, FIRST_TURN)
    second = await agents.Runner.run(ferryman, [*first.to_input_list(), {"role": "user", "content": SECOND_TURN}])
    assert second.final_output


async def tool_and_answer(endpoint: type) -> None:
    ferryman = agent(endpoint, tools=[weather], settings={"tool_choice": "required", "parallel_tool_calls": False})
    ferryman.tool_use_behavior = "stop_on_first_tool"
    found = await agents.Runner.run(ferryman, FIRST_TURN)
    assert found.final_output in ("rain in Oslo", "rain in Bergen")
    history = [*found.to_input_list(), {"role": "user", "content": SECOND_TURN}]
    assert (await agents.Runner.run(agent(endpoint), history)).raw_responses


async def typed_output(endpoint: type) -> None:
    assert isinstance((await agents.Runner.run(agent(endpoint, output_type=Ticket), FIRST_TURN)).final_output, Ticket)


async def typed_output_with_tools(endpoint: type) -> None:
    ferryman = agent(endpoint, output_type=Ticket, tools=[weather], settings={"tool_choice": "none"})
    assert isinstance((await agents.Runner.run(ferryman, FIRST_TURN)).final_output, Ticket)


async def stream(endpoint: type) -> None:
    streamed = agents.Runner.run_streamed(agent(endpoint), FIRST_TURN)
    kinds = {event.type async for event in streamed.stream_events()}
    assert "raw_response_event" in kinds
    assert streamed.final_output


CHAT, RESPONSES = agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel
CASES = (two_turns, tool_and_answer, typed_output, typed_output_with_tools, stream)
run(
    {
        f"check_{case.__name__}_{kind.__name__}": lambda case=case, kind=kind: case(kind)
        for kind in (CHAT, RESPONSES)
        for case in CASES
    }
)
