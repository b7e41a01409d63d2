"""The leases that a consumer keeps alive, and a lower bound of how long each still lasts.

Owns which handoffs are held from arrival to release, and the questions to their producers: all leases of one producer in one
message, repeated every interval. Its producer says how long a lease lasts: if no longer than an interval, it is asked about at
half of that. A lease is good until a lower bound: the producer's answer, counted from the sending of the question, so that
clocks are never compared. Answers and refusals name their question; lost, repeated or late answers can only lower the bound,
and answers to questions from before a lease was taken are ignored for it. Each lease remembers the questions about itself, so
however many leases there are, their answers find them. Leases say how long blocks are *kept*, and so whether a read is worth
starting; they never prove that a read was right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from connectors.p2p.actions import Action, HandoffRef, SendControl
from connectors.p2p.transport.interface import PeerId
from core.wire.kv import LeaseRelease, LeaseRenew, LeaseState

MAX_OPEN_QUESTIONS = 64  # about one lease, of a producer that answers none; the oldest are forgotten


@dataclass(slots=True)
class _HeldLease:
    first_question: int  # the first one about it; earlier questions concern an earlier hold of the same lease
    good_until: float = -math.inf
    expected_until: float | None = None  # not held yet: until when it is kept; None = it is held
    asked_at: dict[int, float] = field(default_factory=dict)  # of the open questions about it, by number, in order
    num_refusals: int = 0  # since the last answer

    def open_question(self, number: int, now: float) -> None:
        """Remember when a question about it is asked."""
        self.asked_at[number] = now
        if len(self.asked_at) > MAX_OPEN_QUESTIONS:
            del self.asked_at[next(iter(self.asked_at))]

    def close_questions(self, last: int) -> float | None:
        """Close the open questions up to this number; return when the last of them was asked.

        None if none of them is open: the answer is to questions that are closed or forgotten, and proves nothing new.
        """
        asked_at = None
        for number in [number for number in self.asked_at if number <= last]:
            asked_at = self.asked_at.pop(number)
        return asked_at


@dataclass(slots=True)
class HeldLeaseCounts:
    """The outcome, since the start, of leases that were expected before their requests came."""

    leases_known_in_time: int = 0  # answered when the engine took the request
    leases_given_up: int = 0  # not held after an interval, though the producer still kept them


class HeldLeases:
    """Leases by handoff: transfer ids come from clients too, so two producers may have one id.

    ``margin_s`` is the time a lease must still have for a read to be worth starting.
    """

    def __init__(self, renew_interval_s: float, margin_s: float, emit: Callable[[Action], None]) -> None:
        self._renew_interval_s = renew_interval_s
        self._margin_s = margin_s
        self._emit = emit
        self._leases: dict[HandoffRef, _HeldLease] = {}
        self._last_number = 0
        self._renew_at = math.inf
        self.counts = HeldLeaseCounts()

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def last_question(self) -> int:
        """Number of the last question to any producer; 0 if there was none."""
        return self._last_number

    def __contains__(self, handoff: HandoffRef) -> bool:
        return handoff in self._leases

    def expect(self, handoff: HandoffRef, now: float) -> None:
        """Ask about a lease that may be held soon. The question renews it once; later rounds renew it only after it is held.

        The first round an interval after the question drops it if it is still not held.
        """
        if handoff not in self._leases:
            self._take(handoff, now).expected_until = now + self._renew_interval_s
            self._ask([handoff], now)

    def hold(self, handoffs: Iterable[HandoffRef], now: float) -> None:
        """Keep these leases alive from now on. Idempotent."""
        taken = []
        for handoff in handoffs:
            lease = self._leases.get(handoff)
            if lease is None:
                self._take(handoff, now)
                taken.append(handoff)
            elif lease.expected_until is not None:
                left_s = lease.good_until - now
                soon = now + left_s / 2 if 0 < left_s <= self._renew_interval_s else math.inf
                self._renew_at = min(self._renew_at, lease.expected_until, soon)  # an interval after the question, or in time
                lease.expected_until = None
                self.counts.leases_known_in_time += lease.good_until > now
        self._ask(taken, now)

    def release(self, handoff: HandoffRef) -> None:
        """Stop keeping the handoff alive, and release it at its producer.

        A release names no incarnation. So while a handoff of that name is held from another one at the same address, nothing is
        sent: the release of that one will be.
        """
        self._leases.pop(handoff, None)
        if not self._holds_name(handoff.transfer_id, handoff.producer.address):
            self._emit(SendControl(handoff.producer.address, LeaseRelease(transfer_ids=(handoff.transfer_id,))))

    def may_start_read(self, handoff: HandoffRef, now: float) -> bool:
        """Return True if a read started now ends within the lease by its lower bound; if not, ask how much is left."""
        lease = self._leases[handoff]
        if lease.good_until > now + self._margin_s:
            return True
        if not lease.asked_at:
            self._ask([handoff], now)
        return False

    def on_state(self, address: str, state: LeaseState) -> tuple[list[str], list[str]]:
        """Process a producer's answer; return the transfer ids that continue, and those with too little time left."""
        going_on: list[str] = []
        ending: list[str] = []
        producer = PeerId(address, state.incarnation)
        for transfer_id, left_ms in state.left_ms.items():
            handoff = HandoffRef(transfer_id, producer)
            lease = self._leases.get(handoff)
            if lease is None or state.number < lease.first_question:
                continue
            lease.num_refusals = 0
            asked_at = lease.close_questions(state.number)
            if left_ms / 1000 <= self._margin_s:
                del self._leases[handoff]
                ending.append(transfer_id)
                continue
            if asked_at is not None:
                lease.good_until = max(lease.good_until, asked_at + left_ms / 1000)
                if lease.expected_until is None and left_ms / 1000 <= self._renew_interval_s:
                    self._renew_at = min(self._renew_at, asked_at + left_ms / 2000)
            going_on.append(transfer_id)
        return going_on, ending

    def on_refused(self, address: str, number: int, now: float) -> list[str]:
        """A producer cannot answer this question; return the held transfer ids that it is about.

        They may be asked about anew. One that is refused twice in a row is dropped, unless it is known to last. Since
        connections keep order, earlier questions about them get no answer any more.
        """
        asked = [each for each, lease in self._leases.items() if each.producer.address == address and number in lease.asked_at]
        for handoff in asked:
            lease = self._leases[handoff]
            lease.close_questions(number)
            lease.num_refusals += 1
            if lease.num_refusals > 1 and lease.good_until <= now + self._margin_s:
                del self._leases[handoff]
        return [handoff.transfer_id for handoff in asked]

    def forget_others(self, address: str, incarnation: int) -> None:
        """Drop the leases of earlier processes at the address."""
        for handoff in list(self._leases):
            if handoff.producer.address == address and handoff.producer.incarnation != incarnation:
                del self._leases[handoff]

    def on_disconnected(self, address: str) -> None:
        """Expect no answers to the open questions; the next round asks again."""
        for handoff, lease in self._leases.items():
            if handoff.producer.address == address:
                lease.asked_at.clear()

    def on_timer(self, now: float) -> None:
        """If it is time, renew the held leases, and drop expected ones that no request has taken."""
        if self._renew_at > now:
            return
        for handoff, lease in list(self._leases.items()):
            if lease.expected_until is not None and lease.expected_until <= now:
                del self._leases[handoff]
                self.counts.leases_given_up += 1
        self._renew_at = now + self._renew_interval_s if self._leases else math.inf
        self._ask([handoff for handoff, lease in self._leases.items() if lease.expected_until is None], now)

    def ask_producer(self, producer: PeerId, now: float) -> None:
        """Ask about all held leases of a producer, whether it is time or not."""
        held = [each for each, lease in self._leases.items() if each.producer == producer and lease.expected_until is None]
        self._ask(held, now)

    def next_timer(self) -> float:
        """Return when it is time to renew; infinite without leases."""
        return self._renew_at

    def _holds_name(self, transfer_id: str, address: str) -> bool:
        """Return True if a handoff of that name is held, whichever process at the address it is of."""
        return any(
            handoff.transfer_id == transfer_id and handoff.producer.address == address and lease.expected_until is None
            for handoff, lease in self._leases.items()
        )

    def _take(self, handoff: HandoffRef, now: float) -> _HeldLease:
        lease = self._leases[handoff] = _HeldLease(self._last_number + 1)
        self._renew_at = min(self._renew_at, now + self._renew_interval_s)
        return lease

    def _ask(self, handoffs: Iterable[HandoffRef], now: float) -> None:
        """Ask each producer one question about all of these leases that it holds."""
        by_address: dict[str, list[HandoffRef]] = {}
        for handoff in handoffs:
            by_address.setdefault(handoff.producer.address, []).append(handoff)
        for address, asked in by_address.items():
            self._last_number += 1
            for handoff in asked:
                self._leases[handoff].open_question(self._last_number, now)
            transfer_ids = tuple(handoff.transfer_id for handoff in asked)
            self._emit(SendControl(address, LeaseRenew(transfer_ids=transfer_ids, number=self._last_number)))
