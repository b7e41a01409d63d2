"""The memory of a worker's KV pool, as the engine passes it to connectors and transports.

Describes the memory and owns none of it. A pool on a device is accessible only through its functions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from core.kv.peer_rows import PeerMemory
from core.kv.seals import DigestBlocks, SealTable
from core.wire.kv import KVLayoutInfo


class BlockCopier(Protocol):
    """Copies whole blocks between a pool on a device and ``num_slots`` slots of host memory, in parallel with the model.

    For one thread. A slot belongs to its last copy until ``wait`` returns.
    """

    @property
    def num_slots(self) -> int:
        """How many copies can be under way."""
        ...

    def slot(self, slot: int) -> memoryview:
        """Return the memory of a slot, ``block_bytes`` writable bytes; no copy may be using it."""
        ...

    def start_read(self, slot: int, block_id: int) -> None:
        """Begin to copy a block into a slot. Nothing may write the block meanwhile."""
        ...

    def start_write(self, slot: int, block_id: int) -> None:
        """Begin to copy a slot into a block. Nothing else may use the block meanwhile."""
        ...

    def start_write_from(self, slot: int, block_id: int, memory: memoryview) -> None:
        """Begin to copy pinned memory into a block; it must not change meanwhile. The slot only numbers the copy."""
        ...

    def wait(self, slot: int) -> None:
        """Return once the last copy from or to a slot is done; at once if there was none."""
        ...


@dataclass(frozen=True, slots=True)
class KVPoolRegion:
    """The memory of a worker's KV pool: ``num_blocks`` runs of ``block_bytes``, or planes of them (``core.kv.block_form``).

    ``buffer`` is a writable uint8 view of host memory, None for device memory. ``memory_fd`` is the anonymous memory file
    behind the pool (``memfd_create``), None if there is none. The engine owns the memory and keeps it mapped while serving.
    ``seals`` is the table of the pool's seals, None on engines without seals. ``new_digester`` returns a function that
    computes the digests of blocks (``core.digest``) by their ids, for one thread: each needs its own. ``new_copier`` returns
    a copier of a pool's rows on a device, for one thread: of its blocks, or of their runs in the planes. ``bind_thread`` lets
    the calling thread use the device through other libraries (a CUDA context belongs to a thread). ``synchronize`` returns
    once the device has done all that any thread or library has given to it so far. ``pin_memory`` pins host memory, so that a
    copier can copy from it without a slot, and returns a function that unpins it, or None where pinning is not possible.
    ``new_peer_memory`` returns what maps the pools of other processes on the same device, for one thread. ``new_copier`` and
    the four after it are None for a pool in host memory, ``new_peer_memory`` also where the engine does not offer it.
    """

    base_address: int
    num_blocks: int
    block_bytes: int
    layout: KVLayoutInfo
    device: str = "cpu"
    buffer: memoryview | None = None
    memory_fd: int | None = None
    seals: SealTable | None = None
    new_digester: Callable[[], DigestBlocks] | None = None
    new_copier: Callable[[], BlockCopier] | None = None
    bind_thread: Callable[[], None] | None = None
    synchronize: Callable[[], None] | None = None
    pin_memory: Callable[[memoryview], Callable[[], None] | None] | None = None
    new_peer_memory: Callable[[], PeerMemory] | None = None
