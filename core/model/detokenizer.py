"""Streams text from token ids: no broken characters, no half stop strings. Torch-free: the router runs it.

Owns the state of one output stream. Knows nothing of requests or HTTP. One ``IncrementalDetokenizer`` and, where the request
names stop strings, one ``StopStringMatcher`` after it per choice:

    token ids --push--> text --push--> text that is safe to send
"""

from __future__ import annotations

import codecs
import contextlib
from collections.abc import Mapping, Sequence
from typing import Protocol

from core.model.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_PRIMING_TOKENS = 6  # of the prompt: enough to hold a cut character and the space rule of a first word
_MAX_PRIMING_TOKENS = 64
_MAX_HELD_TOKENS = 8  # a character has at most 4 bytes; the bytes of more tokens can never become one


class IncrementalDetokenizer:
    """Turn a stream of token ids into text; O(1) amortised per token.

    The pieces, ``flush`` included, join to ``tokenizer.decode`` of all ids (for tokenizers with byte fallback: as long as the
    bytes are valid UTF-8). A character is held back until its last byte has arrived; bytes that can never become one give
    U+FFFD. The end of ``prompt_token_ids`` is context: a character that the prompt leaves incomplete belongs to the output.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True) -> None:
        context = _context(tokenizer, prompt_token_ids)
        self._stream: _Stream = (
            _ByteLevelStream(tokenizer, context, skip_special_tokens)
            if tokenizer.is_byte_level
            else _WindowStream(tokenizer, context, skip_special_tokens)
        )

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that ``token_ids`` complete; may be empty."""
        if len(token_ids) == 1:
            return self._stream.step(token_ids[0])
        return "".join([self._stream.step(token_id) for token_id in token_ids])

    def flush(self, *, is_cut: bool = False) -> str:
        """Return the held-back text, broken bytes as U+FFFD; call it once, at the end.

        ``is_cut``: the text would have gone on, so that a character that is not complete is left out.
        """
        return self._stream.flush(is_cut)


class _Stream(Protocol):
    def step(self, token_id: int) -> str: ...

    def flush(self, is_cut: bool) -> str: ...


