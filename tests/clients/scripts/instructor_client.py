"""instructor in each of its modes for servers with OpenAI's API; no retries, because every output must be valid at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import instructor
import openai
from checks import API_KEY, BASE_URL, FIRST_TURN, MODEL, Ticket, run

MESSAGES = [{"role": "user", "content": FIRST_TURN}]


def client(mode: instructor.Mode) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0), mode=mode)


def ticket(mode: instructor.Mode, **fields: object) -> None:
    found = client(mode).chat.completions.create(
        model=MODEL, messages=MESSAGES, response_model=Ticket, max_retries=1, max_tokens=300, temperature=0, **fields
    )
    assert isinstance(found, Ticket)


def check_tools() -> None:
    ticket(instructor.Mode.TOOLS)


def check_strict_tools() -> None:
    ticket(instructor.Mode.TOOLS_STRICT)


def check_json_schema() -> None:
    ticket(instructor.Mode.JSON_SCHEMA)


def check_json() -> None:
    """This mode asks for any JSON object and describes the schema in words, so a small model needs the schema as well."""
    ticket(
        instructor.Mode.JSON, extra_body={"response_format": None, "structured_outputs": {"json": Ticket.model_json_schema()}}
    )


def check_json_in_markdown() -> None:
    """As above: nothing but words describes the schema."""
    ticket(instructor.Mode.MD_JSON, extra_body={"structured_outputs": {"json": Ticket.model_json_schema()}})


def check_parallel_tools() -> None:
    found = client(instructor.Mode.PARALLEL_TOOLS).chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        response_model=Iterable[Ticket],
        max_tokens=300,
        temperature=0,
        extra_body={"tool_choice": "required", "parallel_tool_calls": False},  # its own auto is too much for a small model
    )
    assert [type(one) for one in found] == [Ticket]


def check_responses_tools() -> None:
    found = client(instructor.Mode.RESPONSES_TOOLS).responses.create(
        model=MODEL, input=FIRST_TURN, response_model=Ticket, max_output_tokens=300, temperature=0
    )
    assert isinstance(found, Ticket)


def check_partial_stream() -> None:
    *_, last = client(instructor.Mode.TOOLS).chat.completions.create_partial(
        model=MODEL, messages=MESSAGES, response_model=Ticket, max_tokens=300, temperature=0
    )
    assert last.place in ("Oslo", "Bergen")


run(globals())
