"""The traffic between workers in the last minute: handoffs by pair, and prompts by worker.

Owns the sliding window: intervals of five seconds, each with one count per pair. Memory is bounded by the intervals and by
``MAX_PAIRS`` in each; handoffs of further pairs count for the workers only.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec

from core.wire.messages import TransferUsage

WINDOW_S = 60.0
NUM_INTERVALS = 12
MAX_PAIRS = 2048
_KEEP_TRANSPORT_S = 600.0


class PairTraffic(msgspec.Struct, kw_only=True):
    """Handoffs from one prefill worker to one decode worker, as rates of the last minute."""

    prefill: str
    decode: str
    handoffs_per_s: float
    failed_per_s: float  # of them not loaded: recomputed, in whole or in part
    bytes_per_s: float
    transport: str  # of the latest load; empty if none was


@dataclass(slots=True)
class _Count:
    handoffs: int = 0
    failed: int = 0
    num_bytes: int = 0
    transport: str = ""

    def add(self, other: _Count) -> None:
        """Add a later count."""
        self.handoffs += other.handoffs
        self.failed += other.failed
        self.num_bytes += other.num_bytes
        self.transport = other.transport or self.transport


@dataclass(slots=True)
class _Interval:
    began: float
    pairs: dict[tuple[str, str], _Count] = field(default_factory=dict)
    prompts: dict[str, int] = field(default_factory=dict)


class Traffic:
    """Counts of one router. Times are seconds of its clock, and workers are named by engine id."""

    def __init__(self) -> None:
        self._intervals: deque[_Interval] = deque(maxlen=NUM_INTERVALS)
        self._since: float | None = None  # the first count
        self._transports: dict[str, tuple[str, float]] = {}  # by worker: of its latest load, and when

    def on_prompt(self, worker: str, now: float) -> None:
        """Count a prompt that a worker has computed."""
        counts = self._current(now).prompts
        if worker in counts or len(counts) < MAX_PAIRS:
            counts[worker] = counts.get(worker, 0) + 1

    def on_handoff(self, prefill: str, decode: str, cost: TransferUsage, now: float) -> None:
        """Count a handoff whose load has ended."""
        if cost.transport:
            self._note_transport(cost.transport, (prefill, decode), now)
        pairs = self._current(now).pairs
        if (prefill, decode) not in pairs and len(pairs) >= MAX_PAIRS:
            return
        count = _Count(1, int(bool(cost.fallback_reason)), cost.transferred_bytes, cost.transport)
        pairs.setdefault((prefill, decode), _Count()).add(count)

    def pairs(self, now: float) -> list[PairTraffic]:
        """Return the pairs of the last minute, the busiest first."""
        total: dict[tuple[str, str], _Count] = {}
        for interval in self._recent(now):
            for pair, count in interval.pairs.items():
                total.setdefault(pair, _Count()).add(count)
        seconds = self._seconds(now)
        rates = [
            PairTraffic(
                prefill=prefill,
                decode=decode,
                handoffs_per_s=round(count.handoffs / seconds, 3),
                failed_per_s=round(count.failed / seconds, 3),
                bytes_per_s=round(count.num_bytes / seconds),
                transport=count.transport,
            )
            for (prefill, decode), count in total.items()
        ]
        return sorted(rates, key=lambda pair: (-pair.handoffs_per_s, pair.prefill, pair.decode))

    def prompts_per_s(self, now: float) -> dict[str, float]:
        """Return how many prompts each worker has computed per second of the last minute."""
        total: dict[str, int] = {}
        for interval in self._recent(now):
            for worker, count in interval.prompts.items():
                total[worker] = total.get(worker, 0) + count
        seconds = self._seconds(now)
        return {worker: round(count / seconds, 3) for worker, count in total.items()}

    def transport(self, worker: str, now: float) -> str:
        """Return the transport of a worker's latest load, as reader or as source; empty if it had none in ten minutes."""
        transport, at = self._transports.get(worker, ("", now))
        return transport if now - at <= _KEEP_TRANSPORT_S else ""

    def _note_transport(self, transport: str, workers: tuple[str, str], now: float) -> None:
        for worker in workers:
            self._transports[worker] = (transport, now)
        if len(self._transports) > MAX_PAIRS:  # names of workers that have left
            recent = {name: known for name, known in self._transports.items() if now - known[1] <= _KEEP_TRANSPORT_S}
            self._transports = recent if len(recent) <= MAX_PAIRS else dict.fromkeys(workers, (transport, now))

    def _current(self, now: float) -> _Interval:
        if not self._intervals or now - self._intervals[-1].began >= WINDOW_S / NUM_INTERVALS:
            self._intervals.append(_Interval(now))
            self._since = now if self._since is None else self._since
        return self._intervals[-1]

    def _recent(self, now: float) -> list[_Interval]:
        return [interval for interval in self._intervals if now - interval.began <= WINDOW_S]

    def _seconds(self, now: float) -> float:
        """Return how long the window is: shorter in the first minute, so that a young router's rates are true."""
        since = now if self._since is None else self._since
        return min(WINDOW_S, max(WINDOW_S / NUM_INTERVALS, now - since))