class _ByteLevelStream:
    """Byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM): every token is a fixed run of bytes, so only UTF-8 has state."""

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._pieces = tokenizer.byte_level_pieces
        self._hidden = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_inside = False  # the last bytes have begun a character
        for token_id in context:
            self.step(token_id)

    def step(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._learn(token_id)
        if not self._is_inside and isinstance(piece, str):
            return piece
        text = self._decoder.decode(piece if isinstance(piece, bytes) else piece.encode())
        self._is_inside = bool(self._decoder.getstate()[0])
        return text

    def flush(self, is_cut: bool) -> str:
        return "" if is_cut else self._decoder.decode(b"", final=True)

    def _learn(self, token_id: int) -> str | bytes:
        """Return a token as text, or as bytes if these are not whole characters, and keep it; empty outside the vocabulary."""
        spelled = self._tokenizer.token(token_id)
        if spelled is None:
            return ""
        raw = token_bytes(spelled, self._tokenizer.byte_of_letter)
        piece: str | bytes = raw
        with contextlib.suppress(UnicodeDecodeError):
            piece = raw.decode()
        self._pieces[token_id] = piece
        return piece


class _WindowStream:
    """Any other tokenizer: decode a short window with and without the new tokens; the difference is the new text.

    ids  ... | prefix .. read | read .. end |
               known text       held or new
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._hidden = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._window = list(context)
        self._read = len(context) - _num_open_bytes(tokenizer, context)  # these bytes belong to a character of the output

    def step(self, token_id: int) -> str:
        if token_id in self._hidden or self._tokenizer.token(token_id) is None:
            return ""  # in the window, endless ones would be decoded again and again
        self._window.append(token_id)
        text = self._new_text()
        must_emit = len(self._window) - self._read > _MAX_HELD_TOKENS
        if not text or (text.endswith(_REPLACEMENT) and not must_emit):
            return ""
        del self._window[: self._read]
        self._read = len(self._window)
        return text

    def flush(self, is_cut: bool) -> str:
        if is_cut:
            del self._window[len(self._window) - _num_open_bytes(self._tokenizer, self._window) :]
            self._read = min(self._read, len(self._window))  # a character that the prompt has begun
        text = self._new_text()
        self._window.clear()
        self._read = 0
        return text

    def _new_text(self) -> str:
        known = self._decode(self._window[: self._read])
        return self._decode(self._window)[len(known) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


def _context(tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> Sequence[int]:
    """Return the end of the prompt; it starts in no run of byte tokens, which are decoded all together or not at all."""
    start = max(0, len(prompt_token_ids) - _PRIMING_TOKENS)
    first_allowed = max(0, len(prompt_token_ids) - _MAX_PRIMING_TOKENS)
    while start > first_allowed and fallback_byte(tokenizer.token(prompt_token_ids[start])) is not None:
        start -= 1
    return prompt_token_ids[start:]


def _num_open_bytes(tokenizer: Tokenizer, token_ids: Sequence[int]) -> int:
    """Return how many byte tokens at the end have begun a character that is not complete, 0 to 3."""
    trailing = bytearray()
    for token_id in reversed(token_ids):
        byte = fallback_byte(tokenizer.token(token_id))
        if byte is None:
            break
        trailing += byte
    trailing.reverse()
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(trailing)
    return len(decoder.getstate()[0])


def fallback_byte(spelled: str | None) -> bytes | None:
    """Return the byte that a token of a byte-fallback vocabulary stands for, such as ``<0xE4>``; None for other tokens."""
    if spelled is None or len(spelled) != 6 or not (spelled.startswith("<0x") and spelled.endswith(">")):
        return None
    try:
        return bytes.fromhex(spelled[3:5])
    except ValueError:
        return None


def token_bytes(spelled: str, byte_of_letter: Mapping[str, int]) -> bytes:
    """Return the bytes of a byte-level token; one with letters outside the alphabet (an added token) stands for itself."""
    try:
        return bytes([byte_of_letter[letter] for letter in spelled])
    except KeyError:
        return spelled.encode()


class StopStrings:
    """The stop strings of a request, prepared once for all its choices."""

    def __init__(self, stop: Sequence[str]) -> None:
        self.texts = tuple(text for text in stop if text)
        self.fallbacks = tuple(map(_fallbacks, self.texts))


def _fallbacks(stop: str) -> list[int]:
    """Return, for each beginning of ``stop``, the length of the longest shorter one at its end (Knuth, Morris, Pratt)."""
    lengths = [0] * len(stop)
    for end in range(1, len(stop)):
        lengths[end] = _advance(stop, lengths, lengths[end - 1], stop[end])
    return lengths


def _advance(stop: str, fallbacks: Sequence[int], num_matched: int, letter: str) -> int:
    """Return the length of the part of ``stop`` that the text ends with, after one more letter."""
    while num_matched and stop[num_matched] != letter:
        num_matched = fallbacks[num_matched - 1]
    return num_matched + (stop[num_matched] == letter)


class StopStringMatcher:
    """Finds stop strings in streamed text and holds back text that may become one.

    The result does not depend on how the text was cut into pieces: the stop that is complete first wins, the longest of
    several. A letter costs the same however long the stops are. With ``include_stop_str_in_output`` nothing is held back, and
    the text ends after the stop instead of before it.
    """

    def __init__(self, stops: StopStrings, *, include_stop_str_in_output: bool = False) -> None:
        self._stops = stops.texts
        self._fallbacks = stops.fallbacks
        self._num_matched = [0] * len(self._stops)  # for each stop, the length of the part that the text ends with
        self._include_stop = include_stop_str_in_output
        self._tail = ""  # the end of the text that may be the start of a stop
        self._num_unsent = 0  # characters at the end of the tail that were not returned yet

    def push(self, text: str, *, may_end: bool = True) -> tuple[str, str | None]:
        """Return (text safe to send, the stop string found or None); after a stop, push nothing more.

        Without ``may_end``, stops that are complete within this text are none; one may still begin in it.
        """
        window = self._tail + text
        first_unsent = len(self._tail) - self._num_unsent
        found = self._first_match(window) if may_end else None
        if found is not None:
            start, stop = found
            cut = start + len(stop) if self._include_stop else start
            self._tail, self._num_unsent = "", 0
            return window[first_unsent:cut], stop
        self._tail = window[len(window) - self._num_held(text) :]
        self._num_unsent = 0 if self._include_stop else len(self._tail)
        return window[first_unsent : len(window) - self._num_unsent], None

    def flush(self) -> str:
        """Return the held-back text, which turned out not to be a stop string."""
        held = self._tail[len(self._tail) - self._num_unsent :]
        self._tail, self._num_unsent = "", 0
        return held

    def _first_match(self, window: str) -> tuple[int, str] | None:
        # Those within the tail were complete when none could end the text.
        places = [(window.find(stop, max(0, len(self._tail) + 1 - len(stop))), stop) for stop in self._stops]
        matches = [(start + len(stop), start, stop) for start, stop in places if start >= 0]
        if not matches:
            return None
        _, start, stop = min(matches)
        return start, stop

    def _num_held(self, text: str) -> int:
        """Return the length of the longest end of the text so far, including the new ``text``, that begins a stop string."""
        for index, stop in enumerate(self._stops):
            num_matched, fallbacks = self._num_matched[index], self._fallbacks[index]
            for letter in text:
                num_matched = _advance(stop, fallbacks, num_matched, letter)
                if num_matched == len(stop):
                    num_matched = fallbacks[-1]
            self._num_matched[index] = num_matched
        return max(self._num_matched, default=0)
