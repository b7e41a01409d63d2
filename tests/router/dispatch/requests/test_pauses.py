"""A pause of the router, however long, costs no stream and no retry."""

from __future__ import annotations

import pytest

from core.errors import DeadlineUnreachable, Overloaded, RequestError, RouterSilent
from core.wire.messages import ErrorInfo, Generate, Heartbeat, Registered
from core.wire.sampling import SamplingParams
from router.dispatch.core import Transmit
from router.dispatch.policy import choose_route

LENGTHS = pytest.mark.parametrize("seconds", [4.0, 6.5, 12.0, 60.0])
SILENT = ErrorInfo.of(RouterSilent("worker heard nothing from the router for too long"))
LATE = ErrorInfo(code="deadline_exceeded", message="the request's time budget is used up", http_status=504)


def pair_decoding(make_bench, **limits):
    bench = make_bench("p0", "d0", **{"max_retries": 0, "request_timeout_s": 50.0, **limits})
    bench.tick(0.0)
    bench.submit()
    bench.prefill_done()
    bench.tokens(1, 51)
    return bench


def freeze(bench, seconds: float) -> None:
    bench.now += seconds


@LENGTHS
@pytest.mark.parametrize("tick_is_first", [False, True])
def test_a_live_worker_that_comes_by_many_connections_costs_no_retry(make_bench, seconds, tick_is_first):
    bench = pair_decoding(make_bench)
    freeze(bench, seconds)
    if tick_is_first:
        bench.do(bench.core.on_timer(bench.now))
    peer = "d0"
    for number in range(5):
        bench.do(bench.core.on_unreachable(peer.encode(), bench.now))
        peer = f"d0-{number}"
        bench.receive(peer, Heartbeat(engine_id="d0", incarnation=1))
        bench.do(bench.core.on_timer(bench.now))
    newest = bench.generated(peer)
    bench.tokens(2, 52, peer=peer, request_id=newest.request_id, finish_reason="length")
    assert bench.output() == [50, 51, 52]
    bench.assert_idle()


@pytest.mark.parametrize("role", ["a", "d"])
def test_workers_that_are_found_cut_off_one_after_the_other_cost_no_retry(make_bench, role):
    names = [f"{role}{number}" for number in range(8)]
    bench = make_bench(*(["p0"] if role == "d" else []), *names, max_retries=0)
    bench.tick(0.0)
    bench.submit()
    if role == "d":
        bench.prefill_done()
    freeze(bench, 30.0)
    bench.do(bench.core.on_timer(bench.now))
    for _ in names:
        name = bench.core.dispatcher.requests["r1"].current.engine_id
        bench.do(bench.core.on_unreachable(name.encode(), bench.now))
        bench.do(bench.core.on_timer(bench.now))
    peer = f"{name}-new"
    bench.receive(peer, Heartbeat(engine_id=name, incarnation=1))
    bench.tokens(len(bench.output()), 51, peer=peer, request_id=bench.generated(peer).request_id, finish_reason="length")
    assert bench.error() is None
    bench.assert_idle()


def test_a_request_that_comes_while_a_pause_ends_has_its_usual_time(make_bench):
    bench = pair_decoding(make_bench)
    freeze(bench, 40.0)
    bench.submit("r2")
    deadline_ms = bench.generated("p0").deadline_ms
    bench.do(bench.core.on_timer(bench.now))
    bench.tick(bench.now + 50.5)
    assert deadline_ms == 50_000
    assert bench.ended.keys() == {"r1", "r2"}


@LENGTHS
def test_a_worker_that_gave_up_its_silent_router_costs_no_retry(make_bench, seconds):
    bench = pair_decoding(make_bench)
    freeze(bench, seconds)
    bench.fails("d0", SILENT)
    bench.do(bench.core.on_timer(bench.now))
    bench.tokens(2, 52, request_id="r1.2", finish_reason="length")
    assert bench.output() == [50, 51, 52]


@LENGTHS
def test_tokens_that_were_lost_meanwhile_cost_no_retry(make_bench, seconds):
    bench = pair_decoding(make_bench)
    freeze(bench, seconds)
    bench.tokens(7, 57)
    bench.tokens(2, 52, request_id="r1.2", finish_reason="length")
    assert bench.output() == [50, 51, 52]


