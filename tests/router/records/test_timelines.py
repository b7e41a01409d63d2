"""The table of timelines: what it keeps of a request, how a request is found, and its bounds."""

from __future__ import annotations

import msgspec
import pytest

from core.wire.messages import ErrorInfo, Generate, TransferUsage
from core.wire.sampling import SamplingParams
from router.dispatch.members import WorkerKey
from router.dispatch.request_state import Retried, open_request
from router.dispatch.timing import RoutingReport, first_token_timing, second_token_timing
from router.dispatch.types import Submission
from router.records.timelines import MAX_EVENTS, Timelines

P0, P1, D0 = WorkerKey("p0", 1), WorkerKey("p1", 2), WorkerKey("d0", 3)
SECRET = (7777, 8888)
LOST = ErrorInfo(code="peer_unreachable", message="the secret is 7777")


def submission(request_id: str = "r1") -> Submission:
    return Submission(request_id=request_id, prompt_token_ids=SECRET, sampling=SamplingParams())


def generate(*, handoff: bool) -> Generate:
    return Generate(request_id="r1", prompt_token_ids=SECRET, sampling=SamplingParams(), handoff=handoff)


def served(timelines: Timelines, request_id: str = "r1", client_id: str = "c1"):
    """Record a request that was served by a pair from 10 s on; return its state."""
    opened = timelines.begin(submission(request_id), client_id, 10.0)
    request = opened.request = open_request(submission(request_id), 10.0, 60.0)
    request.attempt.prefill, request.attempt.decode = P0, D0
    measured = request.measurements
    measured.first_token_at, measured.hit_tokens = 10.1, 1
    measured.first_token = first_token_timing(0.1, 20.0, 70.0)
    cost = TransferUsage(transport="shm", transferred_bytes=99, transfer_ms=5.0, verify_ms=1.0, queue_ms=2.0, first_step_ms=8.0)
    measured.second_token, measured.costs[0] = second_token_timing(0.02, cost), (1, cost)
    request.output_token_ids, request.finish_reasons = [[5, 6, 7]], ["stop"]
    request.placed.routing = RoutingReport(
        reason="prefix", candidates=2, predicted_hit_tokens=2, longest_hit_tokens=2, predicted_ttft_ms=90.0
    )
    opened.outcome = "loaded"
    return request


def test_a_served_request_has_its_steps_its_prediction_and_its_handoff():
    timelines = Timelines()
    request = served(timelines)
    timelines.note_leg("r1", generate(handoff=True), "p0", 10.001)
    timelines.end(request, 11.0)
    (found,) = timelines.find("r1", 21.0)
    assert (found.state, found.outcome, found.age_s, found.total_ms) == ("finished", "stop", 11.0, 1000.0)
    assert (found.prefill, found.decode, found.ttft_ms, found.mean_itl_ms) == ("p0", "d0", 100.0, 450.0)
    assert [(step.name, step.start_ms, step.ms) for step in found.steps] == [
        ("queue", 0.0, 20.0),
        ("prefill", 20.0, 70.0),
        ("relay", 90.0, 10.0),
        ("relay", 100.0, 4.0),
        ("queue", 104.0, 2.0),
        ("transfer", 106.0, 5.0),
        ("verify", 111.0, 1.0),
        ("first_step", 112.0, 8.0),
        ("decode", 120.0, 880.0),
    ]
    assert [(event.name, event.worker, event.at_ms) for event in found.events] == [
        ("prefill", "p0", 1.0),
        ("ended", "", 1000.0),
    ]
    assert (found.routing.hit_tokens, found.routing.ttft_ms, found.num_cached_tokens) == (1, pytest.approx(100.0), 1)
    assert (found.handoff.outcome, found.handoff.transport, found.handoff.num_bytes) == ("loaded", "shm", 99)


def test_a_retry_names_the_worker_that_failed_and_no_text_of_its_error():
    timelines = Timelines()
    request = served(timelines)
    timelines.note_leg("r1", generate(handoff=True), "p1", 10.0)
    timelines.note_retry(Retried("r1", "prefill", LOST, P1, P0), 10.05)
    timelines.note_leg("r1", generate(handoff=True), "p0", 10.05)
    timelines.end(request, 11.0)
    (found,) = timelines.find("r1", 11.0)
    assert [(event.name, event.worker, event.code) for event in found.events[:3]] == [
        ("prefill", "p1", ""),
        ("retry", "p1", "peer_unreachable"),
        ("prefill", "p0", ""),
    ]
    encoded = msgspec.json.encode(found).decode()
    assert "secret" not in encoded
    assert not any(str(token) in encoded for token in SECRET)


@pytest.mark.parametrize("name", ["r1", "cmpl-r1", "chatcmpl-r1", "resp_r1", "c1"])
def test_a_request_is_found_by_every_id_it_is_known_by(name):
    timelines = Timelines()
    timelines.end(served(timelines), 11.0)
    timelines.end(served(timelines, "r2", "c2"), 11.0)
    assert [found.request_id for found in timelines.find(name, 12.0)] == ["r1"]
    assert timelines.find("r3", 12.0) == []


def test_a_client_s_id_has_all_prompts_the_latest_first_and_is_not_told():
    timelines = Timelines()
    timelines.end(served(timelines, "r1"), 11.0)
    timelines.end(served(timelines, "r2"), 11.0)
    served(timelines, "r3")
    found = timelines.find("c1", 12.0)
    assert [(each.request_id, each.state) for each in found] == [("r3", "running"), ("r2", "finished"), ("r1", "finished")]
    assert "c1" not in msgspec.json.encode(found).decode()


@pytest.mark.parametrize(("code", "state"), [("invalid_request", "refused"), ("cancelled", "refused"), ("no_worker", "failed")])
def test_the_mistake_of_a_client_is_no_failure(code, state):
    timelines = Timelines()
    timelines.begin(submission(), "c1", 10.0)
    timelines.fail("r1", ErrorInfo(code=code, message="m"), 10.5)
    (found,) = timelines.latest(10, 11.0)
    assert (found.state, found.outcome, found.total_ms, found.ttft_ms) == (state, code, 500.0, None)


def test_only_the_last_requests_and_their_first_events_are_kept():
    timelines = Timelines(num_kept=3)
    for number in range(10):
        request = served(timelines, f"r{number}")
        for _ in range(2 * MAX_EVENTS):
            timelines.note_retry(Retried(f"r{number}", "prefill", LOST, P1, P0), 10.0)
        timelines.end(request, 11.0)
    assert len(timelines) == 3
    assert [found.request_id for found in timelines.latest(10, 11.0)] == ["r9", "r8", "r7"]
    (found,) = timelines.find("r9", 11.0)
    assert (len(found.events), found.num_more_events) == (MAX_EVENTS, MAX_EVENTS + 1)


def test_events_of_unknown_requests_are_ignored():
    timelines = Timelines()
    timelines.note_leg("r1", generate(handoff=False), "p0", 1.0)
    timelines.note_retry(Retried("r1", "prefill", LOST, P1, P0), 1.0)
    timelines.fail("r1", LOST, 1.0)
    assert len(timelines) == 0
