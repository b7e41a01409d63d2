"""Which requests are admitted, and how they are spread over workers."""

from __future__ import annotations

import pytest

from core.errors import ContextTooLong, InvalidRequest, NoWorker, Overloaded
from core.wire.messages import Generate, Usage
from router.dispatch.request_state import RequestPhase


def test_requests_beyond_the_limit_are_refused(make_bench):
    bench = make_bench("a0")
    for number in range(3):
        bench.submit(f"r{number}")
    with pytest.raises(Overloaded):
        bench.submit("r3")
    bench.do(bench.core.abort("r0", "client", 0.0))
    bench.submit("r3")


def test_a_refused_request_leaves_no_trace(pair):
    with pytest.raises(ContextTooLong):
        pair.submit(prompt=95)
    pair.assert_idle()
    assert pair.to("p0", Generate) == []


def test_requests_are_spread_over_equal_workers(make_bench):
    bench = make_bench("p0", "p1", "d0", "d1")
    bench.submit("r1")
    bench.submit("r2")
    assert len(bench.to("p0", Generate)) == len(bench.to("p1", Generate)) == 1
    bench.prefill_done("r1", "p0")
    bench.prefill_done("r2", "p1")
    assert len(bench.to("d0", Generate)) == len(bench.to("d1", Generate)) == 1


def test_phases_are_counted(pair):
    pair.submit("r1")
    pair.submit("r2")
    pair.prefill_done("r2")
    assert {phase.value: pair.count(phase) for phase in RequestPhase} == {
        "encode": 0,
        "prefill": 1,
        "handoff": 1,
        "decode": 0,
    }
    pair.tokens(1, 51, request_id="r2")
    assert {phase.value: pair.count(phase) for phase in RequestPhase} == {
        "encode": 0,
        "prefill": 1,
        "handoff": 0,
        "decode": 1,
    }


@pytest.mark.parametrize("full", ["p0", "d0"])
def test_request_is_refused_before_any_work_if_no_worker_of_a_role_has_room(make_bench, full):
    bench = make_bench()
    for name in ("p0", "d0"):
        bench.join(name, max_num_choices=2 if name == full else 100)
    bench.submit("r1", n=2)
    with pytest.raises(Overloaded):
        bench.submit("r2")
    assert [message.request_id for message in bench.to("p0", Generate)] == ["r1"]
    bench.do(bench.core.abort("r1", "client", 0.0))
    bench.submit("r3")


@pytest.mark.parametrize("limits", [(3, 100), (100, 3)])
def test_more_choices_than_any_worker_ever_holds_are_the_client_s_mistake(make_bench, limits):
    bench = make_bench()
    bench.join("p0", max_num_choices=limits[0])
    bench.join("d0", max_num_choices=limits[1])
    with pytest.raises(InvalidRequest, match=r"n = 4.* more than 3 choices") as refused:
        bench.submit(n=4)
    assert refused.value.param == "n"
    bench.join("a0", max_num_choices=4)
    bench.submit("r1", n=4)
    with pytest.raises(Overloaded):
        bench.submit("r2", n=4)
    bench.submit("r3", n=3)


def test_a_worker_that_names_no_limit_may_hold_any_number_of_choices(make_bench):
    bench = make_bench()
    bench.join("a0", max_num_choices=1)
    bench.join("a1", max_num_choices=0)
    bench.submit(n=9)
    assert bench.generated("a1").n == 9
    bench.core.membership.by_peer(b"a1").is_refusing = True
    with pytest.raises(Overloaded):
        bench.submit("r2", n=9)


def test_choices_count_until_they_end(make_bench):
    bench = make_bench()
    bench.join("p0", max_num_choices=2)
    bench.join("d0", max_num_choices=4)
    bench.submit("r1", n=2)
    bench.prefill_done("r1", n=2)
    bench.submit("r2", n=2)
    bench.prefill_done("r2", n=2)
    with pytest.raises(Overloaded):
        bench.submit("r3")
    bench.tokens(1, 60, request_id="r1", index=0, finish_reason="stop")
    with pytest.raises(Overloaded):
        bench.submit("r3", n=2)
    bench.tokens(1, 60, request_id="r1", index=1, finish_reason="stop")
    bench.submit("r3", n=2)


def test_a_choice_that_ends_by_its_text_leaves_its_place_to_others(make_bench):
    bench = make_bench("p0")
    bench.join("d0", max_num_choices=2)
    bench.submit("r1", n=2)
    bench.prefill_done("r1", n=2)
    with pytest.raises(Overloaded):
        bench.submit("r2")
    bench.do(bench.core.finish_choice("r1", 0, 0.0))
    (worker,) = [worker for worker in bench.core.membership.workers if worker.role == "decode"]
    assert worker.num_inflight == 1
    bench.tokens(1, 60, request_id="r1", index=0, finish_reason="length")  # was under way
    assert worker.num_inflight == 1
    bench.submit("r2")
    assert worker.num_inflight == 2
    bench.tokens(1, 60, request_id="r1", index=1, finish_reason="stop")
    assert worker.num_inflight == 1
    bench.do(bench.core.abort("r2", "client", 0.0))
    bench.assert_idle()


