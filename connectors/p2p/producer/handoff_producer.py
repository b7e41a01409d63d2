"""The producer's half of an agent: it answers handshakes and keeps leases of consumers.

Pure: every call returns actions. Owns the lease table.
"""

from __future__ import annotations

from collections.abc import Iterable

from connectors.p2p.actions import Action, LeaseGrant, Reply
from connectors.p2p.producer.handshake import HandshakeResponder, WorkerIdentity
from connectors.p2p.producer.leases import LeaseTable, LeaseTerms
from connectors.reports import SendingEnded
from core.clock import Clock
from core.errors import ProtocolError
from core.wire.kv import ControlError, ControlMessage, Handshake, LeaseRelease, LeaseRenew, LeaseState


class HandoffProducer:
    """Serves the pool of one worker. ``responder`` is None on a worker that serves no consumer."""

    def __init__(
        self, identity: WorkerIdentity, clock: Clock, terms: LeaseTerms, responder: HandshakeResponder | None = None
    ) -> None:
        self.leases = LeaseTable(clock, terms)
        self.responder = responder
        self.num_unexpected_questions = 0
        self._identity = identity

    def grant(self, grant: LeaseGrant) -> None:
        """Hold the blocks of a finished request from now on."""
        self.leases.grant(grant.transfer_id, grant.request_id, grant.num_blocks)

    def release(self, transfer_ids: Iterable[str]) -> list[Action]:
        """End these leases. Idempotent."""
        return _ended(self.leases.release(transfer_ids))

    def expire(self) -> list[Action]:
        """End the leases that are due."""
        return _ended(self.leases.expire())

    def on_question(self, message: ControlMessage) -> list[Action]:
        """Handle a message to this worker's control address; the answer is a ``Reply`` among the actions."""
        match message:
            case Handshake() if self.responder is not None:
                return [Reply(self.responder.answer(message))]
            case LeaseRenew():
                left_ms = self.leases.renew(message.transfer_ids)
                return [Reply(LeaseState(incarnation=self._identity.incarnation, left_ms=left_ms, number=message.number))]
            case LeaseRelease():
                return self.release(message.transfer_ids)
        self.num_unexpected_questions += 1
        reason = f"{type(message).__name__} is not for worker {self._identity.engine_id}"
        return [Reply(ControlError(code=ProtocolError.code, message=reason))]


def _ended(request_ids: Iterable[str]) -> list[Action]:
    return [SendingEnded(request_id) for request_id in request_ids]
