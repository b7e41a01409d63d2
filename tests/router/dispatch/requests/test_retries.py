"""Workers that are lost, refuse or fail: which worker continues, from where, and what the client sees."""

from __future__ import annotations

import msgspec
import pytest

from core.errors import NoWorker, RouterSilent
from core.wire.messages import (
    Abort,
    ErrorInfo,
    Generate,
    Heartbeat,
    Registered,
    Release,
    Renew,
    TransferUsage,
    Usage,
)

FULL = ErrorInfo(code="overloaded", message="worker holds 9 choices already", http_status=429, retryable=True)
DRAINING = ErrorInfo(code="no_worker", message="worker is draining", http_status=503, retryable=True)
DEAD = ErrorInfo(code="engine_dead", message="the engine died", http_status=503, retryable=True)
STALE = ErrorInfo(code="stale", message="the seal is another one", http_status=502, retryable=True)
GIVEN_UP = ErrorInfo.of(RouterSilent("worker heard nothing from the router for too long"))
WRONG = ErrorInfo(code="invalid_request", message="no such token", http_status=400)
BROKEN = ErrorInfo(code="internal_error", message="a bug", http_status=500)


# ---- before the first token ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["lost", FULL, DRAINING, DEAD, GIVEN_UP], ids=lambda how: getattr(how, "code", how))
def test_prefill_worker_that_leaves_or_refuses_is_replaced_unseen_by_the_client(make_bench, how):
    bench = make_bench("p0", "d0", "p1")
    bench.submit()
    if how == "lost":
        bench.leave("p0")
    else:
        bench.fails("p0", how)
    again = bench.generated("p1")
    assert (again.request_id, again.handoff, again.kv_handoff) == ("r1.2", True, None)
    assert again.sampling == bench.to("p0", Generate)[0].sampling, "the seed included"
    bench.prefill_done("r1.2", "p1")
    bench.tokens(1, 51, request_id="r1.2", finish_reason="length")
    assert bench.output() == [50, 51]
    assert bench.ended["r1"].request.error is None
    assert bench.kinds() == ["prefill"]
    bench.assert_idle()


def test_the_decode_worker_of_a_pair_is_chosen_again_with_it(make_bench):
    bench = make_bench("p0", "d0")
    bench.join("p1", model_fingerprint=b"v2")
    bench.join("d1", model_fingerprint=b"v2")
    bench.submit()
    bench.leave("p0")
    bench.prefill_done("r1.2", "p1")
    assert bench.to("d0", Generate) == []
    assert bench.generated("d1").kv_handoff is not None


def test_a_lost_aggregated_worker_is_replaced_before_its_first_token(make_bench):
    bench = make_bench("a0", "a1")
    bench.submit()
    bench.leave("a0")
    assert (bench.generated("a1").request_id, bench.generated("a1").choices) == ("r1.2", ())
    bench.tokens(0, 50, peer="a1", request_id="r1.2", finish_reason="stop")
    assert bench.output() == [50]
    bench.assert_idle()


def test_a_request_that_no_pair_has_room_for_gets_the_refusal_itself(pair):
    pair.submit("r2")
    pair.fails("p0", FULL, "r2")
    assert pair.error("r2") == FULL
    assert pair.retries == []
    pair.assert_idle()


def test_a_request_without_a_token_waits_for_the_successor_of_its_only_worker(make_bench):
    bench = make_bench("a0")
    bench.submit()
    bench.leave("a0")
    bench.tick(9.0)
    bench.join("a0", incarnation=2)
    assert (bench.generated("a0").request_id, bench.generated("a0").choices) == ("r1.2", ())
    bench.tokens(0, 50, peer="a0", request_id="r1.2", finish_reason="stop")
    assert bench.output() == [50]
    bench.assert_idle()


def test_a_new_process_is_welcomed_before_it_gets_the_request_of_its_predecessor(make_bench):
    bench = make_bench("a0")
    bench.submit()
    bench.sent.clear()
    bench.join("a0", incarnation=2)
    assert [type(message) for _, message in bench.sent] == [Registered, Generate]


