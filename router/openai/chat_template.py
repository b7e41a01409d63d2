"""Conversations by the model's own chat template: messages, tools, and what a request tells the template.

A model may have a template of its own for requests with tools. If the template knows nothing of tools, they are described in
the messages, by Hermes' form, where the settings say so, and else refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from core.errors import InvalidRequest
from core.model.template_sandbox import MAX_RENDER_S
from core.model.tokenizer import Tokenizer
from router.images.reader import place_of
from router.openai.requests import (
    ChatCompletionRequest,
    ChatMessage,
    ContentPart,
    ImagePart,
    RefusalPart,
    TextPart,
)
from router.openai.tool_choice import earlier_calls, tool_use
from router.tools.described import with_described_tools

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_RESERVED_ARGUMENTS = frozenset({"self", "messages", "tools", "add_generation_prompt", "continue_final_message"})


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The template of one request: its text, and the variables that it reads.

    ``is_given_tools``: it has a list of tools, which may be empty; ``describes_tools``: they are described in the messages.
    """

    text: str
    variables: frozenset[str]
    is_given_tools: bool = False
    describes_tools: bool = False


class ChatTemplate:
    """The templates of one model. ``tools_in_prompt``: what describes tools if the template does not."""

    def __init__(self, tokenizer: Tokenizer, tools_in_prompt: Literal["template", "hermes"], *, has_images: bool) -> None:
        self._tokenizer = tokenizer
        self._has_images = has_images
        self._may_describe_tools = tools_in_prompt == "hermes"

    def render(self, request: ChatCompletionRequest, limit_s: float = MAX_RENDER_S) -> str:
        """Return a conversation rendered by the model's template, with a tag for each image.

        Raises:
            InvalidRequest: a part cannot be read by this model, or the template refuses the conversation.
            RenderTooSlow: the template takes more than ``limit_s``.
        """
        if not request.messages:
            raise InvalidRequest("messages is empty", param="messages")
        messages = [_template_message(index, message, self._has_images) for index, message in enumerate(request.messages)]
        tools = tool_use(request)
        definitions = tools.definitions if tools is not None else []
        has_calls = any("tool_calls" in message for message in messages)
        chosen = self._choose(has_tools=tools is not None, has_calls=has_calls)
        if chosen.describes_tools:
            messages = with_described_tools(messages, definitions)
        self._check_calls_are_read(messages, chosen.text)
        if self._has_images:  # such a template expects messages as lists of parts
            messages = [{**message, "content": _parts(message["content"])} for message in messages]
        is_continued = bool(request.continue_final_message)
        add_prompt = not is_continued if request.add_generation_prompt is None else request.add_generation_prompt
        arguments = request.chat_template_kwargs or {}
        reserved = sorted(_RESERVED_ARGUMENTS & arguments.keys())
        if reserved:
            raise InvalidRequest(f"chat_template_kwargs may not set {reserved[0]}", param="chat_template_kwargs")
        arguments = _reasoning_arguments(request, chosen.variables) | arguments
        if chosen.is_given_tools:
            arguments["tools"] = definitions
        return self._tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=add_prompt,
            continue_final_message=is_continued,
            limit_s=limit_s,
            template_args=arguments,
        )

    def _choose(self, *, has_tools: bool, has_calls: bool) -> _Chosen:
        """Return the template of a request with or without tools; earlier calls may need the one for tools.

        Raises:
            InvalidRequest: there are tools, and nothing tells the model of them.
        """
        known = self._tokenizer
        if has_tools and "tools" in known.tool_template_variables:
            return _Chosen(known.tool_template, known.tool_template_variables, is_given_tools=True)
        if has_tools and not self._may_describe_tools:
            raise InvalidRequest(
                "this model's chat template does not use tools: leave them out, or set router.tools_in_prompt to hermes",
                param="tools",
            )
        if (
            has_calls
            and not self._may_describe_tools
            and _reads_calls(known.tool_template)
            and not _reads_calls(known.template)
        ):
            return _Chosen(known.tool_template, known.tool_template_variables, is_given_tools=True)
        describes_tools = self._may_describe_tools and (has_tools or "tools" not in known.template_variables)
        return _Chosen(known.template, known.template_variables, describes_tools=describes_tools)

    def _check_calls_are_read(self, messages: Sequence[dict[str, Any]], template: str) -> None:
        for index, message in enumerate(messages):
            if "tool_calls" in message and not _reads_calls(template):
                field = f"messages[{index}].tool_calls"
                fix = "leave them out, or set router.tools_in_prompt to hermes"
                raise InvalidRequest(f"{field}: this model's chat template does not use tools: {fix}", param=field)


def _reads_calls(template: str) -> bool:
    return "tool_calls" in template


def _reasoning_arguments(request: ChatCompletionRequest, reads: frozenset[str]) -> dict[str, Any]:
    """Return what the template is told of ``reasoning_effort``; one that does not read it is told nothing."""
    effort = request.reasoning_effort
    if effort is None:
        return {}
    if effort not in _EFFORTS:
        raise InvalidRequest(f"reasoning_effort must be one of {', '.join(_EFFORTS)}", param="reasoning_effort")
    if effort == "none" and "enable_thinking" in reads:
        return {"enable_thinking": False}
    return {"reasoning_effort": effort} if "reasoning_effort" in reads else {}


def _template_message(index: int, message: ChatMessage, sees_images: bool) -> dict[str, Any]:
    """Return a message for the template; its content is a string, or a list of parts if it has images."""
    for field in ("function_call", "audio"):
        if getattr(message, field):
            raise InvalidRequest(
                f"messages[{index}].{field} is not supported yet: leave it out", param=f"messages[{index}].{field}"
            )
    role = "system" if message.role == "developer" else message.role  # OpenAI's newer name; templates use the older one
    content = message.content
    if isinstance(content, list):
        parts = [_template_part(place_of(index, number), part, sees_images) for number, part in enumerate(content)]
        has_images = any(part["type"] == "image" for part in parts)
        result = {"role": role, "content": parts if has_images else "\n".join(part["text"] for part in parts)}
    else:
        result = {"role": role, "content": content or ""}
    if message.name is not None:
        result["name"] = message.name
    if message.tool_calls:
        result["tool_calls"] = earlier_calls(message.tool_calls, f"messages[{index}].tool_calls")
    if message.role == "assistant":
        # Servers call it one or the other, and clients send back what they have received; templates know the first name.
        reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
        if isinstance(reasoning, str):
            result["reasoning_content"] = reasoning
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    return result


def _template_part(place: str, part: ContentPart, sees_images: bool) -> dict[str, str]:
    match part:
        case TextPart():
            return {"type": "text", "text": part.text}
        case RefusalPart():
            return {"type": "text", "text": part.refusal}
        case ImagePart() if sees_images:
            return {"type": "image"}
        case _:
            kind, reads = part.__struct_config__.tag, "texts and images" if sees_images else "text"
            raise InvalidRequest(f"{place} is of type {kind}, this model reads {reads} only", param=place)


def _parts(content: str | list[dict[str, str]]) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
