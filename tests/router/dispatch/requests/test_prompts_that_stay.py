"""Prompts that stay in a long queue beside a worker that is nearly idle, and what they, other routers and tenants change."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest

from core.wire.messages import ErrorInfo
from core.wire.sampling import SamplingParams
from router.dispatch.members import WorkerKey
from router.dispatch.progress import Standing
from tests.router.dispatch.requests.test_queue_moves import LARGE, LONG, SHORT, crowd, done, moved, sent_to, submit, tick


@pytest.fixture
def crowded(make_bench):
    """Return ``crowd`` with the bench of these tests."""
    return partial(crowd, make_bench)


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


@pytest.fixture
def asked(monkeypatch):
    """Return a function: the names of the prompts that a bench asks from now on whether they should move."""

    def listen(bench) -> list[str]:
        names = []
        find_among = bench.core.dispatcher.placement.find_among
        monkeypatch.setattr(
            bench.core.dispatcher.placement,
            "find_among",
            lambda request, *args: names.append(request.request_id) or find_among(request, *args),
        )
        return names

    return listen


def test_no_tick_asks_for_many_prompts_what_none_of_them_gains(crowded, asked):
    bench = crowded(50)
    bench.join("p1", **{**LARGE, "max_model_len": LONG})
    names = asked(bench)
    tick(bench)
    assert names == ["r49", "r48", "r47", "r46"]
    tick(bench)
    assert names[4:] == ["r45", "r44", "r43", "r42"], "the same ones are not asked again at once"
    assert moved(bench) == []


def test_a_tick_asks_for_fewer_prompts_if_they_are_very_long(crowded, asked):
    bench = crowded(10, prompt=70_000)
    bench.join("p1", **{**LARGE, "max_model_len": LONG})
    names = asked(bench)
    tick(bench)
    assert names == ["r9", "r8"]


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
