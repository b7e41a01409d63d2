"""A transport around another one that goes wrong on purpose: the seam where tests and simulations inject faults.

``FaultPlan`` sets the fault of each read by its number, counted from 1 over the life of the transport. Everything
else passes through unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import zmq

from connectors.p2p.transport.interface import PeerId, ReadResult, RowRegion, Transport
from core.errors import KVFerryError, PeerUnreachable, TransferError


@dataclass(slots=True)
class FaultPlan:
    """Numbers of the reads that get each fault. May be changed while the transport runs."""

    refuse: set[int] = field(default_factory=set)  # posting raises PeerUnreachable
    fail: set[int] = field(default_factory=set)  # ends in an error although the bytes have arrived
    stall: set[int] = field(default_factory=set)  # its end is reported only after it or its peer is removed
    corrupt: set[int] = field(default_factory=set)  # one byte of its first row is wrong
    ignore_cancel: bool = False  # a cancelled read stays open, as with NIXL


class FaultTransport(Transport):
    """Applies a plan to the reads of ``inner``. The name is the inner one's."""

    name = "fault"

    def __init__(self, inner: Transport, plan: FaultPlan) -> None:
        self.name = inner.name  # type: ignore[misc]  # the name of an instance
        self.inner = inner
        self.plan = plan
        self.num_posted = 0
        self._numbers: dict[int, int] = {}  # handle → number of the read
        self._targets: dict[int, tuple[PeerId, int, int]] = {}  # handle → peer, region, first local row
        self._stalled: dict[int, ReadResult] = {}
        self._regions: tuple[RowRegion, ...] = ()

    def unavailable_reason(self) -> str | None:
        """Ask the inner transport."""
        return self.inner.unavailable_reason()

    def counts(self) -> Mapping[str, int]:
        """Ask the inner transport."""
        return self.inner.counts()

    def register(self, regions: Sequence[RowRegion], staging: RowRegion | None = None) -> None:
        """Pass on."""
        self._regions = tuple(regions)
        self.inner.register(regions, staging)

    def describe(self) -> bytes:
        """Pass on."""
        return self.inner.describe()

    def add_peer(self, peer: PeerId, metadata: bytes) -> None:
        """Pass on."""
        self.inner.add_peer(peer, metadata)

    def pool_shape(self, peer: PeerId) -> tuple[int, int] | None:
        """Ask the inner transport."""
        return self.inner.pool_shape(peer)

    def bytes_received(self, peer: PeerId) -> int | None:
        """Ask the inner transport."""
        return self.inner.bytes_received(peer)

    def post_read(self, peer: PeerId, region: int, remote_rows: Sequence[int], local_rows: Sequence[int]) -> int:
        """Post, or refuse by plan."""
        self.num_posted += 1
        if self.num_posted in self.plan.refuse:
            raise PeerUnreachable(f"read {self.num_posted} is refused by plan")
        handle = self.inner.post_read(peer, region, remote_rows, local_rows)
        self._numbers[handle] = self.num_posted
        self._targets[handle] = (peer, region, local_rows[0])
        return handle

    def poll(self) -> list[ReadResult]:
        """Report the ended reads, according to the plan."""
        for result in self.inner.poll():
            self._stalled[result.handle] = result
        ready = [handle for handle in self._stalled if self._numbers[handle] not in self.plan.stall]
        return [self._finish(handle) for handle in ready]

    def take_lost_peers(self) -> Sequence[PeerId]:
        """Ask the inner transport."""
        return self.inner.take_lost_peers()

    def cancel(self, handle: int) -> None:
        """End a stalled read too, unless the plan says that cancelling does nothing."""
        if self.plan.ignore_cancel:
            return
        self.inner.cancel(handle)
        if handle in self._stalled:
            self._stalled[handle] = ReadResult(handle, TransferError("the read was cancelled"))
            self.plan.stall.discard(self._numbers[handle])

    def remove_peer(self, peer: PeerId) -> None:
        """Fence: stalled reads of the peer end as well, with an error, although their bytes have arrived."""
        self.inner.remove_peer(peer)
        for handle in [handle for handle in self._numbers if self._targets[handle][0] == peer]:
            self.plan.stall.discard(self._numbers[handle])
            if handle in self._stalled:
                self._stalled[handle] = ReadResult(handle, PeerUnreachable(f"{peer.address} was removed"))

    def pollables(self) -> Sequence[zmq.Socket[bytes] | int]:
        """Pass on."""
        return self.inner.pollables()

    def max_wait_s(self) -> float | None:
        """Poll again soon while reads are stalled."""
        inner = self.inner.max_wait_s()
        return min(0.001, 0.001 if inner is None else inner) if self._stalled else inner

    def close(self) -> None:
        """Pass on."""
        self.inner.close()

    def _finish(self, handle: int) -> ReadResult:
        result, number = self._stalled.pop(handle), self._numbers.pop(handle)
        _, region, first_row = self._targets.pop(handle)
        error: KVFerryError | None = result.error
        if number in self.plan.corrupt:
            buffer, offset = self._regions[region].buffer, first_row * self._regions[region].row_bytes
            assert buffer is not None
            buffer[offset] ^= 0xFF
        if number in self.plan.fail:
            error = TransferError(f"read {number} fails by plan")
        return ReadResult(handle, error)
