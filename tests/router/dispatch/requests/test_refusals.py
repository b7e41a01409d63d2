"""Workers that refuse requests: a full worker is asked again, a closed one counts as lost, and clients see which."""

from __future__ import annotations

from itertools import pairwise

import pytest

from core.errors import NoWorker, Overloaded, ProtocolError, RouterSilent
from core.wire.messages import Abort, ErrorInfo, Generate, Heartbeat, Release

FULL = ErrorInfo(code="overloaded", message="worker holds 9 choices already", http_status=429, retryable=True)
DRAINING = ErrorInfo(code="no_worker", message="worker d0 drains", http_status=503, retryable=True)
DEAD = ErrorInfo(code="engine_dead", message="the engine died", http_status=503, retryable=True)
GRAMMAR = ErrorInfo.of(Overloaded("32 grammars wait to be compiled", param="structured_outputs"))
GIVEN_UP = ErrorInfo.of(RouterSilent("worker heard nothing from the router for too long"))

closing = pytest.mark.parametrize("error", [DRAINING, DEAD], ids=lambda error: error.code)


def refused_by_d0(bench, error: ErrorInfo, request_id: str = "r1"):
    """Return a bench in which d0 has refused a handoff."""
    bench.submit(request_id)
    bench.prefill_done(request_id)
    bench.fails("d0", error, request_id)
    return bench


# ---- what the next client hears ------------------------------------------------------------------------------------------


@closing
def test_next_client_gets_the_refusal_reason_until_the_worker_s_heartbeat(pair, error):
    refused_by_d0(pair, error)
    with pytest.raises(NoWorker, match=f"no decode worker .*: {error.message}") as refused:
        pair.submit("r2")
    assert (refused.value.http_status, refused.value.retryable) == (503, True)
    assert error.message in pair.core.not_ready_reason
    pair.heartbeat("d0")
    assert pair.core.not_ready_reason is None
    pair.submit("r2")
    assert pair.generated("p0").request_id == "r2"


def test_what_a_worker_refused_by_is_what_its_heartbeats_say_later(pair):
    refused_by_d0(pair, DRAINING)
    pair.heartbeat("d0", is_draining=True)
    with pytest.raises(NoWorker, match="worker d0 is draining"):
        pair.submit("r2")


def test_a_worker_that_refuses_for_lack_of_room_is_full_until_its_heartbeat(pair):
    refused_by_d0(pair, FULL)
    with pytest.raises(Overloaded) as refused:
        pair.submit("r2")
    assert (refused.value.http_status, refused.value.retryable) == (429, True)
    assert pair.core.not_ready_reason is None
    pair.heartbeat("d0")
    pair.submit("r2")


@closing
def test_where_one_takes_nothing_and_the_others_are_full_they_are_full(make_bench, error):
    bench = refused_by_d0(make_bench("p0", "d0", "d1"), error)
    bench.fails("d1", FULL, "r1.2")
    with pytest.raises(Overloaded):
        bench.submit("r2")


@closing
def test_an_aggregated_worker_that_takes_nothing_is_no_route(make_bench, error):
    bench = make_bench("a0")
    bench.submit("r1")
    bench.fails("a0", error)
    assert (bench.core.dispatcher.num_waiting, bench.updates) == (1, {}), "a successor may come"
    with pytest.raises(NoWorker, match=error.message):
        bench.submit("r2")


def test_a_refusal_of_a_request_that_has_ended_counts_as_well(make_bench):
    bench = make_bench("a0")
    bench.submit("r1")
    bench.do(bench.core.abort("r1", "client", 0.0))
    bench.fails("a0", DEAD)
    with pytest.raises(NoWorker, match=f"no worker takes requests: {DEAD.message}"):
        bench.submit("r2")


