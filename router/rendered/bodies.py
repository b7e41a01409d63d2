"""Which bodies an engine must render, what the router reads of them, and which have to go to the engine as they are. Pure.

| a body with                                                      | goes                                                     |
|------------------------------------------------------------------|----------------------------------------------------------|
| fields that the router serves                                    | as token ids; it is not seen here                        |
| tools, a form of the output, an adapter's name                   | as token ids that the engine has rendered                |
| what neither the router nor an engine's token routes know        | whole, once for the prompt and once for the answer       |

Media go whole: vLLM 0.32 renders them without the mask of their embeddings, and an engine that gets them back so may die.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from core.errors import InvalidRequest
from router.openai.body_parser import decode_json, explain, parse_body
from router.openai.requests import NEUTRAL, ChatCompletionRequest, CompletionRequest
from router.openai.structured import GUIDED

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
COUNT_TOKENS = f"{MESSAGES}/count_tokens"
_ANTHROPICS = (MESSAGES, COUNT_TOKENS)

# Of the router alone; an engine's API refuses or misreads them.
_OF_ROUTER = ("timeout_s", "session_id", "request_id", "kv_transfer_params")
# Served by an engine's API and rendered by it. The values in ``_NOT_USED`` mean "not used".
_RENDERED = (
    *("tools", "tool_choice", "parallel_tool_calls", "response_format", "structured_outputs", "bad_words", "documents"),
    *(f"guided_{name}" for name in GUIDED),
    "chat_template",
    *("reasoning_effort", "include_reasoning", "thinking_token_budget", "mm_processor_kwargs", "media_io_kwargs"),
    "modalities",
)
_NOT_USED = NEUTRAL | {
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "reasoning_effort": ("none",),
    "include_reasoning": (True, False),
    "guided_json_object": (False,),
}
_FORMS = ("structured_outputs", "response_format")
_REFUSED = ("functions", "function_call")  # an engine would ignore them
# Served by an engine's API only as a whole.
_WHOLE = ("use_beam_search", "vllm_xargs", "return_tokens_as_token_ids", "spaces_between_special_tokens", "logprob_token_ids")
# What splitting an answer into text and tool calls cannot respect.
_NOT_WITH_SPLITTING = ("stop", "prompt_logprobs", "echo", "return_token_ids", "include_stop_str_in_output")
_NOT_WITH_SPLIT_STREAMS = ("logprobs",)  # vLLM 0.32 gives those of whole answers only


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBody:
    """A client's body for an engine. ``adapter`` is the model that it names, empty for the served one.

    ``is_split``: the engine separates tool calls and reasoning from the text of the answer. ``is_whole``: not to be rendered.
    """

    path: str
    fields: dict[str, Any]
    adapter: str
    is_split: bool
    is_whole: bool

    @property
    def is_stream(self) -> bool:
        """True if the client wants events."""
        return self.fields.get("stream") is True

    def for_engine(self, **changes: object) -> dict[str, Any]:
        """Return the body that an engine's API gets; a change of None removes a field."""
        found = {name: value for name, value in self.fields.items() if name not in _OF_ROUTER and name != "model"} | changes
        if self.adapter:
            found["model"] = self.adapter
        elif self.path in _ANTHROPICS:  # where it is required
            found["model"] = self.fields.get("model")
        return {name: value for name, value in found.items() if value is not None}

    def of_router(self) -> ChatCompletionRequest | CompletionRequest:
        """Return the part that the router serves, without the prompt.

        Raises:
            InvalidRequest: names the field that is wrong.
        """
        hidden = {"model", "messages", "prompt", *_RENDERED, *_REFUSED}  # of the last, only values without effect are left
        own: dict[str, Any] = {name: value for name, value in self.fields.items() if name not in hidden and value is not None}
        if self.path == CHAT:
            return parse_body(msgspec.json.encode(own | {"messages": []}), ChatCompletionRequest)
        return parse_body(msgspec.json.encode(own | {"prompt": ""}), CompletionRequest)

    @property
    def timeout_s(self) -> float | None:
        """How long the answer may take as the client says, seconds; None if it does not.

        Raises:
            InvalidRequest: the client's limit is no time.
        """
        value = self.fields.get("timeout_s")
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
            raise InvalidRequest("timeout_s must be a number of seconds above 0", param="timeout_s")
        return value

    @property
    def num_prompts(self) -> int:
        """How many prompts it has, as far as they can be counted before they are rendered."""
        prompt = self.fields.get("prompt")
        return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1


