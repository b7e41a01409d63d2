"""Early pulls: the sealed part of a prompt is named to its decode worker, which gives it up with the attempt."""

from __future__ import annotations

import msgspec
import pytest

from core.wire.early import PrefillProgress, PullEarly
from core.wire.messages import Abort, ErrorInfo, Generate, PrefillChoice
from router.dispatch.members import WorkerKey

LOST = ErrorInfo(code="engine_dead", message="it died", http_status=503, retryable=True)


@pytest.fixture
def early(make_bench):
    """Return a bench with two pairs whose decode workers read early, and a request on p0 and d0."""
    bench = make_bench("p0")
    bench.join("d0", reads_early=True)
    bench.submit()
    return bench


def progress(bench, request_id: str = "r1", peer: str = "p0", first_token: int = 0) -> None:
    handoff = msgspec.structs.replace(bench.handoff(request_id, peer), lease_ms=0)
    bench.receive(peer, PrefillProgress(request_id=request_id, kv_handoff=handoff, first_token=first_token, ready_ms=5.0))


def early_aborts(bench, peer: str) -> list[Abort]:
    return [message for message in bench.to(peer, Abort) if message.reason == "early"]


def test_progress_is_passed_on_with_the_prompt_the_first_time(early):
    assert early.generated("p0").announces
    progress(early)
    progress(early, first_token=64)
    first, second = early.to("d0", PullEarly)
    assert (first.prompt_token_ids, first.first_token) == (early.generated("p0").prompt_token_ids, 0)
    assert (second.prompt_token_ids, second.first_token, second.ready_ms) == ((), 64, 5.0)


def test_request_itself_ends_the_early_pull(early):
    progress(early)
    early.prefill_done()
    assert early.to("d0", Generate)
    assert early_aborts(early, "d0") == []


def test_decode_worker_that_does_not_read_early_gets_no_progress(pair):
    pair.submit()
    assert not pair.generated("p0").announces
    progress(pair)
    assert pair.to("d0", PullEarly) == []


def test_late_progress_is_dropped(early):
    early.prefill_done()
    progress(early)
    progress(early, request_id="unknown")
    assert early.to("d0", PullEarly) == []


def test_progress_that_began_before_this_decode_worker_is_dropped(early):
    progress(early, first_token=64)
    assert early.to("d0", PullEarly) == []


def test_end_at_the_first_token_ends_the_early_pull(early):
    progress(early)
    early.prefill_done(choices=(PrefillChoice(index=0, token_id=50, finish_reason="stop"),), kv_handoff=None)
    assert len(early_aborts(early, "d0")) == 1
    early.assert_idle()


def test_client_that_leaves_ends_the_early_pull(early):
    progress(early)
    early.do(early.core.abort("r1", "client", early.now))
    assert [abort.request_ids for abort in early_aborts(early, "d0")] == [("r1",)]
    early.assert_idle()


def test_retry_ends_the_early_pull_of_the_attempt_before(early):
    early.join("p1")
    progress(early)
    early.fails("p0", LOST)
    assert [abort.request_ids for abort in early_aborts(early, "d0")] == [("r1",)]
    progress(early, request_id="r1.2", peer="p1")
    assert [pull.request_id for pull in early.to("d0", PullEarly)] == ["r1", "r1.2"]


def test_loss_of_the_prefill_worker_ends_the_early_pull(early):
    progress(early)
    early.leave("p0")
    assert len(early_aborts(early, "d0")) == 1


def test_other_decode_worker_than_the_told_one_takes_over_without_early_pull(early):
    early.join("d1", reads_early=True)
    progress(early)
    early.leave("d0")
    progress(early, first_token=64)
    assert early.to("d1", PullEarly) == []
    early.prefill_done()
    assert early.to("d1", Generate)


def test_the_end_of_an_early_pull_leaves_the_prompt_at_its_prefill_worker(early):
    progress(early)
    early.heartbeat("d0", is_draining=True)
    progress(early, first_token=64)
    assert early_aborts(early, "d0")
    assert early.core.route_costs.num_queued_tokens(WorkerKey("p0", 1)) == len(early.generated("p0").prompt_token_ids)
