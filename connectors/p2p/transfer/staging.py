"""The staging area: blocks of peers that differ from ours land here and are converted.

Owns the memory and which rows of it are taken. Such blocks are read whole, so that the producer's digests can be checked on the
producer's bytes; then their tokens are copied to their places in our blocks. Both sides store a token of a head alike, only
the number of tokens, heads or planes of a block differs:

    producer's block   [layers, heads 0 to 3, 16 tokens]
    ours               [layers, heads 2 and 3, 64 tokens]      its slots 32 to 47 are filled

For the transfer thread only.
"""

from __future__ import annotations

import ctypes
import mmap
from bisect import insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from connectors.p2p.actions import PostRead, TokenCopy
from connectors.p2p.transport.interface import RowRegion
from connectors.pool_access import PoolAccess, open_pool
from core.digest import BlockDigester
from core.errors import LayoutMismatch
from core.kv.block_form import BlockForm, Bytes, HeadRange, plane_rows
from core.kv.pool_region import KVPoolRegion
from core.wire.pairing import STAGING_BYTES

_HeadSlices = tuple[slice, slice]  # of the KV heads in the producer's blocks, and in ours


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
    """Host memory in front of a pool. ``region`` is what transports register."""

    pool: KVPoolRegion
    region: RowRegion
    _taken: list[tuple[int, int]] = field(default_factory=list)  # spans in bytes, in order
    _digesters: dict[int, BlockDigester] = field(default_factory=dict)
    _access: PoolAccess | None = None  # of a pool on a device
    _ours: BlockForm = field(init=False)

    def __post_init__(self) -> None:
        self._ours = BlockForm(self.pool.layout)

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

    def convert(self, staged: StagedRows, read: PostRead, theirs: BlockForm) -> None:
        """Fill our blocks from the producer's blocks of ``read``, which have landed in these rows.

        Raises:
            LayoutMismatch: a block of theirs or of ours lacks KV heads that are to be copied; nothing is written.
        """
        heads = _shared_heads(read.heads, theirs.num_heads, self._ours.num_heads)
        row_of: Mapping[int, int] = dict(zip(read.remote_rows, staged.rows, strict=True))
        copies_to: dict[int, list[TokenCopy]] = {}
        for copy in read.copies:
            copies_to.setdefault(copy.local_row, []).append(copy)
        for local_row, copies in copies_to.items():
            block = self._load(local_row)
            for copy in copies:
                source = self._memory(row_of[copy.remote_row], staged.row_bytes)
                _copy_tokens(copy, theirs.views(_planes(source, len(block))), self._ours.views(block), heads)
            _clear_rest(copies, self._ours.views(block), heads)
            self._store(local_row, block)

    def _memory(self, row: int, row_bytes: int) -> memoryview:
        assert self.region.buffer is not None
        return self.region.buffer[row * row_bytes : (row + 1) * row_bytes]

    def _load(self, block_id: int) -> Bytes:
        """Return one of our blocks, [num_planes, bytes], or a copy of one on a device."""
        pool, num_planes = self.pool, self.pool.layout.num_planes
        if pool.buffer is not None:
            blocks = np.frombuffer(pool.buffer, dtype=np.uint8).reshape(num_planes, pool.num_blocks, -1)
            return blocks[:, block_id]
        access = self._open_access()
        rows = plane_rows((block_id,), num_planes, pool.num_blocks)
        return np.stack([np.frombuffer(access.read((row,))[0], dtype=np.uint8).copy() for row in rows])

    def _store(self, block_id: int, block: Bytes) -> None:
        """Copy a block back to the device."""
        if self.pool.buffer is not None:
            return
        access = self._open_access()
        for row, content in zip(plane_rows((block_id,), len(block), self.pool.num_blocks), block, strict=True):
            access.write(row, _filler(content))
        access.finish_writes()

    def _open_access(self) -> PoolAccess:
        if self._access is None:
            self._access = open_pool(self.pool)
        return self._access


def map_staging_area(pool: KVPoolRegion, num_bytes: int = STAGING_BYTES) -> StagingArea | None:
    """Map memory in front of a pool, or return None if its blocks cannot be converted. Pages are allocated on first use."""
    if pool.buffer is None and pool.new_copier is None:
        return None
    memory = mmap.mmap(-1, num_bytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return StagingArea(pool, RowRegion(address, num_bytes, 1, memoryview(memory)))


def _planes(block: memoryview, num_planes: int) -> Bytes:
    return np.frombuffer(block, dtype=np.uint8).reshape(num_planes, -1)


def _copy_tokens(copy: TokenCopy, source: list[Bytes], target: list[Bytes], heads: _HeadSlices) -> None:
    """Copy these tokens between the views of two blocks."""
    theirs, ours = heads
    for there, here in zip(source, target, strict=True):
        tokens = there[:, :, theirs, :, copy.remote_start : copy.remote_start + copy.num_tokens]
        here[:, :, ours, :, copy.local_start : copy.local_start + copy.num_tokens] = tokens


def _clear_rest(copies: list[TokenCopy], block: list[Bytes], heads: _HeadSlices) -> None:
    """Write zeros into the slots that no copy has filled."""
    _, ours = heads
    rest = np.ones(block[0].shape[4], dtype=np.bool_)
    for copy in copies:
        rest[copy.local_start : copy.local_start + copy.num_tokens] = False
    if rest.any():
        for view in block:
            view[:, :, ours, :, rest] = 0


def _shared_heads(heads: HeadRange | None, num_theirs: int, num_ours: int) -> _HeadSlices:
    """Return the slices of the KV heads in the producer's blocks and in ours; None = all heads, of which both have as many.

    Raises:
        LayoutMismatch: one side has fewer heads.
    """
    remote, local, num_heads = HeadRange(0, 0, max(num_theirs, num_ours)) if heads is None else heads
    if remote + num_heads > num_theirs or local + num_heads > num_ours:
        sizes = f"{num_theirs} KV heads in a block at the peer, {num_ours} in ours"
        raise LayoutMismatch(f"{sizes}: {num_heads} cannot be copied from number {remote} there to {local} here")
    return slice(remote, remote + num_heads), slice(local, local + num_heads)


def _filler(content: Bytes) -> Callable[[memoryview], None]:
    def fill(memory: memoryview) -> None:
        memory[:] = content.data

    return fill
