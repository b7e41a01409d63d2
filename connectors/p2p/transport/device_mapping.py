"""Pools of other processes on a device, mapped into this one.

Counts who uses a mapping: two peers may be of the same allocation, and it is opened once. What is read must lie within the
allocation, by what the device says of it here and not by what its owner says.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from connectors.p2p.transport.base import RowShape
from connectors.p2p.transport.shm_metadata import DeviceMemoryRef
from core.errors import KVFerryError, ProtocolError
from core.kv.peer_rows import PeerMemory, PeerRows


@dataclass(frozen=True, slots=True)
class MappedPool:
    """A peer's pool. ``handle`` is that of its allocation, None if this process is the owner and nothing had to be mapped."""

    rows: PeerRows
    handle: bytes | None


class DeviceMappings:
    """The allocations that are mapped here by ``memory``."""

    def __init__(self, memory: PeerMemory) -> None:
        self._memory = memory
        self._addresses: dict[bytes, int] = {}
        self._num_users: Counter[bytes] = Counter()

    def describe(self, address: int, shape: RowShape) -> DeviceMemoryRef:
        """Return what others need to map our own pool, which begins at this address.

        Raises:
            ConnectorUnavailable: its memory cannot be shared.
        """
        handle, offset = self._memory.export()
        return DeviceMemoryRef(handle=handle, offset=offset, address=address, shape=shape)

    def open(self, pool: DeviceMemoryRef, *, is_ours: bool) -> MappedPool:
        """Map a pool. ``is_ours``: its owner is proven to be this process, so that its address is an address here.

        Raises:
            PeerUnreachable: it cannot be mapped or read here.
            ProtocolError: it does not lie within its allocation.
        """
        if is_ours:
            return MappedPool(self._rows(self._memory.extent(pool.address).base_address, pool.address, pool.shape), None)
        base_address = self._open(pool.handle)
        try:
            return MappedPool(self._rows(base_address, base_address + pool.offset, pool.shape), pool.handle)
        except KVFerryError:
            self._close(pool.handle)
            raise

    def close(self, pool: MappedPool) -> None:
        """Unmap a pool, if nobody else uses its allocation. Nothing may be reading it."""
        if pool.handle is not None:
            self._close(pool.handle)

    def _rows(self, base_address: int, address: int, shape: RowShape) -> PeerRows:
        extent = self._memory.extent(base_address)
        end = address + shape.num_rows * shape.row_bytes
        if end > extent.base_address + extent.num_bytes:
            size = f"{shape.num_rows} rows of {shape.row_bytes} bytes at byte {address - extent.base_address}"
            raise ProtocolError(f"memory of {extent.num_bytes} bytes on a device cannot hold the {size} described")
        return self._memory.rows(address, shape.num_rows, shape.row_bytes)

    def _open(self, handle: bytes) -> int:
        if handle not in self._addresses:
            self._addresses[handle] = self._memory.open(handle)
        self._num_users[handle] += 1
        return self._addresses[handle]

    def _close(self, handle: bytes) -> None:
        self._num_users[handle] -= 1
        if not self._num_users[handle]:
            del self._num_users[handle]
            self._memory.close(self._addresses.pop(handle))
