"""``P2PAgent``: one worker's end of every transfer, as synchronous state machines.

The ``consumer`` loads blocks from peers, the ``producer`` keeps blocks for peers, and ``asks`` are the consumer's questions
about beginnings of prompts. Each has a table of ``handlers`` by type of event, which return actions, and ``next_timer``, the
time at which it needs a ``TimerDue``. They open no sockets, start no threads and read no clock, so that a simulation can run
them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

from connectors.p2p.actions import Action, CloseControl, ControlLost, ControlReceived, ExpectHandoff, HandoffRef
from connectors.p2p.consumer.pull import PullProtocol
from connectors.p2p.prefixes.asks import AskAction, PrefixAsks
from connectors.p2p.prefixes.messages import PrefixAnswered
from connectors.p2p.producer.handoff_producer import HandoffProducer
from connectors.p2p.producer.handshake import HandshakeResponder, WorkerIdentity
from connectors.p2p.settings import AgentSettings
from core.machine_driver import EventHandler
from core.wire.kv import PrefixHeld, PrefixRefused


class P2PAgent:
    """The three machines of one worker: ``consumer``, ``producer`` and ``asks``.

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
        self.asks = PrefixAsks(identity)
        handlers = self.consumer.handlers | {ControlReceived: self._on_control}
        self.consumer.handlers |= {kind: partial(self._consume, handler) for kind, handler in handlers.items()}

    def counts(self) -> dict[str, int]:
        """Return what has happened so far, by the name of the event."""
        leases = {f"lease_{name}": count for name, count in dataclasses.asdict(self.producer.leases.counts).items()}
        sources = (self.consumer.counts, self.consumer.leases.counts, self.consumer.peers.health.counts)
        loads = {name: count for source in sources for name, count in dataclasses.asdict(source).items()}
        prefixes = {
            "prefix_questions_answered": self.producer.prefixes.num_answered,
            "prefix_questions_refused": self.producer.prefixes.num_refused,
            "late_prefix_answers": self.asks.num_late_answers,
            "unused_prefix_answers": self.asks.num_unused_answers,
        }
        return leases | loads | prefixes | {"unexpected_questions": self.producer.num_unexpected_questions}

    def _on_control(self, event: ControlReceived, now: float) -> list[Action | AskAction]:
        """Pass a message of a peer on to the machine that has asked for it. A new lease is asked about at once."""
        answers = self.asks.on_control(event, now)
        if not isinstance(event.message, PrefixHeld | PrefixRefused):
            return [*self.consumer.on_control(event, now), *answers]
        self.consumer.peers.note_message(event.address, now)
        found = [answer.handoff for answer in answers if isinstance(answer, PrefixAnswered) and answer.handoff is not None]
        questions = [self.consumer.expect(ExpectHandoff(HandoffRef.of(handoff)), now) for handoff in found]
        return [*answers, *(action for actions in questions for action in actions)]

    def _consume(self, handler: EventHandler, event: object, now: float) -> list[object]:
        """Let the consumer handle an event. A connection that it closes, lost or not, answers no question about a prefix."""
        actions = list(handler(event, now))
        closed = [action.address for action in actions if isinstance(action, CloseControl)]
        return [*actions, *(answer for address in closed for answer in self.asks.on_lost(ControlLost(address), now))]
