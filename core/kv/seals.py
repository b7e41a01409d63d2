"""Seals: a worker's statement, in memory that its peers can read, about each block of its KV pool.

Owns the 64-byte row format and the table of rows. A reader that has read a block reads its row *afterwards*: a row that matches
proves that the block held this content, of this incarnation of the worker, until the bytes had arrived. A block that is
allocated again, or computed again in part, loses its seal before anything can write it, and is sealed with another generation.
Knows no requests, transports or tensors.

    0     4       6        8             16           32       40           44      48              56
    magic version group_id incarnation   block_hash   digest   num_tokens   flags   layout_version  generation

Fields are written first and ``generation`` last, as one aligned 8-byte store; breaking a seal is one such store of ``BROKEN``,
and sealing begins with it. That order holds on x86; another CPU needs a fence between the two.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from core.constants import HASH_BLOCK_SIZE
from core.wire.kv import KVLayoutInfo

SEAL_BYTES = 64
BROKEN = 0  # generations of allocated blocks start at 1

_MAGIC = 0x4C56464B  # "KFVL"
_VERSION = 1
_HAS_DIGEST = 1
_FIELDS = struct.Struct("<IHHQ16sQIIQ")  # everything but the generation
_ROW = struct.Struct("<IHHQ16sQIIQQ")
_GENERATION_INDEX = _FIELDS.size // 8  # in 8-byte words
_WORDS_PER_ROW = SEAL_BYTES // 8
_DIGEST_INDEX, _FLAGS_INDEX = 5, 7  # among the fields
# The bits of all other fields.
_COMPARED = _ROW.pack(2**32 - 1, 2**16 - 1, 2**16 - 1, 2**64 - 1, b"\xff" * 16, 0, 2**32 - 1, 0, 2**64 - 1, 2**64 - 1)

assert _ROW.size == SEAL_BYTES

DigestBlocks = Callable[[Sequence[int]], Sequence[int]]  # ids of blocks → the digests of their bytes, several at a time


def each_by_itself(digest_block: Callable[[int], int]) -> DigestBlocks:
    """Return a function that computes the digests of blocks one after the other."""
    return lambda block_ids: [digest_block(block_id) for block_id in block_ids]


@dataclass(frozen=True, slots=True)
class ExpectedSeal:
    """A reader's expectation of the seal of one block, from the handoff and from its own hashing of its own prompt."""

    generation: int
    group_id: int
    block_hash: bytes
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Seal:
    """One decoded row. ``digest`` is None if the owner made none."""

    incarnation: int
    generation: int
    group_id: int
    block_hash: bytes
    num_tokens: int
    layout_version: int
    digest: int | None


@dataclass(frozen=True, slots=True)
class SealMemory:
    """Zeroed host memory for the rows of a table. ``memory_fd`` is the anonymous memory file that backs it, or None.

    Each block has ``num_landing`` landing rows: one for every block of a peer that may be read into it.
    """

    buffer: memoryview
    base_address: int
    memory_fd: int | None = None
    num_landing: int = 1


def map_seal_memory(num_blocks: int, memory_fd: int | None = None, num_landing: int = 1) -> SealMemory:
    """Map zeroed rows for ``num_blocks`` blocks: a memory file of that size, which peers can map, or memory of this process.

    The mapping lives as long as a view of it; the caller owns the file.
    """
    memory = mmap.mmap(-1 if memory_fd is None else memory_fd, seal_memory_bytes(num_blocks, num_landing))
    return SealMemory(memoryview(memory), ctypes.addressof(ctypes.c_char.from_buffer(memory)), memory_fd, num_landing)


def seal_memory_bytes(num_blocks: int, num_landing: int = 1) -> int:
    """Return the size of a table: own rows, landing rows, and the row of probes."""
    return ((1 + num_landing) * num_blocks + 1) * SEAL_BYTES