@closing
def test_what_was_reserved_at_a_worker_that_takes_nothing_goes_elsewhere(make_bench, error):
    bench = make_bench("p0", "d0", "d1")
    for request_id in ("r1", "r2", "r3"):
        bench.submit(request_id)
    assert [bench.core.dispatcher.requests[name].attempt.decode.engine_id for name in ("r1", "r2", "r3")] == ["d0", "d1", "d0"]
    bench.prefill_done("r1")
    bench.fails("d0", error, "r1")
    bench.prefill_done("r3")
    assert [message.request_id for message in bench.to("d0", Generate)] == ["r1"]
    assert [message.request_id for message in bench.to("d1", Generate)] == ["r1.2", "r3"]


@pytest.mark.parametrize("max_retries", [0, 2])
@pytest.mark.parametrize("error", [FULL, DRAINING], ids=lambda error: error.code)
def test_refusals_before_the_first_token_cost_no_retry(make_bench, error, max_retries):
    bench = make_bench("p0", "p1", "p2", "p3", "d0", max_retries=max_retries)
    bench.submit()
    for number, name in enumerate(("p0", "p1", "p2")):
        bench.fails(name, error, "r1" if not number else f"r1.{number + 1}")
    assert bench.generated("p3").request_id == "r1.4"
    assert bench.core.dispatcher.requests["r1"].retries.blamed == []


def test_prompt_that_is_refused_again_and_again_ends(make_bench):
    bench = make_bench("a0", max_retries=0, request_timeout_s=600.0)
    bench.submit()
    while "r1" not in bench.ended:
        bench.fails("a0", DRAINING, bench.generated("a0").request_id)
        bench.tick(bench.now + 2.0)
    assert bench.error() == DRAINING
    assert bench.now <= 40.0


def test_refusals_for_two_reasons_in_turn_are_counted_together(make_bench):
    bench = make_bench(*(f"a{number}" for number in range(40)), max_retries=0)
    bench.submit()
    request = bench.core.dispatcher.requests["r1"]
    for error in [FULL] * 16 + [DRAINING]:
        assert "r1" not in bench.ended
        bench.fails(request.current.engine_id, error, request.wire_id)
    assert bench.error() == DRAINING


def test_a_lost_request_that_finds_all_full_again_and_again_waits_to_its_deadline(make_bench):
    bench = make_bench("a0", "a1", request_timeout_s=60.0)
    bench.submit()
    bench.leave("a0")
    num_refusals = 0
    while "r1" not in bench.ended:
        request = bench.core.dispatcher.requests["r1"]
        if request.current is not None:
            bench.fails("a1", FULL, request.wire_id)
            num_refusals += 1
        bench.tick(bench.now + 1.0)
    assert (bench.error().code, bench.now) == ("deadline_exceeded", 60.0)
    assert num_refusals > 50
    bench.assert_idle()


@pytest.mark.parametrize("how", ["lost", "drains"])
def test_a_request_waits_for_room_if_the_worker_before_was_lost_or_drained(make_bench, how):
    bench = make_bench("a0", "a1")
    bench.submit()
    first = bench.core.dispatcher.requests["r1"].current.engine_id
    other = {"a0": "a1", "a1": "a0"}[first]
    if how == "lost":
        bench.leave(first)
    else:
        bench.fails(first, DRAINING)
    bench.fails(other, FULL, "r1.2")
    assert "r1" not in bench.ended
    bench.now = 1.0
    bench.heartbeat(other)
    bench.do(bench.core.on_timer(bench.now))
    assert bench.generated(other).request_id == "r1.3"


# ---- refusals of one request only, because of its grammar ----------------------------------------------------------------


def test_a_refused_grammar_does_not_close_the_worker_for_others(make_bench):
    bench = make_bench("a0")
    bench.submit("r1")
    bench.fails("a0", GRAMMAR)
    bench.submit("r2")
    assert bench.generated("a0").request_id == "r2"