def test_load_that_another_router_has_brought_counts(make_bench):
    bench = make_bench("p0")
    bench.join("d0", max_num_choices=10)
    bench.heartbeat("d0", num_running=4, num_waiting=6)
    with pytest.raises(Overloaded):
        bench.submit()
    bench.heartbeat("d0", num_running=4, num_waiting=5)
    bench.submit()


def test_a_full_decode_worker_is_passed_over(make_bench):
    bench = make_bench("p0")
    bench.join("d0", max_num_choices=1, max_num_seqs=1000)
    bench.join("d1", max_num_choices=10, max_num_seqs=1)
    for request_id in ("r1", "r2", "r3"):
        bench.submit(request_id)
        bench.prefill_done(request_id)
    assert [message.request_id for message in bench.to("d0", Generate)] == ["r1"]
    assert [message.request_id for message in bench.to("d1", Generate)] == ["r2", "r3"]


# ---- workers of different size -------------------------------------------------------------------------------------------


@pytest.fixture
def uneven(make_bench):
    """A worker that holds much, and one that holds little."""
    bench = make_bench()
    bench.join("a0", max_model_len=100, max_num_choices=8)
    bench.join("a1", max_model_len=20, max_num_choices=2)
    return bench


larger = pytest.mark.parametrize("wanted", [{"prompt": 40}, {"prompt": 10, "max_tokens": 5, "n": 4}], ids=["tokens", "choices"])


@larger
def test_what_only_a_worker_that_is_away_could_hold_is_worth_another_try(uneven, wanted):
    uneven.heartbeat("a0", is_draining=True)
    with pytest.raises(NoWorker, match="take no requests at the moment") as refused:
        uneven.submit(**wanted)
    assert refused.value.http_status == 503
    uneven.leave("a0")
    uneven.tick(9.0)
    with pytest.raises(NoWorker):
        uneven.submit(**wanted)
    uneven.tick(11.0)
    with pytest.raises((ContextTooLong, InvalidRequest)):
        uneven.submit(**wanted)
    with pytest.raises(ContextTooLong):
        uneven.submit(prompt=100)


@pytest.fixture
def small(make_bench):
    """A decode worker that holds much, alone since its prefill worker has left; all others hold little."""
    bench = make_bench()
    for name in ("p0", "a0"):
        bench.join(name, max_model_len=20, max_num_choices=2)
    bench.join("d0", max_model_len=100, max_num_choices=8)
    bench.leave("p0")
    return bench


@larger
@pytest.mark.parametrize("how", ["drains", "leaves"])
def test_a_worker_that_is_away_and_would_serve_alone_is_worth_another_try(small, wanted, how):
    if how == "drains":
        small.heartbeat("d0", is_draining=True)
    else:
        small.leave("d0")
    with pytest.raises(NoWorker, match="take no requests at the moment"):
        small.submit(**wanted)
    assert small.core.longest_model_len(small.now) == 100
    small.join("p0", incarnation=2, max_model_len=20, max_num_choices=2)
    with pytest.raises((ContextTooLong, InvalidRequest)):  # d0 would read from it
        small.submit(**wanted)
    assert small.core.longest_model_len(small.now) == 20


@larger
def test_a_request_waits_for_the_successor_of_a_worker_that_served_it_alone(small, wanted):
    small.submit(**wanted)
    small.leave("d0")
    small.tick(5.0)
    assert small.core.dispatcher.num_waiting == 1
    small.join("d0", incarnation=2, max_model_len=100, max_num_choices=8)
    assert small.generated("d0").request_id == "r1.2"


def test_a_request_waits_for_the_successor_of_the_only_worker_that_could_hold_it(uneven):
    uneven.submit(prompt=40)
    uneven.leave("a0")
    uneven.tick(5.0)
    assert uneven.core.dispatcher.num_waiting == 1
    uneven.join("a0", incarnation=2, max_model_len=100)
    assert uneven.generated("a0").request_id == "r1.2"


def test_the_longest_context_is_that_of_workers_that_may_be_back(uneven):
    for change in (lambda: None, lambda: uneven.heartbeat("a0", is_draining=True), lambda: uneven.leave("a0")):
        change()
        assert uneven.core.longest_model_len(uneven.now) == 100
    assert uneven.core.max_model_len == 20
    assert uneven.core.longest_model_len(uneven.now + 11.0) == 20