def test_a_request_that_waits_in_vain_before_its_first_token_gets_a_retry_after(make_bench):
    bench = make_bench("a0")
    bench.submit()
    bench.leave("a0")
    bench.tick(10.0)
    assert (bench.error().code, bench.error().http_status) == ("no_worker", 503)
    assert "aggregated worker" not in bench.error().message
    assert "a0 was lost" in bench.error().message
    assert bench.error().retry_after_s > 1
    bench.assert_idle()


@pytest.mark.parametrize("error", [WRONG, BROKEN, STALE], ids=lambda error: error.code)
@pytest.mark.parametrize("has_first_token", [False, True])
def test_what_another_worker_would_not_do_better_is_not_retried(make_bench, error, has_first_token):
    bench = make_bench("p0", "p1", "d0", "d1")
    bench.submit()
    if has_first_token:
        bench.prefill_done()
    bench.fails("d0" if has_first_token else "p0", error)
    assert bench.error() == error
    assert bench.to("p1", Generate) == bench.to("d1", Generate) == []
    assert len(bench.to("p0", Release)) == has_first_token
    bench.assert_idle()


def test_the_number_of_retries_is_bounded(make_bench):
    bench = make_bench("p0", "p1", "p2", "p3", "d0", max_retries=2)
    bench.submit()
    for number, name in enumerate(["p0", "p1", "p2"]):
        assert bench.error() is None if bench.updates else True
        assert bench.generated(name).request_id == ("r1" if not number else f"r1.{number + 1}")
        bench.leave(name)
    assert "prefill worker p2 was lost" in bench.error().message
    assert bench.to("p3", Generate) == []
    bench.assert_idle()


def test_a_worker_that_refused_gets_nothing_until_its_next_heartbeat(make_bench):
    bench = make_bench("p0", "p1", "d0")
    bench.submit("r1")
    bench.fails("p0", FULL)
    bench.submit("r2")
    assert [message.request_id for message in bench.to("p0", Generate)] == ["r1"]
    bench.heartbeat("p0")
    bench.submit("r3")
    assert bench.generated("p0").request_id == "r3"


def test_the_result_of_an_abandoned_attempt_is_released(make_bench):
    bench = make_bench("p0", "p1", "d0")
    bench.submit()
    bench.receive("p0-again", Heartbeat(engine_id="p0", incarnation=1))
    assert bench.to("p0-again", Abort) == [Abort(request_ids=("r1",), reason="peer_lost")]
    assert bench.generated("p1").request_id == "r1.2"
    bench.prefill_done("r1", "p0-again", kv_handoff=bench.handoff())
    assert bench.to("p0-again", Release) == [Release(transfer_ids=("t-r1",))]
    assert bench.updates == {}


def test_a_worker_alone_on_a_new_connection_drops_what_was_lost_and_starts_again(make_bench):
    bench = make_bench("a0")
    bench.submit()
    bench.receive("a0-again", Heartbeat(engine_id="a0", incarnation=1))
    assert bench.to("a0-again", Abort) == [Abort(request_ids=("r1",), reason="peer_lost")]
    assert bench.generated("a0-again").request_id == "r1.2"
    assert bench.to("a0-again", Registered)
    bench.tokens(0, 9, peer="a0-again", request_id="r1")
    bench.tokens(0, 50, peer="a0-again", request_id="r1.2", finish_reason="stop")
    assert bench.output() == [50]
    bench.assert_idle()


def test_an_unreachable_worker_is_dropped_once(make_bench):
    bench = make_bench("a0")
    bench.submit()
    bench.do(bench.core.on_unreachable(b"a0", 0.0))
    assert bench.core.dispatcher.num_waiting == 1
    assert bench.core.on_unreachable(b"a0", 0.0) == []


# ---- between the first token and the decode worker's ---------------------------------------------------------------------