def test_a_grammar_that_every_worker_refuses_before_the_first_token_is_a_429(make_bench):
    bench = make_bench("p0", "p1", "d0")
    bench.submit()
    bench.fails("p0", GRAMMAR)
    bench.fails("p1", GRAMMAR, bench.generated("p1").request_id)
    assert (bench.error(), bench.error().http_status) == (GRAMMAR, 429)
    assert [len(bench.to(name, Generate)) for name in ("p0", "p1")] == [1, 1]
    bench.assert_idle()


def test_a_grammar_refused_after_the_first_token_is_tried_elsewhere(make_bench):
    bench = refused_by_d0(make_bench("p0", "d0", "d1"), GRAMMAR)
    assert (bench.generated("d1").request_id, bench.generated("d1").kv_handoff) == ("r1.2", bench.handoff())
    request = bench.core.dispatcher.requests["r1"]
    assert (request.retries.num_refusals, request.retries.kinds, request.retries.blamed) == (1, [], [])


def test_a_worker_that_refuses_a_grammar_is_asked_again_later_and_later(make_bench):
    bench = refused_by_d0(make_bench("p0", "d0", request_timeout_s=600.0), GRAMMAR)
    refused_at, num_sent = [0.0], 1
    while "r1" not in bench.ended:
        bench.tick(bench.now + 0.25)
        if len(bench.to("d0", Generate)) > num_sent:
            num_sent += 1
            refused_at.append(bench.now)
            bench.fails("d0", GRAMMAR, bench.generated("d0").request_id)
    pauses = [later - earlier for earlier, later in pairwise(refused_at)]
    assert (pauses[:6], set(pauses[6:])) == ([0.5, 1.0, 2.0, 4.0, 8.0, 16.0], {16.0})
    assert (bench.error(), num_sent) == (GRAMMAR, 19), "16 refusals are free, and two retries"
    assert bench.to("p0", Release) == [Release(transfer_ids=("t-r1",))]
    bench.assert_idle()


def test_the_first_pause_of_a_refused_grammar_is_short_whatever_came_before(make_bench):
    bench = make_bench("a0")
    bench.submit()
    for _ in range(6):
        bench.fails("a0", DRAINING, bench.generated("a0").request_id)
        bench.tick(bench.now + 2.0)
    bench.fails("a0", GRAMMAR, "r1.7")
    bench.tick(bench.now + 0.5)
    assert bench.generated("a0").request_id == "r1.8"


@pytest.mark.parametrize("num_workers", [2, 4, 19])
def test_more_decode_workers_do_not_end_a_refused_grammar_sooner(make_bench, num_workers):
    bench = make_bench("p0", *(f"d{number}" for number in range(num_workers)), request_timeout_s=600.0)
    bench.submit()
    bench.prefill_done()
    request, pauses = bench.core.dispatcher.requests["r1"], set()
    while "r1" not in bench.ended:
        while request.current is not None and "r1" not in bench.ended:
            bench.fails(request.current.engine_id, GRAMMAR, request.wire_id)
        pauses |= set() if pauses else {until - bench.now for until in request.retries.refusing_until.values()}
        bench.tick(bench.now + 0.5)
    assert pauses == {0.5}, "each worker is asked again as if it was the only one"
    assert bench.now > 190.0
    assert bench.error() == GRAMMAR


@pytest.mark.parametrize("num_workers", [1, 4, 19])
def test_more_workers_do_not_end_a_refused_grammar_sooner_before_its_first_token(make_bench, num_workers):
    bench = make_bench("a0", request_timeout_s=600.0)
    bench.submit()
    for number in range(1, num_workers + 1):
        bench.join(f"a{number}")
    bench.leave("a0")  # which may have admitted it: it waits
    request = bench.core.dispatcher.requests["r1"]
    while "r1" not in bench.ended:
        while request.current is not None and "r1" not in bench.ended:
            bench.fails(request.current.engine_id, GRAMMAR, request.wire_id)
        bench.tick(bench.now + 0.5)
    assert bench.now > 190.0
    assert bench.error() == GRAMMAR