@LENGTHS
def test_heartbeats_from_before_a_pause_mark_no_worker_as_stalled(make_bench, seconds):
    bench = pair_decoding(make_bench)
    bench.heartbeat("d0", stalled_ms=60_000.0)
    freeze(bench, seconds)
    bench.do(bench.core.on_timer(bench.now))
    assert not bench.core.membership.by_peer(b"d0").is_closed


def test_a_worker_whose_connection_is_gone_gets_nothing_until_it_is_back(make_bench):
    bench = make_bench("p0", "d0", "d1")
    bench.tick(0.0)
    freeze(bench, 12.0)
    bench.do(bench.core.on_unreachable(b"d0", bench.now))
    bench.submit()
    bench.prefill_done()
    assert bench.generated("d1").request_id == "r1"
    bench.receive("d0-again", Heartbeat(engine_id="d0", incarnation=1))
    assert not bench.core.membership.by_peer(b"d0-again").is_closed


@pytest.mark.parametrize("pause_s", [0.0, 12.0])
def test_late_messages_of_an_old_connection_do_not_cut_the_new_one_off(make_bench, pause_s):
    bench = make_bench("p0", "d0")
    bench.tick(0.0)
    freeze(bench, pause_s)
    bench.receive("d0-again", Heartbeat(engine_id="d0", incarnation=1))
    for _ in range(2):
        bench.heartbeat("d0")
        bench.do(bench.core.on_unreachable(b"d0", bench.now))
    worker = bench.core.membership.by_peer(b"d0-again")
    assert (worker.peer, worker.is_closed) == (b"d0-again", False)
    bench.do(bench.core.on_unreachable(b"d0-again", bench.now))
    assert bench.core.membership.by_peer(b"d0-again") is None or worker.is_closed


def test_a_late_heartbeat_by_an_older_connection_opens_no_worker_that_is_cut_off(make_bench):
    bench = make_bench("a0", "a1")
    bench.receive("a0-2", Heartbeat(engine_id="a0", incarnation=1))
    bench.tick(0.0)
    freeze(bench, 30.0)
    bench.do(bench.core.on_timer(bench.now))
    bench.do(bench.core.on_unreachable(b"a0-2", bench.now))
    bench.receive("a0", Heartbeat(engine_id="a0", incarnation=1))
    assert bench.core.membership.has_cut_off
    bench.submit()
    assert [peer for peer, message in bench.sent if isinstance(message, Generate)] == ["a1"]
    bench.receive("a0-3", Heartbeat(engine_id="a0", incarnation=1))
    assert not bench.core.membership.has_cut_off


def test_a_stream_leaves_a_worker_whose_connection_is_gone_at_once(make_bench):
    bench = make_bench("p0", "d0", "d1", max_retries=0)
    bench.tick(0.0)
    bench.submit()
    bench.prefill_done()
    freeze(bench, 12.0)
    bench.do(bench.core.on_unreachable(b"d0", bench.now))
    bench.do(bench.core.on_timer(bench.now))
    assert bench.generated("d1").request_id == "r1.2"


def test_a_worker_that_died_meanwhile_is_dropped_when_all_has_settled(make_bench):
    bench = pair_decoding(make_bench)
    freeze(bench, 12.0)
    bench.do(bench.core.on_unreachable(b"d0", bench.now))
    frozen_until = bench.now
    while bench.core.membership.by_peer(b"d0") is not None:
        bench.now += 1.0
        bench.heartbeat("p0")
        bench.do(bench.core.on_timer(bench.now))
    assert 4.0 <= bench.now - frozen_until <= 7.0


@pytest.mark.parametrize("gap_s", [0.25, 0.75, 2.0, 30.0])
def test_a_router_that_is_always_late_drops_a_silent_worker(make_bench, gap_s):
    bench = make_bench("p0", "d0")
    for _ in range(100):
        freeze(bench, gap_s)
        bench.heartbeat("p0")
        bench.do(bench.core.on_timer(bench.now))
    assert [member.key.engine_id for member in bench.core.membership.members] == ["p0"]


