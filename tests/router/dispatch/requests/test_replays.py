"""Workers lost in mid-stream: another one continues, and the client sees no break."""

from __future__ import annotations

import pytest

from core.errors import NoWorker, RouterSilent
from core.wire.messages import Abort, ErrorInfo, Generate, Heartbeat, Release, TokenLogprobs, Tokens, TransferUsage, Usage

FULL = ErrorInfo(code="overloaded", message="worker holds 9 choices already", http_status=429, retryable=True)
DRAINING = ErrorInfo(code="no_worker", message="worker is draining", http_status=503, retryable=True)
DEAD = ErrorInfo(code="engine_dead", message="the engine died", http_status=503, retryable=True)
GIVEN_UP = ErrorInfo.of(RouterSilent("worker heard nothing from the router for too long"))


@pytest.mark.parametrize("how", ["lost", DRAINING, DEAD, GIVEN_UP], ids=lambda how: getattr(how, "code", how))
def test_a_stream_continues_with_another_decode_worker_that_computes_all_of_it(make_bench, how):
    bench = make_bench("p0", "d0", "d1")
    bench.submit(max_tokens=9)
    bench.prefill_done()
    bench.tokens(1, 51, 52)
    if how == "lost":
        bench.join("d0", incarnation=2, model_fingerprint=b"another model")
    else:
        bench.fails("d0", how)
    again = bench.generated("d1")
    assert (again.request_id, again.kv_handoff, again.handoff) == ("r1.2", None, False)
    assert [choice.output_token_ids for choice in again.choices] == [(50, 51, 52)]
    assert (again.sampling, again.prompt_token_ids) == (bench.generated("p0").sampling, bench.generated("p0").prompt_token_ids)
    assert bench.to("p0", Release) == [], "the lost worker has read and released it"
    bench.tokens(3, 53, peer="d1", request_id="r1.2")
    bench.tokens(4, 54, peer="d1", request_id="r1.2", finish_reason="stop")
    assert bench.output() == [50, 51, 52, 53, 54]
    assert [update.error for update in bench.updates["r1"]] == [None] * 4
    assert bench.kinds() == ["replay"]
    bench.assert_idle()


def test_only_live_choices_are_replayed_each_from_its_own_position(make_bench):
    bench = make_bench("p0", "d0", "d1")
    bench.submit(n=3)
    bench.prefill_done(n=3)
    bench.tokens(1, 60, index=0, finish_reason="stop")
    bench.tokens(1, 61, index=1)
    bench.tokens(1, 62, 63, index=2)
    bench.leave("d0")
    starts = [(choice.index, choice.output_token_ids) for choice in bench.generated("d1").choices]
    assert starts == [(1, (51, 61)), (2, (52, 62, 63))]
    assert bench.core.membership.by_peer(b"d1").num_inflight == 2
    bench.tokens(2, 71, index=1, peer="d1", request_id="r1.2", finish_reason="stop")
    bench.tokens(3, 72, index=2, peer="d1", request_id="r1.2", finish_reason="length")
    assert [bench.output(index=index) for index in range(3)] == [[50, 60], [51, 61, 71], [52, 62, 63, 72]]
    assert bench.ended["r1"].request.finish_reasons == ["stop", "stop", "length"]
    bench.assert_idle()


def test_an_aggregated_worker_lost_in_mid_stream_is_replaced(make_bench):
    bench = make_bench("a0")
    bench.submit(n=2, prompt_logprobs=1)
    bench.tokens(0, 50, peer="a0", usage=Usage(num_cached_tokens=2, prompt_logprobs=(None,)))
    bench.join("d0")
    bench.leave("a0")
    again = bench.generated("d0")
    assert [(choice.index, choice.output_token_ids) for choice in again.choices] == [(0, (50,)), (1, ())]
    assert again.sampling.prompt_logprobs is None, "they have been told"
    bench.tokens(1, 51, request_id="r1.2", usage=Usage(kv_transfer=TransferUsage()))
    assert bench.output() == [50, 51]
    assert bench.updates["r1"][-1].handoff is None, "there never was one"


def test_a_stream_never_continues_with_another_model(make_bench):
    bench = make_bench("p0", "d0")
    bench.join("d1", model_fingerprint=b"v2")
    bench.join("a1", model_fingerprint=b"v2", max_num_seqs=1)
    bench.heartbeat("a1", num_running=9)
    bench.submit()
    bench.prefill_done()
    bench.tokens(1, 51)
    bench.leave("d0")
    bench.tick(10.0)
    assert bench.to("d1", Generate) == bench.to("a1", Generate) == []
    assert bench.error().code == NoWorker.code


