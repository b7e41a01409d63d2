"""A body of ``POST /v1/responses`` as the chat that it means, and a chat's errors in the words of that body."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from core.errors import InvalidRequest, RequestError
from core.wire.messages import ErrorInfo
from router.openai.requests import ChatCompletionRequest, ChatMessage, ContentPart, ImagePart, ImageURL, RefusalPart, TextPart
from router.openai.sampling import check_ranges
from router.responses_api.requests import (
    InputImagePart,
    InputItem,
    InputPart,
    InputTextPart,
    OutputTextPart,
    ReasoningTextPart,
    ResponsesRequest,
)

# Fields that mean the same in chats.
_SAME = (
    *("model", "temperature", "top_p", "stream", "parallel_tool_calls", "metadata", "user"),
    *("prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "seed", "stop", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "priority", "cache_salt", "timeout_s"),
    *("request_id", "session_id", "chat_template_kwargs", "include_reasoning", "kv_transfer_params"),
)
# The chat's name of a field → this endpoint's.
_RENAMED = {
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "messages": "input",
}
RequestErrorT = TypeVar("RequestErrorT", bound=RequestError)

_IMAGE_IN_CHATS = "is of type image_url"
_IN_TOOL = re.compile(r"(\btools\[\d+\])\.function\.")


def chat_request(request: ResponsesRequest) -> ChatCompletionRequest:
    """Return the chat that a body means. ``check_responses_supported`` must have passed.

    Raises:
        InvalidRequest: an item, a tool or the form of the output is malformed or not supported; names the field.
    """
    same = {name: getattr(request, name) for name in _SAME}
    chat = ChatCompletionRequest(
        **same,
        messages=_messages(request),
        max_completion_tokens=request.max_output_tokens,
        tools=_tools(request.tools),
        tool_choice=_tool_choice(request.tool_choice),
        response_format=_form(request.text.format) if request.text else None,
        verbosity=request.text.verbosity if request.text else None,
        reasoning_effort=request.reasoning.effort if request.reasoning else None,
    )
    check_ranges(chat)
    return chat


def in_words_of_responses(error: RequestErrorT) -> RequestErrorT:
    """Return an error of a chat with this endpoint's names of fields.

    Places in messages are dropped, because they are not those of the items.
    """
    text, param = _renamed(error.message, error.param)
    return type(error)(text, param=param)


def failure_in_words_of_responses(info: ErrorInfo) -> ErrorInfo:
    """Return what a worker or the router core reported of a chat's request, as ``in_words_of_responses``."""
    text, param = _renamed(info.message, info.param)
    return msgspec.structs.replace(info, message=text, param=param)


def _renamed(text: str, param: str | None) -> tuple[str, str | None]:
    text = _IN_TOOL.sub(r"\1.", text).replace("response_format.json_schema.", "response_format.")
    param = _IN_TOOL.sub(r"\1.", param) if param is not None else None
    for theirs, ours in _RENAMED.items():
        place = re.compile(rf"\b{re.escape(theirs)}\b(\[\d+\][\w.\[\]]*)?")
        if param is not None and place.match(param):
            return place.sub(ours, text).replace(_IMAGE_IN_CHATS, "has a part of type input_image"), ours
    return text, param


def _messages(request: ResponsesRequest) -> list[ChatMessage]:
    found = [ChatMessage(role="system", content=request.instructions)] if request.instructions else []
    if isinstance(request.input, str):
        return [*found, ChatMessage(role="user", content=request.input)]
    if not request.input:
        raise InvalidRequest("input is an empty list", param="input")
    reasoning = ""  # of the next message or call
    for index, item in enumerate(request.input):
        place = f"input[{index}]"
        match item.type:
            case "reasoning":
                reasoning += _text(item.content, f"{place}.content")
                continue
            case "function_call":
                _add_call(found, _call(item, place), reasoning)
            case "function_call_output":
                found.append(_output_message(item, place))
            case "item_reference":
                why = "is an item_reference, which is not supported: answers are not kept here: send the item itself"
                raise InvalidRequest(f"{place} {why}", param=f"{place}.type")
            case _:
                found.append(_message(item, place, reasoning))
        reasoning = ""
    return found