def test_the_longest_context_is_not_below_what_a_decode_worker_alone_serves(make_bench):
    bench = make_bench()
    bench.join("p0", max_model_len=50)
    bench.join("d0", max_model_len=100)
    bench.leave("p0")
    assert (bench.core.max_model_len, bench.core.longest_model_len(bench.now)) == (100, 100)


# ---- a decode worker alone ---------------------------------------------------------------------------------------------------


def test_a_decode_worker_serves_alone_once_its_prefill_worker_is_lost(make_bench):
    bench = make_bench("p0", "d0")
    bench.leave("p0")
    bench.submit(n=2)
    alone = bench.generated("d0")
    assert (alone.handoff, alone.kv_handoff, alone.choices, alone.n) == (False, None, (), 2)
    assert bench.core.not_ready_reason is None
    usage = Usage(num_cached_tokens=4)
    for index in range(2):
        bench.tokens(0, 50 + index, index=index, usage=usage, finish_reason="length")
    report = bench.updates["r1"][-1].handoff
    assert (report.cost.recomputed_tokens, report.cost.fallback_reason) == (6, "no_prefill")
    assert (report.first_token, report.second_token) == (None, None)
    bench.assert_idle()


def test_a_decode_worker_does_not_serve_alone_before_there_was_a_prefill_worker(make_bench):
    bench = make_bench("d0")
    with pytest.raises(NoWorker, match="no prefill worker"):
        bench.submit()
    assert bench.core.not_ready_reason is not None


def test_decode_worker_serves_alone_if_it_cannot_read_the_only_prefill_worker(make_bench):
    bench = make_bench("p0", "d0")
    bench.join("p1", model_fingerprint=b"new")
    bench.leave("p0")
    bench.submit()
    assert not bench.generated("d0").handoff
    assert bench.core.not_ready_reason is None


def test_a_decode_worker_without_a_readable_prefill_worker_does_not_serve_alone(make_bench):
    bench = make_bench("d0")
    bench.join("p1", model_fingerprint=b"new")
    with pytest.raises(NoWorker, match="model fingerprint"):
        bench.submit()


@pytest.mark.parametrize("how", ["drains", "stalls", "dies"])
def test_a_prefill_worker_that_takes_nothing_counts_as_lost(make_bench, how):
    bench = make_bench("p0", "d0")
    if how == "drains":
        bench.heartbeat("p0", is_draining=True)
    elif how == "stalls":
        for bench.now in (1.0, 2.0, 3.0, 4.0):
            bench.heartbeat("p0", stalled_ms=bench.now * 1000.0)
            bench.heartbeat("d0")
            bench.do(bench.core.on_timer(bench.now))
    else:
        bench.core.membership.by_peer(b"p0").closed_because = "dead"
    bench.submit()
    assert not bench.generated("d0").handoff


def test_a_prefill_worker_that_is_full_is_not_passed_by(make_bench):
    bench = make_bench("p0", "d0")
    bench.core.membership.by_peer(b"p0").is_refusing = True
    with pytest.raises(Overloaded):
        bench.submit()


def test_with_the_prefill_worker_back_handoffs_are_made_again(make_bench):
    bench = make_bench("p0", "d0")
    bench.leave("p0")
    bench.submit("r1")
    bench.join("p0", incarnation=2)
    bench.submit("r2")
    assert bench.generated("p0").handoff


def test_a_missing_decode_worker_says_when_to_come_again(make_bench):
    bench = make_bench("p0")
    bench.join("d0", start_ms=12_000, is_supervised=True)
    bench.tick(1.0)
    bench.leave("d0")
    bench.tick(5.0)
    with pytest.raises(NoWorker, match="no decode worker") as caught:
        bench.submit()
    assert caught.value.retry_after_s == 31, "34 s from the first tick without it, 3 s of which have passed"


def test_a_stream_waits_for_a_supervised_successor_beyond_worker_wait_s(make_bench):
    bench = make_bench("p0", worker_wait_s=5.0, request_timeout_s=200.0)
    bench.join("d0", start_ms=12_000, is_supervised=True)
    bench.submit()
    bench.prefill_done()
    bench.tokens(1, 51)
    bench.leave("d0")
    bench.tick(31.0)
    bench.join("d0", incarnation=2)
    assert bench.generated("d0").request_id == "r1.2"


def test_a_worker_that_only_short_requests_reach_sets_no_limit_of_choices(make_bench):
    bench = make_bench()
    bench.join("p0", host_id="h1", max_model_len=40)
    bench.join("d0", host_id="h1", max_num_choices=4)  # reads only from p0, which takes no long prompt
    bench.join("p1", host_id="h2")
    bench.join("d1", host_id="h2", max_num_choices=2)
    bench.submit("r1", n=3)
    with pytest.raises(InvalidRequest, match="holds more than 2 choices"):
        bench.submit("r2", prompt=60, n=3)
