"""The staging area: blocks of peers with another block size land here and are converted to ours.

Owns the memory and which rows of it are taken. Such blocks are read into rows of the producer's size, so that the producer's
digests can be checked on the producer's bytes; then their tokens are copied to their places in our blocks. Both sides store
a token alike, only the number of tokens per block differs:

    producer's block   [planes, 16, token]   ->   slots 32 to 47 of ours   [planes, 64, token]

A plane holds the keys or values of one layer, or of one head if heads come before tokens (HND). For the transfer thread only.
"""

from __future__ import annotations

import ctypes
import mmap
from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from connectors.p2p.actions import TokenCopy
from connectors.p2p.transport.interface import RowRegion
from core.digest import BlockDigester
from core.kv.pool_region import KVPoolRegion
from core.wire.kv import KVLayoutInfo
from core.wire.pairing import STAGING_BYTES

Tokens = npt.NDArray[np.uint8]  # [planes, tokens, bytes of a token in a plane]


@dataclass(frozen=True, slots=True)
class StagedRows:
    """Rows of the staging area that a read may write, until they are returned. ``first`` counts in rows of this size."""

    first: int
    num_rows: int
    row_bytes: int

    @property
    def span(self) -> tuple[int, int]:
        """First byte, and the one after the last."""
        return self.first * self.row_bytes, (self.first + self.num_rows) * self.row_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return self.num_rows * self.row_bytes

    @property
    def rows(self) -> tuple[int, ...]:
        """Row numbers, in order."""
        return tuple(range(self.first, self.first + self.num_rows))


@dataclass(slots=True)
class StagingArea:
    """Host memory in front of a pool. ``region`` is what transports register; a block of the pool has ``num_planes``."""

    pool: KVPoolRegion
    region: RowRegion
    num_planes: int
    _taken: list[tuple[int, int]] = field(default_factory=list)  # spans in bytes, in order
    _digesters: dict[int, BlockDigester] = field(default_factory=dict)

    @property
    def num_taken_bytes(self) -> int:
        """Bytes that a read may write."""
        return sum(end - start for start, end in self._taken)

    @property
    def num_free_bytes(self) -> int:
        """Bytes that are free, in all gaps together."""
        return self.region.num_bytes - self.num_taken_bytes

    # ---- allocation of rows ------------------------------------------------------------------------------------------

    def holds(self, num_rows: int, row_bytes: int) -> bool:
        """Say whether so many rows have room in an empty area."""
        return num_rows * row_bytes <= self.region.num_bytes

    def take(self, num_rows: int, row_bytes: int, num_held_bytes: int = 0) -> StagedRows | None:
        """Take adjacent rows, the first that are free; None if there is no such place now.

        A peer that already holds ``num_held_bytes`` of the area gets no more than it leaves free.
        """
        num_bytes = num_rows * row_bytes
        if num_held_bytes and num_held_bytes + num_bytes > self.num_free_bytes - num_bytes:
            return None
        start = 0
        for taken_start, taken_end in [*self._taken, (self.region.num_bytes, self.region.num_bytes)]:
            first = -(-start // row_bytes)
            if (first + num_rows) * row_bytes <= taken_start:
                staged = StagedRows(first, num_rows, row_bytes)
                insort(self._taken, staged.span)
                return staged
            start = taken_end
        return None

    def give_back(self, staged: StagedRows) -> None:
        """Release these rows, which no read writes any more."""
        self._taken.remove(staged.span)

    # ---- content of rows ---------------------------------------------------------------------------------------------

    def digests(self, staged: StagedRows) -> tuple[int, ...]:
        """Return the digests of the blocks in these rows."""
        digester = self._digesters.get(staged.row_bytes)
        if digester is None:
            digester = self._digesters[staged.row_bytes] = BlockDigester(staged.row_bytes)
        return tuple(digester.digest(self._memory(row, staged.row_bytes)) for row in staged.rows)

    def convert(self, staged: StagedRows, remote_rows: Sequence[int], copies: Sequence[TokenCopy]) -> None:
        """Fill our blocks from the producer's blocks ``remote_rows``, which have landed in these rows."""
        row_of: Mapping[int, int] = dict(zip(remote_rows, staged.rows, strict=True))
        layout = self.pool.layout
        copies_to: dict[int, list[TokenCopy]] = {}
        for copy in copies:
            copies_to.setdefault(copy.local_row, []).append(copy)
        for local_row, parts in copies_to.items():
            block = self._block(local_row)
            target = self._tokens(block.memory)
            if sum(part.num_tokens for part in parts) < layout.block_size:
                target[:] = 0
            for part in parts:
                source = self._tokens(self._memory(row_of[part.remote_row], staged.row_bytes))
                tokens = source[:, part.remote_start : part.remote_start + part.num_tokens]
                target[:, part.local_start : part.local_start + part.num_tokens] = tokens
            block.store()

    def _memory(self, row: int, row_bytes: int) -> memoryview:
        assert self.region.buffer is not None
        return self.region.buffer[row * row_bytes : (row + 1) * row_bytes]

    def _block(self, block_id: int) -> _Block:
        """Return the memory of one of our blocks, or, on a device, host memory that will be copied into it."""
        size = self.pool.block_bytes
        if self.pool.buffer is not None:
            return _Block(self.pool.buffer[block_id * size : (block_id + 1) * size], lambda: None)
        write_block = self.pool.write_block
        assert write_block is not None, "a pool in no host memory is written by its engine"
        content = memoryview(bytearray(size))
        return _Block(content, lambda: write_block(block_id, content))

    def _tokens(self, block: memoryview) -> Tokens:
        """View a block, ours or the producer's, by its tokens."""
        layout = self.pool.layout
        token_bytes = layout.block_bytes // (self.num_planes * layout.block_size)
        return np.frombuffer(block, dtype=np.uint8).reshape(self.num_planes, -1, token_bytes)


@dataclass(frozen=True, slots=True)
class _Block:
    memory: memoryview
    store: Callable[[], None]


def map_staging_area(pool: KVPoolRegion, num_bytes: int = STAGING_BYTES) -> StagingArea | None:
    """Map memory in front of a pool, or return None if its blocks cannot be converted. Pages are allocated on first use."""
    if pool.buffer is None and pool.write_block is None:
        return None
    memory = mmap.mmap(-1, num_bytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return StagingArea(pool, RowRegion(address, num_bytes, 1, memoryview(memory)), _num_planes(pool.layout))


def _num_planes(layout: KVLayoutInfo) -> int:
    return 2 * layout.num_layers * (layout.num_kv_heads if layout.order == "HND" else 1)
