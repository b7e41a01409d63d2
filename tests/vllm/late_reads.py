"""Reads of blocks that come late, on command: in an engine with the variable ``LATE_READS``, over its real transport.

An abandoned read still comes, as with NIXL, and its bytes land then. A fence drops it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from connectors.p2p.transport.factory import TransportSettings, create_transport
from connectors.p2p.transport.interface import POOL_REGION, PeerId, ReadResult, Transport
from connectors.testing.fault_transport import FaultPlan, FaultTransport
from core.errors import KVFerryError, PeerUnreachable

VARIABLE = "LATE_READS"
_POLL_S = 0.001

made: list[LateReads] = []  # transports of this process


class LateReads(FaultTransport):
    """Keeps the next ``num_to_keep`` reads of blocks from the real transport until ``let_go``. Kept handles are negative."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner, FaultPlan(ignore_cancel=True))
        self.num_to_keep = 0
        self._kept: dict[int, tuple[PeerId, int, Sequence[int], Sequence[int]]] = {}
        self._num_ever_kept = 0
        self._late: dict[int, int] = {}  # handle of the real read → the one that it had while it was kept
        self._dropped: list[ReadResult] = []
        self._may_go = False

    @property
    def num_kept(self) -> int:
        """How many reads are kept."""
        return len(self._kept)

    def let_go(self) -> None:
        """Post what is kept, at the next poll. Any thread."""
        self._may_go = True

    def post_read(self, peer: PeerId, region: int, remote_rows: Sequence[int], local_rows: Sequence[int]) -> int:
        """Post, or keep."""
        if region != POOL_REGION or not self.num_to_keep:
            return super().post_read(peer, region, remote_rows, local_rows)
        self.num_to_keep -= 1
        self._num_ever_kept += 1
        self._kept[-self._num_ever_kept] = peer, region, remote_rows, local_rows
        return -self._num_ever_kept

    def poll(self) -> list[ReadResult]:
        """Report the ended reads, late ones under the handles that they had."""
        if self._may_go:
            self._may_go, kept, self._kept = False, self._kept, {}
            for handle, read in kept.items():
                self._post_late(handle, read)
        ended = [ReadResult(self._late.pop(result.handle, result.handle), result.error) for result in super().poll()]
        dropped, self._dropped = self._dropped, []
        return ended + dropped

    def cancel(self, handle: int) -> None:
        """Do nothing: NIXL cannot."""

    def remove_peer(self, peer: PeerId) -> None:
        """Fence: what is kept of the peer never comes."""
        super().remove_peer(peer)
        for handle in [handle for handle, read in self._kept.items() if read[0] == peer]:
            del self._kept[handle]
            self._dropped.append(ReadResult(handle, PeerUnreachable(f"{peer.address} was removed")))

    def max_wait_s(self) -> float | None:
        """Poll again soon while reads are kept."""
        inner = super().max_wait_s()
        is_busy = self._kept or self._dropped
        return min(_POLL_S, _POLL_S if inner is None else inner) if is_busy else inner

    def _post_late(self, handle: int, read: tuple[PeerId, int, Sequence[int], Sequence[int]]) -> None:
        try:
            self._late[super().post_read(*read)] = handle
        except KVFerryError as error:
            self._dropped.append(ReadResult(handle, error))


def install() -> None:
    """Give the ranks that this process will start such transports."""
    from connectors.vllm import connector

    def create(name: str, settings: TransportSettings) -> Transport:
        made.append(LateReads(create_transport(name, settings)))
        return made[-1]

    connector.WorkerSide = functools.partial(connector.WorkerSide, create=create)  # type: ignore[assignment,misc]