def _message(item: InputItem, place: str, reasoning: str) -> ChatMessage:
    if item.role is None:
        raise InvalidRequest(f"{place}.role is required in a message", param=f"{place}.role")
    for field in ("call_id", "arguments", "output"):
        if getattr(item, field) is not None:
            raise InvalidRequest(f"{place}.{field} is no field of a message: leave it out", param=f"{place}.{field}")
    if item.role == "user" and item.content in (None, []):
        raise InvalidRequest(f"{place}.content is required in a message of the user", param=f"{place}.content")
    message = ChatMessage(role=item.role, content=_content(item.content, f"{place}.content"), name=item.name)
    if item.role == "assistant" and reasoning:
        message.reasoning_content = reasoning
    return message


def _call(item: InputItem, place: str) -> dict[str, Any]:
    for field in ("call_id", "name", "arguments"):
        if not isinstance(getattr(item, field), str):
            raise InvalidRequest(f"{place}.{field} is required in a function_call", param=f"{place}.{field}")
    return {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}


def _add_call(found: list[ChatMessage], call: dict[str, Any], reasoning: str) -> None:
    """Add a call to the assistant's message before it, or as a message of its own."""
    if found and found[-1].role == "assistant" and not reasoning:
        found[-1].tool_calls = [*(found[-1].tool_calls or []), call]
        return
    found.append(ChatMessage(role="assistant", tool_calls=[call], reasoning_content=reasoning or None))


def _output_message(item: InputItem, place: str) -> ChatMessage:
    if item.call_id is None or item.output is None:
        field = "call_id" if item.call_id is None else "output"
        raise InvalidRequest(f"{place}.{field} is required in a function_call_output", param=f"{place}.{field}")
    return ChatMessage(role="tool", tool_call_id=item.call_id, content=_content(item.output, f"{place}.output"))


def _content(content: str | Sequence[InputPart] | None, place: str) -> str | list[ContentPart]:
    if content is None or isinstance(content, str):
        return content or ""
    return [_part(part, f"{place}[{index}]") for index, part in enumerate(content)]


def _text(content: str | Sequence[InputPart] | None, place: str) -> str:
    parts = _content(content, place)
    return parts if isinstance(parts, str) else "\n".join(part.text for part in parts if isinstance(part, TextPart))


def _part(part: InputPart, place: str) -> ContentPart:
    match part:
        case InputTextPart() | OutputTextPart() | ReasoningTextPart():
            return TextPart(text=part.text)
        case TextPart() | RefusalPart():
            return part
        case InputImagePart(image_url=str() as url):
            return ImagePart(image_url=ImageURL(url=url))
        case InputImagePart():
            raise InvalidRequest(f"{place}.image_url is required: files are not kept here", param=f"{place}.image_url")
        case _:
            raise InvalidRequest(f"{place} is of type input_file, which is not supported: send its text", param=place)


def _tools(value: object) -> object:
    """Return the tools in the form of chats; what is malformed in a function is found there."""
    if not isinstance(value, list):
        return value
    return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(value)]


def _tool(tool: object, place: str) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or kind != "function":
        named = f"of type {kind!r}" if isinstance(kind, str) else "malformed"
        raise InvalidRequest(f"{place} is {named}: only tools of type function are supported", param=place)
    if "name" not in tool and "function" in tool:
        shape = '{"type": "function", "name": ..., "parameters": ...}'
        raise InvalidRequest(f"{place} is in the form of chats: here it is {shape}, without function", param=place)
    kept = {name: tool[name] for name in ("name", "description", "parameters", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": kept}


def _tool_choice(value: object) -> object:
    match value:
        case None | "none" | "auto" | "required":
            return value
        case {"type": "function", "name": str() as name}:
            return {"type": "function", "function": {"name": name}}
        case {"type": str() as kind} if kind != "function":
            what = f"tool_choice of type {kind!r}"
        case _:
            what = "this tool_choice"
    raise InvalidRequest(
        f'{what} is not supported: it must be none, auto, required, or {{"type": "function", "name": ...}}', param="tool_choice"
    )


def _form(value: object) -> object:
    """Return ``text.format`` as the ``response_format`` of chats."""
    match value:
        case {"type": "json_schema", **described}:
            return {"type": "json_schema", "json_schema": described}
        case {"type": "text" | "json_object"} | None:
            return value
    raise InvalidRequest("text.format.type must be one of text, json_object, json_schema", param="text.format")