def test_losing_the_prefill_worker_after_the_first_token_leaves_the_request_alone(pair):
    pair.submit()
    pair.prefill_done()
    pair.leave("p0")
    pair.tick(25.0)
    pair.tokens(1, 51, finish_reason="length")
    assert pair.ended["r1"].request.error is None
    assert pair.retries == []
    pair.assert_idle()


def test_prefill_failure_after_the_first_token_is_hidden_from_the_client(pair):
    pair.submit()
    pair.prefill_done()
    pair.fails("p0", BROKEN)
    pair.tokens(1, 51, finish_reason="length")
    assert pair.ended["r1"].request.error is None


@pytest.mark.parametrize("how", ["leaves", "drains"])
def test_a_reserved_decode_worker_that_goes_is_replaced(make_bench, how):
    bench = make_bench("p0", "d0", "d1")
    bench.submit()
    if how == "leaves":
        bench.leave("d0")
    else:
        bench.heartbeat("d0", is_draining=True)
    bench.prefill_done()
    assert bench.to("d0", Generate) == []
    assert bench.generated("d1").request_id == "r1", "it is still the first attempt"
    bench.tokens(1, 51, peer="d1", finish_reason="length")
    assert bench.ended["r1"].request.error is None
    bench.assert_idle()


@pytest.mark.parametrize("how", ["lost", FULL, DRAINING, DEAD, GIVEN_UP], ids=lambda how: getattr(how, "code", how))
def test_the_same_handoff_goes_to_another_decode_worker(make_bench, how):
    bench = make_bench("p0", "d0", "d1")
    bench.submit()
    bench.prefill_done()
    bench.now = 20.0
    if how == "lost":
        bench.leave("d0")
    else:
        bench.fails("d0", how)
    again = bench.generated("d1")
    assert (again.request_id, again.kv_handoff, again.deadline_ms) == ("r1.2", bench.handoff(), 40_000)
    assert [choice.output_token_ids for choice in again.choices] == [(50,)]
    assert bench.to("p0", Release) == []
    bench.tick(21.0)
    assert bench.to("p0", Renew) == [Renew(transfer_ids=("t-r1",))]
    bench.tokens(1, 51, peer="d1", request_id="r1.2", finish_reason="length")
    assert bench.output() == [50, 51]
    assert bench.kinds() == ["handoff"]
    bench.assert_idle()


def test_choices_that_have_begun_continue_with_the_handoff_that_others_still_need(make_bench):
    bench = make_bench("p0", "d0", "d1")
    bench.submit(n=3)
    bench.prefill_done(n=3)
    bench.tokens(1, 60, 61, index=0)
    bench.tokens(1, 70, index=1, finish_reason="stop")
    bench.leave("d0")
    again = bench.generated("d1")
    assert again.kv_handoff == bench.handoff()
    assert [(choice.index, choice.output_token_ids) for choice in again.choices] == [(0, (50, 60, 61)), (2, (52,))]
    assert bench.kinds() == ["replay"]


def test_lease_is_released_after_every_choice_restarts_on_the_next_worker(make_bench):
    bench = make_bench("p0", "d0", "d1")
    bench.submit(n=2)
    bench.prefill_done(n=2)
    bench.tokens(1, 60, index=0)
    bench.leave("d0")
    bench.tokens(1, 70, index=1, peer="d1", request_id="r1.2")
    bench.do(bench.core.abort("r1", "client", 0.0))
    assert bench.to("p0", Release) == [Release(transfer_ids=("t-r1",))]


def test_a_refusal_by_a_decode_worker_uses_up_no_retry(make_bench):
    bench = make_bench("p0", "d0", "d1", "d2", max_retries=0)
    bench.submit()
    bench.prefill_done()
    bench.fails("d0", FULL)
    bench.fails("d1", DRAINING, "r1.2")
    assert bench.generated("d2").request_id == "r1.3"
    bench.leave("d2")
    assert "decode worker d2 was lost" in bench.error().message


