"""One load: which of its units have been read, verified or given up, and its costs.

Bookkeeping only: ``connectors.p2p.consumer.pull`` decides what happens next. Units are named by their index in the request;
one is read, verified and used as a whole, and shares no block with another (``connectors.p2p.actions.ReadUnit``).

    waiting ──posted──▶ open ──ended──▶ arrived ──its seal is right──▶ verified
       ▲                  │                │
       │◀─ posted in vain ┴── failed ──────┼── its seal is wrong ────▶ invalid
       └──────── wrong digest, once ───────┘
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from connectors.p2p.actions import PullRequest, Refusal, TokenCopy
from connectors.p2p.consumer.verification import SealCheck, SealTerms
from connectors.p2p.transport.interface import PeerId
from connectors.reports import ALL_BLOCKS, LoadEnded
from core.errors import StaleBlock
from core.wire.messages import ErrorInfo, TransferUsage


class LoadPhase(Enum):
    """The stage of a load."""

    CONNECTING = "connecting"  # its peer
    READING = "reading"  # its lease, then its blocks
    SEALING = "sealing"  # the seals of the units that have arrived; no block of it is being read


@dataclass(frozen=True, slots=True)
class RowSlice:
    """Units that are read together, and their rows."""

    indices: tuple[int, ...]
    remote_rows: tuple[int, ...]
    local_rows: tuple[int, ...]
    copies: tuple[TokenCopy, ...] = ()


NO_ROWS = RowSlice((), (), ())


class Load:
    """The units of one request. ``open_reads`` maps each block read that is not terminal to its slice.

    ``seal_read`` reads the seals of the units ``sealing``, or waits to be begun after ``open_reads``. ``digests`` are those of
    the arrived blocks of the producer, if digests are verified. ``asked_since`` is the time since which progress of the load
    depends on the peer and on no other transport or load, ``reading_since`` when it began to read the peer (infinite before),
    ``last_ended_at`` the end of the last block read, ``seals_ended_at`` the end of the seal read. ``wants_room``: one of its
    reads had no room in the staging area. ``looks_again_at`` is finite after it has found blocks without a seal, for the first
    time at ``unsealed_since``: nothing is read before that time.
    """

    def __init__(self, request: PullRequest, now: float, deadline: float) -> None:
        self.request = request
        self.producer = request.handoff.producer
        self.is_converted = any(unit.copies for unit in request.units)  # blocks of another size, by way of the staging area
        self.started_at = self.asked_since = now
        self.deadline = deadline
        self.phase = LoadPhase.CONNECTING
        self.reading_since = math.inf
        self.last_ended_at = now
        self.seals_ended_at: float | None = None
        self.open_reads: dict[int, RowSlice] = {}
        self.seal_read: int | None = None
        self.sealing = NO_ROWS
        self._check: SealCheck | None = None
        self.wants_room = False
        self.has_read_again = False
        self.unsealed_since = math.inf
        self.looks_again_at = math.inf
        self.digests: dict[int, int] = {}
        self.num_rows = len(request.local_rows)
        self._units_per_read = 1  # until the peer is known
        self._waiting: deque[RowSlice] = deque()
        self._arrived: set[int] = set()  # and neither verified nor invalid
        self._verified: set[int] = set()
        self._invalid: dict[int, ErrorInfo] = {}
        self._num_rows_read = 0
        self._bytes_ended_at: float | None = None
        self._whole = self._slice(range(len(request.units)))
        self._queue(range(len(request.units)))

    @property
    def is_waiting(self) -> bool:
        """True if there are units whose read has not been posted."""
        return bool(self._waiting)

    @property
    def may_read(self) -> bool:
        """False while it waits for room, or before it looks again for seals."""
        return not self.wants_room and self.looks_again_at == math.inf

    @property
    def is_untouched(self) -> bool:
        """True if nothing has arrived."""
        return not (self._arrived or self._verified or self._num_rows_read)

    @property
    def num_open_rows(self) -> int:
        """Rows that go to the quarantine if the load ends now."""
        return len(self.open_rows())

    @property
    def has_arrived(self) -> bool:
        """True if there are units for which only the seals are missing."""
        return bool(self._arrived)

    @property
    def is_loaded(self) -> bool:
        """True if every unit has arrived and is verified."""
        return len(self._verified) == len(self.request.units)

    @property
    def is_reading(self) -> bool:
        """True if a read of it is not terminal."""
        return bool(self.open_reads) or self.seal_read is not None

    # ---- reading ---------------------------------------------------------------------------------------------------

    def next_slice(self) -> RowSlice:
        """Take the units of the next read."""
        return self._waiting.popleft()

    def start_over(self, now: float) -> None:
        """Look for the peer again; the open reads will fail, as they were posted to a peer that is closed by now.

        The time so far does not count against the next transport.
        """
        assert self.is_untouched, f"{self.request.request_id} has got something from its peer"
        self.phase = LoadPhase.CONNECTING
        self.reading_since = math.inf
        self.asked_since = now
        self.wants_room = False

    def begin_reading(self, now: float, rows_per_read: int) -> None:
        """The peer is open: read the blocks, at most so many rows per read, or one unit if it has more."""
        self.phase = LoadPhase.READING
        self.reading_since = now
        self._units_per_read = max(1, rows_per_read // max((len(unit.remote_rows) for unit in self.request.units), default=1))
        indices = [index for rows in self._waiting for index in rows.indices]
        self._waiting.clear()
        self._queue(indices)

    def offer_room(self, now: float) -> None:
        """There may be room again. If nothing has been posted, the missing progress so far does not count against the peer."""
        self.wants_room = False
        if not self.open_reads:
            self.reading_since = self.asked_since = now

    def want_again(self, rows: RowSlice) -> None:
        """Queue the units of a read that was posted in vain again."""
        self._waiting.append(rows)

    def arrive(self, rows: RowSlice) -> None:
        """Record that the bytes of these rows are here."""
        self._arrived.update(rows.indices)
        self._num_rows_read += len(rows.remote_rows)

    def invalidate(self, indices: Iterable[int], error: ErrorInfo) -> None:
        """Record that these units must not be used."""
        for index in indices:
            self._arrived.discard(index)
            self._invalid[index] = error

    def invalidate_waiting(self, error: ErrorInfo) -> None:
        """Mark units that have not been requested as invalid."""
        while self._waiting:
            self.invalidate(self._waiting.popleft().indices, error)

    def to_seal(self) -> RowSlice:
        """Return the units that need their seals, in order: those that have arrived, and those that are being read."""
        indices = self._arrived.union(*(rows.indices for rows in self.open_reads.values()))
        return self._whole if len(indices) == len(self._whole.indices) else self._slice(sorted(indices))

    def begin_sealing(self) -> None:
        """The bytes are here: the time since the last read ended counts as verification."""
        self.phase = LoadPhase.SEALING
        if self._bytes_ended_at is None:
            self._bytes_ended_at = self.last_ended_at

    def seal_check(self, terms: SealTerms) -> SealCheck:
        """Return the check of the seals that are being read, built on first use."""
        if self._check is None:
            self._check = SealCheck(terms, {index: self.request.units[index] for index in self.sealing.indices})
        return self._check

    def end_sealing(self) -> RowSlice:
        """Remove the terminal seal read and return its units."""
        rows, self.sealing, self.seal_read, self._check = self.sealing, NO_ROWS, None, None
        return rows

    def arrived_of(self, indices: Iterable[int]) -> list[int]:
        """Return those of these units whose bytes have arrived and are neither verified nor invalid."""
        return [index for index in indices if index in self._arrived]

    def verify(self, indices: Iterable[int]) -> None:
        """Record that these units are verified."""
        self._verified.update(indices)
        self._arrived.difference_update(indices)

    def read_again(self, indices: Sequence[int]) -> None:
        """Queue units whose bytes did not match their seals, for their one retry."""
        self.has_read_again = True
        self._queue_again(indices)

    def look_again(self, indices: Sequence[int], now: float, at: float) -> None:
        """Queue units without seals, to be read again at this time."""
        self.unsealed_since = min(self.unsealed_since, now)
        self.looks_again_at = at
        self._queue_again(indices)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def report(self, error: ErrorInfo | None, transport: str, block_bytes: int, now: float) -> LoadEnded:
        """Return the result of the load. ``error`` applies to failed units without an error of their own."""
        units = self.request.units
        invalid = [index for index in range(len(units)) if index not in self._verified]
        if invalid:
            error = self._invalid.get(invalid[0], error)
            assert error is not None, "rows are missing for no reason"
        invalid_rows = tuple(row for index in invalid for row in units[index].local_rows)
        verify_s = self._verify_s(now)
        return LoadEnded(
            self.request.request_id,
            usage=TransferUsage(
                transport=transport,
                transferred_tokens=self._num_verified_tokens(),
                transferred_bytes=self._num_rows_read * block_bytes,
                transfer_ms=1000 * (now - self.started_at - verify_s),
                verify_ms=1000 * verify_s,
                verified_blocks=sum(len(units[index].remote_rows) for index in self._verified),
            ),
            error=error,
            invalid_block_ids=() if error is None else invalid_rows if self._verified else ALL_BLOCKS,
            quarantined_block_ids=self.open_rows(),
            peer=self.producer.address,
        )

    def open_rows(self) -> tuple[int, ...]:
        """Return the local rows that a block read may still write, or, if it has begun, the seal read may."""
        if self.seal_read is not None:
            return self.sealing.local_rows
        return tuple(row for rows in self.open_reads.values() for row in rows.local_rows)

    def _verify_s(self, now: float) -> float:
        """Return the time from the last byte to the last seal and digest, less the thread switch that bytes need as well."""
        if self._bytes_ended_at is None:
            return 0.0
        return (now if self.seals_ended_at is None else self.seals_ended_at) - self._bytes_ended_at

    def _num_verified_tokens(self) -> int:
        """Count usable tokens: a token is missing if any group lacks it, and groups mostly lack the same ones."""
        missing: dict[int, int] = {}
        for index, unit in enumerate(self.request.units):
            if index not in self._verified:
                group_id = unit.expected[0].group_id
                missing[group_id] = missing.get(group_id, 0) + unit.num_tokens
        return max(0, self.request.num_tokens - max(missing.values(), default=0))

    def _queue_again(self, indices: Sequence[int]) -> None:
        self._arrived.difference_update(indices)
        self._queue(indices)

    def _queue(self, indices: Sequence[int]) -> None:
        for first in range(0, len(indices), self._units_per_read):
            self._waiting.append(self._slice(indices[first : first + self._units_per_read]))

    def _slice(self, indices: Sequence[int]) -> RowSlice:
        units = [self.request.units[index] for index in indices]
        return RowSlice(
            tuple(indices),
            tuple(row for unit in units for row in unit.remote_rows),
            tuple(row for unit in units for row in unit.local_rows),
            tuple(copy for unit in units for copy in unit.copies),
        )


def refused_load(request_id: str, refusal: Refusal) -> LoadEnded:
    """Return the report of a load that is refused without being tried."""
    return LoadEnded(request_id, TransferUsage(), ErrorInfo.of(refusal.error), ALL_BLOCKS, peer=refusal.producer.address)


def restart_error(expected: PeerId, incarnation: int) -> StaleBlock:
    """Return the error of a load whose producer has restarted as ``incarnation``."""
    return StaleBlock(
        f"the worker at {expected.address} has restarted since it made the handoff: "
        f"incarnation {incarnation:016x} instead of {expected.incarnation:016x}"
    )
