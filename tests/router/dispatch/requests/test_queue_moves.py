"""Prompts that wait in a long queue, and a worker that is nearly idle: which of them move there, when, and how often.

A prompt of ``LONG`` tokens is predicted to take a little more than a second, one of ``SHORT`` tokens 20 ms.
"""

from __future__ import annotations

from itertools import pairwise

import pytest

from core.errors import Overloaded
from core.wire.messages import Abort, ErrorInfo, Generate
from core.wire.sampling import SamplingParams
from router.dispatch.members import WorkerKey
from router.dispatch.progress import Standing

LARGE = {"max_model_len": 100_000, "num_blocks": 100_000, "max_num_seqs": 1000}
LONG, SHORT = 10_000, 100


def submit(bench, *names: str, prompt: int = LONG, salt: str | None = None, **fields) -> None:
    """Submit prompts that have nothing in common, unless they get the same salt."""
    for name in names:
        submission = bench.submission(name, prompt=prompt, cache_salt=name if salt is None else salt, **fields)
        bench.do(bench.core.submit(submission, bench.now))


@pytest.fixture
def crowded(make_bench):
    """Return a function: a bench with so many prompts at p0, of which all but one wait, and one decode worker."""

    def make(num_prompts: int = 10, prompt: int = LONG, **limits):
        bench = make_bench(max_requests=2000, **limits)
        bench.join("p0", **LARGE)
        bench.join("d0", **LARGE)
        submit(bench, *(f"r{number}" for number in range(num_prompts)), prompt=prompt)
        bench.heartbeat("p0", num_running=1, num_waiting=num_prompts - 1)
        return bench

    return make


def tick(bench, count: int = 1) -> None:
    for _ in range(count):
        bench.now += 0.25
        bench.do(bench.core.on_timer(bench.now))


def done(bench, wire_id: str, name: str, seconds: float = 1.06) -> None:
    bench.prefill_done(wire_id, name, prefill_ms=1e3 * seconds)


def moved(bench) -> list[str]:
    return [move.request_id for move in bench.moves]


def sent_to(bench, name: str) -> list[str]:
    return [message.request_id for message in bench.to(name, Generate)]


# ---- what moves ------------------------------------------------------------------------------------------------------------


def test_the_last_prompt_of_a_long_queue_moves_to_a_worker_that_joins(crowded):
    bench = crowded()
    bench.join("p1", **LARGE)
    tick(bench)
    assert sent_to(bench, "p1") == ["r9.2"]
    assert [(abort.request_ids, abort.reason) for abort in bench.to("p0", Abort)] == [(("r9",), "moved")]
    assert (bench.moves[0].former, bench.moves[0].successor) == (WorkerKey("p0", 1), WorkerKey("p1", 1))
    assert 8.0 < bench.moves[0].gain_s < 11.0
    assert [bench.core.membership.by_peer(name).num_inflight for name in (b"p0", b"p1", b"d0")] == [9, 1, 10]


def test_a_move_is_no_failure_and_costs_no_retry(crowded):
    bench = crowded(max_retries=0)
    bench.join("p1", **LARGE)
    tick(bench)
    bench.prefill_done("r9.2", "p1")
    bench.prefill_done("r9", "p0")
    assert bench.output("r9") == [50], "the former worker's late answer counts for nothing"
    bench.tokens(1, 51, request_id="r9.2", finish_reason="length")
    request = bench.ended["r9"].request
    assert (request.error, request.retries.kinds, request.retries.blamed, request.retries.avoid) == (None, [], [], set())
    assert bench.retries == []


def test_a_worker_gets_about_a_second_of_work_and_more_once_that_is_done(crowded):
    bench = crowded()
    bench.join("p1", **LARGE)
    tick(bench)
    assert moved(bench) == ["r9"]
    tick(bench, 3)
    assert moved(bench) == ["r9", "r8"]
    done(bench, "r9.2", "p1")
    tick(bench)
    assert moved(bench) == ["r9", "r8", "r7"]


