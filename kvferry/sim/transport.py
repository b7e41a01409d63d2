"""A transport under virtual time: rows are copied one by one while other processes run, and reads fail as real ones do.

A row is read on the owner's side at one moment and lands at the reader's at a later one; in between, and between two rows
of a read, either side may do anything. So a reader can see a block before, while and after it is overwritten, and bytes can
land where no load expects them any more. The real transports differ by ``TransportTraits``; ``ReadWeather`` has the random
faults. A reader's ``LandingWatch`` sees every row that is written, and checks that it may be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

import msgspec

from connectors.p2p.transport.interface import POOL_REGION, PeerId, ReadResult, RowRegion, Transport, landing_regions
from core.errors import ConnectorUnavailable, KVFerryError, PeerUnreachable, ProtocolError, TransferError
from kvferry.sim.loop import EventLoop, Process
from kvferry.sim.network import Network
from kvferry.sim.troubles import Kind, Trouble


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportTraits:
    """The behaviour of a kind of transport. The name is the real one's: peers choose and verify by it."""

    name: str
    is_one_sided: bool  # the owner's memory can be read while its process is frozen
    has_late_bytes: bool  # cancelling a read does not stop it
    outlives_owner: bool  # mapped memory can be read after its owner's death
    shares_errors: bool = False  # an error is one of the connection: it ends all reads of the peer
    keeps_order: bool = False  # if the fabric allows it: ``Transport.reads_in_order``
    tells_losses: bool = False  # the death of an owner is noticed without a read: ``Transport.take_lost_peers``


TRAITS = {
    "tcp": TransportTraits(
        name="tcp", is_one_sided=False, has_late_bytes=False, outlives_owner=False, keeps_order=True, tells_losses=True
    ),
    "nixl": TransportTraits(name="nixl", is_one_sided=True, has_late_bytes=True, outlives_owner=False, shares_errors=True),
    "shm": TransportTraits(name="shm", is_one_sided=True, has_late_bytes=False, outlives_owner=True, keeps_order=True),
}


@dataclass(slots=True)
class ReadWeather:
    """Random faults of reads. Rates are shares of all reads; times in seconds. May be changed while it runs."""

    row_s: float = 0.002  # from one row to the next, and from the owner to the reader, up to
    stall_rate: float = 0.0  # reads that stop at some row for up to ``stall_s``
    stall_s: float = 0.0
    error_rate: float = 0.0  # reads that end in an error, with some of their bytes written
    corrupt_rate: float = 0.0  # reads of which one byte arrives wrong
    corrupts_data: bool = False  # any byte; else only bytes of the second region, the seals
    refuse_rate: float = 0.0  # reads that cannot be posted
    drop_rate: float = 0.0  # reads whose answer is dropped, if the producer has to answer: they never end by themselves
    num_stalled: int = 0
    num_failed: int = 0
    num_corrupted: int = 0


class LandingWatch(Protocol):
    """Sees the writes of a transport into its own process's memory."""

    def on_post(self, handle: int, region: int, local_rows: Sequence[int]) -> None:
        """A read may write these rows from now on."""

    def on_landing(self, handle: int, region: int, local_row: int) -> None:
        """A row has just been written."""

    def on_end(self, handle: int) -> None:
        """The read is terminal: it writes nothing more."""


@dataclass(slots=True)
class _Owner:
    process: Process
    regions: tuple[RowRegion, ...]


class _Metadata(msgspec.Struct, frozen=True):
    number: int


@dataclass(slots=True, eq=False)
class _Read:
    handle: int
    peer: PeerId
    owner: _Owner
    region: int
    target: RowRegion
    remote_rows: tuple[int, ...]
    local_rows: tuple[int, ...]
    num_rows_left: int
    num_rows_unseen: int
    behind: list[_Read] = field(default_factory=list)  # all of whose rows must be read before one of these is
    has_begun: bool = False
    has_arrived: bool = False  # reported when those have ended
    fails: bool = False
    corrupt_row: int = -1  # index of the row
    drop_row: int = -1  # index of the row with which the answer ends
    stall: tuple[int, float] = (-1, 0.0)  # index of the row, seconds
    unanswered: Trouble | None = None  # lasts until it ends or its reader dies


@dataclass(slots=True)
class SimFabric:
    """All registered memory, by the number of its owner; the common state of all transports of a simulation.

    ``keeps_order``: transports that can read seals only after all rows requested before do so.
    """

    loop: EventLoop
    network: Network
    random: Random
    weather: ReadWeather
    keeps_order: bool = False
    owners: dict[int, _Owner] = field(default_factory=dict)
    last_handle: int = 0  # of all reads: a worker may have several transports, and one watch

    def add_owner(self, process: Process, regions: Sequence[RowRegion]) -> int:
        """Let others read these regions; return the owner's number."""
        number = len(self.owners) + 1
        self.owners[number] = _Owner(process, tuple(regions))
        return number