@pytest.mark.parametrize("gap_s", [0.25, 0.75, 2.0, 4.0])
def test_a_router_that_is_always_late_leaves_a_stalled_worker(make_bench, gap_s):
    bench = make_bench("p0", "d0")
    for number in range(100):
        freeze(bench, gap_s)
        bench.heartbeat("p0")
        bench.heartbeat("d0", stalled_ms=1e3 * gap_s * (number + 1))
        bench.do(bench.core.on_timer(bench.now))
    stalled = [member.key.engine_id for member in bench.core.membership.members if member.is_closed]
    assert stalled == ["d0"]


def test_a_router_that_is_late_every_other_time_leaves_a_stalled_worker(make_bench):
    bench = make_bench("p0", "d0")
    stalled_ms = 0.0
    for number in range(100):
        gap_s = 0.5 if number % 2 else 2.0
        stalled_ms += 1e3 * gap_s
        freeze(bench, gap_s)
        bench.heartbeat("p0")
        bench.heartbeat("d0", stalled_ms=stalled_ms)
        bench.do(bench.core.on_timer(bench.now))
    assert [member.key.engine_id for member in bench.core.membership.members if member.is_closed] == ["d0"]


def test_a_router_that_pauses_now_and_then_is_settled_between(make_bench):
    pauses = make_bench("p0", "d0").core.membership.pauses
    now = 0.0
    pauses.on_tick(now)
    for _ in range(9):
        now += 30.0
        pauses.on_tick(now)
        assert pauses.is_settling(now)
        for _ in range(40):
            now += 0.5
            pauses.on_tick(now)
        assert not pauses.is_settling(now)


def test_without_a_pause_a_dead_connection_is_a_dead_worker_at_once(make_bench):
    bench = pair_decoding(make_bench, max_retries=2)
    bench.do(bench.core.on_unreachable(b"d0", bench.now))
    assert bench.core.membership.by_peer(b"d0") is None


def test_a_process_that_was_taken_for_lost_and_lives_has_cost_no_retry(make_bench):
    bench = make_bench("p0", "d0", max_retries=1)
    bench.submit()
    bench.prefill_done()
    for number in range(3):
        peer = "d0" if not number else f"d0-{number}"
        bench.do(bench.core.on_unreachable(peer.encode(), bench.now))
        register = {"engine_id": "d0"}
        bench.join(f"d0-{number + 1}", **register)
    assert bench.error() is None
    assert bench.generated("d0-3").request_id == "r1.4"


def test_hand_to_and_fro_without_a_token_ends(make_bench):
    bench = make_bench("p0", "d0", max_retries=1)
    bench.submit()
    bench.prefill_done()
    while "r1" not in bench.ended:
        bench.fails("d0", SILENT, bench.generated("d0").request_id)
    assert bench.error().code == "router_silent"
    assert 16 <= len(bench.retries) <= 20


# ---- deadlines -------------------------------------------------------------------------------------------------------------


def test_the_routers_own_limit_does_not_count_its_pause(make_bench):
    bench = pair_decoding(make_bench, request_timeout_s=50.0)
    freeze(bench, 60.0)
    bench.do(bench.core.on_timer(bench.now))
    assert bench.ended == {}
    bench.tick(bench.now + 51.0)
    assert bench.error().code == "deadline_exceeded"


def test_a_deadline_that_the_client_has_set_holds_all_the_same(make_bench):
    bench = make_bench("p0", "d0")
    bench.tick(0.0)
    bench.do(bench.core.submit(bench.submission(timeout_s=50.0), bench.now))
    freeze(bench, 60.0)
    bench.do(bench.core.on_timer(bench.now))
    assert bench.error().code == "deadline_exceeded"


def test_a_worker_whose_deadline_did_not_know_of_the_pause_costs_no_retry(make_bench):
    bench = pair_decoding(make_bench, request_timeout_s=50.0)
    freeze(bench, 60.0)
    bench.do(bench.core.on_timer(bench.now))
    bench.fails("d0", LATE)
    assert bench.generated("d0").request_id == "r1.2"
    assert bench.generated("d0").deadline_ms > 40_000


