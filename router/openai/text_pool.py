"""Threads for text work that would block the event loop: tokenizing, detokenizing, chat templates.

Owns the threads and the limit on the cost of one text. A long text is first tokenized in pieces, and refused when the pieces
have too many tokens. The tokenizer releases Python's lock while it works; a template does so every few milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from core.errors import ContextTooLong
from core.model.tokenizer import Tokenizer
from router.threads import submit

INLINE_CHARACTERS = 4096  # characters or tokens; takes less than 15 ms in any script
_PIECE_CHARACTERS = 32 << 10

T = TypeVar("T")


class TextPool:
    """The threads of one router."""

    def __init__(self, tokenizer: Tokenizer, num_threads: int) -> None:
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="kvferry-text")

    async def run(self, work: Callable[[], T]) -> T:
        """Run ``work`` on the next free thread and return its result. Raises Overloaded if no thread can be started."""
        return await submit(self._threads, work)

    async def encode(
        self, text: str, *, add_special_tokens: bool, max_tokens: int, param: str = "prompt", is_inline: bool = True
    ) -> Sequence[int]:
        """Return the token ids of a text; without ``is_inline`` even a short text is tokenized on a thread.

        Raises:
            ContextTooLong: a long text has more than ``max_tokens``; tokenization stops early. Names ``param``.
        """
        if is_inline and len(text) <= INLINE_CHARACTERS:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await self.run(lambda: self._encode(text, add_special_tokens, max_tokens, param))

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        if len(token_ids) <= INLINE_CHARACTERS:
            return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return await self.run(lambda: self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def close(self) -> None:
        """Cancel work that waits for a thread."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _encode(self, text: str, add_special_tokens: bool, max_tokens: int, param: str) -> Sequence[int]:
        if len(text) > _PIECE_CHARACTERS:
            self._check_pieces(text, max_tokens, param)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _check_pieces(self, text: str, max_tokens: int, param: str) -> None:
        """Refuse a text whose pieces have too many tokens. Cuts add a few tokens, so ``max_tokens`` must leave room."""
        num_tokens = 0
        for start in range(0, len(text), _PIECE_CHARACTERS):
            num_tokens += len(self._tokenizer.encode(text[start : start + _PIECE_CHARACTERS], add_special_tokens=False))
            if num_tokens > max_tokens:
                num_read = min(start + _PIECE_CHARACTERS, len(text))
                raise ContextTooLong(
                    f"{param} is too long: its text has {len(text)} characters, and the first {num_read} of "
                    f"them are more than {max_tokens} tokens: send less",
                    param=param,
                )
