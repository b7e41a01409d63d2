"""A reader's open questions about prefixes: each ends once, by an answer, by the loss of the source, or at its deadline.

Does no I/O and reads no clock. An answer that comes too late releases what the source keeps for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from connectors.p2p.actions import ControlLost, ControlReceived, SendControl
from connectors.p2p.prefixes.messages import (
    PREFIX_REFUSALS,
    AskPrefix,
    CancelPrefixAsk,
    PrefixAnswered,
    PrefixExpired,
    PrefixRefusal,
    PrefixUnused,
)
from connectors.p2p.producer.handshake import WorkerIdentity
from core.machine_driver import ByType, EventHandler, TimerDue
from core.wire.kv import ControlError, KVHandoff, LeaseRelease, PrefixHeld, PrefixQuestion, PrefixRefused

AskAction = SendControl | PrefixAnswered | PrefixExpired


@dataclass(frozen=True, slots=True)
class _OpenAsk:
    order: AskPrefix
    asked_at: float
    deadline: float


class PrefixAsks:
    """Asks sources. ``handlers`` routes events; the ends of control connections are passed on by the agent."""

    def __init__(self, identity: WorkerIdentity) -> None:
        self._identity = identity
        self._last_number = 0
        self._open: dict[int, _OpenAsk] = {}
        self.num_late_answers = 0
        self.num_unused_answers = 0
        self._answered: dict[str, float] = {}  # deadlines by request, infinite once told; until its load is over or it ends
        self.handlers: ByType[EventHandler] = ByType(
            {AskPrefix: self.ask, CancelPrefixAsk: self.cancel, PrefixUnused: self.on_unused, TimerDue: self.on_timer}
        )

    def __len__(self) -> int:
        return len(self._open)

    def ask(self, order: AskPrefix, now: float) -> list[AskAction]:
        """Send a question."""
        self._last_number += 1
        self._open[self._last_number] = _OpenAsk(order, now, now + order.patience_s)
        question = PrefixQuestion(
            number=self._last_number,
            engine_id=self._identity.engine_id,
            incarnation=order.source.incarnation,
            model_fingerprint=self._identity.model_fingerprint,
            block_size=order.block_size,
            chain=order.chain,
        )
        return [SendControl(order.source.control_address, question)]

    def cancel(self, order: CancelPrefixAsk, now: float) -> list[AskAction]:
        """Forget the question of a request that no longer waits for the answer."""
        self._answered.pop(order.request_id, None)
        for number, found in list(self._open.items()):
            if found.order.request_id == order.request_id:
                del self._open[number]
        return []

    def on_unused(self, unused: PrefixUnused, now: float) -> list[AskAction]:
        """No load comes from the answer to this request's question."""
        self._answered.pop(unused.request_id, None)
        self.num_unused_answers += 1
        return []

    def on_control(self, event: ControlReceived, now: float) -> list[AskAction]:
        """Handle an answer to a question; other messages are ignored."""
        match message := event.message:
            case PrefixHeld():
                return self._on_held(event.address, message, now)
            case PrefixRefused():
                found = self._take(message.number, event.address)
                return [] if found is None else self._refuse(found, _known(message.reason), now)
            case ControlError() if message.may_answer(PrefixQuestion):  # of a worker that serves no prefixes
                return self._on_error(event.address, message.number, now)
        return []

    def end_load(self, request_id: str) -> bool:
        """Return True if the load of a request that has just ended came from an answer."""
        return self._answered.pop(request_id, None) is not None

    def on_lost(self, event: ControlLost, now: float) -> list[AskAction]:
        """The connection to a source is gone."""
        return self._refuse_all_at(event.address, now)

    def on_timer(self, event: TimerDue, now: float) -> list[AskAction]:
        """Give up the questions without an answer in time, and tell of the answers that were not used in time."""
        late = [number for number, found in self._open.items() if found.deadline <= now]
        expired = [request_id for request_id, deadline in self._answered.items() if deadline <= now]
        self._answered |= dict.fromkeys(expired, math.inf)
        refused = [action for number in late for action in self._refuse(self._open.pop(number), "deadline", now)]
        return [*refused, *map(PrefixExpired, expired)]

    def next_timer(self) -> float | None:
        """Return the earliest deadline of a question or an answer, None without one."""
        questions = (found.deadline for found in self._open.values())
        earliest = min((*questions, *self._answered.values()), default=math.inf)
        return None if earliest == math.inf else earliest

    def _on_held(self, address: str, message: PrefixHeld, now: float) -> list[AskAction]:
        found, handoff = self._take(message.number, address), message.kv_handoff
        if found is None:
            self.num_late_answers += 1
            return [_release(address, handoff)]
        if handoff.incarnation != found.order.source.incarnation:
            return [_release(address, handoff), *self._refuse(found, "restarted", now)]
        handoff = msgspec.structs.replace(handoff, control_address=address)
        self._answered[found.order.request_id] = found.deadline
        return [PrefixAnswered(found.order.request_id, handoff, None, found.deadline, now - found.asked_at)]

    def _on_error(self, address: str, number: int, now: float) -> list[AskAction]:
        """End the question that a source could not answer; all to it if it does not say which (0)."""
        if not number:
            return self._refuse_all_at(address, now)
        found = self._take(number, address)
        return [] if found is None else self._refuse(found, "peer_lost", now)

    def _take(self, number: int, address: str) -> _OpenAsk | None:
        found = self._open.get(number)
        if found is None or found.order.source.control_address != address:
            return None
        return self._open.pop(number)

    def _refuse(self, ask: _OpenAsk, refusal: PrefixRefusal, now: float) -> list[AskAction]:
        return [PrefixAnswered(ask.order.request_id, None, refusal, ask.deadline, now - ask.asked_at)]

    def _refuse_all_at(self, address: str, now: float) -> list[AskAction]:
        numbers = [number for number, found in self._open.items() if found.order.source.control_address == address]
        return [action for number in numbers for action in self._refuse(self._open.pop(number), "peer_lost", now)]


def _release(address: str, handoff: KVHandoff) -> SendControl:
    return SendControl(address, LeaseRelease(transfer_ids=(handoff.transfer_id,), reason="late"))


def _known(reason: str) -> PrefixRefusal:
    return next((refusal for refusal in PREFIX_REFUSALS if refusal == reason), "invalid")
