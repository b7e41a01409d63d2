"""The body of ``POST /v1/responses``, as typed structs.

Owns the shape of requests, and the fields that are known and refused; ``router.responses_api.translation`` owns their meaning.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from core.errors import InvalidRequest
from router.openai.requests import NEUTRAL, ImageDetail, KVTransferParams, RefusalPart, TextPart

LOGPROBS_INCLUDED: Literal["message.output_text.logprobs"] = "message.output_text.logprobs"
Included = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
Summary = Literal["auto", "concise", "detailed"]


class InputTextPart(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="input_text"):
    """A text of the user, or of a function's output."""

    text: str


class OutputTextPart(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="output_text"):
    """A text of the assistant, from an earlier answer."""

    text: str


class ReasoningTextPart(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="reasoning_text"):
    """The reasoning of an earlier answer."""

    text: str


class InputImagePart(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="input_image"):
    """An image by its URL, ``data:`` or http(s)."""

    image_url: str | None = None
    detail: ImageDetail | None = None
    file_id: str | None = None


class InputFilePart(msgspec.Struct, tag_field="type", tag="input_file"):
    """A file, known only so that the error can name it."""


InputPart = InputTextPart | OutputTextPart | ReasoningTextPart | InputImagePart | InputFilePart | TextPart | RefusalPart


class InputItem(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One item of a conversation: a message (also without ``type``), a call, its output, or reasoning.

    A reference to an item is known only so that the error can say why it is refused.
    """

    type: Literal["message", "function_call", "function_call_output", "reasoning", "item_reference"] | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None
    name: str | None = None
    arguments: str | None = None
    call_id: str | None = None
    output: str | list[InputPart] | None = None
    summary: Any = None
    encrypted_content: Any = None


class ReasoningConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """How much the model reasons. Summaries are not made: the reasoning itself is in the answer."""

    effort: Any = None
    summary: Summary | None = None
    generate_summary: Summary | None = None


class TextConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The form of the output: text, a JSON object, or one that follows a schema."""

    format: Any = None
    verbosity: Any = None


class ResponsesStreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Accepted without effect."""

    include_obfuscation: bool | None = None


class ResponsesRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /v1/responses``."""

    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[Included] | None = None
    max_tool_calls: Annotated[int, msgspec.Meta(ge=0)] | None = None  # of built-in tools, and there are none
    metadata: dict[str, Any] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    # beyond OpenAI's, as in chats
    seed: int | None = None
    stop: str | list[str] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout_s: float | None = None
    request_id: str | None = None
    session_id: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    kv_transfer_params: KVTransferParams | None = None
    # known, refused unless neutral
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None
    truncation: str | None = None
    top_logprobs: int | None = None
    service_tier: Any = None


# Field → the values that mean "not used", and why others are refused, with the fix.
RESPONSES_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "background": (False,),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
    "service_tier": NEUTRAL["service_tier"],
}
_REASONS = {
    "store": "answers are not kept here: leave it out, or set it to false",
    "previous_response_id": "answers are not kept here: send the earlier items again, as part of input",
    "conversation": "conversations are not kept here: send the earlier items as part of input",
    "prompt": "prompts are not kept here: send the text as instructions and input",
    "background": "answers are not kept here: set stream instead",
    "truncation": "nothing is cut off silently: send fewer items",
    "top_logprobs": "use /v1/chat/completions for log-probabilities",
}


def check_responses_supported(request: ResponsesRequest) -> None:
    """Refuse known fields that are not supported.

    Raises:
        InvalidRequest: names the first such field, the reason and the fix.
    """
    for field, neutral in RESPONSES_NEUTRAL.items():
        value = getattr(request, field)
        if value is not None and value not in neutral:
            reason = _REASONS.get(field, "leave it out")
            raise InvalidRequest(f"{field} is not supported: {reason}", param=field)
    if LOGPROBS_INCLUDED in (request.include or ()):
        raise InvalidRequest(f"include: {LOGPROBS_INCLUDED} is not supported: {_REASONS['top_logprobs']}", param="include")