def test_refusals_after_the_first_token_are_not_counted_as_retries(make_bench):
    bench = make_bench("p0", "p1", "d0")
    bench.submit()
    bench.leave("p0")
    bench.prefill_done("r1.2", "p1")
    for refusal, request_id in ((FULL, "r1.2"), (DRAINING, "r1.3")):
        bench.fails("d0", refusal, request_id)
        bench.tick(bench.now + 1.0)
    bench.tokens(1, 51, request_id="r1.4", usage=Usage(kv_transfer=TransferUsage()))
    report = bench.updates["r1"][-1].handoff
    assert (report.num_retries, report.num_replays, report.num_refusals) == (1, 0, 2)
    bench.tokens(2, 52, request_id="r1.4", finish_reason="length")
    assert bench.ended["r1"].request.retries.kinds == ["prefill"]


def test_a_request_with_a_token_waits_for_room_and_keeps_its_lease(make_bench):
    bench = make_bench("p0", "d0", request_timeout_s=50.0)
    bench.submit()
    bench.prefill_done()
    bench.fails("d0", FULL)
    assert bench.core.dispatcher.num_waiting == 1
    assert "r1" not in bench.ended
    for now in range(1, 40):
        bench.now = float(now)
        bench.heartbeat("p0")
        bench.heartbeat("d0")
        bench.core.membership.by_peer(b"d0").is_refusing = True
        bench.do(bench.core.on_timer(bench.now))
    assert len(bench.to("p0", Renew)) == 3
    bench.tick(41.0)
    assert bench.generated("d0").kv_handoff == bench.handoff()
    bench.tokens(1, 51, request_id="r1.2", finish_reason="length")
    assert bench.output() == [50, 51]
    bench.assert_idle()


def test_a_request_that_waits_for_room_ends_at_its_deadline(make_bench):
    bench = make_bench("p0", "d0", request_timeout_s=15.0)
    bench.submit()
    bench.prefill_done()
    bench.fails("d0", FULL)
    for now in range(1, 16):
        bench.now = float(now)
        bench.heartbeat("p0")
        bench.heartbeat("d0")
        bench.core.membership.by_peer(b"d0").is_refusing = True
        bench.do(bench.core.on_timer(bench.now))
    assert bench.error().code == "deadline_exceeded"
    assert bench.to("p0", Release)
    bench.assert_idle()


def test_a_request_whose_decode_workers_are_all_gone_waits_for_one_to_come(pair):
    pair.submit()
    pair.prefill_done()
    pair.leave("d0")
    pair.tick(9.0)
    pair.join("d0", incarnation=2)
    assert pair.generated("d0").kv_handoff == pair.handoff()
    pair.tokens(1, 51, request_id="r1.2", finish_reason="length")
    assert pair.output() == [50, 51]
    pair.assert_idle()


def test_a_request_that_waits_in_vain_ends_with_the_reason_and_no_lease(pair):
    pair.submit()
    pair.prefill_done()
    pair.leave("d0")
    pair.tick(9.9)
    assert "r1" not in pair.ended
    pair.tick(10.0)
    assert (pair.error().code, pair.error().http_status) == (NoWorker.code, 503)
    assert "decode worker d0 was lost" in pair.error().message
    assert "for 10 s" in pair.error().message
    assert pair.to("p0", Release) == [Release(transfer_ids=("t-r1",))]
    pair.assert_idle()


def test_a_request_that_none_of_the_workers_left_ever_holds_does_not_wait_for_room(make_bench):
    """No member can ever continue it, so it ends as if there were no worker."""
    bench = make_bench("p0", "d0")
    bench.join("d1", max_num_choices=2)
    bench.submit(n=3)
    bench.prefill_done(n=3)
    assert bench.generated("d0").request_id == "r1"
    bench.leave("d0")
    bench.now = 9.0
    bench.heartbeat("p0")
    bench.heartbeat("d1")
    bench.tick(9.0)
    assert bench.error("r1") is None, "a larger worker may register"
    bench.tick(10.0)
    assert (bench.error("r1").code, bench.error("r1").retryable) == ("no_worker", True)
    assert bench.to("p0", Release) == [Release(transfer_ids=("t-r1",))]
    assert bench.to("d1", Generate) == []
    bench.assert_idle()


