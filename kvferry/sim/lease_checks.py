"""An independent account of one agent's leases: which blocks are held until when.

An owner may not revive a lease that is over, nor promise more than it keeps; a reader may not start a read that may outlast its
lease, as far as it knows. The agent's driver reports the agent's actions and events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from connectors.p2p.settings import AgentSettings
from core.clock import Clock
from core.wire.kv import LeaseState

_ROUNDING_S = 0.0011  # answers are in whole milliseconds


class LeaseChecks:
    """Both roles of one agent. ``complain`` receives violations."""

    def __init__(self, name: str, settings: AgentSettings, clock: Clock, complain: Callable[[str], None]) -> None:
        self._name = name
        self._terms = settings.leases
        self._margin_s = settings.pull.lease_margin_s
        self._clock = clock
        self.complain = complain
        self._granted: dict[str, tuple[float, float]] = {}  # transfer id → its end, and the latest one
        self._asked_at: dict[tuple[str, int], float] = {}  # owner's address and number of the question → when
        self._known: dict[str, float] = {}  # transfer id → until when the owner has promised to keep it

    # ---- the owner ---------------------------------------------------------------------------------------------------

    def on_grant(self, transfer_id: str) -> None:
        """Blocks are held from now on."""
        now, terms = self._clock.now(), self._terms
        self._granted[transfer_id] = now + min(terms.grant_s, terms.max_s), now + terms.max_s

    def on_renewal(self, transfer_ids: Iterable[str]) -> None:
        """A consumer asks to extend leases."""
        now = self._clock.now()
        for transfer_id in transfer_ids:
            end, latest = self._granted.get(transfer_id, (now, now))
            if end > now:
                self._granted[transfer_id] = max(end, min(now + self._terms.renew_s, latest)), latest

    def on_release(self, transfer_ids: Iterable[str]) -> None:
        """No consumer needs the blocks any more."""
        for transfer_id in transfer_ids:
            self._granted.pop(transfer_id, None)

    def on_answer(self, state: LeaseState) -> None:
        """The owner reports the remaining times, right after the renewal."""
        now = self._clock.now()
        for transfer_id, left_ms in state.left_ms.items():
            left_s = self._granted.get(transfer_id, (now, now))[0] - now
            if left_ms > 0 and left_ms / 1000 > left_s + _ROUNDING_S:
                self.complain(f"{self._name}: says that {left_ms} ms are left of {transfer_id}, which has {left_s:.3f} s")

    # ---- the reader --------------------------------------------------------------------------------------------------

    def on_question(self, address: str, number: int) -> None:
        """The reader asks an owner how long it keeps leases."""
        self._asked_at[address, number] = self._clock.now()

    def on_lease_state(self, address: str, state: LeaseState) -> None:
        """The owner has answered."""
        asked_at = self._asked_at.get((address, state.number))
        if asked_at is None:
            return
        for transfer_id, left_ms in state.left_ms.items():
            self._known[transfer_id] = max(self._known.get(transfer_id, 0.0), asked_at + left_ms / 1000)

    def on_read(self, transfer_id: str) -> None:
        """A read of blocks is ordered."""
        left_s = self._known.get(transfer_id, 0.0) - self._clock.now()
        if left_s <= self._margin_s - _ROUNDING_S:
            self.complain(f"{self._name}: begins to read {transfer_id}, of whose lease it knows {left_s:.3f} s")
