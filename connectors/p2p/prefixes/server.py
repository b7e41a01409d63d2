"""A source's half in the event loop: checks questions, passes them on to the engine, and answers them.

The blocks that the engine keeps for a reader are under a lease of the worker's table, like those of a handoff. Does no I/O and
reads no clock.
"""

from __future__ import annotations

from collections.abc import Iterable

from connectors.p2p.actions import Action
from connectors.p2p.prefixes.messages import (
    AnswerTo,
    PinEnded,
    PinsFreed,
    PrefixAsked,
    PrefixFound,
    PrefixNotFound,
    PrefixRefusal,
)
from connectors.p2p.producer.handshake import WorkerIdentity
from connectors.p2p.producer.leases import LeaseTable
from core.machine_driver import ByType, EventHandler
from core.wire.kv import PrefixHeld, PrefixRefused

MAX_OPEN_QUESTIONS = 256  # that the engine has not answered; more are refused

ServerAction = Action | AnswerTo | PrefixAsked | PinEnded


class PrefixServer:
    """The questions to one worker, and its pins. ``leases`` is shared with the handoffs of the worker."""

    def __init__(self, identity: WorkerIdentity, leases: LeaseTable) -> None:
        self._identity = identity
        self._leases = leases
        self._num_open = 0
        self._pins: dict[str, int] = {}  # blocks by transfer id
        self.num_answered = 0
        self.num_refused = 0
        self.handlers: ByType[EventHandler] = ByType(
            {
                PrefixAsked: self.on_asked,
                PrefixFound: self.on_found,
                PrefixNotFound: self.on_not_found,
                PinsFreed: self.on_freed,
            }
        )

    @property
    def num_pinned_blocks(self) -> int:
        """Blocks that are kept for readers of prefixes."""
        return sum(self._pins.values())

    def on_asked(self, asked: PrefixAsked, now: float) -> list[ServerAction]:
        """Pass a question on to the engine, or refuse it."""
        question = asked.question
        if question.incarnation != self._identity.incarnation:
            return self._refuse(asked, "restarted")
        if question.model_fingerprint != self._identity.model_fingerprint:
            return self._refuse(asked, "model")
        if self._num_open >= MAX_OPEN_QUESTIONS:
            return self._refuse(asked, "busy")
        self._num_open += 1
        return [asked]

    def on_found(self, found: PrefixFound, now: float) -> list[ServerAction]:
        """Lease the blocks that the engine has pinned, and answer."""
        self._num_open -= 1
        self.num_answered += 1
        transfer_id = found.handoff.transfer_id
        self._pins[transfer_id] = found.num_blocks
        self._leases.grant(transfer_id, transfer_id, found.num_blocks, now)
        return [AnswerTo(found.asked.sender, PrefixHeld(number=found.asked.question.number, kv_handoff=found.handoff))]

    def on_not_found(self, found: PrefixNotFound, now: float) -> list[ServerAction]:
        """Answer that there is nothing."""
        self._num_open -= 1
        return self._refuse(found.asked, found.refusal)

    def on_freed(self, freed: PinsFreed, now: float) -> list[ServerAction]:
        """End the leases of pins that the engine has freed; the engine need not be told."""
        held = [transfer_id for transfer_id in freed.transfer_ids if self._pins.pop(transfer_id, None) is not None]
        self._leases.release(held)
        return []

    def take_ended(self, request_ids: Iterable[str]) -> tuple[list[ServerAction], list[str]]:
        """Split the ends of leases: return the reports of pins, and the request ids of handoffs."""
        pins: list[ServerAction] = []
        others = []
        for request_id in request_ids:
            if self._pins.pop(request_id, None) is None:
                others.append(request_id)
            else:
                pins.append(PinEnded(request_id))
        return pins, others

    def _refuse(self, asked: PrefixAsked, refusal: PrefixRefusal) -> list[ServerAction]:
        self.num_refused += 1
        refused = PrefixRefused(number=asked.question.number, incarnation=self._identity.incarnation, reason=refusal)
        return [AnswerTo(asked.sender, refused)]
