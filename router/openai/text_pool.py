"""Threads for work on texts that would hold up the event loop: tokenizing, detokenizing, chat templates.

Owns the threads and the bound on what one text may cost: it is tokenized in pieces first, until there are more tokens than any
use has room for. The tokenizer gives up Python's lock while it works; a template does so every few milliseconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from core.errors import ContextTooLong
from core.model.tokenizer import Tokenizer

INLINE_CHARACTERS = 4096  # of a text, or tokens: below 15 ms with any script
_PIECE_CHARACTERS = 32 << 10

T = TypeVar("T")


class TextPool:
    """The threads of one router."""

    def __init__(self, tokenizer: Tokenizer, num_threads: int) -> None:
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="kvferry-text")

    async def run(self, work: Callable[[], T]) -> T:
        """Return what ``work`` returns, done on a thread once one is free."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def encode(self, text: str, *, add_special_tokens: bool, max_tokens: int, is_inline: bool = True) -> Sequence[int]:
        """Return the token ids of a text; without ``is_inline`` a short one leaves the event loop's thread as well.

        Raises:
            ContextTooLong: a long text has more than ``max_tokens``; it is not tokenized to its end.
        """
        if is_inline and len(text) <= INLINE_CHARACTERS:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await self.run(lambda: self._encode(text, add_special_tokens, max_tokens))

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        if len(token_ids) <= INLINE_CHARACTERS:
            return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return await self.run(lambda: self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def close(self) -> None:
        """Drop what waits for a thread."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _encode(self, text: str, add_special_tokens: bool, max_tokens: int) -> Sequence[int]:
        if len(text) > _PIECE_CHARACTERS:
            self._check_pieces(text, max_tokens)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _check_pieces(self, text: str, max_tokens: int) -> None:
        """Refuse a text whose pieces have too many tokens. A cut adds a few; who sets ``max_tokens`` leaves room for them."""
        num_tokens = 0
        for start in range(0, len(text), _PIECE_CHARACTERS):
            num_tokens += len(self._tokenizer.encode(text[start : start + _PIECE_CHARACTERS], add_special_tokens=False))
            if num_tokens > max_tokens:
                raise ContextTooLong(
                    f"The text has {len(text)} characters, and its first {start + _PIECE_CHARACTERS} are more than "
                    f"{max_tokens} tokens, which is too long here."
                )