def num_landing_rows(block_size: int) -> int:
    """Return how many landing rows a block of ``block_size`` tokens needs: peers' blocks are at least one hash block long."""
    return max(1, block_size // HASH_BLOCK_SIZE)


class SealTable:
    """One row per block, followed by the landing rows of each block for the seals of peers' blocks.

    The last row belongs to no block: a transport's probes write it, and it is never read.

    ``digest_blocks`` computes the digests of blocks by their ids; None = seals have no digests. Written by the engine thread;
    landing rows by the transfer thread.
    """

    def __init__(
        self,
        memory: SealMemory,
        incarnation: int,
        layout_version: int,
        digest_blocks: DigestBlocks | None = None,
    ) -> None:
        self.memory = memory
        self.buffer = memory.buffer
        self.num_landing = memory.num_landing
        self.num_blocks = len(memory.buffer) // ((1 + memory.num_landing) * SEAL_BYTES)
        self.incarnation = incarnation
        self.layout_version = layout_version
        self._digest_blocks = digest_blocks
        self._words = memory.buffer.cast("Q")
        self._rows = np.frombuffer(memory.buffer, dtype=np.dtype((np.void, SEAL_BYTES)))

    @property
    def has_digests(self) -> bool:
        """True if seals are made with digests."""
        return self._digest_blocks is not None

    @property
    def num_rows(self) -> int:
        """Own rows, landing rows, and the row of probes."""
        return (1 + self.num_landing) * self.num_blocks + 1

    @property
    def probe_row(self) -> int:
        """Where the probe of a transport lands."""
        return self.num_rows - 1

    def seal(self, block_id: int, expected: ExpectedSeal) -> None:
        """Record the content of a block whose KV is complete. A reader never sees a mix of the old and the new row."""
        self.seal_all([(block_id, expected)])

    def seal_all(self, blocks: Sequence[tuple[int, ExpectedSeal]]) -> None:
        """Seal several blocks and compute their digests together: on a device, the start of the computation takes most time."""
        block_ids = [block_id for block_id, _ in blocks]
        self.break_seals(block_ids)
        digests = self._digest_blocks(block_ids) if self._digest_blocks is not None and blocks else [0] * len(blocks)
        for (block_id, expected), digest in zip(blocks, digests, strict=True):
            self._write(block_id, expected, digest)

    def _write(self, block_id: int, expected: ExpectedSeal, digest: int) -> None:
        flags = _HAS_DIGEST if self._digest_blocks is not None else 0
        _FIELDS.pack_into(
            self.buffer,
            block_id * SEAL_BYTES,
            _MAGIC,
            _VERSION,
            expected.group_id,
            self.incarnation,
            expected.block_hash,
            digest,
            expected.num_tokens,
            flags,
            self.layout_version,
        )
        self._words[block_id * _WORDS_PER_ROW + _GENERATION_INDEX] = expected.generation

    def break_seals(self, block_ids: Iterable[int]) -> None:
        """Take the seals off, before anything may write these blocks."""
        self._break(block_ids)

    def sealed_generation(self, block_id: int) -> int:
        """Return the generation that is sealed, ``BROKEN`` if none."""
        return self._words[block_id * _WORDS_PER_ROW + _GENERATION_INDEX]

    def row(self, row: int) -> bytes:
        """Return a copy of an own or landing row."""
        return bytes(self.buffer[row * SEAL_BYTES : (row + 1) * SEAL_BYTES])

    def rows(self, rows: Sequence[int] | npt.NDArray[np.int64]) -> bytes:
        """Return copies of own or landing rows, concatenated."""
        return self._rows.take(rows).tobytes()

    def landing_rows(self, block_ids: Sequence[int], count: int) -> list[int]:
        """Return ``count`` rows for the seals of the peer's blocks that are read into these blocks, each a different row.

        As many peer's blocks as ours: one row of each. Several per block of ours: the second rows of each follow, and so on.
        """
        num_turns = -(-count // max(1, len(block_ids)))
        assert num_turns <= self.num_landing, f"{count} seals cannot land beside {len(block_ids)} blocks"
        firsts = range(self.num_blocks, (1 + num_turns) * self.num_blocks, self.num_blocks)
        return [first + block_id for first in firsts for block_id in block_ids][:count]

    def clear_landing(self, rows: Iterable[int]) -> None:
        """Clear the rows of earlier reads, so that a read that brings nothing cannot be mistaken for a successful one."""
        self._break(rows)

    def _break(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._words[row * _WORDS_PER_ROW + _GENERATION_INDEX] = BROKEN


def decode_seal(row: bytes) -> Seal | None:
    """Decode a row; None if it is not an intact seal (never written, broken, or of another version)."""
    magic, version, group_id, incarnation, block_hash, digest, num_tokens, flags, layout_version, generation = _ROW.unpack(row)
    if (magic, version) != (_MAGIC, _VERSION) or generation == BROKEN:
        return None
    has_digest = bool(flags & _HAS_DIGEST)
    return Seal(incarnation, generation, group_id, block_hash, num_tokens, layout_version, digest if has_digest else None)


def encode_seal(seal: Seal) -> bytes:
    """Return the row of a seal for memory without a table of seals: blocks in stores and tiers."""
    flags = 0 if seal.digest is None else _HAS_DIGEST
    return _pack(seal, seal.incarnation, seal.layout_version, seal.digest or 0, flags)


def _pack(seal: Seal | ExpectedSeal, incarnation: int, layout_version: int, digest: int = 0, flags: int = 0) -> bytes:
    return _ROW.pack(
        _MAGIC,
        _VERSION,
        seal.group_id,
        incarnation,
        seal.block_hash,
        digest,
        seal.num_tokens,
        flags,
        layout_version,
        seal.generation,
    )


class ExpectedRows:
    """The expected rows of several blocks, to compare all at once. Can be made before the real rows have arrived."""

    def __init__(self, seals: Iterable[ExpectedSeal], incarnation: int, layout_version: int) -> None:
        wanted = list(seals)
        rows = [_pack(one, incarnation, layout_version) for one in wanted]
        self._value = int.from_bytes(b"".join(rows), "little")
        self._compared = int.from_bytes(_COMPARED * len(wanted), "little")
        self._num_bytes = SEAL_BYTES * len(wanted)
        self._are_possible = all(one.generation != BROKEN for one in wanted)

    def equal(self, rows: bytes, digests: Sequence[int] | None = None) -> bool:
        """Return True if the rows match; with ``digests`` each must also have the digest of its block."""
        if not self._are_possible or len(rows) != self._num_bytes:
            return False
        if (int.from_bytes(rows, "little") ^ self._value) & self._compared:
            return False
        return digests is None or digests == [_digest_of(row) for row in _ROW.iter_unpack(rows)]


def _digest_of(row: tuple[Any, ...]) -> int | None:
    digest, flags = row[_DIGEST_INDEX], row[_FLAGS_INDEX]
    return digest if flags & _HAS_DIGEST else None


def find_mismatch(row: bytes, expected: ExpectedSeal, incarnation: int, layout_version: int) -> str | None:
    """Return the difference between a seal and the expected one, with both values; None if equal. Digests are not compared."""
    magic, version, group_id, sealed_by, block_hash, _, num_tokens, _, layout, generation = _ROW.unpack(row)
    if (
        generation == expected.generation != BROKEN
        and block_hash == expected.block_hash
        and num_tokens == expected.num_tokens
        and group_id == expected.group_id
        and sealed_by == incarnation
        and layout == layout_version
        and magic == _MAGIC
        and version == _VERSION
    ):
        return None
    return _describe_mismatch(row, expected, incarnation, layout_version)


def _describe_mismatch(row: bytes, expected: ExpectedSeal, incarnation: int, layout_version: int) -> str:
    seal = decode_seal(row)
    if seal is None:
        return "the block has no seal: it was reused, or is being rewritten"
    if seal.incarnation != incarnation:
        return f"incarnation {seal.incarnation:016x} instead of {incarnation:016x}"
    for name in ("generation", "group_id", "block_hash", "num_tokens"):
        found, wanted = getattr(seal, name), getattr(expected, name)
        if found != wanted:
            return f"{name} {_shown(found)} instead of {_shown(wanted)}"
    return f"layout {seal.layout_version:016x} instead of {layout_version:016x}"


def layout_fingerprint(layout: KVLayoutInfo) -> int:
    """Return 64 bits that differ for different layouts, the same in every process."""
    return int.from_bytes(hashlib.blake2b(msgspec.msgpack.encode(layout), digest_size=8).digest(), "little")


def _shown(value: int | bytes) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