def test_a_request_that_waits_for_a_worker_does_not_wait_during_the_pause(make_bench):
    bench = pair_decoding(make_bench, worker_wait_s=10.0, max_retries=2)
    bench.leave("d0")
    bench.tick(5.0)
    freeze(bench, 60.0)
    bench.do(bench.core.on_timer(bench.now))
    assert bench.core.dispatcher.num_waiting == 1
    bench.join("d1")
    assert bench.generated("d1").request_id == "r1.2"


def test_the_pace_of_prompts_is_not_judged_by_the_pause(make_bench):
    bench = make_bench("p0", "d0", max_requests=9)
    bench.tick(0.0)
    bench.submit("r1")
    freeze(bench, 60.0)
    bench.do(bench.core.on_timer(bench.now))
    bench.prefill_done("r1")
    bench.submit("r2")
    assert bench.core.wait_estimates.wait_s(bench.core.membership.by_peer(b"p0").key, bench.now) < 2.0


def thawed(make_bench, number: int):
    """Return the bench of a router that was just paused, and the names of its workers."""
    names = [f"a{index}" for index in range(number)]
    bench = make_bench(*names)
    bench.tick(0.0)
    freeze(bench, 30.0)
    bench.do(bench.core.on_timer(bench.now))
    return bench, names


def probed(actions) -> list[str]:
    sent = [action for action in actions if isinstance(action, Transmit)]
    return [action.peer.decode() for action in sent if isinstance(action.message, Registered)]


def test_workers_that_are_found_lost_one_after_the_other_are_not_all_probed_for_each(make_bench):
    bench, names = thawed(make_bench, 8)
    num_probed = []
    for name in names:
        num_probed.append(len(probed(bench.core.on_unreachable(name.encode(), bench.now))))
        bench.receive(f"{name}-new", Heartbeat(engine_id=name, incarnation=1))
    assert num_probed == [7, *[0] * 7]
    bench.now += 0.25
    assert probed(bench.core.on_timer(bench.now)) == [f"{name}-new" for name in names]
    bench.now += 0.25
    assert probed(bench.core.on_timer(bench.now)) == []


def test_a_connection_lost_later_has_the_others_probed_beside_a_dead_worker(make_bench):
    bench, _ = thawed(make_bench, 4)
    bench.do(bench.core.on_unreachable(b"a0", bench.now))
    bench.now += 1.0
    assert probed(bench.core.on_unreachable(b"a1", bench.now)) == ["a2", "a3"]
    bench.now += 1.0
    assert probed(bench.core.on_unreachable(b"a1", bench.now)) == []  # it was known


def one_of_two_is_back(make_bench, other: dict, **limits):
    """Return the bench of a router that settles: a0, which holds one choice, is back, and ``other`` is not yet."""
    bench = make_bench(**{"max_requests": 100, **limits})
    bench.join("a0", max_num_choices=1)
    bench.join("a1", **{"max_num_choices": 1, **other})
    bench.tick(0.0)
    freeze(bench, 30.0)
    bench.do(bench.core.on_timer(bench.now))
    for name in ("a0", "a1"):
        bench.do(bench.core.on_unreachable(name.encode(), bench.now))
    bench.receive("a0-new", Heartbeat(engine_id="a0", incarnation=1))
    return bench


def refused(bench, kind: type[RequestError], num_waiting: int = 0, **fields) -> bool:
    """Submit a prompt that must be refused; return whether it may wait for workers."""
    submission = bench.submission("r2", **fields)
    with pytest.raises(kind) as found:
        bench.core.submit(submission, bench.now)
    return bench.core.may_serve_soon(submission, found.value, bench.now, num_waiting)


def test_a_prompt_waits_for_a_worker_that_is_cut_off_if_the_others_are_full(make_bench):
    bench = one_of_two_is_back(make_bench, {})
    bench.submit("r1")
    assert refused(bench, Overloaded)
    bench.receive("a1-new", Heartbeat(engine_id="a1", incarnation=1))
    bench.submit("r2")
    assert not refused(bench, Overloaded)