def test_a_move_is_no_new_load_for_the_planner(crowded):
    bench = crowded()
    offered = bench.core.route_costs.offered
    before = offered("prefill", bench.now + 0.25)
    bench.join("p1", **LARGE)
    tick(bench)
    assert moved(bench) == ["r9"]
    assert offered("prefill", bench.now) == pytest.approx(before)


def test_a_move_to_a_worker_of_another_role_is_load_of_that_role(crowded):
    bench = crowded()
    offered = bench.core.route_costs.offered
    before = offered("prefill", bench.now + 0.25)
    bench.join("a1", **LARGE)
    tick(bench)
    assert offered("prefill", bench.now) + offered("aggregated", bench.now) == pytest.approx(before)
    assert offered("aggregated", bench.now) > 0


def test_prompts_return_to_a_worker_that_was_lost_and_is_back(crowded):
    bench = crowded(4)
    bench.join("p1", **LARGE)
    submit(bench, "a", "b")
    bench.leave("p0")
    assert sent_to(bench, "p1") == ["a", "b", "r0.2", "r1.2", "r2.2", "r3.2"]
    bench.join("p0", **LARGE)
    bench.heartbeat("p1", num_running=1, num_waiting=5)
    tick(bench)
    assert sent_to(bench, "p0")[-1] == "r3.3", "the process has not failed"


def test_prompts_move_between_pairs_and_aggregated_workers(crowded):
    bench = crowded()
    bench.join("a1", **LARGE)
    tick(bench)
    assert sent_to(bench, "a1") == ["r9.2"]


@pytest.mark.parametrize("num_choices", [1, 3])
def test_prompts_move_while_their_reservations_fill_the_decode_worker(crowded, num_choices):
    bench = crowded(0)
    bench.join("d0", **LARGE, max_num_choices=10 * num_choices)
    submit(bench, *(f"r{number}" for number in range(10)), n=num_choices)
    bench.heartbeat("p0", num_running=1, num_waiting=9)
    bench.join("p1", **LARGE)
    tick(bench)
    assert moved(bench) == ["r9"]
    workers = [bench.core.membership.by_peer(name) for name in (b"p0", b"p1", b"d0")]
    assert [worker.num_inflight for worker in workers] == [9 * num_choices, num_choices, 10 * num_choices]
    assert workers[2].num_reserved == 10 * num_choices


def test_a_look_in_vain_changes_no_count(crowded):
    bench = crowded()
    bench.join("p1", **{**LARGE, "max_model_len": LONG})
    workers = [bench.core.membership.by_peer(name) for name in (b"p0", b"p1", b"d0")]

    def counts() -> list[tuple[int, int, int]]:
        return [(worker.num_inflight, worker.num_inflight_tokens, worker.num_reserved) for worker in workers]

    before = counts()
    tick(bench, 4)
    assert (counts(), moved(bench)) == (before, [])


def test_a_prompt_moves_once(crowded):
    bench = crowded()
    bench.join("p1", **LARGE)
    tick(bench)
    bench.leave("p1")
    assert sent_to(bench, "p0")[-1] == "r9.3"
    bench.join("p1", incarnation=2, **LARGE)
    bench.heartbeat("p0", num_running=1, num_waiting=9)
    tick(bench)
    assert moved(bench) == ["r9", "r8"]


def test_a_moved_prompt_that_is_refused_goes_back(crowded):
    bench = crowded()
    bench.join("p1", **LARGE)
    tick(bench)
    bench.fails("p1", ErrorInfo.of(Overloaded("full")), "r9.2")
    assert sent_to(bench, "p0")[-1] == "r9.3"


def test_a_refusal_after_a_move_is_no_retry_of_the_request(crowded):
    bench = crowded()
    bench.join("p1", **LARGE)
    tick(bench)
    bench.fails("p1", ErrorInfo.of(Overloaded("full")), "r9.2")
    request = bench.core.dispatcher.requests["r9"]
    assert (request.retries.kinds, request.retries.blamed) == ([], [])


