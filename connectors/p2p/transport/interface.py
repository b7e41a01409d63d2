"""A transport of KV blocks: it reads rows of a peer's registered memory into rows of one's own.

A *region* is memory cut into equal rows; a row is one KV block of all layers, or of one layer if the pool keeps them apart, or
one seal. Everywhere region 0 is the KV pool
and region 1 the table of its seals (``regions_of``). A producer registers its regions and describes them; a consumer adds the
producer as a peer and posts reads of scattered rows. Blocks of a peer that have another size than ours are read into separate
memory, the staging area, which is cut into rows of the peer's size (``landing_regions``). Transports move bytes and know
nothing of requests, leases or models. All calls come from one thread, the transfer thread, except that ``register`` and
``describe`` may be called before that thread starts.

Every implementation passes ``connectors.testing.transport_suite``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import zmq

from core.errors import KVFerryError, LayoutMismatch
from core.kv.peer_rows import PeerMemory
from core.kv.pool_region import BlockCopier, KVPoolRegion
from core.kv.seals import SEAL_BYTES, SealTable

POOL_REGION = 0
SEAL_REGION = 1


class PeerId(NamedTuple):
    """One incarnation of a peer: a restarted process at the same address is another peer."""

    address: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class RowRegion:
    """``num_rows`` contiguous rows of ``row_bytes`` each, starting at ``base_address``.

    ``buffer`` is a writable uint8 view of host memory, None for device memory. ``memory_fd`` is the anonymous memory file that
    holds the region from its first byte, None if there is none. The owner of the memory keeps it mapped while registered.
    ``new_copier`` returns what copies rows of device memory to and from host memory, for one thread. ``synchronize`` returns
    once the device has done all that it has been given so far. ``new_peer_memory`` returns what maps the pools of other
    processes on the device, for one thread; None if the engine does not offer it. All are None for host memory.
    """

    base_address: int
    num_rows: int
    row_bytes: int
    buffer: memoryview | None = None
    memory_fd: int | None = None
    device: str = "cpu"
    new_copier: Callable[[], BlockCopier] | None = None
    synchronize: Callable[[], None] | None = None
    new_peer_memory: Callable[[], PeerMemory] | None = None

    @property
    def num_bytes(self) -> int:
        """Size of the whole region."""
        return self.num_rows * self.row_bytes

    def cut(self, row_bytes: int) -> RowRegion:
        """Return the same memory in rows of another size; a remainder at its end belongs to no row."""
        return replace(self, num_rows=self.num_bytes // row_bytes, row_bytes=row_bytes)

    @classmethod
    def of_pool(cls, pool: KVPoolRegion) -> RowRegion:
        """Return the region of a KV pool: one row per block, or per block and plane (``core.kv.block_form.plane_rows``)."""
        num_planes = pool.layout.num_planes
        return cls(
            pool.base_address,
            pool.num_blocks * num_planes,
            pool.block_bytes // num_planes,
            pool.buffer,
            pool.memory_fd,
            pool.device,
            pool.new_copier,
            pool.synchronize,
            pool.new_peer_memory,
        )

    @classmethod
    def of_seals(cls, seals: SealTable) -> RowRegion:
        """Return the region of a seal table: one row per block, then its landing rows and the row of probes."""
        memory = seals.memory
        return cls(memory.base_address, seals.num_rows, SEAL_BYTES, memory.buffer, memory.memory_fd)


def regions_of(pool: KVPoolRegion) -> list[RowRegion]:
    """Return the regions that a worker registers: its pool, and its seal table if it has one."""
    seals = [] if pool.seals is None else [RowRegion.of_seals(pool.seals)]
    return [RowRegion.of_pool(pool), *seals]


def landing_regions(
    ours: Sequence[RowRegion], staging: RowRegion | None, their_row_bytes: Sequence[int]
) -> tuple[RowRegion, ...]:
    """Return the local regions for the rows of a peer: our own, or the staging area if the peer's blocks have another size.

    Raises:
        LayoutMismatch: no local region fits rows of this size; the message holds both values.
    """
    landing = list(ours)
    if staging is not None and their_row_bytes and 0 < their_row_bytes[POOL_REGION] != ours[POOL_REGION].row_bytes:
        landing[POOL_REGION] = staging.cut(their_row_bytes[POOL_REGION])
    our_row_bytes = [region.row_bytes for region in landing]
    if our_row_bytes != list(their_row_bytes) or not landing[POOL_REGION].num_rows:
        sizes = [region.row_bytes for region in ours]
        raise LayoutMismatch(f"rows of {sizes} bytes here, of {list(their_row_bytes)} bytes at the peer")
    return tuple(landing)


@dataclass(frozen=True, slots=True)
class ReadResult:
    """A read that is terminal: nothing is written into its rows any more, whether it ended well or with an error.

    The engine then gives the rows to other requests. A transport that cannot know after a failure that no byte is
    under way fences the peer before it reports; all reads of that peer end then, as after ``remove_peer``.

    ``error`` is None if every byte has arrived. After an error the content of the rows is undefined.
    """

    handle: int
    error: KVFerryError | None = None


class Transport(ABC):
    """Reads rows of peers' regions. Regions are named by their index in ``register``, the same on both sides."""

    name: ClassVar[str]

    # True if a read begins only after all earlier posted reads of the same peer have read their rows,
    # so that seals may be requested together with their blocks.
    reads_in_order: ClassVar[bool] = False

    def counts(self) -> Mapping[str, int]:
        """Return what has happened so far, by the name of the event. Any thread."""
        return {}

    @abstractmethod
    def unavailable_reason(self) -> str | None:
        """Return why this transport cannot run here, or None if it can. Cheap, without side effects."""

    @abstractmethod
    def register(self, regions: Sequence[RowRegion], staging: RowRegion | None = None) -> None:
        """Receive this process's regions, once, and the staging area for peers with another block size.

        Raises:
            ConnectorUnavailable: the library, a system call, or a property of the memory is missing.
        """

    @abstractmethod
    def describe(self) -> bytes:
        """Start serving the regions and return what a peer needs to read them, in the transport's own encoding."""

    @abstractmethod
    def add_peer(self, peer: PeerId, metadata: bytes) -> None:
        """Prepare to read from a peer, given its ``describe()``. May block for a fraction of a second.

        Raises:
            PeerUnreachable: the peer is gone, or is another process than the one of the metadata.
            ProtocolError: the metadata is malformed.
            LayoutMismatch: the peer's rows have another size than ours, and there is no staging area for them.
        """

    def pool_shape(self, peer: PeerId) -> tuple[int, int] | None:
        """Return number and bytes of the rows of an added peer's pool by its metadata, None if the metadata do not say."""
        return None

    def bytes_received(self, peer: PeerId) -> int | None:
        """Return how many bytes of reads have arrived from an added peer so far; None if this transport cannot tell.

        It need not count each byte, but during a slow read of some MiB it must grow many times.
        """
        return None

    @abstractmethod
    def post_read(self, peer: PeerId, region: int, remote_rows: Sequence[int], local_rows: Sequence[int]) -> int:
        """Start reading ``remote_rows[i]`` into ``local_rows[i]`` and return a handle; ``poll`` reports how it ended.

        ``local_rows`` are rows of the region in which the peer's rows land (``landing_regions``).

        Raises:
            ProtocolError: a row or region is out of range, a local row is named twice, or the lists differ in length. Nothing
                is read.
            PeerUnreachable: the peer is unknown or known to be gone.
        """

    @abstractmethod
    def poll(self) -> list[ReadResult]:
        """Make progress without waiting and return the reads that became terminal, each exactly once."""

    def take_lost_peers(self) -> Sequence[PeerId]:
        """Return the added peers that ``poll`` has found to be gone since the last call, each once.

        A read that failed for that reason tells as much; a transport that learns of losses by its reads alone returns none.
        """
        return ()

    @abstractmethod
    def cancel(self, handle: int) -> None:
        """Ask for an early end of a read. Its result still comes from ``poll``, at once where late bytes are impossible.

        An unknown or ended handle is ignored.
        """

    @abstractmethod
    def remove_peer(self, peer: PeerId) -> None:
        """Fence a peer: after this returns, no byte of it can arrive. Its open reads end with an error in ``poll``.

        It is not lost any more (``take_lost_peers``). An unknown peer is ignored.
        """

    def pollables(self) -> Sequence[zmq.Socket[bytes] | int]:
        """Return the sockets and file descriptors whose readability means that ``poll`` has something to do."""
        return ()

    def max_wait_s(self) -> float | None:
        """Return how long ``poll`` may be left alone if no pollable becomes readable: 0 = it has work now, None = no limit."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Fence all peers, stop serving, forget the regions."""