class SimTransport(Transport):
    """Reads rows of other processes of the simulation. ``wake`` is called when ``poll`` has something to report."""

    name = "sim"

    def __init__(
        self,
        fabric: SimFabric,
        process: Process,
        traits: TransportTraits,
        wake: Callable[[], None],
        watch: LandingWatch | None = None,
    ) -> None:
        self.name = traits.name  # type: ignore[misc]  # the name of an instance
        self.reads_in_order = traits.keeps_order and fabric.keeps_order  # type: ignore[misc]
        self._fabric = fabric
        self._process = process
        self._traits = traits
        self._wake = wake
        self._watch = watch
        self._regions: tuple[RowRegion, ...] = ()
        self._staging: RowRegion | None = None
        self._number: int | None = None
        self._peers: dict[PeerId, _Owner] = {}
        self._landing: dict[PeerId, tuple[RowRegion, ...]] = {}  # regions in which their rows land
        self._reads: dict[int, _Read] = {}
        self._ended: list[ReadResult] = []
        self._lost: list[PeerId] = []

    @property
    def num_open_reads(self) -> int:
        """Reads that are not terminal."""
        return len(self._reads)

    def staged_bytes(self) -> list[range]:
        """Return which bytes of the staging area an open read may still write."""
        reads = [read for read in self._reads.values() if self._watched(read) == len(self._regions)]
        return [
            range(row * read.target.row_bytes, (row + 1) * read.target.row_bytes) for read in reads for row in read.local_rows
        ]

    def unavailable_reason(self) -> str | None:
        """It needs nothing."""
        return None

    def register(self, regions: Sequence[RowRegion], staging: RowRegion | None = None) -> None:
        """Take host memory."""
        if any(region.buffer is None for region in regions):
            raise ConnectorUnavailable("simulated transport: only host memory can be copied")
        self._regions, self._staging = tuple(regions), staging

    def describe(self) -> bytes:
        """Join the fabric as an owner."""
        if self._number is None:
            self._number = self._fabric.add_owner(self._process, self._regions)
        return msgspec.msgpack.encode(_Metadata(self._number))

    def add_peer(self, peer: PeerId, metadata: bytes) -> None:
        """Look the owner up."""
        try:
            number = msgspec.msgpack.decode(metadata, type=_Metadata).number
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"malformed metadata: {error}") from None
        owner = self._fabric.owners.get(number)
        if owner is None or not owner.process.is_alive:
            raise PeerUnreachable(f"{peer.address} is gone")
        if not self._traits.outlives_owner and self._fabric.network.reads_open_in(self._process.name, owner.process.name):
            raise PeerUnreachable(f"{peer.address} takes no connection by {self.name}")
        self._landing[peer] = landing_regions(self._regions, self._staging, [region.row_bytes for region in owner.regions])
        self._peers[peer] = owner
        if self._traits.tells_losses:
            owner.process.on_death(lambda: self._process.call_later(self._hop_s(), lambda: self._lose(peer, owner)))

    def post_read(self, peer: PeerId, region: int, remote_rows: Sequence[int], local_rows: Sequence[int]) -> int:
        """Start to copy, row by row."""
        owner = self._peers.get(peer)
        if owner is None or not owner.process.is_alive:
            raise PeerUnreachable(f"{peer.address} is gone")
        if self._happens(self._fabric.weather.refuse_rate):
            self._fabric.network.troubles.note(Kind.FAILED, (self._process.name, owner.process.name), 0.0)
            raise PeerUnreachable(f"{peer.address} is gone")
        if not 0 <= region < len(self._regions):
            raise ProtocolError(f"region {region} is not one of {len(self._regions)}")
        target = self._landing[peer][region]
        _check_rows(owner.regions[region], target, remote_rows, local_rows)
        self._fabric.last_handle += 1
        num_rows = len(local_rows)
        rows = tuple(remote_rows), tuple(local_rows)
        read = _Read(
            self._fabric.last_handle, peer, owner, region, target, *rows, num_rows_left=num_rows, num_rows_unseen=num_rows
        )
        if self.reads_in_order and region != POOL_REGION:
            read.behind = [other for other in self._reads.values() if other.peer == peer]
        self._decide_fate(read)
        self._reads[read.handle] = read
        if self._watch is not None:
            self._watch.on_post(read.handle, self._watched(read), read.local_rows)
        if not self._traits.outlives_owner:
            owner.process.on_death(lambda: self._on_owner_death(read))
        self._begin_if_due(read)
        return read.handle

    def poll(self) -> list[ReadResult]:
        """Report what has ended."""
        ended, self._ended = self._ended, []
        return ended

    def take_lost_peers(self) -> Sequence[PeerId]:
        """Return the peers whose connections have ended with their owners."""
        lost, self._lost = self._lost, []
        return lost

    def cancel(self, handle: int) -> None:
        """End the read, unless its bytes cannot be stopped."""
        read = self._reads.get(handle)
        if read is not None and not self._traits.has_late_bytes:
            self._end(read, TransferError("the read was cancelled"))

    def remove_peer(self, peer: PeerId) -> None:
        """End the peer's reads; they write nothing any more."""
        self._lost = [other for other in self._lost if other != peer]
        self._peers.pop(peer, None)
        self._landing.pop(peer, None)
        for read in [read for read in self._reads.values() if read.peer == peer]:
            self._end(read, PeerUnreachable(f"{peer.address} was removed"))

    def close(self) -> None:
        """Fence all peers."""
        for peer in list(self._peers):
            self.remove_peer(peer)

    # ---- one read ----------------------------------------------------------------------------------------------------

    def _decide_fate(self, read: _Read) -> None:
        weather, random = self._fabric.weather, self._fabric.random
        index = random.randrange(len(read.local_rows))
        if self._happens(weather.stall_rate):
            weather.num_stalled += 1
            read.stall = (index, random.uniform(0.0, weather.stall_s))
            self._note(Kind.STALLED, read, read.stall[1])
        if self._happens(weather.error_rate):
            weather.num_failed += 1
            read.fails = True
            self._note(Kind.FAILED, read)
        if (read.region or weather.corrupts_data) and self._happens(weather.corrupt_rate):
            weather.num_corrupted += 1
            read.corrupt_row = index
            self._note(Kind.CORRUPTED, read)

        if not self._traits.is_one_sided and self._happens(weather.drop_rate):
            read.drop_row = index
            self._note(Kind.DROPPED, read)
            read.unanswered = self._note(Kind.UNANSWERED, read, math.inf)
            self._process.on_death(lambda: self._await_no_answer(read))

    def _note(self, kind: Kind, read: _Read, seconds: float = 0.0) -> Trouble:
        return self._fabric.network.troubles.note(kind, (self._process.name, read.owner.process.name), seconds)

    def _await_no_answer(self, read: _Read) -> None:
        if read.unanswered is not None:
            read.unanswered.end = min(read.unanswered.end, self._fabric.loop.now)

    def _plan_row(self, read: _Read, index: int) -> None:
        """Read the owner's row after a while. A process that takes part in the copy must be running for it."""
        delay_s = self._hop_s() + (read.stall[1] if index == read.stall[0] else 0.0)
        if self._traits.is_one_sided:
            self._fabric.loop.call_later(delay_s, lambda: self._send_row(read, index))
        else:
            read.owner.process.call_later(delay_s, lambda: self._send_row(read, index))

    def _send_row(self, read: _Read, index: int) -> None:
        if read.handle not in self._reads or not self._is_readable(read.owner):
            return
        closed_s = self._fabric.network.reads_open_in(self._process.name, read.owner.process.name)
        if closed_s and not self._traits.outlives_owner:  # memory of the same machine needs no network
            self._fabric.loop.call_later(closed_s, lambda: self._send_row(read, index))
            return
        source = read.owner.regions[read.region]
        assert source.buffer is not None
        start = read.remote_rows[index] * source.row_bytes
        content = bytearray(source.buffer[start : start + source.row_bytes])
        if index == read.corrupt_row:
            content[self._fabric.random.randrange(len(content))] ^= 1 << self._fabric.random.randrange(8)
        if index == read.drop_row:
            return
        self._note_seen(read)
        land = self._fabric.loop.call_later if self._traits.is_one_sided else self._process.call_later
        land(self._hop_s(), lambda: self._land(read, index, bytes(content)))
        if index + 1 < len(read.local_rows):
            self._plan_row(read, index + 1)

    def _land(self, read: _Read, index: int, content: bytes) -> None:
        if read.handle not in self._reads or not self._process.is_alive:
            return
        target, row = read.target, read.local_rows[index]
        assert target.buffer is not None
        target.buffer[row * target.row_bytes : (row + 1) * target.row_bytes] = content
        if self._watch is not None:
            self._watch.on_landing(read.handle, self._watched(read), row)
        read.num_rows_left -= 1
        if read.num_rows_left:
            return
        if read.fails and self._traits.shares_errors:
            self._process.call_later(self._hop_s(), lambda: self._end_all_of(read.peer))
            return
        if read.fails:
            self._process.call_later(self._hop_s(), lambda: self._end(read, TransferError("the read failed on the way")))
        else:
            self._process.call_later(self._hop_s(), lambda: self._end_well(read))

    def _end_well(self, read: _Read) -> None:
        """Report that a read has arrived, after the reads that were requested before it."""
        read.has_arrived = True
        if not self._is_any_open(read.behind):
            self._end(read, None)

    def _end_all_of(self, peer: PeerId) -> None:
        """The connection to a peer has failed; until it is opened again nothing can be read from it."""
        self._peers.pop(peer, None)
        for read in [read for read in self._reads.values() if read.peer == peer]:
            self._end(read, PeerUnreachable(f"the connection to {peer.address} has failed"))

    def _lose(self, peer: PeerId, owner: _Owner) -> None:
        """The connection to a peer that has died has ended, unless the peer was removed before."""
        if self._peers.get(peer) is owner:
            self._lost.append(peer)
            self._end_all_of(peer)
            self._wake()

    def _on_owner_death(self, read: _Read) -> None:
        """Rows under way may still land; then the read ends with an error."""
        delay_s = 2 * self._fabric.weather.row_s + self._fabric.random.uniform(0.0, 0.5)
        self._process.call_later(delay_s, lambda: self._end(read, PeerUnreachable(f"{read.peer.address} died")))

    def _end(self, read: _Read, error: KVFerryError | None) -> None:
        if self._reads.pop(read.handle, None) is not None:
            self._await_no_answer(read)
            if self._watch is not None:
                self._watch.on_end(read.handle)
            self._ended.append(ReadResult(read.handle, error))
            self._wake()
            self._continue_after(read, error)

    # ---- the order of reads ------------------------------------------------------------------------------------------

    def _has_to_wait(self, read: _Read) -> bool:
        return any(other.num_rows_unseen and other.handle in self._reads for other in read.behind)

    def _is_any_open(self, reads: Sequence[_Read]) -> bool:
        return any(read.handle in self._reads for read in reads)

    def _begin_if_due(self, read: _Read) -> None:
        if not read.has_begun and not self._has_to_wait(read):
            read.has_begun = True
            self._plan_row(read, 0)

    def _note_seen(self, read: _Read) -> None:
        """A row of the owner's has been read; with the last one, later reads may begin."""
        read.num_rows_unseen -= 1
        if not read.num_rows_unseen:
            self._begin_after(read)

    def _begin_after(self, read: _Read) -> None:
        for other in list(self._reads.values()):
            if read in other.behind:
                self._begin_if_due(other)

    def _continue_after(self, read: _Read, error: KVFerryError | None) -> None:
        """A read has ended: begin and end the reads that wait for it. Reads after lost bytes are lost with them."""
        is_lost = isinstance(error, PeerUnreachable)
        self._begin_after(read)
        for other in [other for other in self._reads.values() if read in other.behind and other.has_arrived]:
            if is_lost or not self._is_any_open(other.behind):
                self._end(other, error if is_lost else None)

    # ---- details -----------------------------------------------------------------------------------------------------

    def _is_readable(self, owner: _Owner) -> bool:
        return owner.process.is_alive or self._traits.outlives_owner

    def _happens(self, rate: float) -> bool:
        return rate > 0 and self._fabric.random.random() < rate

    def _hop_s(self) -> float:
        return self._fabric.random.uniform(0.0, self._fabric.weather.row_s)

    def _watched(self, read: _Read) -> int:
        """Return the number of the region in which a read lands: the staging area comes after all others."""
        is_staged = read.region == POOL_REGION and read.target.row_bytes != self._regions[POOL_REGION].row_bytes
        return len(self._regions) if is_staged else read.region


def _check_rows(source: RowRegion, target: RowRegion, remote_rows: Sequence[int], local_rows: Sequence[int]) -> None:
    if not remote_rows or len(remote_rows) != len(local_rows) or len(set(local_rows)) != len(local_rows):
        raise ProtocolError("a read needs as many remote as local rows, and each local row once")
    for rows, found in ((remote_rows, source), (local_rows, target)):
        if min(rows) < 0 or max(rows) >= found.num_rows:
            raise ProtocolError(f"rows {list(rows)} are not all within the {found.num_rows} rows of the region")
