"""The keys of a prompt: what the workers themselves call its blocks."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from core.kv.hashing import BlockHasher, ExtraKey

KEY_BYTES = 8


def prompt_keys(
    hasher: BlockHasher, token_ids: Sequence[int], extra_keys: Sequence[ExtraKey] = (), block_size: int = 0
) -> array[int]:
    """Return one key for each full block of a prompt, its last token excepted, since it is always computed.

    ``block_size`` is a multiple of the hasher's; 0 = the hasher's own.
    """
    num_hashes = (block_size or hasher.hash_block_size) // hasher.hash_block_size
    chain = hasher.hash_request_blocks(array("i", token_ids[:-1]), extra_keys)
    return hash_keys(chain[num_hashes - 1 :: num_hashes])


def hash_keys(block_hashes: Sequence[bytes]) -> array[int]:
    """Return the keys of whole block hashes: their first 8 bytes, little-endian."""
    keys = array("Q")
    keys.frombytes(b"".join([block_hash[:KEY_BYTES] for block_hash in block_hashes]))
    return keys