def test_the_loss_of_the_new_worker_costs_no_retry_before_it_has_begun_the_prompt(crowded):
    bench = crowded(max_retries=0)
    bench.join("p1", **LARGE)
    tick(bench)
    bench.leave("p1")
    assert sent_to(bench, "p0")[-1] == "r9.3"
    bench.leave("p0")
    assert bench.ended["r9"].request.error.code == "peer_lost", "a loss without a move costs one"


def test_a_loss_after_the_first_token_costs_a_retry_after_a_move(crowded):
    bench = crowded(max_retries=0)
    bench.join("a1", **LARGE)
    tick(bench)
    bench.tokens(0, 50, request_id="r9.2", peer="a1")
    bench.leave("a1")
    assert bench.ended["r9"].request.error.code == "peer_lost"


def test_a_moved_prompt_that_is_refused_waits_if_no_other_worker_has_room(crowded):
    bench = crowded(max_retries=0)
    bench.join("p1", **LARGE)
    tick(bench)
    bench.heartbeat("p0", is_draining=True, num_running=1, num_waiting=8)
    bench.fails("p1", ErrorInfo.of(Overloaded("full")), "r9.2")
    assert bench.core.dispatcher.num_waiting == 1, "a worker had admitted it"


def test_each_tick_moves_a_bounded_number_of_prompts(crowded):
    bench = crowded(400, prompt=SHORT)
    bench.join("p1", **LARGE)
    numbers = []
    for _ in range(9):
        tick(bench)
        numbers.append(len(bench.moves))
    assert numbers[:6] == [8, 16, 24, 32, 40, 48]
    assert numbers[-1] <= 52, "a second of work"


def test_the_most_crowded_worker_gives_first(crowded):
    bench = crowded(12)
    bench.heartbeat("p0", is_draining=True, num_running=1, num_waiting=11)
    bench.join("p1", **LARGE)
    submit(bench, *(f"s{number}" for number in range(8)))
    bench.heartbeat("p1", num_running=1, num_waiting=7)
    bench.join("p2", **LARGE)
    tick(bench)
    assert moved(bench) == ["r11"], "a worker that drains has a queue as well"


# ---- what stays ------------------------------------------------------------------------------------------------------------


def test_prompts_stay_if_they_would_gain_little(crowded):
    bench = crowded(3)
    bench.join("p1", **LARGE)
    tick(bench, 9)
    assert moved(bench) == []


def test_a_prompt_stays_if_its_own_time_is_most_of_the_wait(crowded):
    bench = crowded(1, prompt=30_000)
    submit(bench, "long", prompt=40_000)
    bench.heartbeat("p0", num_running=1, num_waiting=1)
    bench.join("p1", **LARGE)
    tick(bench, 9)
    assert moved(bench) == []


@pytest.mark.parametrize(("salt", "where"), [("seen", "p0"), ("new", "p1")])
def test_a_prompt_whose_beginning_its_worker_holds_stays_where_it_is_short(crowded, salt, where):
    bench = crowded(1)
    submit(bench, "first", prompt=30_000, salt="seen")
    done(bench, "r0", "p0")
    done(bench, "first", "p0", 3.46)
    submit(bench, *(f"s{number}" for number in range(8)))
    submit(bench, "last", prompt=30_000, salt=salt)
    bench.heartbeat("p0", num_running=8, num_waiting=1)
    bench.join("p1", **LARGE)
    tick(bench)
    assert bench.core.dispatcher.requests["last"].attempt.prefill.engine_id == where


def test_prompts_that_a_worker_has_begun_stay(crowded):
    bench = crowded()
    bench.join("p1", **LARGE)
    bench.heartbeat("p0", num_running=10)
    tick(bench)
    assert moved(bench) == []
    bench.heartbeat("p0", num_running=9, num_waiting=1)
    tick(bench)
    done(bench, "r9.2", "p1")
    tick(bench, 3)
    assert moved(bench) == ["r9"], "no more than have waited at its last heartbeat"


