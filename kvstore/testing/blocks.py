"""Sealed blocks with content derived from a number, for tests and benchmarks of stores."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np

from core.kv.seals import Seal, decode_seal, encode_seal
from kvstore.key import LAYOUT_KEY_BYTES, StoreKey
from kvstore.seal_check import BlockVerifier

LAYOUT = bytes(range(LAYOUT_KEY_BYTES))
BLOCK_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class SealedBlock:
    """A block with the key and the seal that it would have on a worker."""

    key: StoreKey
    content: memoryview
    seal: bytes


def make_key(number: int, *, layout: bytes = LAYOUT, group_id: int = 0) -> StoreKey:
    """Return the key of block ``number``."""
    return StoreKey(hashlib.blake2b(number.to_bytes(8, "little"), digest_size=16).digest(), layout, group_id)


def make_block(number: int, num_bytes: int = BLOCK_BYTES, *, layout: bytes = LAYOUT, group_id: int = 0) -> SealedBlock:
    """Return block ``number``: different bytes for every number, layout and group, the same ones every time."""
    key = make_key(number, layout=layout, group_id=group_id)
    seed = int.from_bytes(hashlib.blake2b(key.pack(), digest_size=8).digest(), "little")
    content = np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)
    return seal_block(key, memoryview(content))  # type: ignore[arg-type]


def seal_block(key: StoreKey, content: memoryview) -> SealedBlock:
    """Return a block with its right seal."""
    digest = BlockVerifier().digest(content)
    seal = Seal(0xABCD, 1, key.group_id, key.block_hash, 16, key.layout_version, digest)
    return SealedBlock(key, content, encode_seal(seal))


def with_seal(block: SealedBlock, **changes: object) -> SealedBlock:
    """Return the block with a seal of another content."""
    seal = decode_seal(block.seal)
    assert seal is not None, "the seal of a test block is intact"
    return replace(block, seal=encode_seal(replace(seal, **changes)))  # type: ignore[arg-type]
