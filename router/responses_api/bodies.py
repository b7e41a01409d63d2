"""The answer of ``POST /v1/responses`` and the events of its stream, as typed structs. Owns their exact shapes."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from router.openai.responses import KVTransferUsage

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    """The text of a message."""

    text: str
    annotations: list[Any] = msgspec.field(default_factory=list)
    logprobs: list[Any] = msgspec.field(default_factory=list)


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """The text of reasoning."""

    text: str


class MessageItem(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """A message of the model."""

    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class FunctionCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A call of one of the request's functions; ``arguments`` is JSON text."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model wrote between its thinking tags."""

    id: str
    status: ItemStatus
    content: list[ReasoningText]
    summary: list[Any] = msgspec.field(default_factory=list)


OutputItem = MessageItem | FunctionCallItem | ReasoningItem


class ResponseError(msgspec.Struct, kw_only=True):
    """Why a response failed. ``code`` is one of OpenAI's, which strict clients demand; ``reason`` is ours, and stable."""

    code: Literal["server_error", "rate_limit_exceeded"]
    message: str
    reason: str


class IncompleteDetails(msgspec.Struct, kw_only=True):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class InputTokensDetails(msgspec.Struct, kw_only=True):
    """Tokens of the input that were loaded from a cache; writing to it costs nothing."""

    cached_tokens: int
    cache_write_tokens: Literal[0] = 0


class OutputTokensDetails(msgspec.Struct, kw_only=True):
    """Output tokens that were reasoning."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, kw_only=True):
    """Token counts. ``kv_transfer`` is that of the other endpoints."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int
    kv_transfer: KVTransferUsage | UnsetType = UNSET


class ResponseBody(msgspec.Struct, kw_only=True):
    """Answer of ``POST /v1/responses``; most fields repeat the request's."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: ResponseStatus
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    reasoning: dict[str, Any]
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[Any]
    top_p: float
    user: str | None
    background: Literal[False] = False
    previous_response_id: None = None
    store: Literal[False] = False
    truncation: Literal["disabled"] = "disabled"


class _Event(msgspec.Struct, kw_only=True):
    """An event of a stream; ``sequence_number`` counts from 0."""

    sequence_number: int = 0


class ResponseStatusEvent(_Event, kw_only=True):
    """The response has begun, or ended."""

    type: Literal["response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"]
    response: ResponseBody


class ItemEvent(_Event, kw_only=True):
    """An item has begun, or is whole."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class PartEvent(_Event, kw_only=True):
    """A part of a message has begun, or is whole."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    item_id: str
    output_index: int
    content_index: int = 0
    part: OutputText | ReasoningText


class _TextEvent(_Event, kw_only=True):
    item_id: str
    output_index: int
    content_index: int = 0
    logprobs: list[Any] = msgspec.field(default_factory=list)


class TextDeltaEvent(_TextEvent, kw_only=True):
    """New text."""

    type: Literal["response.output_text.delta", "response.reasoning_text.delta"]
    delta: str


class TextDoneEvent(_TextEvent, kw_only=True):
    """A text is whole."""

    type: Literal["response.output_text.done", "response.reasoning_text.done"]
    text: str


class ArgumentsDeltaEvent(_Event, kw_only=True):
    """New arguments of a call."""

    type: Literal["response.function_call_arguments.delta"] = "response.function_call_arguments.delta"
    item_id: str
    output_index: int
    delta: str


class ArgumentsDoneEvent(_Event, kw_only=True):
    """The arguments of a call are whole."""

    type: Literal["response.function_call_arguments.done"] = "response.function_call_arguments.done"
    item_id: str
    output_index: int
    name: str
    arguments: str


ResponseEvent = (
    ResponseStatusEvent | ItemEvent | PartEvent | TextDeltaEvent | TextDoneEvent | ArgumentsDeltaEvent | ArgumentsDoneEvent
)
RESPONSE_EVENTS = (
    *(ResponseStatusEvent, ItemEvent, PartEvent, TextDeltaEvent, TextDoneEvent),
    *(ArgumentsDeltaEvent, ArgumentsDoneEvent),
)
