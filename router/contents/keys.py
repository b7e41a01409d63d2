"""The keys of a prompt: what the workers themselves call its blocks."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from core.constants import HASH_BLOCK_SIZE
from core.kv.hashing import BlockHasher, ExtraKey
from core.token_ids import pack_token_ids
from core.wire.contents import KEY_BYTES


def prompt_chain(hasher: BlockHasher, token_ids: Sequence[int], extra_keys: Sequence[ExtraKey] = ()) -> list[bytes]:
    """Return the hash chain of a prompt without its last token: one value for each 16 tokens."""
    return hasher.hash_request_blocks(pack_token_ids(token_ids[:-1]), extra_keys)


def chain_keys(chain: Sequence[bytes], block_size: int = HASH_BLOCK_SIZE) -> array[int]:
    """Return the keys of the blocks of this size: of a block, the chain's value at its end.

    Of a size that is no multiple of ``HASH_BLOCK_SIZE`` there are none: no worker of ours has such blocks.
    """
    num_hashes, rest = divmod(block_size, HASH_BLOCK_SIZE)
    if rest or not num_hashes:
        return array("Q")
    return hash_keys(chain[num_hashes - 1 :: num_hashes])


def hash_keys(block_hashes: Sequence[bytes]) -> array[int]:
    """Return the keys of whole block hashes: their first 8 bytes, little-endian."""
    keys = array("Q")
    keys.frombytes(b"".join([block_hash[:KEY_BYTES] for block_hash in block_hashes]))
    return keys
