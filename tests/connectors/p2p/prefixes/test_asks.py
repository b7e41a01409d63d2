"""A reader's questions: each ends once, whatever becomes of the source."""

from __future__ import annotations

import msgspec
import pytest

from connectors.p2p.actions import ControlLost, ControlReceived, SendControl
from connectors.p2p.prefixes.asks import PrefixAsks
from connectors.p2p.prefixes.messages import AskPrefix, CancelPrefixAsk, PrefixAnswered, PrefixExpired, PrefixUnused
from core.machine_driver import TimerDue
from core.wire.kv import (
    ControlError,
    KVHandoff,
    KVSource,
    LeaseRelease,
    LeaseRenew,
    PrefixHeld,
    PrefixQuestion,
    PrefixRefused,
    kind_of,
)

ADDRESS = "tcp://10.0.0.1:5600"
SOURCE = KVSource(engine_id="decode-0", incarnation=7, control_address=ADDRESS, num_tokens=64)
CHAIN = bytes(range(16)) * 4


@pytest.fixture
def asks(make_identity) -> PrefixAsks:
    return PrefixAsks(make_identity("prefill-0", 42))


def order(request_id: str = "r", patience_s: float = 1.0) -> AskPrefix:
    return AskPrefix(request_id, SOURCE, 16, CHAIN, patience_s)


def held(identity, number: int, incarnation: int = 7) -> PrefixHeld:
    handoff = KVHandoff(
        transfer_id="px-1",
        engine_id="decode-0",
        incarnation=incarnation,
        control_address="tcp://elsewhere:1",
        model_fingerprint=identity.model_fingerprint,
        layout=identity.layout,
        groups=(),
        num_tokens=64,
        lease_ms=1000,
    )
    return PrefixHeld(number=number, kv_handoff=handoff)


def asked(asks: PrefixAsks, now: float = 0.0) -> int:
    (action,) = asks.ask(order(), now)
    assert isinstance(action, SendControl)
    assert action.address == ADDRESS
    assert isinstance(action.message, PrefixQuestion)
    assert (action.message.incarnation, action.message.chain, action.message.block_size) == (7, CHAIN, 16)
    return action.message.number


def test_an_answer_is_reported_with_its_deadline_and_the_address_asked(asks, make_identity):
    number = asked(asks)
    (answer,) = asks.on_control(ControlReceived(ADDRESS, held(make_identity(), number)), 0.25)
    assert isinstance(answer, PrefixAnswered)
    assert (answer.refusal, answer.deadline, answer.asked_s) == (None, 1.0, 0.25)
    assert answer.handoff is not None
    assert answer.handoff.control_address == ADDRESS
    assert len(asks) == 0
    assert asks.end_load("r")
    assert not asks.end_load("r")
    assert asks.next_timer() is None


def test_an_answer_from_which_nothing_is_loaded_is_counted(asks, make_identity):
    number = asked(asks)
    asks.on_control(ControlReceived(ADDRESS, held(make_identity(), number)), 0.25)
    assert asks.on_unused(PrefixUnused("r"), 1.0) == []
    assert asks.num_unused_answers == 1
    assert not asks.end_load("r")


def test_the_deadline_of_an_answer_is_told_once_while_nothing_has_become_of_it(asks, make_identity):
    number = asked(asks)
    asks.on_control(ControlReceived(ADDRESS, held(make_identity(), number)), 0.25)
    assert asks.next_timer() == 1.0
    assert asks.on_timer(TimerDue(), 0.9) == []
    assert asks.on_timer(TimerDue(), 1.0) == [PrefixExpired("r")]
    assert asks.next_timer() is None
    assert asks.on_timer(TimerDue(), 2.0) == []
    assert asks.end_load("r"), "it had begun"