def test_the_prompt_of_another_tenant_that_is_most_probably_computed_next_stays(crowded):
    bench = crowded(0)
    bench.join("p0", **LARGE, has_fair_shares=True)
    submit(bench, *(f"r{number}" for number in range(30)), tenant=1)
    submit(bench, "other", prompt=30_000, tenant=2)
    bench.now = 1.06
    done(bench, "r0", "p0")
    bench.now = 2.12
    done(bench, "r1", "p0")
    bench.now = 5.0
    bench.heartbeat("p0", num_running=1, num_waiting=28)
    bench.heartbeat("d0")
    bench.join("p1", **LARGE)
    tick(bench)
    assert moved(bench) == ["r29"], "the worker computes 'other' since it has had the least service"


def test_an_urgent_prompt_that_is_most_probably_computed_next_stays(crowded):
    bench = crowded(0)
    bench.join("p0", **LARGE, has_patience=True)
    submit(bench, *(f"r{number}" for number in range(10)))
    submit(bench, "urgent", prompt=20_000, priority=-10)
    bench.now = 1.06
    done(bench, "r0", "p0")
    bench.now = 3.0
    bench.heartbeat("p0", num_running=1, num_waiting=9)
    bench.heartbeat("d0")
    bench.join("p1", **LARGE)
    tick(bench)
    assert moved(bench) == ["r9"]


def test_prompts_that_have_come_before_a_heartbeat_but_have_been_begun_since_stay(crowded):
    bench = crowded(5)
    bench.heartbeat("p0", num_running=2, num_waiting=3)
    done(bench, "r0", "p0")
    done(bench, "r1", "p0")
    requests = bench.core.dispatcher.requests
    unbegun = bench.core.dispatcher._moves._unbegun(bench.core.membership.by_peer(b"p0"), bench.now)
    assert list(unbegun) == [requests["r4"]], "r2 and r3 may be computed now"


def test_a_prompt_that_is_read_early_or_has_embeddings_stays(crowded):
    bench = crowded()
    bench.core.dispatcher.requests["r9"].attempt.early_decode = WorkerKey("d0", 1)
    bench.core.dispatcher.requests["r8"].ec_sources[b"image"] = object()
    bench.join("p1", **LARGE)
    tick(bench)
    assert moved(bench) == ["r7"]


def test_a_prompt_stays_away_from_a_worker_that_has_failed_it(crowded):
    bench = crowded(9)
    bench.join("p1", **LARGE)
    submit(bench, "bad")
    bench.fails("p1", ErrorInfo(code="internal_error", message="a bug", http_status=500, retryable=True), "bad")
    assert sent_to(bench, "p0")[-1] == "bad.2"
    bench.heartbeat("p0", num_running=1, num_waiting=9)
    tick(bench)
    assert moved(bench) == ["r8"]


def test_a_prompt_moves_to_no_pair_whose_handoffs_fail(crowded):
    bench = crowded()
    bench.join("p1", **LARGE)
    pair = WorkerKey("p1", 1), WorkerKey("d0", 1)
    for _ in range(2):
        bench.core.dispatcher._pairs.note(pair, "deadline", bench.now)
    tick(bench)
    assert moved(bench) == []


@pytest.mark.parametrize(
    "load",
    [
        {"is_draining": True},
        {"num_queued_tokens_of_others": 20_000},
        {"num_running": 1000},
        {"num_leased_blocks": 100_000},
    ],
    ids=["draining", "other routers", "slots", "leases"],
)
def test_nothing_moves_to_a_worker_that_could_not_begin_it_soon(crowded, load):
    bench = crowded()
    bench.join("p1", **LARGE)
    bench.heartbeat("p1", **load)
    tick(bench)
    assert moved(bench) == []


