"""Turns prompts and conversations into token ids without stalling the event loop.

Owns the forms of ``prompt`` and the parts of messages. Work of more than about ten milliseconds runs on the threads of
``router.openai.text_pool``. Input that cannot fit is refused before it is processed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal, cast

from core.errors import ContextTooLong, InvalidRequest
from core.model.image_prompt import ImagePrompts
from core.model.template_sandbox import RenderTooSlow
from core.model.tokenizer import Tokenizer
from core.wire.media import MMFeature
from router.images.reader import Hold, PlacedImage, RequestImageReader, find_images
from router.openai.chat_template import ChatTemplate
from router.openai.requests import (
    ChatCompletionRequest,
    ChatMessage,
    CommonRequest,
    CompletionRequest,
    TextPart,
)
from router.openai.sampling import ModelLimits, check_token_ids, truncated
from router.openai.text_pool import INLINE_CHARACTERS, TextPool
from router.threads import submit

MAX_PROMPTS = 128
MAX_MESSAGES = 4096  # per conversation; the limit of message parts as well
MAX_TOKEN_IDS = 1 << 20  # of all prompts of a request
TOKEN_BYTES = 48  # per prompt token, while its request runs
_UNCOUNTED_TOKENS = 1024  # per request, which are not counted as held
_INLINE_RENDER_S = 0.05  # then it goes on on a thread
_INLINE_MESSAGES = 64  # a template takes about ten microseconds for each
_MAX_TEXT_TOKENS = 32 << 10  # of a text that is not used directly as a prompt; four times the model's context if that is more
MAX_CHOICES = 1024  # prompts times n; each choice has buffers here and a place in a worker's batch


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as tokens and as text, the client's own text if it sent one; and its images with their identifiers.

    The image identifiers are valid for the weights of ``model_fingerprint``, which is empty without images. If an engine has
    rendered it, there is no text unless it is echoed, and the fingerprint is the engine's.
    """

    token_ids: tuple[int, ...]
    text: str
    mm_features: tuple[MMFeature, ...] = ()
    media: tuple[bytes, ...] = ()
    media_places: tuple[str, ...] = ()
    model_fingerprint: bytes = b""
    engine_request: bytes = b""  # as that of ``Generate``


@dataclass(frozen=True, slots=True)
class ImageSupport:
    """What a model with image input needs: an image reader, the form of images in prompts, and the current model fingerprint.

    ``model_fingerprint`` raises NoWorker if there is no route, and waits while one is expected.
    """

    reader: RequestImageReader
    prompts: ImagePrompts
    model_fingerprint: Callable[[], Awaitable[bytes]]


