"""Two routers with the same idle workers choose different ones, unless a session, a hit or a queue says otherwise."""

from __future__ import annotations

import pytest

from core.wire.messages import Generate


def prompts(bench):
    """Return the workers that have got prompts, in order."""
    return [peer for peer, message in bench.sent if isinstance(message, Generate)]


@pytest.fixture
def place(make_bench):
    """Return a function: the worker that a router gives a prompt, with two idle prefill workers."""

    def chosen(rank, num_others=1, **fields):
        bench = make_bench("p0", "p1", "d0")
        for name in ("p0", "p1", "d0"):
            bench.heartbeat(name, router_rank=rank, num_other_routers=num_others)
        bench.do(bench.core.submit(bench.submission(**fields), bench.now))
        return prompts(bench)[0], bench.core.dispatcher.requests["r1"].placed.routing.reason

    return chosen


def test_two_routers_give_their_first_prompts_to_different_workers(place):
    assert {place(rank) for rank in (0, 1)} == {("p0", "load"), ("p1", "load")}


def test_a_session_has_the_same_worker_at_every_router(place):
    for session in ("a", "b", "c", "d"):
        assert len({place(rank, affinity=session)[0] for rank in (0, 1)}) == 1


def test_a_preference_outweighs_no_queue(make_bench):
    bench = make_bench("p0", "p1", "d0", max_requests=9)
    for name in ("p0", "p1", "d0"):
        bench.heartbeat(name, router_rank=0, num_other_routers=1)
    for number in range(2):
        bench.submit(f"r{number}", prompt=40)
    assert prompts(bench) == ["p0", "p1"]
