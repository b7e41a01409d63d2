"""Chunks: embeddings cut into a fixed number of rows, each chunk with a seal, for memory, stores and transports.

Owns the size of a chunk, the hash that names one, and the digest of whole embeddings. Embeddings are of any number of rows;
pools, stores and transports move blocks of one size. The last chunk of an item is filled up with zeros.

    item   | row 0 ... row 63 | row 64 ... row 127 | row 128 .. zeros |     [num_embeds, hidden_size]
             chunk 0            chunk 1              chunk 2                CHUNK_EMBEDS rows each

The hash of a chunk covers the identifier and number of rows of its item and its position among them, keyed by the model. Every
seal names this hash and the layout, so a chunk of another item, shape, dtype or model is refused like a KV block of another
prompt. Pure.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import numpy as np

from core.digest import WORD_BYTES, BlockDigester
from core.ec_connector import EmbeddingsLayout
from core.errors import CorruptBlock, LayoutMismatch
from core.kv.hashing import BLOCK_HASH_BYTES
from core.wire.kv import KVLayoutInfo
from core.wire.media import ECSeal, MMFeature

CHUNK_EMBEDS = 64  # the size of a common image, or of a tile of one; the same in the whole cluster

_ORDER = "EMBED"  # the layout of no KV cache
_DOMAIN = b"kvferry embed v1"
_PLACE = struct.Struct("<16sII")
_MAX_DIGESTERS = 8  # each holds about a MiB of scratch memory


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """The chunks of one model's embeddings. ``model_fingerprint`` has 1 to 64 bytes."""

    embeddings: EmbeddingsLayout
    model_fingerprint: bytes

    @property
    def embed_bytes(self) -> int:
        """Size of one row."""
        return self.embeddings.hidden_size * self.embeddings.itemsize

    @property
    def chunk_bytes(self) -> int:
        """Size of a chunk, which is a multiple of whole words, because it has 64 rows."""
        return CHUNK_EMBEDS * self.embed_bytes

    @property
    def as_blocks(self) -> KVLayoutInfo:
        """The layout as transports and stores see it: a chunk is a block with one row per token."""
        return KVLayoutInfo(
            dtype=self.embeddings.dtype,
            order=_ORDER,
            block_size=CHUNK_EMBEDS,
            num_layers=1,
            num_kv_heads=1,
            head_dim=self.embeddings.hidden_size,
            block_bytes=self.chunk_bytes,
        )

    def num_bytes(self, num_embeds: int) -> int:
        """Return the size of an item's rows."""
        return num_embeds * self.embed_bytes

    def chunk_hashes(self, identifier: bytes, num_embeds: int) -> list[bytes]:
        """Return the hashes that the seals of an item's chunks must contain, 16 bytes each, in order."""
        return [self._chunk_hash(identifier, num_embeds, index) for index in range(num_chunks(num_embeds))]

    def seal(self, identifier: bytes, num_embeds: int, digest: int) -> ECSeal:
        """Return the seal of whole embeddings."""
        layout = self.embeddings
        return ECSeal(
            identifier=identifier, num_embeds=num_embeds, hidden_size=layout.hidden_size, dtype=layout.dtype, digest=digest
        )

    def check_seal(self, seal: ECSeal, feature: MMFeature) -> None:
        """Check that announced embeddings belong to a feature and have the shape and dtype of this layout.

        Raises:
            LayoutMismatch: they do not; the message holds both values.
        """
        wanted = self.seal(feature.identifier, feature.num_embeds, seal.digest)
        for name in ("identifier", "num_embeds", "hidden_size", "dtype"):
            found, needed = getattr(seal, name), getattr(wanted, name)
            if found != needed:
                raise LayoutMismatch(f"embeddings are announced with {name} {_shown(found)} instead of {_shown(needed)}")

    def _chunk_hash(self, identifier: bytes, num_embeds: int, index: int) -> bytes:
        place = _PLACE.pack(identifier, num_embeds, index)
        return hashlib.blake2b(place, digest_size=BLOCK_HASH_BYTES, key=self.model_fingerprint, person=_DOMAIN).digest()


def num_chunks(num_embeds: int) -> int:
    """Return the number of chunks of an item with this many rows."""
    return -(-num_embeds // CHUNK_EMBEDS)


def rows_in_chunk(num_embeds: int, index: int) -> int:
    """Return how many rows of an item are in a chunk of it; the rest of the chunk is zero."""
    return min(CHUNK_EMBEDS, num_embeds - index * CHUNK_EMBEDS)


class RowsDigester:
    """Digests of whole embeddings in host memory. Holds scratch memory, so each thread needs one of its own."""

    def __init__(self) -> None:
        self._digesters: dict[int, BlockDigester] = {}

    def digest(self, content: memoryview) -> int:
        """Return the digest of the bytes of rows, padded with zeros to whole words."""
        num_bytes = content.nbytes
        if num_bytes % WORD_BYTES:
            padded = np.zeros(-(-num_bytes // WORD_BYTES) * WORD_BYTES, dtype=np.uint8)
            padded[:num_bytes] = np.frombuffer(content, dtype=np.uint8)
            content = padded.data
        return self._digester(content.nbytes).digest(content)

    def check(self, content: memoryview, seal: ECSeal) -> None:
        """Check rows against their seal.

        Raises:
            CorruptBlock: they do not match the seal.
        """
        found = self.digest(content)
        if found != seal.digest:
            raise CorruptBlock(f"digest {found:016x} of the embeddings instead of {seal.digest:016x} in their seal")

    def _digester(self, num_bytes: int) -> BlockDigester:
        digester = self._digesters.pop(num_bytes, None) or BlockDigester(num_bytes)
        if len(self._digesters) >= _MAX_DIGESTERS:
            del self._digesters[next(iter(self._digesters))]
        self._digesters[num_bytes] = digester
        return digester


def _shown(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
