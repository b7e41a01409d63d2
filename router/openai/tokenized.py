"""What ``/tokenize`` and ``/detokenize`` answer."""

from __future__ import annotations

import msgspec


class Tokenized(msgspec.Struct, kw_only=True):
    """Answer of ``POST /tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct, kw_only=True):
    """Answer of ``POST /detokenize``."""

    prompt: str