@pytest.mark.parametrize(
    "load",
    [{"kv_cache_usage": 1.0}, {"num_running": 9, "num_waiting": 5, "kv_cache_usage": 0.5}],
    ids=["its blocks are used", "others wait"],
)
def test_nothing_moves_to_an_aggregated_worker_without_free_blocks(crowded, load):
    bench = crowded()
    bench.join("a1", **LARGE)
    bench.heartbeat("a1", **load)
    tick(bench)
    assert moved(bench) == []
    bench.heartbeat("a1", num_running=9, kv_cache_usage=0.5)
    tick(bench, 12)
    assert sent_to(bench, "a1")[:1] == [f"{moved(bench)[0]}.2"]


def test_a_full_worker_does_not_hide_another_one_that_has_room(crowded):
    bench = crowded()
    for name in ("a1", "a2"):
        bench.join(name, **LARGE)
    bench.heartbeat("a1", kv_cache_usage=1.0)
    bench.heartbeat("a2", num_running=500)
    tick(bench)
    assert sent_to(bench, "a2") == ["r9.2"]


def test_nothing_moves_to_a_worker_that_backs_off_after_a_stall(crowded):
    bench = crowded()
    bench.join("p1", **LARGE)
    progress = bench.core.membership.by_peer(b"p1").progress
    progress.standing, progress.is_backing_off = Standing.PROBATION, True
    progress._returned_at = bench.now
    progress._num_stalls = 1
    tick(bench)
    assert moved(bench) == []
    tick(bench, 4)
    assert moved(bench) == ["r9"], "one at a time until one succeeds"


def test_no_tick_asks_for_many_prompts_what_none_of_them_gains(crowded, monkeypatch):
    bench = crowded(50)
    bench.join("p1", **{**LARGE, "max_model_len": LONG})
    asked = []
    find_among = bench.core.dispatcher.placement.find_among
    monkeypatch.setattr(
        bench.core.dispatcher.placement,
        "find_among",
        lambda request, *args: asked.append(request.request_id) or find_among(request, *args),
    )
    tick(bench)
    assert asked == ["r49", "r48", "r47", "r46"]
    tick(bench)
    assert asked[4:] == ["r45", "r44", "r43", "r42"], "the same ones are not asked again at once"
    assert moved(bench) == []


def test_many_prompts_that_stay_do_not_hide_the_earlier_ones_of_their_worker(crowded):
    bench = crowded(20)
    submit(bench, *(f"big{number}" for number in range(40)), prompt=SHORT, sampling=SamplingParams(seed=7, max_tokens=60_000))
    bench.join("p1", **{**LARGE, "max_model_len": 50_000})
    for _ in range(24):
        bench.heartbeat("p0", num_running=1, num_waiting=59)
        tick(bench)
    assert moved(bench)[:1] == ["r19"]


def test_many_prompts_that_stay_do_not_hide_those_of_another_worker(crowded):
    bench = crowded(0)
    submit(bench, *(f"big{number}" for number in range(40)), sampling=SamplingParams(seed=7, max_tokens=60_000))
    bench.heartbeat("p0", num_running=1, num_waiting=39, is_draining=True)
    bench.join("p2", **{**LARGE, "max_model_len": 50_000})
    submit(bench, *(f"s{number}" for number in range(10)))
    bench.heartbeat("p2", num_running=1, num_waiting=9)
    bench.join("p1", **{**LARGE, "max_model_len": 50_000})
    tick(bench, 2)
    assert moved(bench) == ["s9"]


def test_a_prompt_that_stays_is_asked_ever_less_often(crowded):
    bench = crowded(request_timeout_s=600.0)
    bench.join("p1", **{**LARGE, "max_model_len": LONG})
    placed, asked_at = bench.core.dispatcher.requests["r9"].placed, []
    for _ in range(300):
        bench.heartbeat("p0", num_running=1, num_waiting=9)
        bench.heartbeat("p1")
        bench.heartbeat("d0")
        tick(bench)
        if placed.num_stays > len(asked_at):
            asked_at.append(bench.now)
    assert [later - earlier for earlier, later in pairwise(asked_at)] == [2.0, 4.0, 8.0, 16.0, 32.0]


