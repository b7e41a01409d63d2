"""What a transport needs of a device to read the pools of other processes on it, as functions of the memory's owner.

Interfaces only; ``core.peer_memory`` implements them for CUDA. An instance belongs to one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class ExportedMemory(NamedTuple):
    """How another process finds our pool: the handle of its allocation, and the pool's first byte counted from there."""

    handle: bytes
    offset: int


class Extent(NamedTuple):
    """First address and number of bytes of an allocation."""

    base_address: int
    num_bytes: int


class CopyUnderWay(Protocol):
    """A copy that has been submitted (``torch.cuda.Event`` is one)."""

    def query(self) -> bool:
        """Return True if it is done."""
        ...

    def synchronize(self) -> None:
        """Return once it is done."""
        ...


class PeerRows(Protocol):
    """Rows of a peer's pool. They must stay mapped until the copies that were begun are done."""

    def start_copy(self, remote_rows: Sequence[int], local_rows: Sequence[int]) -> CopyUnderWay:
        """Begin to copy rows into rows of our pool, of the same size, after all copies that were begun before."""
        ...

    def copy_to_host(self, first_row: int, target: memoryview) -> None:
        """Copy adjacent rows into host memory, as many as it holds; they are there when this returns."""
        ...


class PeerMemory(Protocol):
    """Maps allocations of other processes, so that the device copies from them into our pool by itself."""

    def export(self) -> ExportedMemory:
        """Return what another process needs to map our pool.

        Raises:
            ConnectorUnavailable: the pool's memory cannot be shared.
        """
        ...

    def open(self, handle: bytes) -> int:
        """Map another process's allocation and return its address. It stays, also if its owner dies, until ``close``.

        Raises:
            PeerUnreachable: it cannot be mapped.
        """
        ...

    def close(self, address: int) -> None:
        """Unmap an allocation. Nothing may be reading it."""
        ...

    def extent(self, address: int) -> Extent:
        """Return the allocation that holds this address.

        Raises:
            PeerUnreachable: there is none.
        """
        ...

    def rows(self, address: int, num_rows: int, row_bytes: int) -> PeerRows:
        """Return the rows from this address on, all within one allocation.

        Raises:
            PeerUnreachable: the device cannot read them.
        """
        ...