@pytest.mark.parametrize("end", ["load", "unused", "cancel"])
def test_the_deadline_of_an_answer_that_is_over_is_not_told(asks, make_identity, end):
    number = asked(asks)
    asks.on_control(ControlReceived(ADDRESS, held(make_identity(), number)), 0.25)
    match end:
        case "load":
            asks.end_load("r")
        case "unused":
            asks.on_unused(PrefixUnused("r"), 0.5)
        case "cancel":
            asks.cancel(CancelPrefixAsk("r"), 0.5)
    assert asks.next_timer() is None
    assert asks.on_timer(TimerDue(), 1.0) == []


@pytest.mark.parametrize("end", ["refused", "error", "lost", "deadline"])
def test_a_question_without_an_answer_ends_once(asks, end):
    number = asked(asks)
    match end:
        case "refused":
            message = PrefixRefused(number=number, incarnation=7, reason="pressure")
            found, reason = asks.on_control(ControlReceived(ADDRESS, message), 0.1), "pressure"
        case "error":
            other = ControlError(code="protocol_error", message="not for me", kind=kind_of(LeaseRenew))
            assert asks.on_control(ControlReceived(ADDRESS, other), 0.1) == []
            message = ControlError(code="protocol_error", message="not for me", kind=kind_of(PrefixQuestion))
            found, reason = asks.on_control(ControlReceived(ADDRESS, message), 0.1), "peer_lost"
        case "lost":
            found, reason = asks.on_lost(ControlLost(ADDRESS), 0.1), "peer_lost"
        case "deadline":
            assert asks.on_timer(TimerDue(), 0.9) == []
            assert asks.next_timer() == 1.0
            found, reason = asks.on_timer(TimerDue(), 1.0), "deadline"
    assert [(answer.request_id, answer.handoff, answer.refusal) for answer in found] == [("r", None, reason)]
    assert asks.on_lost(ControlLost(ADDRESS), 2.0) == []


def test_a_refused_question_ends_alone_if_the_refusal_names_it(asks):
    first, second, third = (asks.ask(order(name), 0.0)[0].message.number for name in "abc")

    def refuse(number: int, address: str = ADDRESS) -> list[str]:
        message = ControlError(code="protocol_error", message="not for me", kind=kind_of(PrefixQuestion), number=number)
        return [answer.request_id for answer in asks.on_control(ControlReceived(address, message), 0.1)]

    assert refuse(second, "tcp://10.0.0.2:5600") == []
    assert refuse(second) == ["b"]
    assert refuse(second) == []
    asks.cancel(CancelPrefixAsk("a"), 0.2)
    assert refuse(first) == []
    assert refuse(third) == ["c"]


@pytest.mark.parametrize("end", ["deadline", "cancel", "other address", "other number"])
def test_an_answer_that_nobody_waits_for_is_released(asks, make_identity, end):
    number, address = asked(asks), ADDRESS
    match end:
        case "deadline":
            asks.on_timer(TimerDue(), 1.0)
        case "cancel":
            assert asks.cancel(CancelPrefixAsk("r"), 0.1) == []
        case "other address":
            address = "tcp://10.0.0.2:5600"
        case "other number":
            number += 1
    release = SendControl(address, LeaseRelease(transfer_ids=("px-1",), reason="late"))
    assert asks.on_control(ControlReceived(address, held(make_identity(), number)), 2.0) == [release]
    assert asks.num_late_answers == 1


def test_an_answer_of_another_incarnation_is_released_and_refused(asks, make_identity):
    number = asked(asks)
    release, answer = asks.on_control(ControlReceived(ADDRESS, held(make_identity(), number, incarnation=8)), 0.1)
    assert isinstance(release, SendControl)
    assert (answer.handoff, answer.refusal) == (None, "restarted")


def test_an_unknown_reason_does_not_become_a_label(asks):
    refused = PrefixRefused(number=asked(asks), incarnation=7, reason="x" * 500)
    (answer,) = asks.on_control(ControlReceived(ADDRESS, refused), 0.1)
    assert answer.refusal == "invalid"


def test_a_question_keeps_the_chain_whole():
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"type": "px", "number": 1, "engine_id": "a", "incarnation": 1, "chain": b""}, PrefixQuestion)
