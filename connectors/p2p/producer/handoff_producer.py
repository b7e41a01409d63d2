"""The producer's half of an agent: it answers handshakes and keeps leases of consumers.

Pure: every call returns actions. Owns the lease table.
"""

from __future__ import annotations

from collections.abc import Iterable

from connectors.p2p.actions import Action, LeaseGrant, ReleaseHandoffs, RenewHandoffs, Reply
from connectors.p2p.prefixes.server import PrefixServer, ServerAction
from connectors.p2p.producer.handshake import HandshakeResponder, WorkerIdentity
from connectors.p2p.producer.leases import LeaseTable, LeaseTerms
from connectors.reports import SendingEnded
from core.errors import ProtocolError
from core.machine_driver import ByType, EventHandler, TimerDue
from core.wire.kv import ControlMessage, Handshake, LeaseRelease, LeaseRenew, LeaseState, refusal_of


class HandoffProducer:
    """Serves the pool of one worker. ``responder`` is None on a worker that serves no consumer.

    ``handlers`` routes events; a control message is answered by a ``Reply``.
    """

    def __init__(self, identity: WorkerIdentity, terms: LeaseTerms, responder: HandshakeResponder | None = None) -> None:
        self.leases = LeaseTable(terms)
        self.responder = responder
        self.num_unexpected_questions = 0
        self.next_timer = self.leases.next_expiry
        self.prefixes = PrefixServer(identity, self.leases)
        self._identity = identity
        self.handlers: ByType[EventHandler] = ByType(
            {
                LeaseGrant: self.grant,
                RenewHandoffs: self.renew,
                ReleaseHandoffs: self.release,
                LeaseRelease: self.release,
                LeaseRenew: self.on_renew,
                Handshake: self.on_handshake,
                TimerDue: self.expire,
                object: self.refuse,
            }
        )
        self.handlers |= self.prefixes.handlers

    def grant(self, grant: LeaseGrant, now: float) -> list[Action]:
        """Hold the blocks of a finished request from now on."""
        self.leases.grant(grant.transfer_id, grant.request_id, grant.num_blocks, now)
        return []

    def renew(self, event: RenewHandoffs, now: float) -> list[Action]:
        """Extend the leases of these handoffs."""
        self.leases.renew(event.transfer_ids, now)
        return []

    def release(self, event: ReleaseHandoffs | LeaseRelease, now: float) -> list[ServerAction]:
        """End these leases. Idempotent."""
        return self._ended(self.leases.release(event.transfer_ids))

    def expire(self, event: TimerDue, now: float) -> list[ServerAction]:
        """End the leases that are due."""
        return self._ended(self.leases.expire(now))

    def on_handshake(self, handshake: Handshake, now: float) -> list[Reply]:
        """Accept a consumer, or refuse it."""
        if self.responder is None:
            return self.refuse(handshake, now)
        return [Reply(self.responder.answer(handshake))]

    def on_renew(self, message: LeaseRenew, now: float) -> list[Action]:
        """Extend a consumer's leases and return the time left of each."""
        left_ms = self.leases.renew(message.transfer_ids, now)
        return [Reply(LeaseState(incarnation=self._identity.incarnation, left_ms=left_ms, number=message.number))]

    def refuse(self, message: ControlMessage, now: float) -> list[Reply]:
        """Answer a control message that no producer expects."""
        self.num_unexpected_questions += 1
        reason = f"{type(message).__name__} is not for worker {self._identity.engine_id}"
        return [Reply(refusal_of(message, ProtocolError.code, reason))]

    def _ended(self, request_ids: Iterable[str]) -> list[ServerAction]:
        pins, others = self.prefixes.take_ended(request_ids)
        return [*pins, *(SendingEnded(request_id) for request_id in others)]
