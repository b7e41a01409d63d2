"""The name of a block in the store, and its packed form.

Owns the parts of a key. A block hash is keyed by the model's fingerprint and chains the tokens of the whole prefix, the
tenant's ``cache_salt`` and the adapters; the layout part stands for the order of the bytes and the numbers of layers and heads.
Two blocks with one key have the same content, whichever worker computed them.

    packed: block_hash[16] | layout_version: u64 | zeros[8] | group_id: u32        36 bytes, little-endian
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from core.errors import ProtocolError
from core.kv.hashing import BLOCK_HASH_BYTES
from core.kv.seals import layout_fingerprint
from core.wire.kv import KVLayoutInfo

LAYOUT_KEY_BYTES = 16
PACKED_KEY_BYTES = BLOCK_HASH_BYTES + LAYOUT_KEY_BYTES + 4

_VERSION_BYTES = 8
_MAX_GROUP_ID = 2**16 - 1  # a seal has 16 bits for it


class StoreKey(NamedTuple):
    """The identity of a block: the hash of its prefix (16 bytes), the layout of its bytes (``layout_key``), its group."""

    block_hash: bytes
    layout: bytes
    group_id: int

    @property
    def layout_version(self) -> int:
        """The layout version in the seals of such blocks: ``core.kv.seals.layout_fingerprint``."""
        return int.from_bytes(self.layout[:_VERSION_BYTES], "little")

    def pack(self) -> bytes:
        """Return the 36 bytes under which tiers and messages know the block."""
        return b"%b%b%b" % (self.block_hash, self.layout, self.group_id.to_bytes(4, "little"))

    @classmethod
    def unpack(cls, packed: bytes) -> StoreKey:
        """Return the key of 36 bytes.

        Raises:
            ProtocolError: they are not a key.
        """
        if len(packed) != PACKED_KEY_BYTES:
            raise ProtocolError(f"a packed store key has {PACKED_KEY_BYTES} bytes, not {len(packed)}")
        group_id = int.from_bytes(packed[-4:], "little")
        if group_id > _MAX_GROUP_ID:
            raise ProtocolError(f"group id {group_id} of a store key is above {_MAX_GROUP_ID}")
        return cls(packed[:BLOCK_HASH_BYTES], packed[BLOCK_HASH_BYTES:-4], group_id)


def layout_key(layout: KVLayoutInfo) -> bytes:
    """Return the 16 bytes that identify a layout."""
    return layout_fingerprint(layout).to_bytes(LAYOUT_KEY_BYTES, "little")


def pack_keys(keys: Iterable[StoreKey]) -> bytes:
    """Return the packed keys, one after another."""
    return b"".join([b"%b%b%b" % (block_hash, layout, group_id.to_bytes(4, "little")) for block_hash, layout, group_id in keys])


def split_keys(packed: bytes) -> list[bytes]:
    """Split ``pack_keys`` into single packed keys.

    Raises:
        ProtocolError: the length is not a multiple of a key's.
    """
    if len(packed) % PACKED_KEY_BYTES:
        raise ProtocolError(f"{len(packed)} bytes are no whole number of store keys")
    return [packed[start : start + PACKED_KEY_BYTES] for start in range(0, len(packed), PACKED_KEY_BYTES)]
