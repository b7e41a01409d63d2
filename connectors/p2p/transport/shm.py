"""Reads from the memory of another process on the same host: one copy per run of adjacent blocks, one for all short rows.

The producer's pool is an anonymous memory file. The consumer opens it as ``/proc/<pid>/fd/<n>`` and maps it read-only: no
name in ``/dev/shm``, nothing to clean up after a crash. The producer's identity is proven, not assumed: a pidfd taken first
shows that the process number was not reused until the files were open, and a second small file holds a random token of this
incarnation. Copies happen in ``poll``, some MiB at a time and read by read, on the caller's thread; therefore removing a
peer is an exact fence, and seals that are requested after their blocks are read after them.

A thread maps the pages of a producer's pool while the first reads run: waiting for all of them would delay the first read by
0.1 s for each GiB.

A file whose size is not sealed is refused: its owner could shrink it, and the reader's next access would be a SIGBUS.

Sources: memfd_create(2), pidfd_open(2), proc_pid_fd(5).
"""

from __future__ import annotations

import mmap
import os
import select
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from connectors.p2p.transport.base import (
    RowShape,
    Run,
    SystemNumber,
    adjacent_runs,
    check_read,
    decode_metadata,
    landing_of,
    region_at,
)
from connectors.p2p.transport.interface import POOL_REGION, PeerId, ReadResult, RowRegion, Transport
from connectors.p2p.transport.page_mapping import PageMapping
from core.errors import ConfigError, ConnectorUnavailable, KVFerryError, PeerUnreachable, ProtocolError, TransferError
from core.ids import IdSource
from core.sealed_size import cannot_shrink
from core.stream_copy import stream_copy
from core.struct_types import prepared

TOKEN_BYTES = 32
COPY_BYTES_PER_POLL = 16 << 20  # bounds how long a cancellation or another peer waits
MAX_SHORT_ROW_BYTES = 1024  # rows up to this size, seals, are gathered: a call for each run would cost more than the bytes

Rows = npt.NDArray[np.uint8]  # [num_rows, row_bytes]


class MemoryFile(msgspec.Struct, frozen=True, kw_only=True):
    """One region of the producer: its descriptor number in the producer's process, and the proof that it is that file."""

    fd: SystemNumber
    inode: int
    shape: RowShape


@prepared
class ShmMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """What a producer tells its consumers."""

    pid: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    token_fd: SystemNumber
    token: bytes
    files: tuple[MemoryFile, ...]


@dataclass(slots=True)
class _Peer:
    """A producer whose files are mapped here; ``pages`` puts them into the page table."""

    pidfd: int
    maps: list[mmap.mmap]
    rows: list[Rows]
    shapes: list[RowShape]
    landing: tuple[RowRegion, ...] = ()  # regions in which its rows land
    targets: list[Rows] = field(default_factory=list)
    pages: PageMapping | None = None


class _ShortRows(NamedTuple):
    """Row numbers of a read of short rows, in pairs: copied at once, however they are scattered."""

    remote: npt.NDArray[np.int64]
    local: npt.NDArray[np.int64]


@dataclass(slots=True)
class _Read:
    handle: int
    peer_id: PeerId
    region: int
    copies: deque[Run | _ShortRows] = field(default_factory=deque)


