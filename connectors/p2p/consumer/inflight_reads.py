"""The reads that are not terminal: those that a load waits for, and the late reads of loads that have ended.

Owns the numbers of reads, the load of each, and the quarantine; decides when a peer's late reads keep so many blocks that
nothing more may be read from it. Emits the actions that follow from the end of a load or of a read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from connectors.p2p.actions import Action, CancelRead, QuarantineEnded
from connectors.p2p.consumer.load import Load, RowSlice
from connectors.p2p.consumer.quarantine import LateRead, Quarantine
from connectors.p2p.transport.interface import PeerId
from core.errors import PeerUnreachable


@dataclass(frozen=True, slots=True)
class QuarantineBounds:
    """The most blocks that may be kept: in total, and per peer, counting the blocks of its open loads if its reads do not end.

    A cancelled read that has not ended for ``fence_grace_s`` counts as one that does not end: most end at once. A peer without
    such a read never has a load refused for its own bound.
    """

    max_blocks: int
    max_blocks_in_total: int
    fence_grace_s: float  # also of a peer that has reached its bound


class InflightReads:
    """Open reads by their numbers. ``num_quarantined`` counts the blocks that have come into quarantine since the start."""

    def __init__(self, bounds: QuarantineBounds, emit: Callable[[Action], None]) -> None:
        self._bounds = bounds
        self.emit = emit
        self._loads: dict[int, Load] = {}
        self._num_awaited: Counter[PeerId] = Counter()
        self._last_read_id = 0
        self.quarantine = Quarantine()
        self.num_quarantined = 0

    def awaited_peers(self) -> list[PeerId]:
        """Return the peers with reads that loads wait for."""
        return list(self._num_awaited)

    def open_blocks(self, load: Load, rows: RowSlice) -> int:
        """Return the number of a new read of blocks."""
        read_id = self._open(load)
        load.open_reads[read_id] = rows
        return read_id

    def open_seals(self, load: Load, rows: RowSlice) -> int:
        """Return the number of a new read of seals."""
        load.seal_read = self._open(load)
        load.sealing = rows
        return load.seal_read

    def end(self, read_id: int) -> Load | None:
        """Remove a terminal read; return the load that waits for it. The blocks of a late read are free again."""
        freed = self.quarantine.end(read_id)
        if freed:
            self.emit(QuarantineEnded(freed))
        load = self._loads.pop(read_id, None)
        if load is not None:
            self._count_awaited(load.producer, -1)
        return load

    def abandon(self, load: Load, fence_at: float, now: float) -> None:
        """Cancel the reads of a load that is over. Their blocks are kept until they end, or their peer is fenced.

        The read of the seals may or may not have begun. If not, it ends at once; if it has, it inherits the blocks that the
        reads of the blocks have kept.
        """
        late = {read_id: rows.local_rows for read_id, rows in load.open_reads.items()}
        if load.seal_read is not None:
            being_read = {row for rows in late.values() for row in rows}
            late[load.seal_read] = tuple(row for row in load.sealing.local_rows if row not in being_read)
        for read_id, rows in late.items():
            del self._loads[read_id]
            self._count_awaited(load.producer, -1)
            heir = None if read_id == load.seal_read else load.seal_read
            self.quarantine.add(read_id, LateRead(load.producer, rows, load.reading_since, now, fence_at, heir))
            self.num_quarantined += len(rows)
            self.emit(CancelRead(read_id))

    def is_full(self, peer: PeerId, now: float) -> bool:
        """Return True if no load from a peer may be added.

        A peer with reads that do not end counts with the open reads of its other loads, too: all may end in the quarantine.
        """
        quarantine, late_since = self.quarantine, now - self._bounds.fence_grace_s
        if (
            quarantine.num_waiting_blocks >= self._bounds.max_blocks_in_total
            and quarantine.oldest_of(quarantine.peers()) <= late_since
        ):
            return True
        num_blocks = quarantine.num_blocks_of(peer)
        are_late = num_blocks > 0 and quarantine.oldest_of([peer]) <= late_since
        return are_late and num_blocks + self._num_open_blocks(peer) >= self._bounds.max_blocks

    def why_full(self, peer: PeerId) -> PeerUnreachable:
        """Return the error of a load that is not started."""
        ours, total = self.quarantine.num_blocks_of(peer), self.quarantine.num_waiting_blocks
        return PeerUnreachable(
            f"no load from {peer.address} is started: {ours} blocks are quarantined for its reads that do not end, "
            f"{total} in total"
        )

    def hurry_if_full(self, serving: Iterable[PeerId], now: float) -> None:
        """Bring forward the fencing of peers that fill the quarantine, except peers that still serve loads."""
        spared, are_too_many = set(serving), self.quarantine.num_waiting_blocks >= self._bounds.max_blocks_in_total
        for peer in self.quarantine.peers():
            is_at_bound = are_too_many or self.quarantine.num_blocks_of(peer) >= self._bounds.max_blocks
            if peer not in spared and is_at_bound:
                self.quarantine.hurry(peer, now + self._bounds.fence_grace_s)

    def _open(self, load: Load) -> int:
        self._last_read_id += 1
        self._loads[self._last_read_id] = load
        self._count_awaited(load.producer, 1)
        return self._last_read_id

    def _count_awaited(self, peer: PeerId, difference: int) -> None:
        self._num_awaited[peer] += difference
        if not self._num_awaited[peer]:
            del self._num_awaited[peer]

    def _num_open_blocks(self, peer: PeerId) -> int:
        loads = {load for load in self._loads.values() if load.producer == peer}
        return sum(load.num_open_rows for load in loads)
