"""The keys of a prompt's blocks, as a router that looks it up has them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from core.constants import HASH_BLOCK_SIZE
from core.kv.hashing import BlockHasher, ExtraKey
from router.contents.keys import chain_keys, prompt_chain


def prompt_keys(
    hasher: BlockHasher, token_ids: Sequence[int], extra_keys: Sequence[ExtraKey] = (), block_size: int = HASH_BLOCK_SIZE
) -> array[int]:
    """Return one key for each full block of a prompt, its last token excepted, since it is always computed.

    ``block_size`` is a multiple of ``HASH_BLOCK_SIZE``.
    """
    return chain_keys(prompt_chain(hasher, token_ids, extra_keys), block_size)
