"""A producer's memory, mapped into this process: its files, and its pool if that is on a device.

The pidfd is alive after the last open, so every ``/proc/<pid>`` path named the same process; the token proves that it is the
right one. A file whose size is not sealed is refused: its owner could shrink it, and the reader's next access would be a
SIGBUS.

Sources: memfd_create(2), pidfd_open(2), proc_pid_fd(5).
"""

from __future__ import annotations

import mmap
import os
import select
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from connectors.p2p.transport.base import RowShape
from connectors.p2p.transport.device_mapping import DeviceMappings, MappedPool
from connectors.p2p.transport.page_mapping import PageMapping
from connectors.p2p.transport.shm_metadata import TOKEN_BYTES, MemoryFileRef, ShmMetadata
from core.errors import PeerUnreachable, ProtocolError
from core.kv.peer_rows import PeerRows
from core.sealed_size import cannot_shrink

Rows = npt.NDArray[np.uint8]  # [num_rows, row_bytes]


@dataclass(slots=True)
class MappedOwner:
    """A producer whose regions are mapped here. ``pages`` puts those of its files into the page table."""

    pidfd: int
    shapes: list[RowShape]
    rows: list[Rows | PeerRows] = field(default_factory=list)  # of each region
    maps: list[mmap.mmap] = field(default_factory=list)
    pool: MappedPool | None = None  # on a device
    pages: PageMapping | None = None

    @property
    def has_exited(self) -> bool:
        """True if its process is gone."""
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        return bool(poller.poll(0))

    def start_mapping_pages(self) -> None:
        """Begin to map the files' pages ahead of the reads; where no thread can be started, each read maps its own."""
        files = [rows for rows in self.rows if isinstance(rows, np.ndarray)]
        pages = PageMapping([(rows.ctypes.data, len(each)) for rows, each in zip(files, self.maps, strict=True)])
        try:
            pages.start()
        except RuntimeError:
            return
        self.pages = pages

    def unmap(self, devices: DeviceMappings | None) -> None:
        """Give back everything. Nothing may be reading it."""
        if self.pages is not None:
            self.pages.close()
        self.rows.clear()  # the arrays hold the maps open
        for mapped in self.maps:
            mapped.close()
        if self.pool is not None and devices is not None:
            devices.close(self.pool)
        os.close(self.pidfd)


def map_owner(producer: ShmMetadata, devices: DeviceMappings | None) -> MappedOwner:
    """Open and check what a producer describes, then map it. ``devices`` maps a pool on a device.

    Raises:
        PeerUnreachable: it is gone, or is another process than the one that described it, or its memory cannot be mapped.
        ProtocolError: its memory is not what it describes.
    """
    try:
        pidfd = os.pidfd_open(producer.pid)
    except OSError as error:
        raise PeerUnreachable(f"process {producer.pid} is gone: {error}") from None
    owner = MappedOwner(pidfd, producer.shapes)
    try:
        _check_token(producer)
        if producer.device is not None and devices is not None:
            owner.pool = devices.open(producer.device, is_ours=producer.pid == os.getpid())
            owner.rows.append(owner.pool.rows)
        for file in producer.files:
            owner.maps.append(_map_file(producer.pid, file))
            owner.rows.append(as_rows(owner.maps[-1], file.shape))
        if owner.has_exited:
            raise PeerUnreachable(f"process {producer.pid} died while its memory was mapped")
    except (OSError, ValueError) as error:
        owner.unmap(devices)
        raise PeerUnreachable(f"cannot map the memory of process {producer.pid}: {error}") from None
    except Exception:
        owner.unmap(devices)
        raise
    return owner


def as_rows(memory: memoryview | mmap.mmap, shape: RowShape) -> Rows:
    """Return a view of the first bytes of host memory, [num_rows, row_bytes]."""
    flat = np.frombuffer(memory, dtype=np.uint8, count=shape.num_rows * shape.row_bytes)
    return flat.reshape(shape.num_rows, shape.row_bytes)


def memory_file(fd: int, shape: RowShape) -> MemoryFileRef:
    """Return the description of a memory file of ours."""
    return MemoryFileRef(fd=fd, inode=os.fstat(fd).st_ino, shape=shape)


def _check_token(producer: ShmMetadata) -> None:
    fd = os.open(f"/proc/{producer.pid}/fd/{producer.token_fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        token = os.pread(fd, TOKEN_BYTES, 0)
    finally:
        os.close(fd)
    if len(producer.token) != TOKEN_BYTES or token != producer.token:
        raise PeerUnreachable(f"process {producer.pid} is not the one that described its memory")


def _map_file(pid: int, file: MemoryFileRef) -> mmap.mmap:
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