class PromptReader:
    """Tokenizes for one model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        pool: TextPool,
        image_support: ImageSupport | None = None,
        tools_in_prompt: Literal["template", "hermes"] = "template",
    ) -> None:
        self._tokenizer = tokenizer
        self._pool = pool
        self._image_support = image_support  # None = the model reads text only
        self._template = ChatTemplate(tokenizer, tools_in_prompt, has_images=image_support is not None)
        self._longest_token = max(map(len, tokenizer.backend.get_vocab(with_added_tokens=True)), default=1)

    async def read_completion(
        self, request: CompletionRequest, limits: ModelLimits, hold: Hold = lambda num_bytes: None
    ) -> list[Prompt]:
        """Return the prompts of a completion request; ``hold`` counts the memory of their tokens.

        Raises:
            InvalidRequest: a prompt is empty, has mixed forms or unknown ids, or there are too many choices or tokens.
            ContextTooLong: a prompt has too many tokens, or a text is so long that no tokenization of it fits.
        """
        add_special = request.add_special_tokens is not False
        items = _split_prompt(request.prompt)
        check_num_choices(len(items), request.n or 1)
        is_inline = sum(len(item) for item in items if isinstance(item, str)) <= INLINE_CHARACTERS
        prompts, num_tokens = [], 0
        for index, item in enumerate(items):
            if index:
                await asyncio.sleep(0)  # so that heartbeats are read during a thousand prompts
            if isinstance(item, str):
                self._check_length(len(item), request, limits)
                token_ids = await self._encode(item, request, limits, add_special, is_inline)
            else:
                token_ids = item
            if not token_ids:
                raise InvalidRequest(f"prompt {index} is empty", param="prompt")
            kept = truncated(token_ids, request, limits)
            _check_num_tokens(kept, limits, "prompt")  # before millions of them are checked
            num_tokens += len(kept)
            _check_all_tokens(num_tokens)
            hold(_memory_of(num_tokens) - _memory_of(num_tokens - len(kept)))
            prompts.append(await self._prompt(item, kept, len(token_ids), limits))
        return prompts

    async def _prompt(
        self, source: str | list[int], token_ids: tuple[int, ...], num_before: int, limits: ModelLimits
    ) -> Prompt:
        """Return the prompt, with the client's text if it still matches the tokens."""
        if isinstance(source, str) and len(token_ids) == num_before:
            return Prompt(token_ids, source)
        check_token_ids("prompt", token_ids, limits.vocab_size)
        return Prompt(token_ids, await self._pool.decode(token_ids))

    async def read_chat(
        self, request: ChatCompletionRequest, limits: ModelLimits, hold: Hold = lambda num_bytes: None
    ) -> Prompt:
        """Return the rendered conversation; ``hold`` counts the memory of tokens and fetched images.

        Raises:
            InvalidRequest: a part cannot be read or is not an image, or the template refuses the conversation.
            ContextTooLong: the text is so long that no tokenization of it fits.
            NoWorker: there are images but no route, so their identifiers cannot be made.
        """
        check_messages(request.messages)
        self._check_length(sum(map(_num_characters, request.messages)), request, limits)
        text = await self.render_in_time(request)
        references = find_images(request.messages)
        if references and self._image_support is not None:
            return await self._read_with_images(request, text, await self._image_support.reader.read(references, hold), limits)
        token_ids = truncated(await self._encode_chat(request, text, limits), request, limits)
        hold(_memory_of(len(token_ids)))
        return Prompt(token_ids, text)

    async def _read_with_images(
        self, request: ChatCompletionRequest, text: str, placed: Sequence[PlacedImage], limits: ModelLimits
    ) -> Prompt:
        assert self._image_support is not None
        if request.truncate_prompt_tokens is not None:
            raise InvalidRequest(
                "truncate_prompt_tokens is not supported yet with images: leave it out", param="truncate_prompt_tokens"
            )
        prompts, images = self._image_support.prompts, [found.image for found in placed]
        expanded = prompts.expand(text, [image.size for image in images])
        token_ids = await self._encode_chat(request, expanded, limits)
        _check_num_tokens(token_ids, limits, "messages")
        fingerprint = await self._image_support.model_fingerprint()
        features, media = await submit(None, partial(prompts.features, token_ids, images, fingerprint))
        places = {found.image.content: found.place for found in reversed(placed)}  # the first of equal files
        return Prompt(tuple(token_ids), text, features, media, tuple(places[content] for content in media), fingerprint)

    async def _encode_chat(self, request: ChatCompletionRequest, text: str, limits: ModelLimits) -> Sequence[int]:
        self._check_length(len(text), request, limits)
        token_ids = await self._encode(text, request, limits, bool(request.add_special_tokens))
        if not token_ids:
            raise InvalidRequest("the conversation is empty", param="messages")
        return token_ids

    async def render_in_time(self, request: ChatCompletionRequest) -> str:
        """Return the rendered conversation, from a thread if it is long or takes long. ``check_messages`` must have passed."""
        messages = request.messages
        is_short = len(messages) <= _INLINE_MESSAGES and sum(map(_num_parts, messages)) <= _INLINE_MESSAGES
        # Tools, earlier calls and reasoning may be long, and are not counted as characters: a template may leave them out.
        has_more = bool(request.tools) or any(map(_has_more_than_content, messages))
        if is_short and not has_more and sum(map(_num_characters, messages)) <= INLINE_CHARACTERS * 16:
            with suppress(RenderTooSlow):
                return self._template.render(request, _INLINE_RENDER_S)
        return await self._pool.run(lambda: self._template.render(request))

    def _check_length(self, num_characters: int, request: CommonRequest, limits: ModelLimits) -> None:
        """Refuse a text that cannot fit, before seconds are spent on its tokenization."""
        param = "messages" if isinstance(request, ChatCompletionRequest) else "prompt"
        if request.truncate_prompt_tokens is not None:
            self.check_text(num_characters, limits.longest_model_len, param)
        elif num_characters > self._longest_token * limits.longest_model_len:
            raise ContextTooLong(
                f"This model's maximum context length is {limits.longest_model_len} tokens. A prompt of {num_characters} "
                "characters takes more.",
                param=param,
            )

    def check_text(self, num_characters: int, max_model_len: int, param: str) -> None:
        """Refuse a text, not used directly as a prompt, that must have more tokens than ``max_text_tokens``.

        Raises:
            ContextTooLong: names the limit.
        """
        most = self._longest_token * max_text_tokens(max_model_len)
        if num_characters > most:
            raise ContextTooLong(f"{param} has {num_characters} characters, at most {most} are taken here", param=param)

    async def _encode(
        self, text: str, request: CommonRequest, limits: ModelLimits, add_special_tokens: bool, is_inline: bool = True
    ) -> Sequence[int]:
        param = "messages" if isinstance(request, ChatCompletionRequest) else "prompt"
        encode = partial(self._pool.encode, text, add_special_tokens=add_special_tokens, param=param, is_inline=is_inline)
        if request.truncate_prompt_tokens is not None:
            return await encode(max_tokens=max_text_tokens(limits.longest_model_len))
        longest = limits.longest_model_len
        try:  # twice, because pieces have more tokens than the whole; the exact number is checked later
            return await encode(max_tokens=2 * longest)
        except ContextTooLong as error:
            limit = f"This model's maximum context length is {longest} tokens"
            raise ContextTooLong(f"{limit}. However, {error.message}", param=param) from None

    async def tokenize(self, text: str, *, add_special_tokens: bool, max_model_len: int, param: str) -> Sequence[int]:
        """Return the token ids of a text that is not a prompt, and came in the field ``param``.

        Raises:
            ContextTooLong: it has more than ``max_text_tokens``.
        """
        self.check_text(len(text), max_model_len, param)
        most = max_text_tokens(max_model_len)
        return await self._pool.encode(text, add_special_tokens=add_special_tokens, max_tokens=most, param=param)