class TimedBody(msgspec.Struct):
    """What a body must tell before it may wait: how long its request may take, seconds; None if it does not say."""

    timeout_s: float | None = None


def timed_body(body: bytes) -> TimedBody | None:
    """Return the time of a body, whatever else is in it; None if it will be refused: no JSON object, or its time no number."""
    try:
        return msgspec.json.decode(body, type=TimedBody)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def check_timed_body(body: bytes) -> None:
    """Refuse a body for which ``timed_body`` returns None. Raises: InvalidRequest."""
    try:
        decode_json(body, TimedBody)
    except msgspec.ValidationError as error:
        reason = explain(str(error))
        raise reason if reason.param else InvalidRequest("the body must be a JSON object") from None


def engine_body(path: str, body: bytes, model: str, *, splits_output: bool) -> EngineBody | None:
    """Return the body for an engine; None if the router serves it. ``splits_output``: of all answers to chats.

    Raises:
        InvalidRequest: the model is no string, an engine would ignore a field, or two give the form of the output; names it.
    """
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # the router's own reading says what is wrong
    if not isinstance(fields, dict):
        return None
    named = fields.get("model")
    adapter = named if isinstance(named, str) and named != model else ""
    is_chat = path == CHAT
    has_tools = _is_used(fields, "tools") and fields.get("tool_choice") != "none"
    is_split = is_chat and (splits_output or has_tools)
    is_whole = path in _ANTHROPICS or any(_is_used(fields, name) for name in _WHOLE)
    is_whole = is_whole or (is_split and _loses_something(fields))
    is_rendered = is_split or bool(adapter) or any(_is_used(fields, name) for name in _RENDERED)
    if is_chat:
        is_rendered = is_rendered or _has_tool_messages(fields.get("messages"))
        is_whole = is_whole or _has_media(fields.get("messages"))
    if not is_rendered and not is_whole:
        return None
    if not isinstance(named, str | None):
        raise InvalidRequest("model must be a string", param="model")
    if path not in _ANTHROPICS:
        _check_supported(fields)
        fields = _with_structured_outputs(fields)
    return EngineBody(path=path, fields=fields, adapter=adapter, is_split=is_split, is_whole=is_whole)


def _loses_something(fields: Mapping[str, Any]) -> bool:
    """Return True if splitting the answer would lose what the body asks for."""
    names = _NOT_WITH_SPLITTING + (_NOT_WITH_SPLIT_STREAMS if fields.get("stream") is True else ())
    return any(_is_used(fields, name) for name in names)


def _check_supported(fields: Mapping[str, Any]) -> None:
    for name in _REFUSED:
        if _is_used(fields, name):
            raise InvalidRequest(f"{name} is not supported yet: leave it out", param=name)


def _with_structured_outputs(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with ``structured_outputs`` in the place of the older ``guided_*``, which vLLM 0.32 ignores."""
    guided = {name: fields[f"guided_{name}"] for name in GUIDED if _is_used(fields, f"guided_{name}")}
    if not guided:
        return fields
    forms = [*(f"guided_{name}" for name in guided), *filter(lambda name: _is_used(fields, name), _FORMS)]
    if len(forms) > 1:
        raise InvalidRequest(f"{forms[0]} and {forms[1]} both give the form of the output: leave one out", param=forms[0])
    older = {f"guided_{name}" for name in GUIDED}
    return {name: value for name, value in fields.items() if name not in older} | {"structured_outputs": guided}


def _is_used(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if name in ("stop", "echo", "logprobs", "return_token_ids", "include_stop_str_in_output"):
        return bool(value)
    return value is not None and value not in _NOT_USED.get(name, ())


def _has_tool_messages(messages: object) -> bool:
    return any(message.get("role") == "tool" or message.get("tool_calls") for message in _objects(messages))


def _has_media(messages: object) -> bool:
    """Return True if a message has parts that are no text."""
    parts = (part for message in _objects(messages) for part in _objects(message.get("content")))
    return any(part.get("type") not in ("text", "refusal") for part in parts)


def _objects(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
