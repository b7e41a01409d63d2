"""How long a worker keeps blocks for a reader: the lease table.

Owns which handoffs and pinned prefixes are held and until when. Pure: no sockets, no timers, no blocks. It returns the names
of ended leases, to be reported as ``finished_sending`` or as ended pins. Leases decide how long blocks are *kept*, never
whether a read was correct. Durations only: clocks are never compared across processes.

Expiry is a heap with lazy deletion: a renewal pushes a new entry, an entry that no longer matches its lease is skipped. So a
renewed lease at the head never hides expired ones further down.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

MAX_REMEMBERED_ENDS = 4096  # ended leases kept to tell a late message from one about an unknown lease


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """Durations in seconds: at grant, per renewal, and in total."""

    grant_s: float
    renew_s: float
    max_s: float


@dataclass(slots=True)
class LeaseCounts:
    """What has happened since the table was made."""

    granted: int = 0
    renewed: int = 0
    released: int = 0
    expired: int = 0
    late: int = 0  # renewals and releases of a lease that had ended
    unknown: int = 0  # of one that never existed


@dataclass(slots=True)
class _Lease:
    request_id: str
    num_blocks: int
    expires_at: float
    last_expiry: float  # no renewal goes beyond


class LeaseTable:
    """Leases by transfer id."""

    def __init__(self, terms: LeaseTerms) -> None:
        self._terms = terms
        self._leases: dict[str, _Lease] = {}
        self._expiries: list[tuple[float, str]] = []
        self._ended: OrderedDict[str, None] = OrderedDict()
        self.counts = LeaseCounts()
        self.num_blocks = 0

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, transfer_id: str, request_id: str, num_blocks: int, now: float) -> None:
        """Hold the blocks of a finished request. A transfer id is granted once."""
        assert transfer_id not in self._leases, f"{transfer_id} is granted twice"
        lease = _Lease(request_id, num_blocks, now + self._terms.grant_s, now + self._terms.max_s)
        lease.expires_at = min(lease.expires_at, lease.last_expiry)
        self._leases[transfer_id] = lease
        self.num_blocks += num_blocks
        self.counts.granted += 1
        heapq.heappush(self._expiries, (lease.expires_at, transfer_id))

    def renew(self, transfer_ids: Iterable[str], now: float) -> dict[str, int]:
        """Extend these leases and return what is left of each in whole ms; 0 = not held (any more)."""
        left_ms: dict[str, int] = {}
        for transfer_id in transfer_ids:
            lease = self._leases.get(transfer_id)
            # A lease that is due but not collected yet may not be renewed: its holder knows how long it lasts.
            if lease is None or lease.expires_at <= now:
                self._count_stray(transfer_id)
                left_ms[transfer_id] = 0
                continue
            expires_at = min(now + self._terms.renew_s, lease.last_expiry)
            if expires_at > lease.expires_at:
                lease.expires_at = expires_at
                heapq.heappush(self._expiries, (expires_at, transfer_id))
            self.counts.renewed += 1
            left_ms[transfer_id] = int(1000 * (lease.expires_at - now))
        return left_ms

    def release(self, transfer_ids: Iterable[str]) -> list[str]:
        """End these leases and return the request ids whose blocks are free now. Idempotent."""
        request_ids = []
        for transfer_id in transfer_ids:
            if transfer_id not in self._leases:
                self._count_stray(transfer_id)
                continue
            request_ids.append(self._end(transfer_id))
            self.counts.released += 1
        return request_ids

    def expire(self, now: float) -> list[str]:
        """End the leases that are due and return their request ids, the longest overdue first."""
        request_ids = []
        while self._expiries and self._expiries[0][0] <= now:
            expires_at, transfer_id = heapq.heappop(self._expiries)
            lease = self._leases.get(transfer_id)
            if lease is not None and lease.expires_at == expires_at:
                request_ids.append(self._end(transfer_id))
                self.counts.expired += 1
        return request_ids

    def longest_left_s(self, now: float) -> float:
        """Return how long the last of the leases lasts without a renewal, 0 without any."""
        return max((lease.expires_at - now for lease in self._leases.values()), default=0.0)

    def next_expiry(self) -> float | None:
        """Return the time at which ``expire`` has something to do, or None."""
        while self._expiries:
            expires_at, transfer_id = self._expiries[0]
            lease = self._leases.get(transfer_id)
            if lease is not None and lease.expires_at == expires_at:
                return expires_at
            heapq.heappop(self._expiries)
        return None

    def _end(self, transfer_id: str) -> str:
        lease = self._leases.pop(transfer_id)
        self.num_blocks -= lease.num_blocks
        self._ended[transfer_id] = None
        if len(self._ended) > MAX_REMEMBERED_ENDS:
            self._ended.popitem(last=False)
        return lease.request_id

    def _count_stray(self, transfer_id: str) -> None:
        if transfer_id in self._ended or transfer_id in self._leases:  # still held: it is due, but not collected
            self.counts.late += 1
        else:
            self.counts.unknown += 1
