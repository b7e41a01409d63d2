"""Reads the memory of another process on the same host: one copy per run of adjacent blocks, one for all short rows.

The producer's pool is an anonymous memory file. The consumer opens it as ``/proc/<pid>/fd/<n>`` and maps it read-only: no
name in ``/dev/shm``, nothing to clean up after a crash. The producer's identity is proven, not assumed: a pidfd taken first
shows that the process number was not reused until the files were open, and a second small file holds a random token of this
incarnation. Copies happen in ``poll``, some MiB at a time and read by read, on the caller's thread; therefore removing a
peer is an exact fence, and seals that are requested after their blocks are read after them.

A pool on a CUDA device is mapped by CUDA IPC, and its rows are copied by a kernel of this process into its own pool. Such a
read is launched when it is posted, and is over when its event says so. Of one peer all reads keep their order: a copy by the
host waits for earlier ones by the device, and the other way round. Removing a peer waits for what was launched.

A thread maps the pages of a producer's pool while the first reads run: waiting for all of them would delay the first read by
0.1 s for each GiB.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from connectors.p2p.transport.base import (
    DEVICE_BACKOFF_S,
    Backoff,
    RowShape,
    Run,
    adjacent_runs,
    check_read,
    decode_metadata,
    landing_of,
    region_at,
)
from connectors.p2p.transport.device_mapping import DeviceMappings
from connectors.p2p.transport.interface import POOL_REGION, PeerId, ReadResult, RowRegion, Transport
from connectors.p2p.transport.shm_metadata import TOKEN_BYTES, ShmMetadata
from connectors.p2p.transport.shm_owner import MappedOwner, Rows, as_rows, map_owner, memory_file
from core.errors import ConnectorUnavailable, KVFerryError, PeerUnreachable, TransferError
from core.ids import IdSource
from core.kv.peer_rows import CopyUnderWay, PeerRows
from core.stream_copy import stream_copy

COPY_BYTES_PER_POLL = 16 << 20  # bounds how long a cancellation or another peer waits
MAX_SHORT_ROW_BYTES = 1024  # rows up to this size, seals, are gathered: a call for each run would cost more than the bytes


@dataclass(slots=True)
class _Peer:
    """A producer, and where its rows land: ``targets`` has None for a pool on a device."""

    owner: MappedOwner
    landing: tuple[RowRegion, ...]
    targets: list[Rows | None]


class _ShortRows(NamedTuple):
    """Row numbers of a read of short rows, in pairs: copied at once, however they are scattered.

    No view of the rows is kept here: while one is left, their memory cannot be unmapped.
    """

    remote: npt.NDArray[np.int64]
    local: npt.NDArray[np.int64]


@dataclass(slots=True)
class _HostRead:
    """A read that lands in host memory, by copies that are made in ``poll``."""

    handle: int
    peer_id: PeerId
    region: int
    copies: deque[Run | _ShortRows] = field(default_factory=deque)


@dataclass(slots=True)
class _DeviceRead:
    """A read from device to device. ``under_way`` is None until its turn comes."""

    handle: int
    peer_id: PeerId
    rows: PeerRows
    remote_rows: Sequence[int]
    local_rows: Sequence[int]
    under_way: CopyUnderWay | None = None
    is_cancelled: bool = False


class ShmTransport(Transport):
    """Reads rows by mapping the producer's memory file, or its memory on a device."""

    name = "shm"
    reads_in_order = True  # one after the other, by this process or by one stream of the device

    def __init__(self, ids: IdSource) -> None:
        self._ids = ids
        self._regions: tuple[RowRegion, ...] = ()
        self._staging: RowRegion | None = None
        self._devices: DeviceMappings | None = None  # where our pool is on a device
        self._token_fd: int | None = None
        self._peers: dict[PeerId, _Peer] = {}
        self._reads: dict[int, _HostRead | _DeviceRead] = {}  # in posting order
        self._has_copies = False  # that the next ``poll`` will do
        self._ended: list[ReadResult] = []
        self._lost: list[PeerId] = []
        self._last_handle = 0
        self._backoff = Backoff(*DEVICE_BACKOFF_S)

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
        """Register memory; peers can read only a region with a memory file, and a pool that a device can share."""
        for number, region in enumerate(regions):
            if region.buffer is None and (number != POOL_REGION or region.new_peer_memory is None):
                raise ConnectorUnavailable(
                    f"shm transport: the engine has memory on {region.device} and no way to share it with other processes"
                )
        self._regions = tuple(regions)
        self._staging = staging
        new_peer_memory = regions[POOL_REGION].new_peer_memory if regions else None
        if new_peer_memory is not None:
            self._devices = DeviceMappings(new_peer_memory())

    def describe(self) -> bytes:
        """Publish the descriptor numbers of the regions' files and the token of this incarnation."""
        device, files = None, []
        for region in self._regions:
            shape = RowShape(region.num_rows, region.row_bytes)
            if region.buffer is None and self._devices is not None:
                device = self._devices.describe(region.base_address, shape)
            elif region.memory_fd is not None:
                files.append(memory_file(region.memory_fd, shape))
            else:
                raise ConnectorUnavailable("shm transport: the KV pool or its seals do not lie in an anonymous memory file")
        token = self._ids.bits(8 * TOKEN_BYTES).to_bytes(TOKEN_BYTES, "little")
        if self._token_fd is None:
            self._token_fd = os.memfd_create("kvferry-token", os.MFD_CLOEXEC)
        os.pwrite(self._token_fd, token, 0)
        metadata = ShmMetadata(pid=os.getpid(), token_fd=self._token_fd, token=token, files=tuple(files), device=device)
        return msgspec.msgpack.encode(metadata)

    def add_peer(self, peer: PeerId, metadata: bytes) -> None:
        """Map the producer's memory, its files read-only."""
        producer = decode_metadata(metadata, ShmMetadata, self.name)
        landing = landing_of(self._regions, self._staging, producer.shapes)
        self._check_kind(producer)
        if peer not in self._peers:
            owner = map_owner(producer, self._devices)
            owner.start_mapping_pages()
            self._peers[peer] = _Peer(owner, landing, [_host_rows(region) for region in landing])

    def pool_shape(self, peer: PeerId) -> tuple[int, int] | None:
        """Return the shape in its metadata, which its memory can hold."""
        shape = self._peers[peer].owner.shapes[POOL_REGION]
        return shape.num_rows, shape.row_bytes

    def post_read(self, peer: PeerId, region: int, remote_rows: Sequence[int], local_rows: Sequence[int]) -> int:
        """Queue the copies, which ``poll`` does; those of the device are launched at once, if it is their turn."""
        producer = self._peers.get(peer)
        if producer is None:
            raise PeerUnreachable(f"no shared memory of {peer.address} is mapped")
        local = region_at(producer.landing, region)
        check_read(producer.owner.shapes[region], local, remote_rows, local_rows)
        self._last_handle += 1
        handle, rows = self._last_handle, producer.owner.rows[region]
        if not isinstance(rows, np.ndarray) and producer.targets[region] is None:
            if producer.owner.has_exited:  # its memory stays mapped, and the device would read it at once
                raise PeerUnreachable(f"{peer.address} has died")
            self._backoff.restart()
            self._reads[handle] = _DeviceRead(handle, peer, rows, remote_rows, local_rows)
            try:
                self._take_turns()
            except Exception:  # of the device: what it has not begun is no read
                del self._reads[handle]
                raise
            return handle
        copies: deque[Run | _ShortRows] = deque()
        target = producer.targets[region]
        if isinstance(rows, np.ndarray) and target is not None and local.row_bytes <= MAX_SHORT_ROW_BYTES:
            copies.append(_ShortRows(np.asarray(remote_rows), np.asarray(local_rows)))
        else:
            copies.extend(adjacent_runs(remote_rows, local_rows, max(1, COPY_BYTES_PER_POLL // local.row_bytes)))
        self._reads[handle] = _HostRead(handle, peer, region, copies)
        self._has_copies = True
        return handle

    def poll(self) -> list[ReadResult]:
        """Copy for at most ``COPY_BYTES_PER_POLL``, until a read has ended, and notice producers that have died."""
        self._drop_dead_producers()
        self._end_done_by_device()
        budget, read = COPY_BYTES_PER_POLL, self._take_turns()
        while budget > 0 and read is not None and not self._ended:
            budget -= self._copy_next(read)
            if not read.copies:
                self._finish(read)
            read = self._take_turns()
        self._has_copies = read is not None
        ended, self._ended = self._ended, []
        self._backoff.after_look(has_ended=bool(ended))
        return ended

    def take_lost_peers(self) -> Sequence[PeerId]:
        """Return the producers that have died."""
        lost, self._lost = self._lost, []
        return lost

    def cancel(self, handle: int) -> None:
        """Drop the copies that have not been done; none by the host is under way outside ``poll``. A device ends its own."""
        read = self._reads.get(handle)
        if isinstance(read, _DeviceRead) and read.under_way is not None:
            read.is_cancelled = True
        elif read is not None:
            self._end(handle, TransferError("the read was cancelled"))

    def remove_peer(self, peer: PeerId) -> None:
        """Unmap the producer's memory, once the device has done what was launched."""
        self._lost = [other for other in self._lost if other != peer]
        producer = self._peers.pop(peer, None)
        if producer is None:
            return
        reads = [read for read in self._reads.values() if read.peer_id == peer]
        try:
            for read in reads:
                if isinstance(read, _DeviceRead) and read.under_way is not None:
                    read.under_way.synchronize()
        finally:  # also behind an error of the device, which ends the worker
            for read in reads:
                self._end(read.handle, PeerUnreachable(f"{peer.address} was removed"))
            producer.owner.unmap(self._devices)

    def pollables(self) -> Sequence[int]:
        """Readable pidfds of producers that have died, so that their memory is returned at once."""
        return [producer.owner.pidfd for producer in self._peers.values()]

    def max_wait_s(self) -> float | None:
        """Copies that are not done are work for now; those of a device are looked at with a back-off."""
        if self._has_copies or self._ended:
            return 0.0
        return self._backoff.wait_s if self._reads else None

    def close(self) -> None:
        """Unmap all producers and withdraw the token."""
        with ExitStack() as every:
            every.callback(self._withdraw)
            for peer in self._peers:
                every.callback(self.remove_peer, peer)

    def _withdraw(self) -> None:
        if self._token_fd is not None:
            os.close(self._token_fd)
            self._token_fd = None
        self._regions = ()
        self._staging = self._devices = None

    def _check_kind(self, producer: ShmMetadata) -> None:
        """Refuse a pool in host memory to a pool on a device, and the other way round."""
        theirs, ours = (
            "host memory" if device is None else "memory on a device" for device in (producer.device, self._devices)
        )
        if theirs != ours:
            raise PeerUnreachable(
                f"the KV pool of process {producer.pid} is {theirs}, and ours is {ours}: shm reads within one kind only, tcp "
                "between both (connector.transports)"
            )

    def _take_turns(self) -> _HostRead | None:
        """Launch the device's reads whose turn has come; return the first read by the host whose turn it is, if there is one.

        That of a read by the host comes when no earlier read of its peer is open, that of a read by the device when none by
        the host is: the device does its own in order.
        """
        found, by_host, by_device = None, set[PeerId](), set[PeerId]()
        for read in self._reads.values():
            if isinstance(read, _DeviceRead):
                if read.under_way is None and read.peer_id not in by_host:
                    read.under_way = read.rows.start_copy(read.remote_rows, read.local_rows)
                by_device.add(read.peer_id)
                continue
            if found is None and read.peer_id not in by_host | by_device:
                found = read
            by_host.add(read.peer_id)
        return found

    def _end_done_by_device(self) -> None:
        launched = [read for read in self._reads.values() if isinstance(read, _DeviceRead) and read.under_way is not None]
        for read in launched:
            if read.under_way is not None and read.under_way.query():
                self._finish(read)

    def _copy_next(self, read: _HostRead) -> int:
        copy = read.copies.popleft()
        producer = self._peers[read.peer_id]
        source, target = producer.owner.rows[read.region], producer.targets[read.region]
        row_bytes = producer.landing[read.region].row_bytes
        assert target is not None, "else the device copies"
        if isinstance(copy, _ShortRows):
            assert isinstance(source, np.ndarray), "rows on a device are copied in runs"
            _as_items(target)[copy.local] = _as_items(source)[copy.remote]
            return len(copy.local) * row_bytes
        rows = target[copy.local : copy.local + copy.num_rows]
        # The GIL is released meanwhile: the engine thread computes.
        if isinstance(source, np.ndarray):
            stream_copy(rows, source[copy.remote : copy.remote + copy.num_rows])
        else:
            source.copy_to_host(copy.remote, rows.reshape(-1).data)
        return copy.num_rows * row_bytes

    def _finish(self, read: _HostRead | _DeviceRead) -> None:
        """End a read whose copies are done; if the producer died meanwhile, the read fails."""
        if self._peers[read.peer_id].owner.has_exited:
            self._end(read.handle, PeerUnreachable(f"{read.peer_id.address} died during a read"))
        elif isinstance(read, _DeviceRead) and read.is_cancelled:
            self._end(read.handle, TransferError("the read was cancelled"))
        else:
            self._end(read.handle, None)

    def _end(self, handle: int, error: KVFerryError | None) -> None:
        del self._reads[handle]
        self._ended.append(ReadResult(handle, error))

    def _drop_dead_producers(self) -> None:
        for peer in [peer for peer, producer in self._peers.items() if producer.owner.has_exited]:
            self.remove_peer(peer)
            self._lost.append(peer)


def _host_rows(region: RowRegion) -> Rows | None:
    """Return the rows of a region in host memory."""
    return None if region.buffer is None else as_rows(region.buffer, RowShape(region.num_rows, region.row_bytes))


def _as_items(rows: Rows) -> npt.NDArray[np.void]:
    """Return a view of rows with one item for each: of bytes, numpy would copy them one by one."""
    return rows.view(np.dtype((np.void, rows.shape[1])))[:, 0]
