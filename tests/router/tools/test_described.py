"""Tools for a template that knows none: what the messages say then."""

import json

from router.tools.described import with_described_tools

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
USER = {"role": "user", "content": "hi"}


def call(city):
    return {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": {"city": city}}}


def test_functions_stand_in_a_system_message_of_their_own():
    system, user = with_described_tools([USER], TOOLS)
    assert (system["role"], user) == ("system", USER)
    (line,) = [line for line in system["content"].splitlines() if line.startswith("{") and "parameters" in line]
    assert json.loads(line) == TOOLS[0]


def test_functions_follow_the_clients_system_message():
    system, _ = with_described_tools([{"role": "system", "content": "Be short."}, USER], TOOLS)
    assert system["content"].startswith("Be short.\n\n# Tools\n")


def test_calls_and_their_answers_become_text():
    messages = [
        USER,
        {"role": "assistant", "content": "I look.", "tool_calls": [call("Oslo"), call("Rome")]},
        {"role": "tool", "content": "rain", "tool_call_id": "call_1"},
        {"role": "tool", "content": "sun", "tool_call_id": "call_2"},
        {"role": "assistant", "content": "", "tool_calls": [call("Bonn")]},
        {"role": "tool", "content": [{"type": "text", "text": "fog"}]},
        USER,
    ]
    said = '<tool_call>\n{"name":"weather","arguments":{"city":"%s"}}\n</tool_call>'
    assert with_described_tools(messages, []) == [
        USER,
        {"role": "assistant", "content": f"I look.\n{said % 'Oslo'}\n{said % 'Rome'}"},
        {"role": "user", "content": "<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response>"},
        {"role": "assistant", "content": said % "Bonn"},
        {"role": "user", "content": "<tool_response>\nfog\n</tool_response>"},
        USER,
    ]


def test_arguments_that_are_no_object_stand_there_as_they_were_written():
    broken = {"type": "function", "function": {"name": "weather", "arguments": '{"city": Os'}}
    (message,) = with_described_tools([{"role": "assistant", "content": "", "tool_calls": [broken]}], [])
    assert message["content"] == '<tool_call>\n{"name":"weather","arguments":{"city": Os}\n</tool_call>'


def test_the_clients_messages_stay_as_they_are():
    messages = [{"role": "system", "content": "x"}, {"role": "tool", "content": "a"}, {"role": "tool", "content": "b"}]
    before = json.dumps(messages)
    with_described_tools(messages, TOOLS)
    assert json.dumps(messages) == before
