"""The bodies that OpenAI clients send, as typed structs, including fields that are accepted without effect.

Owns the shape of requests; ``router.openai.sampling`` owns ranges and meaning. Every optional field accepts null, which clients
send. vLLM's additional fields are listed after OpenAI's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec


class TextPart(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """A text part of a message."""

    text: str


class RefusalPart(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="refusal"):
    """An earlier refusal of the assistant; read as text."""

    refusal: str


ImageDetail = Literal["auto", "low", "high", "original"]


class ImageURL(msgspec.Struct, forbid_unknown_fields=True):
    """The URL of an image, ``data:`` or http(s). ``detail`` is a hint without effect."""

    url: str
    detail: ImageDetail | None = None


class ImagePart(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="image_url"):
    """An image in a message."""

    image_url: ImageURL


class AudioPart(msgspec.Struct, tag_field="type", tag="input_audio"):
    """An audio part, known only so that the error can name it."""


class FilePart(msgspec.Struct, tag_field="type", tag="file"):
    """A file part, known only so that the error can name it."""


ContentPart = TextPart | RefusalPart | ImagePart | AudioPart | FilePart


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_call_id: str | None = None
    tool_calls: Any = None
    function_call: Any = None
    audio: Any = None
    annotations: Any = None
    reasoning: Any = None
    reasoning_content: Any = None


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a stream reports in addition to the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class KVTransferParams(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Options of the KV handoff. ``kv_load_failure_policy``: "recompute", or "fail" to end the request with an error."""

    kv_load_failure_policy: str | None = None


class CommonRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields that completions and chat completions share."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    # sampling and stopping beyond OpenAI's
    min_tokens: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    # the form of the output, see router.openai.structured
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json_object: Any = None
    guided_decoding_backend: str | None = None
    # prompt, scheduling and output beyond OpenAI's
    priority: int | None = None  # workers with scheduler.policy=priority serve smaller values first; others ignore it
    cache_salt: str | None = None
    timeout_s: float | None = None  # time limit of the whole answer; refused at once if it cannot be met
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = None
    request_id: str | None = None
    session_id: str | None = None
    kv_transfer_params: KVTransferParams | None = None
    # known, refused unless neutral
    best_of: int | None = None
    bad_words: Any = None
    length_penalty: Any = None
    use_beam_search: Any = None
    spaces_between_special_tokens: Any = None
    return_tokens_as_token_ids: Any = None
    guided_whitespace_pattern: Any = None
    service_tier: Any = None
    vllm_xargs: Any = None


class CompletionRequest(CommonRequest, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /v1/completions``; ``prompt`` is a string, token ids, or a list of either."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None


class ChatCompletionRequest(CommonRequest, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    prediction: dict[str, Any] | None = None  # would make the same answer faster
    # beyond OpenAI's
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # known, refused unless neutral
    echo: bool | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    reasoning_effort: Any = None
    include_reasoning: bool | None = None
    verbosity: Any = None
    web_search_options: Any = None
    chat_template: Any = None
    documents: Any = None


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /tokenize``: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Any = None
    tool_choice: Any = None
    reasoning_effort: Any = None

    def as_chat(self) -> ChatCompletionRequest:
        """Return the chat whose prompt the conversation is."""
        return ChatCompletionRequest(
            messages=self.messages or [],
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template_kwargs=self.chat_template_kwargs,
            tools=self.tools,
            tool_choice=self.tool_choice,
            reasoning_effort=self.reasoning_effort,
        )


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /detokenize``."""

    tokens: list[int]
    model: str | None = None


def is_one_of(value: object, values: Sequence[object]) -> bool:
    """Return True if a value and its type are among these: ``True`` is not ``1``, nor ``0`` ``False``."""
    return any(type(value) is type(one) and value == one for one in values)


# Field → the values that mean "not used". Any other value is refused as unsupported, not silently ignored.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "bad_words": ([],),
    "length_penalty": (1, 1.0),
    "use_beam_search": (False,),
    "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "guided_whitespace_pattern": (),
    "service_tier": ("auto", "default", "flex", "priority", "scale"),  # there is one tier
    "vllm_xargs": ({},),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "verbosity": ("low", "medium", "high"),  # a hint; no model is told
    "web_search_options": (),
    "chat_template": (),
    "documents": ([],),
}
