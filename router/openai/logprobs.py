"""Log-probabilities for clients: the text and bytes of single tokens, and OpenAI's two shapes.

A token that is only part of a character has bytes but no text of its own: it is written as U+FFFD, with its exact bytes if the
shape has a field for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import msgspec

from core.model.detokenizer import IncrementalDetokenizer, fallback_byte, token_bytes
from core.model.tokenizer import Tokenizer
from core.wire.messages import TokenLogprobs

ENCODED_AT_ONCE = 128  # tokens with their alternatives; takes some milliseconds
_LOWEST = -9999.0  # JSON has no -inf
_SENTENCEPIECE_SPACE = "\u2581"
_encoder = msgspec.json.Encoder()

E = TypeVar("E")
T = TypeVar("T")


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Log-probabilities of the completions endpoint: parallel lists over the tokens."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TopLogprob(msgspec.Struct, kw_only=True):
    """One alternative at a position."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct, kw_only=True):
    """One position of a chat completion."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """Log-probabilities of the chat endpoint."""

    content: list[ChatLogprob]
    refusal: list[ChatLogprob] | None = None


class TokenTexts:
    """Renders single tokens of one vocabulary, and caches each."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, bytes]] = {}  # at most one entry per vocabulary token

    def text_of(self, token_id: int) -> str:
        """Return the token's text, with its leading space."""
        return self._render(token_id)[0]

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that the token stands for."""
        return self._render(token_id)[1]

    def offsets_of(self, text: str, token_ids: Sequence[int]) -> list[int]:
        """Return where each token of a prompt starts in its text; a token inside a character has the offset of the character.

        A special token advances the offset only if the text spells it out. A space that the tokenizer drops at the start does
        not count.
        """
        stream = IncrementalDetokenizer(self._tokenizer, skip_special_tokens=False)
        offsets, offset = [], 0
        for token_id in token_ids:
            offsets.append(min(offset, len(text)))
            if token_id in self._tokenizer.special_token_ids and not text.startswith(self.text_of(token_id), offset):
                continue
            piece = stream.push((token_id,))
            if text.find(piece, offset, offset + len(piece) + 1) > offset:
                offset = offsets[-1] = offset + 1
            offset += len(piece)
        return offsets

    def _render(self, token_id: int) -> tuple[str, bytes]:
        known = self._known.get(token_id)
        if known is not None:
            return known
        spelled = self._tokenizer.token(token_id)
        if spelled is None:
            return "", b""
        known = self._known[token_id] = self._spell(token_id, spelled)
        return known

    def _spell(self, token_id: int, spelled: str) -> tuple[str, bytes]:
        if _SENTENCEPIECE_SPACE in spelled and not self._tokenizer.is_byte_level:
            text = spelled.replace(_SENTENCEPIECE_SPACE, " ")  # decoding a single token would drop a leading space
            return text, text.encode()
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        if "\ufffd" not in text:
            return text, text.encode()
        byte = fallback_byte(spelled)
        return text, token_bytes(spelled, self._tokenizer.byte_of_letter) if byte is None else byte


def completion_logprobs(
    texts: TokenTexts, entries: Iterable[TokenLogprobs | None], token_ids: Sequence[int], offsets: Sequence[int]
) -> CompletionLogprobs:
    """Return the parallel lists for tokens and their offsets in the text; the first token of a prompt has no entry."""
    result = CompletionLogprobs(text_offset=list(offsets), token_logprobs=[], tokens=[], top_logprobs=[])
    for token_id, entry in zip(token_ids, entries, strict=True):
        result.tokens.append(texts.text_of(token_id))
        if entry is None:
            result.token_logprobs.append(None)
            result.top_logprobs.append(None)
            continue
        result.token_logprobs.append(_finite(entry.logprobs[0]))
        alternatives: dict[str, float] = {}
        for other, logprob in zip(entry.token_ids, entry.logprobs, strict=True):
            alternatives.setdefault(texts.text_of(other), _finite(logprob))
        result.top_logprobs.append(alternatives)
    return result


def chat_logprobs(texts: TokenTexts, entries: Iterable[TokenLogprobs], num_top: int) -> ChatLogprobs:
    """Return one entry per token with its ``num_top`` best alternatives."""
    content = []
    for entry in entries:
        tops = zip(entry.token_ids[1 : num_top + 1], entry.logprobs[1 : num_top + 1], strict=True)
        content.append(
            ChatLogprob(
                token=texts.text_of(entry.token_ids[0]),
                logprob=_finite(entry.logprobs[0]),
                bytes=list(texts.bytes_of(entry.token_ids[0])),
                top_logprobs=[
                    TopLogprob(token=texts.text_of(token_id), logprob=_finite(logprob), bytes=list(texts.bytes_of(token_id)))
                    for token_id, logprob in tops
                ],
            )
        )
    return ChatLogprobs(content=content)


def prompt_logprobs(texts: TokenTexts, entries: Iterable[TokenLogprobs | None]) -> list[dict[str, dict[str, Any]] | None]:
    """Return vLLM's shape: per prompt token, None or {token id: {logprob, rank, decoded_token}}; the token itself first."""
    result: list[dict[str, dict[str, Any]] | None] = []
    for entry in entries:
        if entry is None:
            result.append(None)
            continue
        position: dict[str, dict[str, Any]] = {}
        for number, (token_id, logprob) in enumerate(zip(entry.token_ids, entry.logprobs, strict=True)):
            rank = entry.rank if number == 0 else number
            shown = {"logprob": _finite(logprob), "rank": rank, "decoded_token": texts.text_of(token_id)}
            position.setdefault(str(token_id), shown)
        result.append(position)
    return result


def in_pieces(entries: Sequence[E], build: Callable[[Sequence[E]], list[T]]) -> list[T]:
    """Return what is built of log-probabilities, of many as JSON: an encoder call holds the interpreter's lock."""
    if len(entries) <= ENCODED_AT_ONCE:
        return build(entries)
    starts = range(0, len(entries), ENCODED_AT_ONCE)
    pieces = [_encoder.encode(build(entries[start : start + ENCODED_AT_ONCE])) for start in starts]
    return cast(list[T], msgspec.Raw(b"[" + b",".join([piece[1:-1] for piece in pieces]) + b"]"))


def _finite(logprob: float) -> float:
    return logprob if logprob > _LOWEST else _LOWEST  # NaN compares false
