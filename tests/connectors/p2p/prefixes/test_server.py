"""A source's event loop: which questions reach the engine, and when a pin ends."""

from __future__ import annotations

import msgspec
import pytest

from connectors.p2p.actions import ReleaseHandoffs
from connectors.p2p.prefixes.messages import AnswerTo, PinEnded, PinsFreed, PrefixAsked, PrefixFound, PrefixNotFound
from connectors.p2p.prefixes.server import MAX_OPEN_QUESTIONS
from connectors.p2p.producer.handoff_producer import HandoffProducer
from connectors.p2p.producer.leases import LeaseTerms
from core.machine_driver import TimerDue
from core.wire.kv import KVHandoff, LeaseRelease, PrefixHeld, PrefixQuestion, PrefixRefused


@pytest.fixture
def producer(make_identity) -> HandoffProducer:
    return HandoffProducer(make_identity("decode-0", 42), LeaseTerms(10.0, 5.0, 60.0))


@pytest.fixture
def asked(make_identity) -> PrefixAsked:
    fingerprint = make_identity().model_fingerprint
    question = PrefixQuestion(
        number=3, engine_id="prefill-0", incarnation=42, model_fingerprint=fingerprint, block_size=16, chain=bytes(16)
    )
    return PrefixAsked(b"reader", question)


def found(asked: PrefixAsked, identity) -> PrefixFound:
    handoff = KVHandoff(
        transfer_id="px-1",
        engine_id="decode-0",
        incarnation=42,
        control_address="tcp://10.0.0.1:5600",
        model_fingerprint=identity.model_fingerprint,
        layout=identity.layout,
        groups=(),
        num_tokens=16,
        lease_ms=10_000,
    )
    return PrefixFound(asked, handoff, 4)


@pytest.mark.parametrize(("field", "value", "reason"), [("incarnation", 43, "restarted"), ("model_fingerprint", b"x", "model")])
def test_a_question_for_another_process_or_model_is_refused(producer, asked, field, value, reason):
    wrong = PrefixAsked(asked.sender, msgspec.structs.replace(asked.question, **{field: value}))
    assert producer.prefixes.on_asked(wrong, 0.0) == [
        AnswerTo(b"reader", PrefixRefused(number=3, incarnation=42, reason=reason))
    ]


def test_questions_beyond_the_bound_are_refused_until_the_engine_answers(producer, asked):
    for _ in range(MAX_OPEN_QUESTIONS):
        assert producer.prefixes.on_asked(asked, 0.0) == [asked]
    (refused,) = producer.prefixes.on_asked(asked, 0.0)
    assert refused.message.reason == "busy"
    producer.prefixes.on_not_found(PrefixNotFound(asked, "missing"), 0.0)
    assert producer.prefixes.on_asked(asked, 0.0) == [asked]


@pytest.mark.parametrize("end", ["release", "router's release", "expiry", "freed"])
def test_a_pin_is_leased_and_ends_once(producer, asked, make_identity, end):
    producer.prefixes.on_asked(asked, 0.0)
    (answer,) = producer.prefixes.on_found(found(asked, make_identity()), 0.0)
    assert isinstance(answer.message, PrefixHeld)
    assert (producer.leases.num_blocks, producer.prefixes.num_pinned_blocks) == (4, 4)
    match end:
        case "release":
            ended = producer.release(LeaseRelease(transfer_ids=("px-1",)), 1.0)
        case "router's release":
            ended = producer.release(ReleaseHandoffs(("px-1",)), 1.0)
        case "expiry":
            ended = producer.expire(TimerDue(), 10.0)
        case "freed":
            ended = producer.prefixes.on_freed(PinsFreed(("px-1",)), 1.0)
    assert ended == ([] if end == "freed" else [PinEnded("px-1")])
    assert (producer.leases.num_blocks, producer.prefixes.num_pinned_blocks) == (0, 0)
    assert producer.release(LeaseRelease(transfer_ids=("px-1",)), 2.0) == []