class ShmTransport(Transport):
    """Reads rows by mapping the producer's memory file."""

    name = "shm"
    reads_in_order = True  # one after the other, by this process

    def __init__(self, ids: IdSource) -> None:
        self._ids = ids
        self._regions: tuple[RowRegion, ...] = ()
        self._staging: RowRegion | None = None
        self._token_fd: int | None = None
        self._peers: dict[PeerId, _Peer] = {}
        self._reads: dict[int, _Read] = {}  # in posting order
        self._ended: list[ReadResult] = []
        self._lost: list[PeerId] = []
        self._last_handle = 0

    def unavailable_reason(self) -> str | None:
        """Probe the two system calls and ``/proc``."""
        if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
            return "this operating system has no memfd_create or pidfd_open"
        try:
            os.close(os.pidfd_open(os.getpid()))
        except OSError as error:
            return f"pidfd_open is refused: {error}"
        if not os.path.isdir(f"/proc/{os.getpid()}/fd"):
            return "/proc is not mounted"
        return None

    def register(self, regions: Sequence[RowRegion], staging: RowRegion | None = None) -> None:
        """Register host memory; peers can read only a region with a memory file."""
        for region in regions:
            if region.buffer is None:
                raise ConfigError(
                    f"connector.transports: shm maps host memory, and this worker's KV pool is on {region.device}: "
                    "use nixl, which reads device memory, or tcp, which copies it through host memory (nixl,tcp tries both)",
                    param="connector.transports",
                )
        self._regions = tuple(regions)
        self._staging = staging

    def describe(self) -> bytes:
        """Publish the descriptor numbers of the regions' files and the token of this incarnation."""
        files = []
        for region in self._regions:
            if region.memory_fd is None:
                raise ConnectorUnavailable("shm transport: the KV pool does not lie in an anonymous memory file")
            shape = RowShape(region.num_rows, region.row_bytes)
            files.append(MemoryFile(fd=region.memory_fd, inode=os.fstat(region.memory_fd).st_ino, shape=shape))
        token = self._ids.bits(8 * TOKEN_BYTES).to_bytes(TOKEN_BYTES, "little")
        if self._token_fd is None:
            self._token_fd = os.memfd_create("kvferry-token", os.MFD_CLOEXEC)
        os.pwrite(self._token_fd, token, 0)
        return msgspec.msgpack.encode(ShmMetadata(pid=os.getpid(), token_fd=self._token_fd, token=token, files=tuple(files)))

    def add_peer(self, peer: PeerId, metadata: bytes) -> None:
        """Map the producer's files read-only."""
        producer = decode_metadata(metadata, ShmMetadata, self.name)
        landing = landing_of(self._regions, self._staging, [file.shape for file in producer.files])
        if peer not in self._peers:
            mapped = _map_producer(producer)
            mapped.landing = landing
            mapped.targets = [_as_rows(_host_memory(region), RowShape(region.num_rows, region.row_bytes)) for region in landing]
            spans = [(rows.ctypes.data, len(each)) for rows, each in zip(mapped.rows, mapped.maps, strict=True)]
            mapped.pages = _start_mapping(spans)
            self._peers[peer] = mapped

    def pool_shape(self, peer: PeerId) -> tuple[int, int] | None:
        """Return the shape of its pool's file."""
        shape = self._peers[peer].shapes[POOL_REGION]
        return shape.num_rows, shape.row_bytes

    def post_read(self, peer: PeerId, region: int, remote_rows: Sequence[int], local_rows: Sequence[int]) -> int:
        """Queue the copies; ``poll`` does them."""
        producer = self._peers.get(peer)
        if producer is None:
            raise PeerUnreachable(f"no shared memory of {peer.address} is mapped")
        local = region_at(producer.landing, region)
        check_read(producer.shapes[region], local, remote_rows, local_rows)
        copies: deque[Run | _ShortRows] = deque()
        if local.row_bytes <= MAX_SHORT_ROW_BYTES:
            copies.append(_ShortRows(np.asarray(remote_rows), np.asarray(local_rows)))
        else:
            copies.extend(adjacent_runs(remote_rows, local_rows, max(1, COPY_BYTES_PER_POLL // local.row_bytes)))
        self._last_handle += 1
        self._reads[self._last_handle] = _Read(self._last_handle, peer, region, copies)
        return self._last_handle

    def poll(self) -> list[ReadResult]:
        """Copy for at most ``COPY_BYTES_PER_POLL``, until a read has ended, and notice producers that have died."""
        self._drop_dead_producers()
        budget = COPY_BYTES_PER_POLL
        while budget > 0 and self._reads and not self._ended:
            read = next(iter(self._reads.values()))
            budget -= self._copy_next(read)
            if not read.copies:
                self._finish(read)
        ended, self._ended = self._ended, []
        return ended

    def take_lost_peers(self) -> Sequence[PeerId]:
        """Return the producers that have died."""
        lost, self._lost = self._lost, []
        return lost

    def cancel(self, handle: int) -> None:
        """Drop the copies that have not been done; none is under way outside ``poll``."""
        if handle in self._reads:
            self._end(handle, TransferError("the read was cancelled"))

    def remove_peer(self, peer: PeerId) -> None:
        """Unmap the producer's files."""
        self._lost = [other for other in self._lost if other != peer]
        producer = self._peers.pop(peer, None)
        if producer is None:
            return
        for read in [read for read in self._reads.values() if read.peer_id == peer]:
            self._end(read.handle, PeerUnreachable(f"{peer.address} was removed"))
        _unmap(producer)

    def pollables(self) -> Sequence[int]:
        """Readable pidfds of producers that have died, so that their memory is returned at once."""
        return [producer.pidfd for producer in self._peers.values()]

    def max_wait_s(self) -> float | None:
        """Copies that are not done are work for now."""
        return 0.0 if self._reads or self._ended else None

    def close(self) -> None:
        """Unmap all producers and withdraw the token."""
        for peer in list(self._peers):
            self.remove_peer(peer)
        if self._token_fd is not None:
            os.close(self._token_fd)
            self._token_fd = None
        self._regions = ()
        self._staging = None

    def _copy_next(self, read: _Read) -> int:
        copy = read.copies.popleft()
        producer = self._peers[read.peer_id]
        source, target = producer.rows[read.region], producer.targets[read.region]
        if isinstance(copy, _ShortRows):
            target[copy.local] = source[copy.remote]
            return len(copy.local) * producer.landing[read.region].row_bytes
        # The GIL is released meanwhile: the engine thread computes.
        stream_copy(target[copy.local : copy.local + copy.num_rows], source[copy.remote : copy.remote + copy.num_rows])
        return copy.num_rows * producer.landing[read.region].row_bytes

    def _finish(self, read: _Read) -> None:
        """End a read whose copies are done; if the producer died meanwhile, the read fails."""
        if _has_exited(self._peers[read.peer_id].pidfd):
            self._end(read.handle, PeerUnreachable(f"{read.peer_id.address} died during a read"))
            return
        self._end(read.handle, None)

    def _end(self, handle: int, error: KVFerryError | None) -> None:
        del self._reads[handle]
        self._ended.append(ReadResult(handle, error))

    def _drop_dead_producers(self) -> None:
        for peer in [peer for peer, producer in self._peers.items() if _has_exited(producer.pidfd)]:
            self.remove_peer(peer)
            self._lost.append(peer)


def _host_memory(region: RowRegion) -> memoryview:
    assert region.buffer is not None, "register takes no other"
    return region.buffer


def _as_rows(memory: memoryview | mmap.mmap, shape: RowShape) -> Rows:
    flat = np.frombuffer(memory, dtype=np.uint8, count=shape.num_rows * shape.row_bytes)
    return flat.reshape(shape.num_rows, shape.row_bytes)


def _start_mapping(spans: Sequence[tuple[int, int]]) -> PageMapping | None:
    """Begin to map pages ahead of the reads; None where no thread can be started, and each read maps its own."""
    pages = PageMapping(spans)
    try:
        pages.start()
    except RuntimeError:
        return None
    return pages


def _map_producer(producer: ShmMetadata) -> _Peer:
    """Open and check the producer's files, then map them.

    The pidfd is alive after the last open, so every ``/proc/<pid>`` path named the same process; the token proves that it is
    the right one.
    """
    try:
        pidfd = os.pidfd_open(producer.pid)
    except OSError as error:
        raise PeerUnreachable(f"process {producer.pid} is gone: {error}") from None
    peer = _Peer(pidfd, [], [], [])
    try:
        _check_token(producer)
        for file in producer.files:
            peer.maps.append(_map_file(producer.pid, file))
            peer.rows.append(_as_rows(peer.maps[-1], file.shape))
            peer.shapes.append(file.shape)
        if _has_exited(pidfd):
            raise PeerUnreachable(f"process {producer.pid} died while its memory was mapped")
    except (OSError, ValueError) as error:
        _unmap(peer)
        raise PeerUnreachable(f"cannot map the memory of process {producer.pid}: {error}") from None
    except KVFerryError:
        _unmap(peer)
        raise
    return peer


def _check_token(producer: ShmMetadata) -> None:
    fd = os.open(f"/proc/{producer.pid}/fd/{producer.token_fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        token = os.pread(fd, TOKEN_BYTES, 0)
    finally:
        os.close(fd)
    if len(producer.token) != TOKEN_BYTES or token != producer.token:
        raise PeerUnreachable(f"process {producer.pid} is not the one that described its memory")


def _map_file(pid: int, file: MemoryFile) -> mmap.mmap:
    num_bytes = file.shape.num_rows * file.shape.row_bytes
    fd = os.open(f"/proc/{pid}/fd/{file.fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        if status.st_ino != file.inode:
            raise PeerUnreachable(f"descriptor {file.fd} of process {pid} is another file than described")
        if num_bytes <= 0 or status.st_size < num_bytes:
            raise ProtocolError(f"memory file of {status.st_size} bytes cannot hold the {num_bytes} bytes described")
        if not cannot_shrink(fd):
            raise ProtocolError(f"the memory file of process {pid} is not sealed against shrinking")
        page_bytes = status.st_blksize  # huge pages count, too: a mapping that ends within one could not be unmapped
        size = min(status.st_size, -(-num_bytes // page_bytes) * page_bytes)
        return mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    finally:
        os.close(fd)


def _unmap(peer: _Peer) -> None:
    if peer.pages is not None:
        peer.pages.close()
    peer.rows.clear()  # the arrays hold the maps open
    for mapped in peer.maps:
        mapped.close()
    os.close(peer.pidfd)


def _has_exited(pidfd: int) -> bool:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))