def test_request_with_no_decode_worker_at_its_handoff_waits(pair):
    pair.submit()
    pair.leave("d0")
    pair.prefill_done()
    assert pair.output() == [50]
    pair.tick(10.0)
    assert pair.error().code == NoWorker.code
    assert pair.to("p0", Release)
    pair.assert_idle()


def test_waiting_requests_are_served_in_the_order_in_which_they_began_to_wait(make_bench):
    bench = make_bench("p0", "d0")
    for request_id in ("r1", "r2"):
        bench.submit(request_id)
        bench.prefill_done(request_id)
    bench.leave("d0")
    bench.join("d1", max_num_choices=1)
    assert [message.request_id for message in bench.to("d1", Generate)] == ["r1.2"]
    bench.tokens(1, 51, peer="d1", request_id="r1.2", finish_reason="stop")
    bench.tick(1.0)
    assert [message.request_id for message in bench.to("d1", Generate)] == ["r1.2", "r2.2"]


def test_without_its_prefill_worker_the_next_decode_worker_computes_the_prompt(make_bench):
    bench = make_bench("p0", "d0", "d1")
    bench.submit()
    bench.prefill_done()
    bench.leave("p0")
    bench.leave("d0")
    again = bench.generated("d1")
    assert again.kv_handoff is None
    assert [choice.output_token_ids for choice in again.choices] == [(50,)]
    usage = Usage(num_cached_tokens=3, kv_transfer=TransferUsage(queue_ms=1.0))
    bench.tokens(1, 51, peer="d1", request_id="r1.2", usage=usage)
    cost = bench.updates["r1"][-1].handoff.cost
    assert (cost.recomputed_tokens, cost.fallback_reason) == (7, "peer_lost")


@pytest.mark.parametrize("workers", [("d0", "p0", "d1"), ("p0", "d0", "d1")], ids="-".join)
def test_a_pair_that_falls_silent_together_is_lost_whichever_is_missed_first(make_bench, workers):
    bench = make_bench(*workers)
    bench.submit()
    bench.prefill_done()
    for bench.now in range(1, 7):
        bench.heartbeat("d1")
        bench.do(bench.core.on_timer(bench.now))
    bench.tokens(1, 51, peer="d1", request_id="r1.2", usage=Usage(kv_transfer=TransferUsage()))
    assert bench.updates["r1"][-1].handoff.cost.fallback_reason == "peer_lost"


def test_a_worker_that_cannot_read_the_handoff_continues_without_it(make_bench):
    bench = make_bench("d0")
    for name in ("p0", "d0"):
        bench.join(name, connector="p2p", transports=("tcp",), has_digests=True)
    bench.join("a0")  # has no connector, as real ones
    bench.heartbeat("a0", num_running=50)
    bench.submit()
    bench.prefill_done()
    bench.leave("d0")
    assert bench.generated("a0").kv_handoff is None
    assert [choice.output_token_ids for choice in bench.generated("a0").choices] == [(50,)]
    assert bench.to("p0", Release) == [Release(transfer_ids=("t-r1",))]
    bench.tokens(1, 51, peer="a0", request_id="r1.2", usage=Usage(kv_transfer=TransferUsage()))
    assert bench.updates["r1"][-1].handoff.cost.fallback_reason == "rejected"


def test_a_worker_with_another_layout_continues_without_the_handoff(make_bench):
    bench = make_bench("p0", "d0")
    bench.submit()
    bench.prefill_done()
    bench.join("d1", layout=msgspec.structs.replace(bench.handoff().layout, dtype="bfloat16"))
    bench.leave("d0")
    assert bench.generated("d1").kv_handoff is None
    assert bench.to("p0", Release) == [Release(transfer_ids=("t-r1",))]
    bench.tokens(1, 51, peer="d1", request_id="r1.2", usage=Usage(kv_transfer=TransferUsage()))
    assert bench.updates["r1"][-1].handoff.cost.fallback_reason == "layout"
