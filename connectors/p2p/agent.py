"""``P2PAgent``: one worker's end of every transfer, as a synchronous state machine.

The agent has a ``consumer``, which loads blocks from peers, and a ``producer``, which keeps blocks for peers. It passes each
event to one of them. Every entry point returns actions, which the driver carries out in order: control messages
(``SendControl``, ``CloseControl``, ``Reply``), commands for the transfer thread, reports for the worker side. It opens no
sockets, starts no threads and reads the time from the given clock only, so that a simulation can run it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from connectors.p2p.actions import Action, ConsumerStep, HandoffRef, LeaseGrant, Refusal, TransferEvent
from connectors.p2p.consumer.pull import PullProtocol
from connectors.p2p.producer.handoff_producer import HandoffProducer
from connectors.p2p.producer.handshake import HandshakeResponder, WorkerIdentity
from connectors.p2p.settings import AgentSettings
from connectors.reports import LoadEnded
from core.clock import Clock
from core.wire.kv import ControlMessage
from core.wire.messages import ErrorInfo, TransferUsage


class P2PAgent:
    """Consumer and producer of one worker.

    ``transports`` are the names by which this worker can read, in order of preference. ``responder`` answers handshakes; it is
    None on a worker that serves no consumer.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        clock: Clock,
        transports: Sequence[str],
        settings: AgentSettings,
        responder: HandshakeResponder | None = None,
    ) -> None:
        self._clock = clock
        self.consumer = PullProtocol(identity, transports, settings.pull)
        self.producer = HandoffProducer(identity, clock, settings.leases, responder)

    @property
    def num_leased_blocks(self) -> int:
        """Blocks that are leased to consumers."""
        return self.producer.leases.num_blocks

    def longest_lease_s(self) -> float:
        """Return how long the longest lease lasts unless it is renewed, in seconds."""
        return self.producer.leases.longest_left_s()

    @property
    def num_loading_blocks(self) -> int:
        """Blocks of loads in progress."""
        return self.consumer.num_loading_blocks

    @property
    def num_quarantined_blocks(self) -> int:
        """Blocks of reported loads that a late read may still write."""
        return self.consumer.num_quarantined_blocks

    @property
    def num_held_leases(self) -> int:
        """Leases at peers that this worker renews or has asked for."""
        return len(self.consumer.leases)

    def transports_in_use(self) -> set[str]:
        """Return the transports by which peers are open for reading."""
        return self.consumer.transports_in_use()

    def num_broken_transports(self) -> dict[str, int]:
        """Return to how many peers each transport is broken; transports without any are left out."""
        return self.consumer.num_broken_transports()

    def counts(self) -> dict[str, int]:
        """Return what has happened so far, by the name of the event."""
        leases = {f"lease_{name}": count for name, count in dataclasses.asdict(self.producer.leases.counts).items()}
        sources = (self.consumer.counts, self.consumer.leases.counts, self.consumer.breaker_counts)
        reader = {name: count for source in sources for name, count in dataclasses.asdict(source).items()}
        return leases | reader | {"unexpected_questions": self.producer.num_unexpected_questions}

    # ---- from the engine -------------------------------------------------------------------------------------------

    def on_metadata(self, metadata: ConsumerStep) -> list[Action]:
        """Start, abort and release what one engine step asks for, in the order of the fields."""
        now = self._clock.now()
        actions: list[Action] = []
        for handoff in metadata.holds:
            actions += self.consumer.hold(handoff, now)
        for request in metadata.pulls:
            actions += self.consumer.start(request, now)
        for request_id, refusal in metadata.refused.items():
            actions.append(_refused(request_id, refusal))
        for request_id in metadata.aborts:
            actions += self.consumer.abort(request_id, now)
        for handoff in metadata.releases:
            actions += self.consumer.release(handoff)
        return actions

    def on_grant(self, grant: LeaseGrant) -> list[Action]:
        """Hold the blocks of a finished request from now on."""
        self.producer.grant(grant)
        return []

    # ---- from the router: leases ----------------------------------------------------

    def expect(self, handoff: HandoffRef) -> list[Action]:
        """Ask for the lease of a handoff that a coming request may load."""
        return self.consumer.expect(handoff, self._clock.now())

    def release(self, transfer_ids: Iterable[str]) -> list[Action]:
        """End these handoffs. Idempotent."""
        return self.producer.release(transfer_ids)

    def renew(self, transfer_ids: Iterable[str]) -> list[Action]:
        """Extend the leases of these handoffs."""
        self.producer.leases.renew(transfer_ids)
        return []

    # ---- from other workers ------------------------------------------------------------------------------------------

    def on_question(self, message: ControlMessage) -> list[Action]:
        """Handle a message to this worker's control address; the answer is a ``Reply`` among the actions."""
        return self.producer.on_question(message)

    def on_control(self, address: str, message: ControlMessage) -> list[Action]:
        """Handle a message from the peer connected at ``address``."""
        return self.consumer.on_control(address, message, self._clock.now())

    def on_disconnected(self, address: str) -> list[Action]:
        """Handle the loss or refusal of the control connection to an address."""
        return self.consumer.on_disconnected(address, self._clock.now())

    # ---- from the transfer thread, and from the clock ----------------------------------------------------------------

    def on_transfer(self, event: TransferEvent, at: float) -> list[Action]:
        """Handle a report of the transfer thread; ``at`` is the time of the event."""
        return self.consumer.on_transfer(event, self._clock.now(), at)

    def on_timer(self) -> list[Action]:
        """Handle all deadlines that have passed; there is none before ``next_timer``."""
        actions = self.consumer.on_timer(self._clock.now())
        return actions + self.producer.expire()

    def next_timer(self) -> float | None:
        """Return the next deadline, or None. Any call into the agent may change it."""
        times = [time for time in (self.producer.leases.next_expiry(), self.consumer.next_timer()) if time is not None]
        return min(times, default=None)


def _refused(request_id: str, refusal: Refusal) -> LoadEnded:
    """Return the report of a load that is refused without being tried."""
    return LoadEnded(request_id, TransferUsage(), ErrorInfo.of(refusal.error), peer=refusal.owner.address)
