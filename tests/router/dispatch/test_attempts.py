"""Names of tries on the wire: what they stand for, and how long those that are over are remembered."""

from __future__ import annotations

import pytest

from core.wire.sampling import SamplingParams
from router.dispatch import attempts as module
from router.dispatch.attempts import Tries
from router.dispatch.request_state import open_flow
from router.dispatch.types import Submission


def flow_of(request_id: str):
    return open_flow(Submission(request_id=request_id, prompt_token_ids=(1,), sampling=SamplingParams()), 0.0, 60.0)


@pytest.fixture
def tries() -> Tries:
    return Tries()


def test_only_the_present_name_stands_for_a_request(tries):
    flow = flow_of("r1")
    tries.begin(flow)
    assert tries.get("r1") is flow
    tries.begin_next(flow, 1.0)
    assert (tries.get("r1"), tries.get("r1.2"), len(tries)) == (None, flow, 1)
    tries.end(flow, 2.0)
    assert (tries.get("r1.2"), len(tries)) == (None, 0)


def test_a_request_that_is_named_twice_is_found_once(tries):
    for request_id in ("r1", "r2"):
        tries.begin(flow_of(request_id))
    assert tries.find_requests(["r2", "r1", "unknown", "r2"]) == ["r2", "r1"]


def test_whoever_is_busy_with_an_ended_try_is_told_again_after_a_while(tries):
    flow = flow_of("r1")
    tries.begin(flow)
    tries.end(flow, 10.0)
    told = [now for now in (10.1, 11.9, 12.0, 13.9, 14.0) if tries.take_abort("r1", now)]
    assert told == [12.0, 14.0]


def test_whoever_is_busy_with_something_unknown_is_told_at_once(tries):
    assert [tries.take_abort("r1", now) for now in (0.0, 0.1)] == [True, False]


def test_ended_tries_are_forgotten_in_the_order_in_which_they_were_last_heard_of(tries, monkeypatch):
    monkeypatch.setattr(module, "_MAX_REMEMBERED", 2)
    for wire_id, now in (("a", 0.0), ("b", 0.0), ("a", 5.0), ("c", 5.0)):
        assert tries.take_abort(wire_id, now)
    assert not tries.take_abort("a", 6.0)
    assert not tries.take_abort("c", 6.0)
    assert tries.take_abort("b", 6.0), "forgotten, so it is told as if for the first time"
    assert len(tries._aborted_at) == 2
