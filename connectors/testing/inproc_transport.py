"""A transport within one process, for simulations and tests: copies between pools, with owners that can die or freeze.

``InprocFabric`` is the network: it knows every owner and decides which of them answer. With ``late_bytes`` a read has no early
end, as with NIXL: a cancelled read stays open and its bytes land when the owner thaws, unless its peer was removed. Everything
happens in ``poll``, in the order of posting, so a run is reproducible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from connectors.p2p.transport.interface import PeerId, ReadResult, RowRegion, Transport, landing_regions
from core.errors import ConnectorUnavailable, KVFerryError, PeerUnreachable, ProtocolError, TransferError


@dataclass(slots=True)
class _Owner:
    regions: tuple[RowRegion, ...]
    is_frozen: bool = False


class InprocFabric:
    """Living owners by number."""

    def __init__(self) -> None:
        self._owners: dict[int, _Owner] = {}
        self._last_number = 0

    def add_owner(self, regions: Sequence[RowRegion]) -> int:
        """Let others read these regions; return the owner's number."""
        self._last_number += 1
        self._owners[self._last_number] = _Owner(tuple(regions))
        return self._last_number

    def owner(self, number: int) -> _Owner | None:
        """Return a living owner, or None."""
        return self._owners.get(number)

    def kill(self, number: int) -> None:
        """Let an owner die."""
        self._owners.pop(number, None)

    def set_frozen(self, number: int, is_frozen: bool) -> None:
        """Freeze or thaw an owner."""
        if number in self._owners:
            self._owners[number].is_frozen = is_frozen


class InprocMetadata(msgspec.Struct, frozen=True):
    """An owner's metadata for its readers."""

    number: int


@dataclass(slots=True)
class _Read:
    peer: PeerId
    region: int
    remote_rows: tuple[int, ...]
    local_rows: tuple[int, ...]


