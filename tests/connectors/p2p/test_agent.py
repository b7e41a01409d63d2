"""The agent: what reaches it goes to the right state machine, on one timer, and every answer is an action."""

from __future__ import annotations

import pytest

from connectors.p2p.actions import (
    CloseControl,
    ControlLost,
    HandoffRef,
    LeaseGrant,
    MeetPeer,
    ReleaseHandoffs,
    RenewHandoffs,
    Reply,
    SendControl,
)
from connectors.p2p.agent import P2PAgent
from connectors.p2p.metadata import P2PConnectorMetadata
from connectors.p2p.prefixes.messages import AskPrefix, PrefixAnswered
from connectors.p2p.producer.handshake import HandshakeResponder
from connectors.p2p.producer.leases import LeaseTerms
from connectors.p2p.settings import AgentSettings, PullSettings
from connectors.p2p.transport.interface import PeerId
from connectors.reports import SendingEnded
from core.machine_driver import TimerDue
from core.testing.clock import FakeClock
from core.wire.kv import (
    ControlError,
    Handshake,
    HandshakeReply,
    KVSource,
    LeaseRelease,
    LeaseRenew,
    LeaseState,
    PrefixQuestion,
    kind_of,
)

SETTINGS = AgentSettings(
    pull=PullSettings(transfer_deadline_s=30.0, handshake_timeout_s=5.0, lease_renew_interval_s=5.0),
    leases=LeaseTerms(grant_s=10.0, renew_s=8.0, max_s=60.0),
)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def owner(make_identity) -> P2PAgent:
    identity = make_identity("prefill-0", 42)
    responder = HandshakeResponder(identity, 512, {"tcp": b"an address"}, has_digests=True)
    return P2PAgent(identity, ("shm", "tcp"), SETTINGS, responder)


@pytest.fixture
def reader(make_identity) -> P2PAgent:
    return P2PAgent(make_identity(), ("shm", "tcp"), SETTINGS)


def ask(agent, clock, event):
    """Return the producer's actions."""
    return agent.producer.handlers[type(event)](event, clock.now())


def test_handshake_and_lease_of_a_reader_are_answered(owner, clock, make_identity):
    ours = make_identity()
    question = Handshake(
        engine_id=ours.engine_id,
        incarnation=ours.incarnation,
        model_fingerprint=ours.model_fingerprint,
        layout=ours.layout,
        transports=("shm", "tcp"),
        host_id=ours.host_id,
    )
    (reply,) = ask(owner, clock, question)
    assert isinstance(reply.message, HandshakeReply)
    assert (reply.message.incarnation, reply.message.transport) == (42, "tcp")
    ask(owner, clock, LeaseGrant("t", "r", 3))
    (state,) = ask(owner, clock, LeaseRenew(transfer_ids=("t", "unknown"), number=17))
    assert state == Reply(LeaseState(incarnation=42, left_ms={"t": 10_000, "unknown": 0}, number=17))


def test_release_by_a_reader_or_by_the_router_ends_the_sending_once(owner, clock):
    for name in ("t", "u"):
        ask(owner, clock, LeaseGrant(name, f"request of {name}", 3))
    assert owner.producer.leases.num_blocks == 6
    assert ask(owner, clock, LeaseRelease(transfer_ids=("t",))) == [SendingEnded("request of t")]
    assert ask(owner, clock, ReleaseHandoffs(["t", "u"])) == [SendingEnded("request of u")]
    assert owner.producer.leases.num_blocks == 0
    assert (owner.counts()["lease_released"], owner.counts()["lease_late"]) == (2, 1)


def test_lease_without_renewals_ends_by_the_timer(owner, clock):
    ask(owner, clock, LeaseGrant("t", "r", 3))
    clock.advance(6.0)
    ask(owner, clock, RenewHandoffs(["t"]))
    assert owner.producer.next_timer() == clock.now() + 8.0
    assert ask(owner, clock, TimerDue()) == []
    clock.advance(8.0)
    assert ask(owner, clock, TimerDue()) == [SendingEnded("r")]
    assert owner.producer.next_timer() is None


@pytest.mark.parametrize("message", [LeaseState(incarnation=1, left_ms={}, number=3), ControlError(code="x", message="y")])
def test_message_for_another_recipient_is_logged_and_counted(owner, clock, message):
    (reply,) = ask(owner, clock, message)
    assert isinstance(reply.message, ControlError)
    assert reply.message.code == "protocol_error"
    assert type(message).__name__ in reply.message.message
    assert (reply.message.kind, reply.message.number) == (kind_of(type(message)), message.number)
    assert owner.counts()["unexpected_questions"] == 1


def test_worker_without_readers_shakes_no_hands(reader, clock, make_identity):
    ours = make_identity()
    question = Handshake(
        engine_id="x", incarnation=1, model_fingerprint=b"", layout=ours.layout, transports=("tcp",), host_id="h"
    )
    (reply,) = ask(reader, clock, question)
    assert isinstance(reply.message, ControlError)


def test_news_of_a_step_is_taken_in_order(reader, clock):
    held, done = (HandoffRef(name, PeerId("tcp://p:1", 1)) for name in "ab")
    actions = reader.consumer.on_step(P2PConnectorMetadata(holds=[held], releases=[done]), clock.now())
    assert actions == [
        SendControl("tcp://p:1", LeaseRenew(transfer_ids=("a",), number=1)),
        SendControl("tcp://p:1", LeaseRelease(transfer_ids=("b",))),
    ]


def test_each_half_has_its_own_timer(owner, clock):
    owner.consumer.on_step(P2PConnectorMetadata(holds=[HandoffRef("h", PeerId("tcp://p:1", 1))]), clock.now())
    ask(owner, clock, LeaseGrant("t", "r", 3))
    assert (owner.consumer.next_timer(), owner.producer.next_timer()) == (clock.now() + 5.0, clock.now() + 10.0)
    clock.advance(5.0)
    renewal = SendControl("tcp://p:1", LeaseRenew(transfer_ids=("h",), number=2))
    assert owner.consumer.on_timer(TimerDue(), clock.now()) == [renewal]
    clock.advance(5.0)
    assert ask(owner, clock, TimerDue()) == [SendingEnded("r")]


def consume(agent, clock, event):
    """Return the consumer's actions."""
    return list(agent.consumer.handlers[type(event)](event, clock.now()))


def ask_for_prefix(agent, clock, address, patience_s=20.0):
    source = KVSource(engine_id="p", incarnation=1, control_address=address, num_tokens=64)
    (action,) = agent.asks.ask(AskPrefix(f"request at {address}", source, 32, bytes(64), patience_s), clock.now())
    assert isinstance(action.message, PrefixQuestion)


@pytest.mark.parametrize("end", ["handshake unanswered", "lost"])
def test_a_closed_connection_ends_the_prefix_questions_on_it(reader, clock, end):
    consume(reader, clock, MeetPeer(PeerId("tcp://p:1", 1)))
    clock.advance(4.9)
    for address in ("tcp://p:1", "tcp://p:2"):
        ask_for_prefix(reader, clock, address)
    clock.advance(0.1)
    actions = consume(reader, clock, TimerDue() if end == "handshake unanswered" else ControlLost("tcp://p:1"))
    assert CloseControl("tcp://p:1") in actions
    (ended,) = (action for action in actions if isinstance(action, PrefixAnswered))
    assert (ended.request_id, ended.refusal) == ("request at tcp://p:1", "peer_lost")
    assert len(reader.asks) == 1
