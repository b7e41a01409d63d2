"""The checks of a block before its use: its seal fits its key, and its bytes fit the seal.

Owns both checks, for every tier and every client. The key comes from the reader's own hashing of its own prompt, so a block
that was stored, moved or returned under a wrong name fails like one whose bytes have changed. Knows no tiers.
"""

from __future__ import annotations

from core.digest import WORD_BYTES, BlockDigester
from core.errors import CorruptBlock, StaleBlock
from core.kv.seals import SEAL_BYTES, Seal, decode_seal
from kvstore.key import StoreKey


def check_seal(key: StoreKey, row: bytes) -> Seal:
    """Return the content of a seal, if it is one of this key and has a digest.

    Raises:
        StaleBlock: it is not; the message holds both values.
    """
    seal = decode_seal(row) if len(row) == SEAL_BYTES else None
    if seal is None:
        raise StaleBlock("the block has no intact seal")
    if seal.block_hash != key.block_hash:
        raise StaleBlock(f"block_hash {seal.block_hash.hex()} instead of {key.block_hash.hex()}")
    if seal.group_id != key.group_id:
        raise StaleBlock(f"group_id {seal.group_id} instead of {key.group_id}")
    if seal.layout_version != key.layout_version:
        raise StaleBlock(f"layout {seal.layout_version:016x} instead of {key.layout_version:016x}")
    if seal.digest is None:
        raise StaleBlock("the seal has no digest")
    return seal


class BlockVerifier:
    """Checks blocks of any size. Holds scratch memory, so each thread needs one of its own."""

    def __init__(self) -> None:
        self._digesters: dict[int, BlockDigester] = {}

    def digest(self, content: memoryview) -> int:
        """Return the digest of a block.

        Raises:
            CorruptBlock: blocks cannot have this size.
        """
        return self._digester(content.nbytes).digest(content)

    def check(self, key: StoreKey, row: bytes, content: memoryview) -> None:
        """Check the seal against the key and the bytes against the seal.

        Raises:
            StaleBlock: the seal is of another block, or is not a seal.
            CorruptBlock: the bytes are not the sealed ones.
        """
        expected = check_seal(key, row).digest
        _compare(self.digest(content), expected)

    def copy(self, key: StoreKey, row: bytes, content: memoryview, target: memoryview) -> None:
        """Check the seal against the key, copy the bytes into ``target`` of as many, and check the copy against the seal.

        Raises: as ``check``; after CorruptBlock the content of ``target`` is garbage.
        """
        expected = check_seal(key, row).digest
        _compare(self._digester(content.nbytes).copy(content, target), expected)

    def _digester(self, num_bytes: int) -> BlockDigester:
        digester = self._digesters.get(num_bytes)
        if digester is None:
            if num_bytes <= 0 or num_bytes % WORD_BYTES:
                raise CorruptBlock(f"{num_bytes} bytes are no block")
            digester = self._digesters[num_bytes] = BlockDigester(num_bytes)
        return digester


def _compare(found: int, expected: int | None) -> None:
    if found != expected:
        raise CorruptBlock(f"digest {found:016x} instead of {expected:016x}")
