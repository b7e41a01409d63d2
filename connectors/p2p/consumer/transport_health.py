"""The circuit breaker of each transport to each peer: which ones must not be used now, and when to retry them.

One breaker per incarnation of a peer and transport. Does no I/O and reads no clock.

    CLOSED ──stalled, deadline, repeated failures──▶ OPEN ──back-off over──▶ PROBING ──▶ CLOSED (the probe came back)
                                                      ▲                         │
                                                      └──error, or no answer────┘ (twice the back-off)

A probe is one read of 64 bytes over a connection of its own, so no handoff waits for its result. The back-off starts again from
its first value only after a handoff was loaded by the transport: a path that carries 64 bytes may still not carry blocks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from connectors.p2p.actions import Action, EndProbe, OpenPeer, ProbeEnded, StartProbe, TransportBroken, TransportRestored
from connectors.p2p.transport.interface import PeerId
from core.errors import KVFerryError


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerTerms:
    """``max_failures`` in a row open a breaker; a probe without an answer for ``probe_timeout_s`` has failed."""

    retry_s: float = 1.0
    retry_max_s: float = 60.0
    probe_timeout_s: float = 5.0
    max_failures: int = 3


@dataclass(slots=True)
class BreakerCounts:
    """What has happened since the start."""

    broken_transports: int = 0
    restored_transports: int = 0
    transport_probes: int = 0


@dataclass(slots=True)
class _Breaker:
    """``due_at`` is when the next probe begins (OPEN) or has failed (PROBING); infinite while CLOSED."""

    retry_s: float
    num_failures: int = 0
    reason: str = ""
    opened_at: float | None = None  # None = CLOSED
    how_to_open: OpenPeer | None = None
    probe_id: int | None = None  # of the probe in progress
    due_at: float = math.inf


@dataclass(slots=True)
class TransportHealth:
    """Breakers by peer and transport. ``emit`` receives probes and entries for the log."""

    terms: BreakerTerms
    emit: Callable[[Action], None]
    counts: BreakerCounts = field(default_factory=BreakerCounts)
    _breakers: dict[tuple[PeerId, str], _Breaker] = field(default_factory=dict)
    _last_probe_id: int = 0

    def is_usable(self, peer: PeerId, transport: str) -> bool:
        """True if the breaker is closed."""
        breaker = self._breakers.get((peer, transport))
        return breaker is None or breaker.opened_at is None

    def reasons(self, peer: PeerId) -> dict[str, str]:
        """Return the broken transports of a peer, and why each is."""
        return {
            transport: breaker.reason
            for (producer, transport), breaker in self._breakers.items()
            if producer == peer and breaker.opened_at is not None
        }

    def num_broken(self) -> dict[str, int]:
        """Return to how many peers each transport is broken; transports without such peers are left out."""
        return Counter(transport for (_, transport), each in self._breakers.items() if each.opened_at is not None)

    def open_breaker(self, how_to_open: OpenPeer, error: KVFerryError, now: float) -> None:
        """Open the breaker of the transport by which a peer was opened. An open one stays as it is."""
        peer, transport = how_to_open.peer, how_to_open.transport
        breaker = self._breaker(peer, transport)
        if breaker.opened_at is not None:
            return
        breaker.reason, breaker.opened_at, breaker.how_to_open = error.message, now, how_to_open
        breaker.num_failures = 0  # of the next time that it is closed
        self.counts.broken_transports += 1
        self.emit(TransportBroken(peer, transport, error.message, breaker.retry_s))
        self._wait(breaker, now)

    def count_failure(self, how_to_open: OpenPeer, error: KVFerryError, now: float) -> None:
        """Count a failed read; ``max_failures`` in a row open the breaker."""
        breaker = self._breaker(how_to_open.peer, how_to_open.transport)
        breaker.num_failures += 1
        if breaker.num_failures >= self.terms.max_failures:
            self.open_breaker(how_to_open, error, now)

    def count_success(self, peer: PeerId, transport: str) -> None:
        """Record that a handoff was loaded."""
        if self.is_usable(peer, transport):
            self._breakers.pop((peer, transport), None)

    def on_probe_ended(self, ended: ProbeEnded, now: float) -> OpenPeer | None:
        """Take the result of a probe; returns the transport that is usable again, if any. An abandoned probe has no result."""
        breaker = next((each for each in self._breakers.values() if each.probe_id == ended.probe_id), None)
        if breaker is None:
            return None
        breaker.probe_id = None
        if ended.error is not None:
            breaker.reason = ended.error.message
            self._wait(breaker, now)
            return None
        assert breaker.how_to_open is not None
        assert breaker.opened_at is not None
        restored = breaker.how_to_open
        self.counts.restored_transports += 1
        self.emit(TransportRestored(restored.peer, restored.transport, now - breaker.opened_at))
        breaker.opened_at, breaker.due_at = None, math.inf
        return restored

    def forget(self, peer: PeerId) -> None:
        """Remove the breakers of a peer: its control connection is lost, or it has restarted."""
        for key in [key for key in self._breakers if key[0] == peer]:
            self._give_up_probe(self._breakers.pop(key))

    def forget_at(self, address: str, but_for: int | None = None) -> None:
        """Remove the breakers of the peers at an address, except of the incarnation ``but_for``."""
        for peer in {peer for peer, _ in self._breakers if peer.address == address and peer.incarnation != but_for}:
            self.forget(peer)

    def on_timer(self, now: float) -> None:
        """Start the probes that are due, and abandon those without an answer in time."""
        for breaker in [breaker for breaker in self._breakers.values() if breaker.due_at <= now]:
            if breaker.probe_id is None:
                self._probe(breaker, now)
            else:
                self._give_up_probe(breaker)
                self._wait(breaker, now)

    def next_timer(self) -> float:
        """Return when ``on_timer`` has something to do; infinite while no breaker is open."""
        return min((breaker.due_at for breaker in self._breakers.values()), default=math.inf)

    def _breaker(self, peer: PeerId, transport: str) -> _Breaker:
        return self._breakers.setdefault((peer, transport), _Breaker(self.terms.retry_s))

    def _wait(self, breaker: _Breaker, now: float) -> None:
        """Wait until the next probe, and twice as long before the one after it."""
        breaker.due_at = now + breaker.retry_s
        breaker.retry_s = min(2 * breaker.retry_s, self.terms.retry_max_s)

    def _probe(self, breaker: _Breaker, now: float) -> None:
        assert breaker.how_to_open is not None
        self._last_probe_id += 1
        breaker.probe_id, breaker.due_at = self._last_probe_id, now + self.terms.probe_timeout_s
        self.counts.transport_probes += 1
        self.emit(StartProbe(self._last_probe_id, breaker.how_to_open))

    def _give_up_probe(self, breaker: _Breaker) -> None:
        if breaker.probe_id is not None:
            self.emit(EndProbe(breaker.probe_id))
            breaker.probe_id = None