class InprocTransport(Transport):
    """Reads rows of another pool of the same process."""

    name = "inproc"

    def __init__(self, fabric: InprocFabric, late_bytes: bool = False) -> None:
        self._fabric = fabric
        self._late_bytes = late_bytes
        self._regions: tuple[RowRegion, ...] = ()
        self._staging: RowRegion | None = None
        self._number: int | None = None
        self._peers: dict[PeerId, int] = {}
        self._landing: dict[PeerId, tuple[RowRegion, ...]] = {}  # regions in which their rows land
        self._bytes_received: dict[PeerId, int] = {}
        self._reads: dict[int, _Read] = {}
        self._ended: list[ReadResult] = []
        self._lost: dict[PeerId, bool] = {}  # peers that can be read no longer; True = to be told of
        self._last_handle = 0

    @property
    def number(self) -> int:
        """The number of this owner in the fabric, once described."""
        assert self._number is not None
        return self._number

    def unavailable_reason(self) -> str | None:
        """It needs nothing."""
        return None

    def register(self, regions: Sequence[RowRegion], staging: RowRegion | None = None) -> None:
        """Take host memory."""
        if any(region.buffer is None for region in regions):
            raise ConnectorUnavailable("inproc transport: only host memory can be copied")
        self._regions, self._staging = tuple(regions), staging

    def describe(self) -> bytes:
        """Join the fabric as an owner."""
        if self._number is None:
            self._number = self._fabric.add_owner(self._regions)
        return msgspec.msgpack.encode(InprocMetadata(self._number))

    def add_peer(self, peer: PeerId, metadata: bytes) -> None:
        """Look the owner up."""
        try:
            number = msgspec.msgpack.decode(metadata, type=InprocMetadata).number
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"malformed inproc metadata: {error}") from None
        owner = self._fabric.owner(number)
        if owner is None:
            raise PeerUnreachable(f"{peer.address} is gone")
        self._landing[peer] = landing_regions(self._regions, self._staging, [region.row_bytes for region in owner.regions])
        self._peers[peer] = number
        self._bytes_received[peer] = 0

    def bytes_received(self, peer: PeerId) -> int | None:
        """Count whole rows."""
        return self._bytes_received.get(peer)

    def post_read(self, peer: PeerId, region: int, remote_rows: Sequence[int], local_rows: Sequence[int]) -> int:
        """Queue the copy; ``poll`` does it if the owner answers."""
        owner = self._fabric.owner(self._peers[peer]) if peer in self._peers else None
        if owner is None or peer in self._lost:
            raise PeerUnreachable(f"{peer.address} is gone")
        if not 0 <= region < len(self._regions):
            raise ProtocolError(f"region {region} is not one of {len(self._regions)}")
        if not remote_rows or len(remote_rows) != len(local_rows) or len(set(local_rows)) != len(local_rows):
            raise ProtocolError("a read needs as many remote as local rows, and each local row once")
        for rows, found in ((remote_rows, owner.regions[region]), (local_rows, self._landing[peer][region])):
            if min(rows) < 0 or max(rows) >= found.num_rows:
                raise ProtocolError(f"rows {list(rows)} are not all within the {found.num_rows} rows of the region")
        self._last_handle += 1
        self._reads[self._last_handle] = _Read(peer, region, tuple(remote_rows), tuple(local_rows))
        return self._last_handle

    def poll(self) -> list[ReadResult]:
        """Do the copies whose owners answer, and notice owners that have died."""
        for handle, read in list(self._reads.items()):
            owner = self._fabric.owner(self._peers[read.peer])
            if owner is None:
                self._end(handle, PeerUnreachable(f"{read.peer.address} died"))
            elif not owner.is_frozen:
                self._copy(read, owner.regions[read.region])
                self._end(handle, None)
        for peer in [peer for peer, number in self._peers.items() if self._fabric.owner(number) is None]:
            self._lost.setdefault(peer, True)
        ended, self._ended = self._ended, []
        return ended

    def take_lost_peers(self) -> Sequence[PeerId]:
        """Return the peers whose owners have died, and those that have broken off."""
        lost = [peer for peer, is_news in self._lost.items() if is_news]
        self._lost.update(dict.fromkeys(lost, False))
        return lost

    def cancel(self, handle: int) -> None:
        """End the read, unless bytes may come late."""
        if handle in self._reads and not self._late_bytes:
            self._end(handle, TransferError("the read was cancelled"))

    def break_off(self, peer: PeerId) -> None:
        """Break the connection to an added peer: until it is removed and added again it cannot be read."""
        self._end_all_of(peer, "has broken off")
        self._lost.setdefault(peer, True)

    def remove_peer(self, peer: PeerId) -> None:
        """End the peer's reads."""
        self._end_all_of(peer, "was removed")
        self._lost.pop(peer, None)
        self._peers.pop(peer, None)
        self._landing.pop(peer, None)
        self._bytes_received.pop(peer, None)

    def max_wait_s(self) -> float | None:
        """A frozen owner may thaw at any time."""
        if self._ended:
            return 0.0
        return 0.001 if self._reads else None

    def close(self) -> None:
        """Leave the fabric."""
        for peer in list(self._peers):
            self.remove_peer(peer)
        if self._number is not None:
            self._fabric.kill(self._number)

    def _end_all_of(self, peer: PeerId, why: str) -> None:
        for handle in [handle for handle, read in self._reads.items() if read.peer == peer]:
            self._end(handle, PeerUnreachable(f"{peer.address} {why}"))

    def _copy(self, read: _Read, source: RowRegion) -> None:
        target, size = self._landing[read.peer][read.region], source.row_bytes
        assert source.buffer is not None
        assert target.buffer is not None
        self._bytes_received[read.peer] += size * len(read.local_rows)
        for remote, local in zip(read.remote_rows, read.local_rows, strict=True):
            target.buffer[local * size : (local + 1) * size] = source.buffer[remote * size : (remote + 1) * size]

    def _end(self, handle: int, error: KVFerryError | None) -> None:
        del self._reads[handle]
        self._ended.append(ReadResult(handle, error))