def test_a_new_request_is_refused_only_when_all_of_many_workers_refuse_its_grammar(make_bench):
    bench = make_bench(*(f"a{number}" for number in range(25)))
    bench.submit()
    request, refusing = bench.core.dispatcher.requests["r1"], []
    while "r1" not in bench.ended:
        refusing.append(request.current.engine_id)
        bench.fails(refusing[-1], GRAMMAR, request.wire_id)
    assert len(refusing) == len(set(refusing)) == 25
    assert bench.error() == GRAMMAR


def test_a_started_request_that_waits_with_its_grammar_leaves_the_worker_to_others(make_bench):
    bench = refused_by_d0(make_bench("p0", "d0"), GRAMMAR)
    bench.submit("r2")
    bench.prefill_done("r2")
    assert bench.generated("d0").request_id == "r2"


def test_other_requests_that_wait_pass_one_whose_grammar_was_refused(make_bench):
    bench = make_bench("a0")
    for request_id in ("r1", "r2"):
        bench.submit(request_id)
    bench.leave("a0")
    bench.join("a0", incarnation=2)
    bench.fails("a0", GRAMMAR, "r1.2")
    bench.fails("a0", FULL, "r2.2")
    assert bench.core.dispatcher.num_waiting == 2
    bench.tick(0.25)
    assert bench.generated("a0").request_id == "r2.3"
    bench.tick(0.5)
    assert bench.generated("a0").request_id == "r1.3"


def test_a_grammar_refused_by_the_only_worker_with_enough_room_is_tried_there_again(make_bench):
    bench = make_bench()
    bench.join("a0", max_num_choices=8)
    bench.join("a1", max_num_choices=2)
    bench.submit(n=4)
    bench.leave("a0")
    bench.join("a0", incarnation=2, max_num_choices=8)
    bench.fails("a0", GRAMMAR, "r1.2")
    assert "r1" not in bench.ended, "a1 can never hold it, but a0 can"
    bench.tick(0.5)
    assert bench.generated("a0").request_id == "r1.3"


# ---- how long started requests wait ----------------------------------------------------------------------------------


@closing
def test_a_closed_worker_is_not_waited_for_like_a_full_one(make_bench, error):
    bench = refused_by_d0(make_bench("p0", "d0", heartbeat_timeout_s=50.0), error)
    bench.wait(9.9)
    assert "r1" not in bench.ended
    bench.wait(10.0)
    assert (bench.error().code, bench.error().http_status) == ("no_worker", 503)
    assert f"{error.message}; no worker could continue the request for 10 s" in bench.error().message
    assert bench.to("p0", Release) == [Release(transfer_ids=("t-r1",))]
    bench.assert_idle()


def test_the_time_without_workers_begins_when_the_request_begins_to_wait(make_bench):
    bench = make_bench("p0", "d0", heartbeat_timeout_s=50.0)
    bench.now = 30.0
    refused_by_d0(bench, DRAINING)
    bench.wait(39.9)
    assert "r1" not in bench.ended
    bench.wait(40.0)
    assert bench.error().code == "no_worker"


def test_the_time_without_workers_begins_when_the_last_full_worker_leaves(make_bench):
    bench = refused_by_d0(make_bench("p0", "d0", heartbeat_timeout_s=50.0), FULL)
    bench.wait(12.0)
    bench.leave("d0")
    bench.wait(21.9)
    assert "r1" not in bench.ended
    bench.wait(22.0)
    assert bench.error().code == "no_worker"
    bench.assert_idle()


