"""While a prompt is computed, its decode worker gets to know the prefill worker: once for each pair of processes."""

from __future__ import annotations

import pytest

from core.wire.early import MeetProducer
from core.wire.messages import Generate

ADDRESS = "tcp://10.0.0.1:5600"


@pytest.fixture
def two(make_bench):
    """Return a bench with one pair of workers that can be introduced."""
    bench = make_bench()
    bench.join("p0", control_address=ADDRESS)
    bench.join("d0", meets_producers=True)
    return bench


def test_decode_worker_meets_the_prefill_worker_of_its_first_prompt(two):
    two.submit()
    (meeting,) = two.to("d0", MeetProducer)
    assert meeting == MeetProducer(engine_id="p0", incarnation=1, control_address=ADDRESS)
    assert two.to("d0", Generate) == []
    two.prefill_done()
    two.submit("r2")
    assert len(two.to("d0", MeetProducer)) == 1


def test_each_pair_is_introduced(two):
    two.join("d1", meets_producers=True)
    for number in range(3):
        two.submit(f"r{number}")
    assert len(two.to("d0", MeetProducer)) == len(two.to("d1", MeetProducer)) == 1


@pytest.mark.parametrize("name", ["p0", "d0"])
def test_process_that_has_come_back_is_introduced_again(two, name):
    two.submit()
    two.prefill_done()
    two.tokens(1, 51, finish_reason="stop")
    two.leave(name)
    two.join(name, control_address=ADDRESS, meets_producers=True)
    two.submit("r2")
    assert len(two.to("d0", MeetProducer)) == 2


def test_next_attempt_on_another_prefill_worker_is_introduced(two):
    two.submit()
    two.join("p1", control_address="tcp://10.0.0.2:5600")
    two.leave("p0")
    assert [meeting.engine_id for meeting in two.to("d0", MeetProducer)] == ["p0", "p1"]


@pytest.mark.parametrize(
    ("of_prefill", "of_decode"),
    [
        ({}, {"meets_producers": True}),
        ({"control_address": ADDRESS}, {}),
    ],
)
def test_workers_that_cannot_meet_are_not_introduced(make_bench, of_prefill, of_decode):
    bench = make_bench()
    bench.join("p0", **of_prefill)
    bench.join("d0", **of_decode)
    bench.submit()
    assert bench.to("p0", Generate)
    assert bench.to("d0", MeetProducer) == []


def test_worker_that_serves_alone_meets_nobody(make_bench):
    bench = make_bench()
    bench.join("a0", control_address=ADDRESS, meets_producers=True)
    bench.submit()
    assert bench.to("a0", Generate)
    assert bench.to("a0", MeetProducer) == []