def test_a_paused_router_moves_nothing_before_it_has_read_what_has_happened(crowded):
    bench = crowded()
    bench.join("p1", **LARGE)
    bench.do(bench.core.on_timer(bench.now + 0.25))
    bench.moves.clear()
    bench.prefill_done("r9.2", "p1")
    bench.now += 4.0
    bench.do(bench.core.on_timer(bench.now))
    assert moved(bench) == []


# ---- several routers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_others", "moves"), [(1, ["r7"]), (6, [])])
def test_each_other_router_that_may_do_the_same_raises_the_least_gain(crowded, num_others, moves):
    bench = crowded(8)
    bench.join("p1", **LARGE)
    bench.heartbeat("p1", num_other_routers=num_others, router_rank=0)
    tick(bench)
    assert moved(bench) == moves


def test_a_worker_that_has_just_joined_does_not_hide_the_other_routers(crowded):
    bench = crowded(8)
    bench.heartbeat("p0", num_running=1, num_waiting=7, num_other_routers=6)
    bench.join("p1", **LARGE)
    tick(bench)
    assert moved(bench) == []


def test_two_routers_see_each_others_moves_before_they_move_more(crowded):
    routers = [crowded(), crowded()]
    for rank, bench in enumerate(routers):
        bench.join("p1", **LARGE)
        bench.heartbeat("p1", num_other_routers=1, router_rank=rank)
        tick(bench)
    assert [moved(bench) for bench in routers] == [["r9"], ["r9"]], "a bounded number at the same time"
    first = routers[0]
    done(first, "r9.2", "p1")
    first.heartbeat("p1", num_other_routers=1, num_queued_tokens_of_others=2 * LONG, num_queued_prompts_of_others=2)
    tick(first)
    assert moved(first) == ["r9"], "that of the other one is computed first"
    first.heartbeat("p1", num_other_routers=1)
    tick(first)
    assert moved(first) == ["r9", "r8"]


@pytest.mark.parametrize("num_prompts_of_others", [10, 0], ids=["told", "not told"])
def test_a_prompt_stays_if_all_that_wait_may_be_those_of_other_routers(crowded, num_prompts_of_others):
    bench = crowded(1, prompt=30_000)
    bench.now = 3.0
    others = {"num_queued_tokens_of_others": 100_000, "num_queued_prompts_of_others": num_prompts_of_others}
    bench.heartbeat("p0", num_running=1, num_waiting=10, num_other_routers=1, **others)
    bench.join("p1", **LARGE)
    tick(bench)
    assert moved(bench) == []


@pytest.mark.parametrize(("is_known", "moves"), [(False, []), (True, ["r2"])])
def test_prompts_of_other_routers_delay_only_those_that_came_after_them(crowded, is_known, moves):
    bench = crowded(0)
    others = {"num_queued_tokens_of_others": 100_000, "num_queued_prompts_of_others": 10, "num_other_routers": 1}
    if is_known:
        bench.heartbeat("p0", num_running=1, num_waiting=9, **others)
    submit(bench, "r0", "r1", "r2")
    bench.heartbeat("p0", num_running=1, num_waiting=12, **others)
    bench.join("p1", **LARGE)
    tick(bench)
    assert moved(bench) == moves


# ---- tenants ---------------------------------------------------------------------------------------------------------------


def test_a_prompt_that_its_share_lets_pass_the_others_stays(crowded):
    bench = crowded(0)
    bench.join("p0", **LARGE, has_fair_shares=True)
    submit(bench, *(f"r{number}" for number in range(30)), prompt=5_000, tenant=1)
    submit(bench, "other", prompt=SHORT, tenant=2)
    bench.heartbeat("p0", num_running=1, num_waiting=30)
    bench.join("p1", **LARGE)
    tick(bench)
    assert moved(bench) == ["r29", "r28"]
    assert bench.generated("p1").tenant == 1