def test_many_that_wait_cost_no_more_than_the_next_one(make_bench, monkeypatch):
    bench = make_bench("p0", "d0", "d1", max_requests=100, heartbeat_timeout_s=50.0)
    bench.submit("running")
    bench.prefill_done("running")
    for number in range(50):
        bench.submit(f"r{number}")
    for name in ("d0", "d1"):
        bench.heartbeat(name, is_draining=True)
    for number in range(50):
        bench.fails("p0", DRAINING, f"r{number}")
    dispatcher, tried, num_offers = bench.core.dispatcher, [], 0
    offers, check = dispatcher.route_costs.offers, dispatcher.placement.check_room

    def count(*args, **kwargs):
        nonlocal num_offers
        num_offers += 1
        return offers(*args, **kwargs)

    monkeypatch.setattr(dispatcher.route_costs, "offers", count)
    monkeypatch.setattr(
        dispatcher.placement, "check_room", lambda request, *args: tried.append(request) or check(request, *args)
    )
    bench.do(bench.core.abort("running", "client", bench.now))
    assert (dispatcher.num_waiting, len(tried), num_offers) == (50, 1, 0)
    bench.wait(9.5)
    assert dispatcher.num_waiting == 50
    bench.wait(11.0)
    assert {bench.error(f"r{number}").code for number in range(50)} == {"no_worker"}, "each has waited for itself"


def test_all_that_wait_for_room_are_placed_in_order_when_there_is_some(make_bench):
    bench = make_bench("p0", "d0", max_requests=100, heartbeat_timeout_s=50.0)
    for number in range(5):
        bench.submit(f"r{number}", n=1 + number % 2)
    bench.leave("p0")
    bench.leave("d0")
    bench.tick(2.0)
    bench.join("a0", max_num_choices=4)
    assert [message.request_id for message in bench.to("a0", Generate)] == ["r0.3", "r1.3", "r2.3"]
    bench.do(bench.core.abort("r0", "client", bench.now))
    assert bench.generated("a0").request_id == "r4.3", "r3 needs two places"


# ---- workers that failed a request and stay --------------------------------------------------------------------------


def gives_up(bench, name: str) -> None:
    bench.fails(name, GIVEN_UP)


def reconnects(bench, name: str) -> None:
    bench.receive(f"{name}-again", Heartbeat(engine_id=name, incarnation=1))
    assert bench.to(f"{name}-again", Abort) == [Abort(request_ids=("r1",), reason="peer_lost")]


def loses_tokens(bench, name: str) -> None:
    bench.tokens(5, 55, peer=name)


@pytest.mark.parametrize("fails", [gives_up, reconnects])
def test_another_prefill_worker_begins_again_even_if_it_has_more_to_do(make_bench, fails):
    bench = make_bench("p0", "d0")
    bench.submit()
    bench.join("p1")
    bench.heartbeat("p1", num_running=3)
    fails(bench, "p0")
    assert bench.generated("p1").request_id == "r1.2"


@pytest.mark.parametrize("has_decoded", [False, True])
@pytest.mark.parametrize("fails", [gives_up, reconnects, loses_tokens])
def test_another_decode_worker_continues_even_if_it_has_more_to_do(make_bench, fails, has_decoded):
    bench = make_bench("p0", "d0", "d1")
    bench.heartbeat("d1", num_running=3)
    bench.submit()
    bench.prefill_done()
    if has_decoded:
        bench.tokens(1, 51)
    fails(bench, "d0")
    assert bench.generated("d1").request_id == "r1.2"


def test_a_worker_that_failed_a_request_gets_it_again_as_the_last_resort(pair):
    pair.submit()
    pair.prefill_done()
    gives_up(pair, "d0")
    assert pair.generated("d0").request_id == "r1.2"


@pytest.mark.parametrize(("max_retries", "num_losses"), [(0, 1), (1, 18), (2, 19)])
def test_a_request_that_breaks_each_worker_ends_although_all_return(make_bench, max_retries, num_losses):
    bench = make_bench("a0", "a1", max_retries=max_retries)
    bench.submit()
    for _ in range(num_losses):
        worker = bench.core.dispatcher.requests["r1"].current.engine_id
        bench.do(bench.core.on_malformed(worker.encode(), ProtocolError("no such message"), bench.now))
        bench.join(worker)
    assert bench.error().code == "peer_lost"
    bench.assert_idle()