@pytest.fixture
def compared(monkeypatch):
    """Return a list that grows each time that workers are compared as if they were not cut off."""
    calls = []
    monkeypatch.setattr("router.dispatch.cut_off.choose_route", lambda *args: calls.append(args) or choose_route(*args))
    return calls


def test_workers_are_compared_once_for_all_refused_prompts_that_need_no_more(make_bench, compared):
    bench = one_of_two_is_back(make_bench, {})
    bench.submit("r1")
    assert [refused(bench, Overloaded) for _ in range(5)] == [True] * 5
    assert len(compared) == 1
    assert refused(bench, Overloaded, prompt=60)
    assert refused(bench, Overloaded, prompt=50)
    assert len(compared) == 2
    bench.do(bench.core.on_timer(bench.now))
    assert refused(bench, Overloaded)
    assert len(compared) == 3


def test_a_prompt_that_needs_more_than_the_one_before_it_waits_for_no_smaller_worker(make_bench):
    bench = one_of_two_is_back(make_bench, {"max_model_len": 64})
    bench.submit("r1")
    assert [refused(bench, Overloaded, prompt=number) for number in (9, 60)] == [True, False]


def test_workers_are_not_compared_for_a_refused_prompt_if_those_cut_off_are_full(make_bench, compared):
    bench = one_of_two_is_back(make_bench, {})
    bench.submit("r1")
    bench.core.membership.workers[1].num_running = 1
    assert not refused(bench, Overloaded)
    assert not compared


def test_a_worker_that_is_cut_off_has_room_as_soon_as_its_request_has_ended(make_bench):
    bench = make_bench(max_requests=100)
    bench.join("a0", max_num_choices=1)
    bench.join("a1", max_num_choices=1)
    for name in ("r0", "r1"):
        bench.submit(name)
    bench.tick(0.0)
    freeze(bench, 30.0)
    bench.do(bench.core.on_timer(bench.now))
    bench.do(bench.core.on_unreachable(b"a1", bench.now))
    assert not refused(bench, Overloaded)
    there = {request.current.engine_id: name for name, request in bench.core.dispatcher.requests.items()}
    bench.do(bench.core.abort(there["a1"], "test", bench.now))
    assert refused(bench, Overloaded)


def test_no_prompt_waits_for_a_full_worker_once_the_router_has_settled(make_bench):
    bench = one_of_two_is_back(make_bench, {})
    bench.submit("r1")
    bench.tick(40.0)
    assert not refused(bench, Overloaded)


@pytest.mark.parametrize("other", [{"max_model_len": 16}, {"model_fingerprint": b"others"}])
def test_no_prompt_waits_for_a_worker_that_is_cut_off_and_does_not_suit_it(make_bench, other):
    bench = one_of_two_is_back(make_bench, other)
    bench.submit("r1")
    assert not refused(bench, Overloaded, model_fingerprint=bench.core.membership.workers[0].facts.model_fingerprint)


@pytest.mark.parametrize(("num_waiting", "may_wait"), [(1, True), (2, False)])
def test_the_prompts_that_wait_for_workers_count_towards_the_routers_limit(make_bench, num_waiting, may_wait):
    bench = one_of_two_is_back(make_bench, {}, max_requests=3)
    bench.submit("r1")
    assert refused(bench, Overloaded, num_waiting) == may_wait


@pytest.mark.parametrize("late", [("a0",), ("a0", "a1")])
def test_a_prompt_with_no_time_for_the_others_waits_for_an_idle_one_that_is_cut_off(make_bench, late):
    bench = one_of_two_is_back(make_bench, {})
    workers = {worker.key.engine_id: worker.key for worker in bench.core.membership.workers}
    for name in late:
        for prompt, number in enumerate((1, 900)):
            queued = Generate(request_id=f"{name}-{prompt}", prompt_token_ids=(1,) * number, sampling=SamplingParams())
            bench.core.wait_estimates.on_sent(workers[name], queued, bench.now)
            if prompt == 0:
                bench.core.wait_estimates.on_first_token(queued.request_id, bench.now + 9.0)
    assert refused(bench, DeadlineUnreachable, timeout_s=1.0) == (late == ("a0",))
