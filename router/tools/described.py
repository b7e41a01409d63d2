"""Tools for a chat template that knows none: described in the messages, in the form of Hermes' and Qwen's templates. Pure.

The functions stand in the system message, earlier calls in the messages of the assistant, and what came of them in messages of
the user, several in a row in one, since many templates want turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

_BEGIN = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
_END = """
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""


def with_described_tools(messages: Sequence[Mapping[str, Any]], definitions: Sequence[object]) -> list[dict[str, Any]]:
    """Return messages for the template that say what the tools and their calls say. Contents are texts, or lists of parts."""
    found: list[dict[str, Any]] = []
    is_answer = False
    for message in messages:
        if message["role"] == "tool":
            text = f"<tool_response>\n{_text(message['content'])}\n</tool_response>"
            if is_answer:
                found[-1]["content"] += f"\n{text}"
            else:
                found.append({"role": "user", "content": text})
            is_answer = True
            continue
        is_answer = False
        calls = message.get("tool_calls") or ()
        plain = {name: value for name, value in message.items() if name not in ("tool_calls", "tool_call_id")}
        if calls:
            plain["content"] = "\n".join(filter(None, [_text(message["content"]), *map(_call, calls)]))
        found.append(plain)
    return _with_functions(found, definitions) if definitions else found


def _with_functions(messages: list[dict[str, Any]], definitions: Sequence[object]) -> list[dict[str, Any]]:
    described = _BEGIN + "\n".join(msgspec.json.encode(item).decode() for item in definitions) + _END
    if messages and messages[0]["role"] == "system":
        first = messages[0]
        return [{**first, "content": f"{_text(first['content'])}\n\n{described}"}, *messages[1:]]
    return [{"role": "system", "content": described}, *messages]


def _call(call: Mapping[str, Any]) -> str:
    name, arguments = msgspec.json.encode(call["function"]["name"]).decode(), call["function"]["arguments"]
    written = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return f'<tool_call>\n{{"name":{name},"arguments":{written}}}\n</tool_call>'


def _text(content: str | Sequence[Mapping[str, str]]) -> str:
    """Return a content's text; an image in it, of a message that calls or answers tools, has no place there."""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part["type"] == "text")
