"""From prompts and conversations to token ids, without stalling the event loop.

Owns how a request's prompt becomes tokens: forms of ``prompt``, parts of messages, truncation. Knows nothing of sampling or
workers. Texts that together take some ten milliseconds are tokenized on a thread: there the tokenizer leaves Python.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from core.errors import ContextTooLong, InvalidRequest
from core.model.image_prompt import ImagePrompts
from core.model.tokenizer import Tokenizer
from core.wire.media import MMFeature
from router.images import Hold, ImageReader, PlacedImage, find_images, place_of
from router.openai import (
    ChatCompletionRequest,
    ChatMessage,
    CommonRequest,
    CompletionRequest,
    ContentPart,
    ImagePart,
    RefusalPart,
    TextPart,
    TokenizeRequest,
)
from router.params import ModelLimits, check_token_ids

INLINE_CHARACTERS = 8192  # at about a megabyte per second, some ten milliseconds
MAX_PROMPTS = 1024
MAX_CHOICES = 1024  # prompts times n: each has buffers here and a place in a worker's batch
_RESERVED_ARGUMENTS = frozenset({"self", "messages", "add_generation_prompt", "continue_final_message"})


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as tokens and as text, the client's own if there was one; and its images, with the names they have for it.

    ``model_fingerprint``: of the weights for which the images have their identifiers, empty without images.
    """

    token_ids: tuple[int, ...]
    text: str
    mm_features: tuple[MMFeature, ...] = ()
    media: tuple[bytes, ...] = ()
    media_places: tuple[str, ...] = ()
    model_fingerprint: bytes = b""


@dataclass(frozen=True, slots=True)
class Sight:
    """What a model that sees images adds: their way in, how they stand in prompts, and the fingerprint that keys names.

    ``model_fingerprint`` raises NoWorker where nobody serves, so that there is none.
    """

    reader: ImageReader
    prompts: ImagePrompts
    model_fingerprint: Callable[[], bytes]


class PromptReader:
    """Tokenizes for one model."""

    def __init__(self, tokenizer: Tokenizer, sight: Sight | None = None) -> None:
        self._tokenizer = tokenizer
        self._sight = sight  # None = the model reads text only
        self._longest_token = max(map(len, tokenizer.backend.get_vocab(with_added_tokens=True)), default=1)

    async def read_completion(self, request: CompletionRequest, limits: ModelLimits) -> list[Prompt]:
        """Return the prompts of a completion request.

        Raises:
            InvalidRequest: a prompt is empty, of mixed kinds, or holds unknown token ids, or there are too many choices.
            ContextTooLong: a prompt has too many tokens, or a text is so long that no tokenization of it fits.
        """
        add_special = request.add_special_tokens is not False
        items = _split_prompt(request.prompt)
        _check_num_choices(len(items), request.n or 1)
        is_inline = sum(len(item) for item in items if isinstance(item, str)) <= INLINE_CHARACTERS
        prompts = []
        for index, item in enumerate(items):
            if index:
                await asyncio.sleep(0)  # a thousand prompts are no reason to leave heartbeats unread
            if isinstance(item, str):
                self._check_length(item, request, limits)
                token_ids = await self.encode(item, add_special_tokens=add_special, is_inline=is_inline)
            else:
                token_ids = item
            if not token_ids:
                raise InvalidRequest(f"prompt {index} is empty", param="prompt")
            kept = _truncate(token_ids, request.truncate_prompt_tokens, limits)
            _check_num_tokens(kept, limits)  # before millions of them are looked at
            prompts.append(self._prompt(item, kept, len(token_ids), limits))
        return prompts

    def _prompt(self, source: str | list[int], token_ids: tuple[int, ...], num_before: int, limits: ModelLimits) -> Prompt:
        """Keep the client's text where it still is the text of the tokens."""
        if isinstance(source, str) and len(token_ids) == num_before:
            return Prompt(token_ids, source)
        check_token_ids("prompt", token_ids, limits.vocab_size)
        return Prompt(token_ids, self._tokenizer.decode(token_ids))

    async def read_chat(
        self, request: ChatCompletionRequest, limits: ModelLimits, hold: Hold = lambda num_bytes: None
    ) -> Prompt:
        """Return the rendered conversation; ``hold`` is told of the bytes of images that were fetched.

        Raises:
            InvalidRequest: a part cannot be read or is no image, or the template refuses the conversation.
            ContextTooLong: the text is so long that no tokenization of it fits.
            NoWorker: there are images, and no worker by whose weights they could be named.
        """
        text = self.render(request)
        references = find_images(request.messages)
        if references and self._sight is not None:
            return await self._read_with_images(request, text, await self._sight.reader.read(references, hold), limits)
        token_ids = await self._encode_chat(request, text, limits)
        return Prompt(_truncate(token_ids, request.truncate_prompt_tokens, limits), text)

    async def _read_with_images(
        self, request: ChatCompletionRequest, text: str, placed: Sequence[PlacedImage], limits: ModelLimits
    ) -> Prompt:
        assert self._sight is not None
        if request.truncate_prompt_tokens is not None:
            raise InvalidRequest(
                "truncate_prompt_tokens is not supported yet with images: leave it out", param="truncate_prompt_tokens"
            )
        prompts, images = self._sight.prompts, [found.image for found in placed]
        expanded = prompts.expand(text, [image.size for image in images])
        token_ids = await self._encode_chat(request, expanded, limits)
        _check_num_tokens(token_ids, limits)
        fingerprint = self._sight.model_fingerprint()
        features, media = await asyncio.to_thread(prompts.features, token_ids, images, fingerprint)
        places = {found.image.content: found.place for found in reversed(placed)}  # of equal files, the first one
        return Prompt(tuple(token_ids), text, features, media, tuple(places[content] for content in media), fingerprint)

    async def _encode_chat(self, request: ChatCompletionRequest, text: str, limits: ModelLimits) -> Sequence[int]:
        self._check_length(text, request, limits)
        token_ids = await self.encode(text, add_special_tokens=bool(request.add_special_tokens))
        if not token_ids:
            raise InvalidRequest("the conversation is empty", param="messages")
        return token_ids

    def render(self, request: ChatCompletionRequest | TokenizeRequest) -> str:
        """Return a conversation as the model's template writes it, a tag for each image.

        Raises:
            InvalidRequest: a part cannot be read by this model, or the template refuses the conversation.
        """
        if not request.messages:
            raise InvalidRequest("messages is empty", param="messages")
        sees = self._sight is not None and isinstance(request, ChatCompletionRequest)
        messages = [_template_message(index, message, sees) for index, message in enumerate(request.messages)]
        if self._sight is not None:  # such a template knows messages as lists of parts
            messages = [{**message, "content": _parts(message["content"])} for message in messages]
        is_continued = bool(request.continue_final_message)
        add_prompt = not is_continued if request.add_generation_prompt is None else request.add_generation_prompt
        arguments = request.chat_template_kwargs or {}
        reserved = sorted(_RESERVED_ARGUMENTS & arguments.keys())
        if reserved:
            raise InvalidRequest(f"chat_template_kwargs may not set {reserved[0]}", param="chat_template_kwargs")
        return self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=add_prompt, continue_final_message=is_continued, **arguments
        )

    def _check_length(self, text: str, request: CommonRequest, limits: ModelLimits) -> None:
        """Refuse what cannot fit before spending seconds on tokenizing it."""
        if request.truncate_prompt_tokens is None and len(text) > self._longest_token * limits.max_model_len:
            raise ContextTooLong(
                f"This model's maximum context length is {limits.max_model_len} tokens. A prompt of {len(text)} characters "
                "takes more.",
                param="messages" if isinstance(request, ChatCompletionRequest) else "prompt",
            )

    async def encode(self, text: str, *, add_special_tokens: bool, is_inline: bool = True) -> Sequence[int]:
        """Return the token ids of a text; without ``is_inline`` a short one leaves the event loop's thread as well."""
        if is_inline and len(text) <= INLINE_CHARACTERS:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self._tokenizer.encode, text, add_special_tokens=add_special_tokens)