def test_moves_from_behind_a_late_prompt_stop_when_the_rest_gains_little(crowded):
    bench = crowded(1, prompt=30_000, request_timeout_s=600.0)
    submit(bench, *(f"q{number}" for number in range(6)))
    bench.now = 6.0
    bench.join("p1", **LARGE)
    for _ in range(24):
        bench.heartbeat("p0", num_running=1, num_waiting=6 - len(bench.moves))
        bench.heartbeat("p1")
        bench.heartbeat("d0")
        num_moves = len(bench.moves)
        tick(bench)
        for move in bench.moves[num_moves:]:
            done(bench, f"{move.request_id}.2", "p1")
    assert moved(bench) == ["q5", "q4", "q3"]
    assert [move.gain_s for move in bench.moves] == pytest.approx([5.3, 4.24, 3.18], abs=0.01)


# ---- by load ---------------------------------------------------------------------------------------------------------------


def test_without_predictions_the_pace_of_a_worker_counts(crowded):
    bench = crowded(routing="least_loaded")
    bench.join("p1", **LARGE)
    tick(bench, 4)
    assert moved(bench) == [], "nothing is known of its pace"
    bench.prefill_done("r0", "p0")
    tick(bench, 4)
    assert moved(bench) == ["r9"], "nothing is known of that of the other one"
    bench.now += 0.25
    bench.prefill_done("r9.2", "p1")
    tick(bench)
    assert moved(bench) == ["r9", "r8"]


def test_without_predictions_a_slow_prompt_does_not_make_its_worker_look_idle(crowded):
    bench = crowded(40, routing="least_loaded", request_timeout_s=600.0)
    bench.join("p1", **LARGE)
    bench.now = 1.06
    done(bench, "r0", "p0")
    tick(bench)
    bench.now = 2.1
    done(bench, "r39.2", "p1")
    for _ in range(120):
        bench.heartbeat("p0", num_running=1, num_waiting=38 - len(bench.moves))
        bench.heartbeat("p1", num_running=1)
        bench.heartbeat("d0")
        tick(bench)
    assert moved(bench) == ["r39", "r38", "r37", "r36"], "one at its start, one that is late at first, and one that waits"


def test_without_predictions_prompts_stay_if_they_would_gain_little(crowded):
    bench = crowded(3, routing="least_loaded")
    bench.join("p1", **LARGE)
    tick(bench, 4)
    bench.prefill_done("r0", "p0")
    tick(bench, 4)
    assert moved(bench) == []


def test_without_predictions_only_the_prompts_before_one_count_as_its_wait(crowded):
    bench = crowded(7, routing="least_loaded")
    bench.join("p1", **LARGE)
    tick(bench, 4)
    bench.prefill_done("r0", "p0")
    for last in ("r6", "r5"):
        bench.core.dispatcher.requests[last].attempt.early_decode = WorkerKey("d0", 1)
    tick(bench)
    assert moved(bench) == []


def test_without_predictions_nothing_moves_to_a_worker_with_prompts_of_other_routers(crowded):
    bench = crowded(routing="least_loaded")
    bench.join("p1", **LARGE)
    tick(bench, 4)
    bench.prefill_done("r0", "p0")
    bench.heartbeat("p1", num_queued_tokens_of_others=10)
    tick(bench)
    assert moved(bench) == []


def test_a_prompt_that_leaves_the_queue_does_not_change_the_pace_of_its_worker(crowded):
    bench = crowded(4)
    bench.now = 3.0
    bench.do(bench.core.abort("r3", "client", bench.now))
    bench.now = 4.0
    bench.prefill_done("r0", "p0")
    assert bench.core.wait_estimates.wait_s(WorkerKey("p0", 1), bench.now) == pytest.approx(8.0)
