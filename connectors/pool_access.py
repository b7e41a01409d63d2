"""The pool's blocks as memory to copy from and to, for pools in host or device memory.

The blocks of a pool in host memory are views of it. The blocks of a pool on a device are copied through pinned memory by a
``BlockCopier`` while the model computes; several copies overlap, so that one block is checked while the next one is copied. An
access belongs to one thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

from core.errors import ConnectorUnavailable
from core.kv.pool_region import BlockCopier, KVPoolRegion
from core.kv.seals import DigestBlocks


class PoolAccess(ABC):
    """Reads and writes whole blocks. ``is_direct``: reads return the blocks themselves, not copies of them."""

    is_direct: ClassVar[bool] = False
    has_digests = False  # whether ``digests`` computes them where the blocks are

    @property
    @abstractmethod
    def max_reads(self) -> int:
        """How many blocks can be read together."""

    @abstractmethod
    def read(self, block_ids: Sequence[int]) -> list[memoryview]:
        """Return the bytes of blocks, ``max_reads`` at most, valid until the next ``read``, also while blocks are written."""

    @abstractmethod
    def write(self, block_id: int, fill: Callable[[memoryview], None]) -> None:
        """Let ``fill`` write a block's bytes into memory that is then copied to the block; exceptions of ``fill`` pass through.

        The block is not to be used before ``finish_writes``, and not at all if ``fill`` raises.
        """

    def write_from(self, block_id: int, memory: memoryview) -> bool:
        """Begin to copy memory, which must not change before ``finish_writes``, into a block; False if it must use ``write``.

        Only where there are ``digests``, so that the copy can be checked.
        """
        return False

    def digests(self, block_ids: Sequence[int]) -> Sequence[int]:
        """Return the digests of blocks in the pool, where it ``has_digests``."""
        raise NotImplementedError

    @abstractmethod
    def finish_writes(self) -> None:
        """Return once all writes are in the pool."""


class HostPoolAccess(PoolAccess):
    """A pool in host memory: blocks are read and written in place."""

    is_direct = True

    def __init__(self, buffer: memoryview, block_bytes: int) -> None:
        self._buffer = buffer
        self._block_bytes = block_bytes

    @property
    def max_reads(self) -> int:
        """Many: they cost no memory, and the store copies them in parallel. Not all: their digests cost time."""
        return 32

    def read(self, block_ids: Sequence[int]) -> list[memoryview]:
        """Return the blocks themselves."""
        return [self._row(block_id) for block_id in block_ids]

    def write(self, block_id: int, fill: Callable[[memoryview], None]) -> None:
        """Fill the block itself."""
        fill(self._row(block_id))

    def finish_writes(self) -> None:
        """Nothing is under way."""

    def _row(self, block_id: int) -> memoryview:
        return self._buffer[block_id * self._block_bytes : (block_id + 1) * self._block_bytes]


class DevicePoolAccess(PoolAccess):
    """A pool on a device, by way of the copier's slots: half of them for reads, which a store may still be copying, and half
    for writes. There must be two at least.
    """

    def __init__(
        self, copier: BlockCopier, digest_blocks: DigestBlocks | None = None, pinned: memoryview | None = None
    ) -> None:
        assert copier.num_slots > 1, "a slot for reads and one for writes"
        self._copier = copier
        self._digest_blocks = digest_blocks
        self.has_digests = digest_blocks is not None
        self._pinned = pinned
        self._pinned_address = 0 if pinned is None else _address(pinned)
        self._read_slots = range(copier.num_slots // 2)
        self._write_slots = range(copier.num_slots // 2, copier.num_slots)
        self._num_writes = 0

    @property
    def max_reads(self) -> int:
        """The number of slots for reads."""
        return len(self._read_slots)

    def read(self, block_ids: Sequence[int]) -> list[memoryview]:
        """Copy the blocks into slots, all at once."""
        slots = self._read_slots[: len(block_ids)]
        for slot, block_id in zip(slots, block_ids, strict=True):
            self._copier.start_read(slot, block_id)
        for slot in slots:
            self._copier.wait(slot)
        return [self._copier.slot(slot) for slot in slots]

    def write(self, block_id: int, fill: Callable[[memoryview], None]) -> None:
        """Fill the slot whose last copy is the oldest, and start the next one from there."""
        slot = self._next_write_slot()
        fill(self._copier.slot(slot))
        self._copier.start_write(slot, block_id)

    def write_from(self, block_id: int, memory: memoryview) -> bool:
        """Copy from pinned memory without a slot."""
        if self._pinned is None or not self.has_digests:
            return False
        start = _address(memory) - self._pinned_address
        if not 0 <= start <= self._pinned.nbytes - memory.nbytes:
            return False
        self._copier.start_write_from(self._next_write_slot(), block_id, self._pinned[start : start + memory.nbytes])
        return True

    def finish_writes(self) -> None:
        """Wait for every slot that was written from."""
        for slot in self._write_slots:
            self._copier.wait(slot)

    def digests(self, block_ids: Sequence[int]) -> Sequence[int]:
        """Return the digests that the engine's own digester computes."""
        assert self._digest_blocks is not None, "asked without has_digests"
        return self._digest_blocks(block_ids)

    def _next_write_slot(self) -> int:
        """Return the slot whose last copy is the oldest, once it is done."""
        slot = self._write_slots[self._num_writes % len(self._write_slots)]
        self._num_writes += 1
        self._copier.wait(slot)
        return slot


def _address(memory: memoryview) -> int:
    return np.frombuffer(memory, dtype=np.uint8).ctypes.data


def open_pool(pool: KVPoolRegion, pinned: memoryview | None = None) -> PoolAccess:
    """Return access to the pool's blocks for one thread. ``pinned`` is host memory that a device copies from.

    Raises:
        ConnectorUnavailable: it is on a device, and the engine has no copier.
    """
    if pool.buffer is not None:
        return HostPoolAccess(pool.buffer, pool.block_bytes)
    if pool.new_copier is None:
        raise ConnectorUnavailable(f"the KV pool is on {pool.device}, and the engine does not say how to copy its blocks")
    return DevicePoolAccess(pool.new_copier(), pool.new_digester() if pool.new_digester is not None else None, pinned)