def check_rendered(prompts: Sequence[Prompt], n: int, hold: Hold) -> None:
    """Refuse prompts of an engine's making that are too many or too long together; ``hold`` counts the memory of their tokens.

    Raises:
        InvalidRequest: names the number of prompts, choices or tokens, and the limit.
    """
    check_num_choices(len(prompts), n)
    num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    _check_all_tokens(num_tokens)
    hold(_memory_of(num_tokens))


def _memory_of(num_tokens: int) -> int:
    """Return the memory of a request's prompts in bytes, as counted by ``hold``."""
    return TOKEN_BYTES * max(0, num_tokens - _UNCOUNTED_TOKENS)


def max_text_tokens(max_model_len: int) -> int:
    """Return the most tokens of a text that is not used directly as a prompt."""
    return max(_MAX_TEXT_TOKENS, 4 * max_model_len)


def check_messages(messages: Sequence[ChatMessage]) -> None:
    """Refuse a conversation with too many messages or parts, or with a message that lacks what its role needs.

    Raises:
        InvalidRequest: names the limit, the field that is missing, or calls that are not the assistant's.
    """
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(f"there are {len(messages)} messages, at most {MAX_MESSAGES} are allowed", param="messages")
    num_parts = sum(map(_num_parts, messages))
    if num_parts > MAX_MESSAGES:
        raise InvalidRequest(f"the messages have {num_parts} parts, at most {MAX_MESSAGES} are allowed", param="messages")
    for index, message in enumerate(messages):
        field = _missing_field(message)
        if field:
            place = f"messages[{index}].{field}"
            raise InvalidRequest(f"{place} is required in a message of the {message.role}", param=place)
        if message.tool_calls and message.role != "assistant":
            place = f"messages[{index}].tool_calls"
            raise InvalidRequest(f"{place} belongs to a message of the assistant: leave it out", param=place)


def _missing_field(message: ChatMessage) -> str:
    """Return what a message of its role cannot be without, empty if it is there."""
    if message.role == "user" and message.content in (None, []):
        return "content"
    return "tool_call_id" if message.role == "tool" and message.tool_call_id is None else ""


def _has_more_than_content(message: ChatMessage) -> bool:
    return bool(message.tool_calls or message.reasoning_content or message.reasoning)


def continued_text(request: ChatCompletionRequest) -> str:
    """Return the text of the message that the answer continues; empty if it begins a message."""
    if not request.continue_final_message:
        return ""
    content = request.messages[-1].content
    parts = [part.text for part in content if isinstance(part, TextPart)] if isinstance(content, list) else [content or ""]
    return "\n".join(parts)


def _num_parts(message: ChatMessage) -> int:
    return len(message.content) if isinstance(message.content, list) else 0


def _num_characters(message: ChatMessage) -> int:
    content = message.content
    if isinstance(content, list):
        return sum(len(part.text) for part in content if isinstance(part, TextPart))
    return len(content or "")


def _split_prompt(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """Return the prompts. OpenAI allows four forms, which may not be mixed."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("prompt is an empty list", param="prompt")
    if isinstance(prompt[0], int):
        _check_all_tokens(len(prompt))
    if len(set(map(type, prompt))) > 1:
        raise InvalidRequest("prompt mixes texts and token ids", param="prompt")
    if isinstance(prompt[0], int):
        return [cast(list[int], prompt)]
    return cast(list[str | list[int]], prompt)


def _check_all_tokens(num_tokens: int) -> None:
    if num_tokens > MAX_TOKEN_IDS:
        raise InvalidRequest(
            f"the prompts have {num_tokens} tokens together, at most {MAX_TOKEN_IDS} are allowed", param="prompt"
        )


def check_num_choices(num_prompts: int, n: int) -> None:
    """Refuse more prompts, or more choices of all prompts together, than one request may have.

    Raises:
        InvalidRequest: names their number and the limit.
    """
    if num_prompts > MAX_PROMPTS:
        raise InvalidRequest(f"prompt holds {num_prompts} prompts, at most {MAX_PROMPTS} are allowed", param="prompt")
    if num_prompts * n > MAX_CHOICES:
        raise InvalidRequest(
            f"{num_prompts} prompts with n = {n} are {num_prompts * n} choices, at most {MAX_CHOICES} are allowed", param="n"
        )


def _check_num_tokens(token_ids: Sequence[int], limits: ModelLimits, param: str) -> None:
    if len(token_ids) >= limits.longest_model_len:
        raise ContextTooLong(
            f"This model's maximum context length is {limits.longest_model_len} tokens. However, the prompt has "
            f"{len(token_ids)}, which leaves no room for an answer.",
            param=param,
        )