def test_lost_tokens_are_computed_again(make_bench):
    bench = make_bench("p0", "d0", "d1")
    bench.submit()
    bench.prefill_done()
    bench.tokens(3, 53)
    assert bench.to("d0", Abort) == [Abort(request_ids=("r1",), reason="protocol_error")]
    assert "tokens 1 to 2 of choice 0 were lost" in bench.retries[0].error.message
    assert [choice.output_token_ids for choice in bench.generated("d1").choices] == [(50,)]
    bench.tokens(4, 54)
    bench.tokens(1, 51, 52, 53, peer="d1", request_id="r1.2", finish_reason="length")
    assert bench.output() == [50, 51, 52, 53]
    bench.assert_idle()


def test_what_came_with_a_gap_in_one_frame_is_not_lost_itself(after_handoff):
    frame = [Tokens("r1", 0, 1, (60,)), Tokens("r1", 1, 2, (72,)), Tokens("r1", 0, 2, (61,))]
    after_handoff.receive("d0", frame)
    assert (after_handoff.output(index=0), after_handoff.output(index=1)) == ([50, 60], [51])
    again = after_handoff.generated("d0")
    assert (again.request_id, [choice.output_token_ids for choice in again.choices]) == ("r1.2", [(50, 60), (51,)])


def test_a_gap_that_comes_again_and_again_ends_the_request(make_bench):
    bench = make_bench("p0", "d0", max_retries=1)
    bench.submit()
    bench.prefill_done()
    bench.tokens(3, 54)
    bench.tokens(3, 54, request_id="r1.2")
    assert bench.error().code == "protocol_error"
    assert bench.to("d0", Abort)[-1].request_ids == ("r1.2",)
    bench.assert_idle()


def test_late_tokens_of_a_lost_attempt_are_not_mistaken_for_the_present_one(make_bench):
    bench = make_bench("p0", "d0")
    bench.submit()
    bench.prefill_done()
    bench.tokens(1, 51)
    bench.receive("d0-again", Heartbeat(engine_id="d0", incarnation=1))
    bench.tokens(2, 99, peer="d0-again")
    bench.tokens(2, 52, peer="d0-again", request_id="r1.2")
    assert bench.output() == [50, 51, 52]


def test_a_silent_worker_is_replaced_within_the_heartbeat_timeout(make_bench):
    bench = make_bench("p0", "d0", "d1")
    bench.submit()
    bench.prefill_done()
    bench.tokens(1, 51)
    bench.now = 5.2
    bench.heartbeat("p0")
    bench.heartbeat("d1")
    bench.do(bench.core.on_timer(5.2))
    assert "decode worker d0 was lost: no heartbeat" in bench.retries[0].error.message
    assert bench.generated("d1").request_id == "r1.2"


def test_logprobs_of_the_second_worker_continue_those_of_the_first(make_bench):
    bench = make_bench("p0", "d0", "d1")
    bench.submit(logprobs=1)
    bench.prefill_done()
    entries = [TokenLogprobs((token, token), (-0.5, -0.5), 1) for token in (51, 52)]
    bench.tokens(1, 51, logprobs=(entries[0],))
    bench.leave("d0")
    bench.tokens(1, 51, 52, logprobs=tuple(entries), peer="d1", request_id="r1.2")
    told = [entry for update in bench.updates["r1"] for choice in update.choices for entry in choice.logprobs or ()]
    assert told == entries


def test_the_report_says_how_often_and_keeps_what_the_first_attempt_cost(make_bench):
    bench = make_bench("p0", "d0", "d1", "d2")
    bench.submit()
    bench.prefill_done()
    bench.fails("d0", FULL)
    loaded = TransferUsage(transport="shm", transferred_tokens=10, transferred_bytes=2048, verified_blocks=1)
    bench.tokens(1, 51, peer="d1", request_id="r1.2", usage=Usage(kv_transfer=loaded))
    bench.leave("d1")
    usage = Usage(num_cached_tokens=0, kv_transfer=TransferUsage(queue_ms=3.0))
    bench.tokens(2, 52, peer="d2", request_id="r1.3", usage=usage, finish_reason="length")
    report = bench.updates["r1"][-1].handoff
    assert report.cost == loaded
    assert (report.num_retries, report.num_replays, report.num_refusals) == (1, 1, 1)
    assert [retried.successor.engine_id for retried in bench.retries] == ["d1", "d2"]
    assert bench.ended["r1"].request.retries.kinds == ["replay"]


def test_a_stream_that_a_drain_has_ended_is_a_replay_and_no_refusal(make_bench):
    bench = make_bench("p0", "d0", "d1")
    bench.submit()
    bench.prefill_done()
    bench.tokens(1, 51)
    bench.fails("d0", DRAINING)
    request = bench.core.dispatcher.requests["r1"]
    assert (request.retries.kinds, request.retries.num_refusals, request.retries.blamed) == (["replay"], 0, [])
