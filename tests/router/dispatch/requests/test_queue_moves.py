"""Prompts that wait in a long queue, and a worker that is nearly idle: which of them move there, when, and what that changes.

A prompt of ``LONG`` tokens is predicted to take a little more than a second, one of ``SHORT`` tokens 20 ms.
"""

from __future__ import annotations

from functools import partial

import pytest

from core.errors import Overloaded
from core.wire.messages import Abort, ErrorInfo, Generate
from router.dispatch.members import WorkerKey

LARGE = {"max_model_len": 100_000, "num_blocks": 100_000, "max_num_seqs": 1000}
LONG, SHORT = 10_000, 100


def submit(bench, *names: str, prompt: int = LONG, salt: str | None = None, **fields) -> None:
    """Submit prompts that have nothing in common, unless they get the same salt."""
    for name in names:
        submission = bench.submission(name, prompt=prompt, cache_salt=name if salt is None else salt, **fields)
        bench.do(bench.core.submit(submission, bench.now))


def crowd(make_bench, num_prompts: int = 10, prompt: int = LONG, **limits):
    """Return a bench with so many prompts at p0, of which all but one wait, and one decode worker."""
    bench = make_bench(max_requests=2000, **limits)
    bench.join("p0", **LARGE)
    bench.join("d0", **LARGE)
    submit(bench, *(f"r{number}" for number in range(num_prompts)), prompt=prompt)
    bench.heartbeat("p0", num_running=1, num_waiting=num_prompts - 1)
    return bench


@pytest.fixture
def crowded(make_bench):
    """Return ``crowd`` with the bench of these tests."""
    return partial(crowd, make_bench)


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
