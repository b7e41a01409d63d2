"""Blocks that a read may still write although its load has ended.

Owns the reads that were open when their load ended, until they are terminal, and when to fence their peer because they do not
end. The engine keeps a reference to each quarantined block and gives it to no request. A late seal read writes the landing row
of its block's seal, so it keeps the block quarantined as well: it inherits the blocks of reads that end before it. Knows no
transports.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from connectors.p2p.transport.interface import PeerId


@dataclass(slots=True)
class LateRead:
    """A read whose load has ended, at ``since``, and has read since ``reading_since``. Its peer is fenced at ``fence_at``."""

    peer: PeerId
    local_rows: tuple[int, ...]
    reading_since: float
    since: float
    fence_at: float  # infinite once the peer is fenced: the report of its end is on its way
    heir: int | None  # the read of their seals, if it was ordered


class Quarantine:
    """Late reads by their ids."""

    def __init__(self) -> None:
        self._reads: dict[int, LateRead] = {}
        self._num_blocks_of: dict[PeerId, int] = {}  # reads of fenced peers left out

    @property
    def num_blocks(self) -> int:
        """Blocks that are kept."""
        return sum(len(read.local_rows) for read in self._reads.values())

    @property
    def num_waiting_blocks(self) -> int:
        """Blocks whose late reads are of peers that are not fenced."""
        return sum(self._num_blocks_of.values())

    def peers(self) -> list[PeerId]:
        """Return the peers that are not fenced and have quarantined blocks."""
        return list(self._num_blocks_of)

    def num_blocks_of(self, peer: PeerId) -> int:
        """Return how many blocks wait for reads of a peer that is not fenced."""
        return self._num_blocks_of.get(peer, 0)

    def oldest_of(self, peers: Collection[PeerId]) -> float:
        """Return when the oldest late read of these peers began to be late, fenced peers left out; infinite without one."""
        waiting = (read for read in self._reads.values() if read.peer in peers and read.fence_at < math.inf)
        return min((read.since for read in waiting), default=math.inf)

    def add(self, read_id: int, read: LateRead) -> None:
        """Keep the blocks of a read that is open, until it ends or its peer is fenced.

        If its heir, the read of their seals, is still late when it ends, the heir keeps the blocks.
        """
        self._reads[read_id] = read
        self._count(read, len(read.local_rows))

    def end(self, read_id: int) -> tuple[int, ...]:
        """Remove a terminal read; return the blocks that no other read keeps. An unknown read keeps none."""
        read = self._reads.pop(read_id, None)
        if read is None:
            return ()
        self._count(read, -len(read.local_rows))
        heir = None if read.heir is None else self._reads.get(read.heir)
        if heir is None:
            return read.local_rows
        heir.local_rows += read.local_rows
        self._count(heir, len(read.local_rows))
        return ()

    def open_peer_of(self, read_id: int) -> PeerId | None:
        """Return the peer of a late read; None of other reads, and once the peer is fenced."""
        read = self._reads.get(read_id)
        return read.peer if read is not None and read.fence_at < math.inf else None

    def fence(self, peer: PeerId) -> None:
        """Record that a peer is being fenced: its late reads become terminal by that."""
        for read in self._reads.values():
            if read.peer == peer and read.fence_at < math.inf:
                self._count(read, -len(read.local_rows))
                read.fence_at = math.inf

    def hurry(self, peer: PeerId, fence_at: float) -> None:
        """Fence a peer no later than this if its late reads have not ended."""
        for read in self._reads.values():
            if read.peer == peer and read.fence_at < math.inf:
                read.fence_at = min(read.fence_at, fence_at)

    def overdue(self, now: float) -> Iterable[PeerId]:
        """Return the peers whose reads should have ended by now, each once."""
        return dict.fromkeys(read.peer for read in self._reads.values() if read.fence_at <= now)

    def overdue_since(self, peer: PeerId, now: float) -> list[float]:
        """Return since when the loads have read whose reads of a peer should have ended by now."""
        return [read.reading_since for read in self._reads.values() if read.peer == peer and read.fence_at <= now]

    def next_fence(self) -> float:
        """Return when the next peer is overdue; infinite if none is going to be."""
        return min((read.fence_at for read in self._reads.values()), default=math.inf)

    def _count(self, read: LateRead, difference: int) -> None:
        """Update the count of blocks that wait for a peer, unless it is fenced."""
        if read.fence_at == math.inf:
            return
        num_blocks = self.num_blocks_of(read.peer) + difference
        self._num_blocks_of[read.peer] = num_blocks
        if not num_blocks:
            del self._num_blocks_of[read.peer]
