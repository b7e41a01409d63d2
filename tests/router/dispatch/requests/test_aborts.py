"""Requests and choices that end from the client's side, in every phase."""

from __future__ import annotations

from core.wire.messages import Abort, Generate, Release, Tokens


def test_an_abort_during_prefill_stops_the_prefill_worker(pair):
    pair.submit()
    pair.do(pair.core.abort("r1", "client disconnected", 0.0))
    assert pair.to("p0", Abort) == [Abort(request_ids=("r1",), reason="client disconnected")]
    assert pair.to("d0", Abort) == []
    assert pair.error().code == "cancelled"
    pair.assert_idle()


def test_an_abort_that_crosses_the_prefill_result_releases_the_handoff(pair):
    pair.submit()
    pair.do(pair.core.abort("r1", "client", 0.0))
    pair.prefill_done()
    assert pair.to("p0", Release) == [Release(transfer_ids=("t-r1",))]
    assert pair.to("d0", Generate) == []


def test_an_abort_during_a_handoff_stops_decode_and_releases_the_lease(pair):
    pair.submit()
    pair.prefill_done()
    pair.do(pair.core.abort("r1", "client", 0.0))
    assert pair.to("d0", Abort) == [Abort(request_ids=("r1",), reason="client")]
    assert pair.to("p0", Release) == [Release(transfer_ids=("t-r1",))]
    pair.assert_idle()


def test_an_abort_during_decode_stops_decode_only(pair):
    pair.submit()
    pair.prefill_done()
    pair.tokens(1, 51)
    pair.do(pair.core.abort("r1", "client", 0.0))
    assert pair.to("d0", Abort)
    assert pair.to("p0", Release) == pair.to("p0", Abort) == []
    pair.assert_idle()


def test_aborting_twice_or_something_unknown_does_nothing(make_bench):
    bench = make_bench("a0")
    bench.submit()
    bench.do(bench.core.abort("r1", "client", 0.0))
    assert bench.core.abort("r1", "client", 0.0) == []
    assert bench.core.abort("ghost", "client", 0.0) == []


def test_a_stop_string_in_the_only_choice_ends_the_request_well(pair):
    pair.submit()
    pair.prefill_done()
    pair.tokens(1, 51)
    pair.do(pair.core.finish_choice("r1", 0, 0.0))
    assert pair.to("d0", Abort) == [Abort(request_ids=("r1",), reason="stop")]
    assert pair.ended["r1"].request.error is None
    assert pair.ended["r1"].request.finish_reasons == ["stop"]
    pair.assert_idle()


def test_a_stop_string_in_one_of_two_choices_lets_the_other_continue(make_bench):
    bench = make_bench("a0")
    bench.submit(n=2)
    bench.receive("a0", [Tokens("r1", 0, 0, (1,)), Tokens("r1", 1, 0, (2,))])
    bench.do(bench.core.finish_choice("r1", 0, 0.0))
    assert bench.to("a0", Abort) == [Abort(request_ids=("r1/0",), reason="stop")]
    bench.receive("a0", [Tokens("r1", 0, 1, (3,)), Tokens("r1", 1, 1, (4,), "length")])
    assert (bench.output(index=0), bench.output(index=1)) == ([1], [2, 4])
    assert bench.ended["r1"].request.finish_reasons == ["stop", "length"]
    bench.assert_idle()


def test_a_choice_stopped_at_its_first_token_has_no_handoff(pair):
    pair.submit(n=2)
    pair.prefill_done(n=2)
    pair.do(pair.core.finish_choice("r1", 1, 0.0))
    assert pair.to("d0", Abort) == [Abort(request_ids=("r1/1",), reason="stop")]
    pair.tokens(1, 60, index=0, finish_reason="stop")
    assert "r1" in pair.ended


def test_an_abort_while_the_request_waits_for_a_decode_worker_releases_the_lease(pair):
    pair.submit()
    pair.leave("d0")
    pair.prefill_done()
    pair.do(pair.core.abort("r1", "client", 0.0))
    assert pair.to("p0", Release) == [Release(transfer_ids=("t-r1",))]
    assert pair.error().code == "cancelled"
    pair.assert_idle()
    pair.join("d0", incarnation=2)
    assert pair.to("d0", Generate) == []


def test_an_abort_after_a_retry_names_the_present_attempt(make_bench):
    bench = make_bench("p0", "p1", "d0")
    bench.submit()
    bench.leave("p0")
    bench.do(bench.core.abort("r1", "client", 0.0))
    assert bench.to("p1", Abort) == [Abort(request_ids=("r1.2",), reason="client")]
    bench.assert_idle()


def test_a_choice_stopped_after_a_retry_is_named_by_the_present_attempt(make_bench):
    bench = make_bench("p0", "d0", "d1")
    bench.submit(n=2)
    bench.prefill_done(n=2)
    bench.leave("d0")
    bench.do(bench.core.finish_choice("r1", 1, 0.0))
    assert bench.to("d1", Abort) == [Abort(request_ids=("r1.2/1",), reason="stop")]


def test_tokens_of_a_stopped_choice_that_are_under_way_are_no_gap(pair):
    pair.submit(n=2)
    pair.prefill_done(n=2)
    pair.tokens(1, 60, index=1)
    pair.do(pair.core.finish_choice("r1", 1, 0.0))
    for position in (2, 3, 4):
        pair.tokens(position, 60 + position, index=1)
    pair.tokens(1, 70, index=0, finish_reason="length")
    assert pair.kinds() == []
    assert pair.output(index=1) == [51, 60]
    assert pair.ended["r1"].request.error is None


def test_the_last_choice_stopped_while_the_request_waits_ends_it_well(pair):
    pair.submit()
    pair.leave("d0")
    pair.prefill_done()
    pair.do(pair.core.finish_choice("r1", 0, 0.0))
    assert pair.ended["r1"].request.error is None
    assert pair.to("p0", Release)
    pair.assert_idle()
