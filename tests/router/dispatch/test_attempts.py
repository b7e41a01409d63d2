"""Names of attempts on the wire: which request they belong to, and how long ended ones are remembered."""

from __future__ import annotations

import pytest

from core.errors import PeerUnreachable
from core.wire.messages import ErrorInfo
from core.wire.sampling import SamplingParams
from router.dispatch import attempts as module
from router.dispatch.attempts import Attempts
from router.dispatch.members import WorkerKey
from router.dispatch.request_state import Attempt, RequestPhase, open_request
from router.dispatch.types import Submission

P0, D0 = WorkerKey("p0", 1), WorkerKey("d0", 1)
LOST = ErrorInfo.of(PeerUnreachable("lost"))


def request_of(request_id: str):
    return open_request(Submission(request_id=request_id, prompt_token_ids=(1,), sampling=SamplingParams()), 0.0, 60.0)


@pytest.fixture
def attempts() -> Attempts:
    return Attempts()


def test_only_the_current_attempt_finds_its_request(attempts):
    request = request_of("r1")
    attempts.begin(request)
    assert attempts.get("r1") is request
    attempts.begin_next(request, LOST, 1.0)
    assert (attempts.get("r1"), attempts.get("r1.2"), len(attempts)) == (None, request, 1)
    attempts.end(request, 2.0)
    assert (attempts.get("r1.2"), len(attempts)) == (None, 0)


def test_next_attempt_keeps_nothing_of_the_last_one_but_a_computed_prompt(attempts):
    request = request_of("r1")
    attempts.begin(request)
    for phase, prefill in ((RequestPhase.HANDOFF, P0), (RequestPhase.DECODE, P0), (RequestPhase.PREFILL, None)):
        request.phase = phase
        first = request.attempt
        first.prefill, first.decode, first.has_handoff, first.is_judged = P0, D0, True, True
        first.shown.add(0)
        attempts.begin_next(request, LOST, 1.0)
        assert request.attempt == Attempt(number=first.number + 1, prefill=prefill, previous_error=LOST)


def test_a_request_that_is_named_twice_is_found_once(attempts):
    for request_id in ("r1", "r2"):
        attempts.begin(request_of(request_id))
    assert attempts.find_requests(["r2", "r1", "unknown", "r2"]) == ["r2", "r1"]


def test_an_ended_attempt_is_aborted_again_after_a_while(attempts):
    request = request_of("r1")
    attempts.begin(request)
    attempts.end(request, 10.0)
    told = [now for now in (10.1, 11.9, 12.0, 13.9, 14.0) if attempts.stop_stale("r1", D0, now)]
    assert told == [12.0, 14.0]


def test_an_unknown_attempt_is_aborted_at_once(attempts):
    assert [bool(attempts.stop_stale("r1", D0, now)) for now in (0.0, 0.1)] == [True, False]


def test_ended_attempts_are_forgotten_in_the_order_in_which_they_were_last_heard_of(attempts, monkeypatch):
    monkeypatch.setattr(module, "_MAX_REMEMBERED", 2)
    for wire_id, now in (("a", 0.0), ("b", 0.0), ("a", 5.0), ("c", 5.0)):
        assert attempts.stop_stale(wire_id, D0, now)
    assert not attempts.stop_stale("a", D0, 6.0)
    assert not attempts.stop_stale("c", D0, 6.0)
    assert attempts.stop_stale("b", D0, 6.0), "forgotten, so it is told as if for the first time"
    assert len(attempts._ended) == 2
