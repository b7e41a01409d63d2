"""``P2PAgent``: one worker's end of every transfer, as two synchronous state machines.

The ``consumer`` loads blocks from peers, the ``producer`` keeps blocks for peers. Each has a table of ``handlers`` by type of
event, which return actions, and ``next_timer``, the time at which it needs a ``TimerDue``. They open no sockets, start no
threads and read no clock, so that a simulation can run them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from connectors.p2p.consumer.pull import PullProtocol
from connectors.p2p.producer.handoff_producer import HandoffProducer
from connectors.p2p.producer.handshake import HandshakeResponder, WorkerIdentity
from connectors.p2p.settings import AgentSettings


class P2PAgent:
    """Consumer and producer of one worker.

    ``transports`` are the names by which this worker can read, in order of preference. ``responder`` answers handshakes; it is
    None on a worker that serves no consumer.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        transports: Sequence[str],
        settings: AgentSettings,
        responder: HandshakeResponder | None = None,
    ) -> None:
        self.consumer = PullProtocol(identity, transports, settings.pull)
        self.producer = HandoffProducer(identity, settings.leases, responder)

    def counts(self) -> dict[str, int]:
        """Return what has happened so far, by the name of the event."""
        leases = {f"lease_{name}": count for name, count in dataclasses.asdict(self.producer.leases.counts).items()}
        sources = (self.consumer.counts, self.consumer.leases.counts, self.consumer.peers.health.counts)
        loads = {name: count for source in sources for name, count in dataclasses.asdict(source).items()}
        return leases | loads | {"unexpected_questions": self.producer.num_unexpected_questions}