def _split_prompt(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """Return the prompts of the four forms that OpenAI allows, which may not be mixed."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("prompt is an empty list", param="prompt")
    if all(isinstance(item, int) for item in prompt):
        return [[item for item in prompt if isinstance(item, int)]]
    if len({type(item) for item in prompt}) > 1:
        raise InvalidRequest("prompt mixes texts and token ids", param="prompt")
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt holds {len(prompt)} prompts, at most {MAX_PROMPTS} are allowed", param="prompt")
    return [item for item in prompt if not isinstance(item, int)]


def _check_num_choices(num_prompts: int, n: int) -> None:
    if num_prompts * n > MAX_CHOICES:
        raise InvalidRequest(
            f"{num_prompts} prompts with n = {n} are {num_prompts * n} choices, at most {MAX_CHOICES} are allowed", param="n"
        )


def _check_num_tokens(token_ids: Sequence[int], limits: ModelLimits) -> None:
    if len(token_ids) >= limits.max_model_len:
        raise ContextTooLong(
            f"This model's maximum context length is {limits.max_model_len} tokens. However, the prompt has "
            f"{len(token_ids)}, which leaves no room for an answer.",
            param="prompt",
        )


def _truncate(token_ids: Sequence[int], limit: int | None, limits: ModelLimits) -> tuple[int, ...]:
    """Return the last ``limit`` tokens; -1 stands for what leaves room for one token of output."""
    if limit is None:
        return tuple(token_ids)
    if limit < 1 and limit != -1:
        raise InvalidRequest(
            f"truncate_prompt_tokens must be at least 1, or -1 for the model's limit, got {limit}",
            param="truncate_prompt_tokens",
        )
    return tuple(token_ids[-(limit if limit > 0 else max(1, limits.max_model_len - 1)) :])


def _template_message(index: int, message: ChatMessage, sees_images: bool) -> dict[str, Any]:
    """Return a message for the template: its content a text, or a list of parts if it holds images."""
    for field in ("tool_calls", "function_call", "audio"):
        if getattr(message, field):
            raise InvalidRequest(
                f"messages[{index}].{field} is not supported yet: leave it out", param=f"messages[{index}].{field}"
            )
    role = "system" if message.role == "developer" else message.role  # OpenAI's newer name; templates know the older one
    content = message.content
    if isinstance(content, list):
        parts = [_template_part(place_of(index, number), part, sees_images) for number, part in enumerate(content)]
        has_images = any(part["type"] == "image" for part in parts)
        result = {"role": role, "content": parts if has_images else "\n".join(part["text"] for part in parts)}
    else:
        result = {"role": role, "content": content or ""}
    if message.name is not None:
        result["name"] = message.name
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
