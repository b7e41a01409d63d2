"""What happens in a worker's event loop, without the event loop: one agent of the p2p connector, pure and synchronous.

Owns the consumer's ``PullProtocol``, the producer's ``LeaseTable`` and handshake, and the routing of everything that happens to
them. Every entry point returns actions, to be carried out in order: control messages on sockets (``SendControl``,
``CloseControl``, ``Reply``), commands for the transfer thread, reports for the worker side. Knows no sockets and no threads;
reads the clock that it was given. ``connectors.p2p.driver`` carries it in a worker, the simulation under a virtual clock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from connectors.load_ended import LoadEnded
from connectors.p2p.actions import Action, ConsumerStep, HandoffRef, LeaseGrant, Refusal, Reply, SendingEnded, TransferEvent
from connectors.p2p.consumer.pull import PullProtocol
from connectors.p2p.producer.handshake import HandshakeResponder, WorkerIdentity
from connectors.p2p.producer.leases import LeaseTable
from connectors.p2p.settings import AgentSettings
from core.clock import Clock
from core.errors import ProtocolError
from core.wire.kv import ControlError, ControlMessage, Handshake, LeaseRelease, LeaseRenew, LeaseState
from core.wire.messages import ErrorInfo, TransferUsage


class P2PAgent:
    """Both roles of one worker; which one works depends on what happens to it.

    ``transports`` are the names by which this worker can read, in order of preference. ``responder`` answers the handshakes of
    readers; None on workers that nobody reads from.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        clock: Clock,
        transports: Sequence[str],
        settings: AgentSettings,
        responder: HandshakeResponder | None = None,
    ) -> None:
        self._identity = identity
        self._clock = clock
        self._responder = responder
        self._leases = LeaseTable(clock, settings.leases)
        self._pull = PullProtocol(identity, transports, settings.pull)
        self._num_unexpected_questions = 0

    @property
    def num_leased_blocks(self) -> int:
        """Blocks that are held for readers."""
        return self._leases.num_blocks

    def longest_lease_s(self) -> float:
        """Return how long readers may still need this worker, unless they renew."""
        return self._leases.longest_left_s()

    @property
    def num_loading_blocks(self) -> int:
        """Blocks of loads that have not been reported."""
        return self._pull.num_loading_blocks

    @property
    def num_quarantined_blocks(self) -> int:
        """Blocks of reported loads that a read may still write."""
        return self._pull.num_quarantined_blocks

    @property
    def num_held_leases(self) -> int:
        """Leases of others that are kept alive from here, or asked for."""
        return len(self._pull.leases)

    def transports_in_use(self) -> set[str]:
        """Return the transports by which peers are open for reading."""
        return self._pull.transports_in_use()

    def num_broken_transports(self) -> dict[str, int]:
        """Return to how many peers each transport is broken; transports without any are left out."""
        return self._pull.num_broken_transports()

    def counts(self) -> dict[str, int]:
        """Return what has happened so far, by the name of the event."""
        leases = {f"lease_{name}": count for name, count in dataclasses.asdict(self._leases.counts).items()}
        sources = (self._pull.counts, self._pull.leases.counts, self._pull.breaker_counts)
        reader = {name: count for source in sources for name, count in dataclasses.asdict(source).items()}
        return leases | reader | {"unexpected_questions": self._num_unexpected_questions}

    # ---- from the engine -------------------------------------------------------------------------------------------

    def on_metadata(self, metadata: ConsumerStep) -> list[Action]:
        """Take one step's news of the scheduler side, in the order of the fields."""
        now = self._clock.now()
        actions: list[Action] = []
        for handoff in metadata.holds:
            actions += self._pull.hold(handoff, now)
        for request in metadata.pulls:
            actions += self._pull.start(request, now)
        for request_id, refusal in metadata.refused.items():
            actions.append(_refused(request_id, refusal))
        for request_id in metadata.aborts:
            actions += self._pull.abort(request_id, now)
        for handoff in metadata.releases:
            actions += self._pull.release(handoff)
        return actions

    def on_grant(self, grant: LeaseGrant) -> list[Action]:
        """Hold the blocks of a finished request from now on."""
        self._leases.grant(grant.transfer_id, grant.request_id, grant.num_blocks)
        return []

    # ---- from the role's hands: what the router says about leases ----------------------------------------------------

    def expect(self, handoff: HandoffRef) -> list[Action]:
        """Learn that a request may come that loads this handoff."""
        return self._pull.expect(handoff, self._clock.now())

    def release(self, transfer_ids: Iterable[str]) -> list[Action]:
        """End these handoffs. Idempotent."""
        return _ended(self._leases.release(transfer_ids))

    def renew(self, transfer_ids: Iterable[str]) -> list[Action]:
        """Keep these handoffs for another while."""
        self._leases.renew(transfer_ids)
        return []

    # ---- from other workers ------------------------------------------------------------------------------------------

    def on_question(self, message: ControlMessage) -> list[Action]:
        """Take a message that came to this worker's own control address; a ``Reply`` among the actions is its answer."""
        match message:
            case Handshake() if self._responder is not None:
                return [Reply(self._responder.answer(message))]
            case LeaseRenew():
                left_ms = self._leases.renew(message.transfer_ids)
                return [Reply(LeaseState(incarnation=self._identity.incarnation, left_ms=left_ms, number=message.number))]
            case LeaseRelease():
                return self.release(message.transfer_ids)
        self._num_unexpected_questions += 1
        reason = f"{type(message).__name__} is not for worker {self._identity.engine_id}"
        return [Reply(ControlError(code=ProtocolError.code, message=reason))]

    def on_control(self, address: str, message: ControlMessage) -> list[Action]:
        """Take a message from the worker that this one reached at ``address``."""
        return self._pull.on_control(address, message, self._clock.now())

    def on_disconnected(self, address: str) -> list[Action]:
        """Learn that the control connection to an address is lost, or was refused."""
        return self._pull.on_disconnected(address, self._clock.now())

    # ---- from the transfer thread, and from the clock ----------------------------------------------------------------

    def on_transfer(self, event: TransferEvent, at: float) -> list[Action]:
        """Take a report of the transfer thread, and when it happened."""
        return self._pull.on_transfer(event, self._clock.now(), at)

    def on_timer(self) -> list[Action]:
        """Do what is due by now; nothing is, before ``next_timer``."""
        actions = self._pull.on_timer(self._clock.now())
        return actions + _ended(self._leases.expire())

    def next_timer(self) -> float | None:
        """Return when ``on_timer`` has something to do, or None. May change with every call into the agent."""
        times = [time for time in (self._leases.next_expiry(), self._pull.next_timer()) if time is not None]
        return min(times, default=None)


def _ended(request_ids: Iterable[str]) -> list[Action]:
    return [SendingEnded(request_id) for request_id in request_ids]


def _refused(request_id: str, refusal: Refusal) -> LoadEnded:
    """Return the report of a load that must not be tried."""
    return LoadEnded(request_id, TransferUsage(), ErrorInfo.of(refusal.error), peer=refusal.owner.address)
