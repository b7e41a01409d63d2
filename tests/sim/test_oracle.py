"""The causal oracle: a fault explains what happens on its own path, at its own time, when no other worker could have served."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from core.errors import EncoderInputMissing
from core.wire.messages import TransferUsage
from kvferry.sim.client import ROUTER_LOST, Client
from kvferry.sim.draw_plan import draw_plan
from kvferry.sim.faults import Fault
from kvferry.sim.oracle import CausalOracle
from kvferry.sim.plan import ClusterPlan
from kvferry.sim.request_path import Setback, WorkerTurn
from kvferry.sim.stalls import bound_s, find_stalls
from kvferry.sim.troubles import Kind, Troubles
from router.dispatch.timing import FirstTokenTiming, HandoffReport, SecondTokenTiming

SUBMITTED = 10.0


class Run:
    """A run of which only troubles and one request are made up: two prefill and two decode workers, or a cluster as wanted."""

    def __init__(self, *kinds: Fault, is_wanted: Callable[[ClusterPlan], bool] | None = None) -> None:
        self.now = 0.0
        self.troubles = Troubles(lambda: self.now)
        is_wanted = is_wanted or is_two_by_two
        self.plan = next(plan for seed in range(200) if is_wanted(plan := draw_plan(seed, kinds)))
        request = next(request for request in self.plan.requests if request.policy is None)
        self.client = Client(request, lambda violation: None)
        self.path = self.client.path
        self.path.router, self.path.submitted_at = "router-0", SUBMITTED

    def trouble(self, kind: Kind, names: str, start: float, seconds: float) -> None:
        self.now = start
        self.troubles.note(kind, names.split(), seconds)

    def attempt(self, engine_id: str, at: float) -> None:
        self.path.turns.append(WorkerTurn(engine_id, engine_id.partition("-")[0], at))

    def end(self, outcome: str, at: float) -> list[str]:
        self.client.end(outcome, "", at)
        return CausalOracle(self.plan, self.troubles).judge(self.client)

    def end_without_its_kv(self, reason: str, at: float) -> list[str]:
        first = FirstTokenTiming(total_ms=0, queue_ms=0, prefill_ms=0, relay_ms=0)
        second = SecondTokenTiming(total_ms=0, relay_ms=0, queue_ms=0, transfer_ms=0, verify_ms=0, first_step_ms=0)
        cost = TransferUsage(recomputed_tokens=1, fallback_reason=reason)
        self.client.report = HandoffReport(cost=cost, first_token=first, second_token=second)
        return self.end("ok", at)


def is_one_with_an_aggregated_worker(plan: ClusterPlan) -> bool:
    roles = [worker.role for worker in plan.workers]
    return sorted(roles) == ["aggregated", "decode", "prefill"] and len({worker.kv_dtype for worker in plan.workers}) == 1


def is_two_by_two(plan: ClusterPlan) -> bool:
    roles = [worker.role for worker in plan.workers]
    is_plain = plan.tier is None and plan.images is None
    return is_plain and sorted(roles) == ["decode", "decode", "prefill", "prefill"] and "router-1" not in plan.routers


@pytest.fixture
def run() -> Run:
    return Run()


# ---- errors


def test_request_that_ends_well_needs_no_cause(run):
    assert run.end("ok", 11.0) == []


@pytest.mark.parametrize(
    "outcome", ["cancelled", "no_worker", "peer_lost", "overloaded", "deadline_exceeded", ROUTER_LOST, EncoderInputMissing.code]
)
def test_error_without_a_cause_is_reported(run, outcome):
    run.attempt("prefill-0", SUBMITTED)
    assert "without a cause" in run.end(outcome, 11.0)[0]


@pytest.mark.parametrize(
    ("away", "is_explained"),
    [
        ("prefill-0 prefill-1 decode-0 decode-1", True),
        ("prefill-0 prefill-1", False),  # a decode worker serves alone
        ("decode-0 decode-1", True),
        ("decode-0 prefill-1", False),
        ("", False),
    ],
)
def test_refusal_has_a_cause_if_there_was_no_route(run, away, is_explained):
    for name in away.split():
        run.trouble(Kind.DOWN, name, 9.5, 5.0)
    assert (run.end("no_worker", 10.0) == []) == is_explained


def lose_everybody(run: Run, start: float, seconds: float) -> None:
    run.attempt("prefill-0", SUBMITTED)
    run.path.setbacks.append(Setback(10.5, "prefill-0", "peer_lost"))
    for name in ("prefill-0", "prefill-1", "decode-0"):
        run.trouble(Kind.DOWN, name, start, seconds)
    run.trouble(Kind.PARTED, "decode-1 router-0", start, seconds)


def test_loss_of_all_able_workers_for_the_whole_wait_is_a_cause(run):
    lose_everybody(run, 10.4, 30.0)
    assert run.end("peer_lost", 10.5 + run.plan.config.router.worker_wait_s) == []


def test_loss_of_all_for_a_part_of_the_wait_is_no_cause(run):
    lose_everybody(run, 10.4, 3.0)
    assert run.end("peer_lost", 10.5 + run.plan.config.router.worker_wait_s)


def test_loss_of_all_at_another_time_is_no_cause(run):
    lose_everybody(run, 30.0, 5.0)
    assert run.end("peer_lost", 10.5 + run.plan.config.router.worker_wait_s)


def test_partition_from_another_process_than_the_router_is_no_cause(run):
    run.trouble(Kind.PARTED, "prefill-0 decode-0", 9.5, 5.0)
    run.trouble(Kind.PARTED, "prefill-1 decode-1", 9.5, 5.0)
    assert run.end("no_worker", 10.0)


def test_pause_of_its_own_router_is_no_cause_of_a_loss(run):
    begin_stream(run)
    run.trouble(Kind.PAUSED, "router-0", 10.4, 12.0)
    assert run.end("peer_lost", 22.5)


def begin_stream(run: Run) -> None:
    run.attempt("prefill-0", SUBMITTED)
    run.path.note_output(10.1)
    run.attempt("decode-0", 10.1)
    run.path.setbacks.append(Setback(10.5, "decode-0", "peer_lost"))


def test_stream_that_no_worker_could_continue_for_the_whole_wait_may_end(run):
    begin_stream(run)
    run.trouble(Kind.DOWN, "decode-0", 10.4, 30.0)
    run.trouble(Kind.FROZEN, "decode-1", 10.0, 30.0)
    wait_s = run.plan.config.router.worker_wait_s
    assert run.end("no_worker", 10.5 + wait_s) == []


def test_stream_that_ends_before_the_wait_is_over_has_no_cause(run):
    begin_stream(run)
    run.trouble(Kind.DOWN, "decode-0", 10.4, 30.0)
    run.trouble(Kind.FROZEN, "decode-1", 10.0, 30.0)
    assert run.end("no_worker", 12.0)


def test_stream_that_a_worker_could_have_continued_has_no_cause(run):
    begin_stream(run)
    run.trouble(Kind.DOWN, "decode-0", 10.4, 30.0)
    run.trouble(Kind.FROZEN, "decode-1", 10.0, 3.0)
    assert run.end("no_worker", 10.5 + run.plan.config.router.worker_wait_s)


def lose_attempts(run: Run, first_hit: int, code: str = "peer_lost") -> list[str]:
    """Lose as many attempts as a request has, to cuts from an attempt on."""
    num_attempts = run.plan.config.router.max_retries + 1
    for number in range(num_attempts):
        at, name = SUBMITTED + 3 * number, f"prefill-{number % 2}"
        run.attempt(name, at)
        if number >= first_hit:
            run.trouble(Kind.CUT, f"{name} router-0", at + 0.8, 0.1)
        if number + 1 < num_attempts:
            run.path.setbacks.append(Setback(at + 0.8, name, code))
    return run.end(code, at + 1.5)


def test_attempts_that_were_all_hit_are_a_cause(run):
    assert lose_attempts(run, 0) == []


def test_attempts_of_which_one_was_not_hit_are_no_cause(run):
    assert lose_attempts(run, 1)


def test_attempts_that_are_lost_to_engines_without_progress_cost_none(run):
    assert lose_attempts(run, 0, "worker_stalled")


def test_client_that_left_may_be_cancelled(run):
    run.client.has_left = True
    assert run.end("cancelled", 11.0) == []


@pytest.mark.parametrize(("at", "is_explained"), [(10.3, False), (15.0, True)])
def test_deadline_is_a_cause_when_it_is_over(at, is_explained):
    run = Run(Fault.DEADLINE)
    assert (run.end("deadline_exceeded", at) == []) == is_explained


# ---- handoffs that were not used


def make_handoff(run: Run) -> None:
    run.attempt("prefill-0", SUBMITTED)
    run.attempt("decode-0", 10.2)


@pytest.mark.parametrize(
    ("reason", "kind", "names"),
    [
        ("stale", Kind.JUMPED, "prefill-0"),
        ("digest", Kind.CORRUPTED, "decode-0 prefill-0"),
        ("peer_lost", Kind.CUT, "decode-0 prefill-0"),
        ("deadline", Kind.STALLED, "decode-0 prefill-0"),
        ("rejected", Kind.FAILED, "decode-0 prefill-0"),
    ],
)
def test_trouble_of_the_pair_within_the_handoff_is_a_cause(run, reason, kind, names):
    make_handoff(run)
    run.trouble(kind, names, 10.3, 0.1)
    assert run.end_without_its_kv(reason, 11.0) == []


@pytest.mark.parametrize(
    ("reason", "kind", "names"),
    [
        ("stale", Kind.JUMPED, "prefill-1"),
        ("digest", Kind.CORRUPTED, "decode-1 prefill-0"),
        ("peer_lost", Kind.CUT, "decode-0 prefill-1"),
        ("deadline", Kind.STALLED, "decode-1 prefill-0"),
        ("rejected", Kind.FAILED, "decode-1 prefill-1"),
        ("digest", Kind.DOWN, "prefill-0"),
    ],
)
def test_trouble_of_others_or_of_another_kind_is_no_cause(run, reason, kind, names):
    make_handoff(run)
    run.trouble(kind, names, 10.3, 0.1)
    assert "was not used" in run.end_without_its_kv(reason, 11.0)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("away", "at", "is_explained"),
    [("decode-0", 9.9, True), ("", 9.9, False), ("prefill-1", 9.9, False), ("decode-0", 10.3, False)],
)
def test_handoff_is_rejected_by_an_aggregated_worker_if_its_readers_were_away(away, at, is_explained):
    run = Run(is_wanted=is_one_with_an_aggregated_worker)
    run.attempt("prefill-0", SUBMITTED)
    run.attempt("aggregated-0", 10.2)
    for name in away.split():
        run.trouble(Kind.DRAINING, name, at, 5.0)
    assert (run.end_without_its_kv("rejected", 11.0) == []) == is_explained


def test_trouble_that_was_over_before_the_handoff_is_no_cause(run):
    make_handoff(run)
    run.trouble(Kind.CUT, "decode-0 prefill-0", 5.0, 1.0)
    assert run.end_without_its_kv("peer_lost", 11.0)


@pytest.mark.parametrize(("last_failure", "is_explained"), [(9.0, True), (7.0, False)])
def test_transport_that_is_off_after_failures_is_a_cause_until_its_back_off_is_over(run, last_failure, is_explained):
    make_handoff(run)
    for at in (last_failure - 0.2, last_failure):
        run.trouble(Kind.FAILED, "decode-0 prefill-0", at, 0.0)
    assert (run.end_without_its_kv("peer_lost", 11.0) == []) == is_explained


@pytest.mark.parametrize(("ended_at", "is_explained"), [(9.0, True), (7.0, False)])
def test_transport_that_is_off_after_an_unanswered_read_is_a_cause(run, ended_at, is_explained):
    make_handoff(run)
    run.trouble(Kind.UNANSWERED, "decode-0 prefill-0", ended_at - 0.2, 0.2)
    assert (run.end_without_its_kv("peer_lost", 11.0) == []) == is_explained


@pytest.mark.parametrize(("ended_at", "is_explained"), [(10.2, True), (9.9, False)])
def test_unanswered_read_of_another_request_is_a_cause_until_it_ends(run, ended_at, is_explained):
    make_handoff(run)
    run.trouble(Kind.UNANSWERED, "decode-0 prefill-1", 8.0, ended_at - 8.0)
    assert (run.end_without_its_kv("deadline", 11.0) == []) == is_explained


def test_lease_that_was_used_up_is_a_cause(run):
    make_handoff(run)
    assert run.end_without_its_kv("stale", 11.0)
    run.client.outcome = ""
    assert run.end_without_its_kv("stale", SUBMITTED + run.plan.config.connector.lease_max_s + 0.1) == []


# ---- stalls


def wait_for(run: Run, seconds: float) -> list[str]:
    run.attempt("decode-0", SUBMITTED)
    run.path.note_output(10.1)
    run.path.note_output(10.1 + seconds)
    run.client.end("ok", "", 10.1 + seconds)
    return find_stalls(CausalOracle(run.plan, run.troubles).case(run.client))


def test_wait_within_the_bound_needs_no_cause(run):
    assert wait_for(run, bound_s(run.plan) - 0.5) == []


def test_wait_beyond_the_bound_while_others_could_serve_is_reported(run):
    run.trouble(Kind.HUNG, "decode-0", 10.2, 60.0)
    assert "without a cause" in wait_for(run, bound_s(run.plan) + 1.0)[0]


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (Kind.PAUSED, ["router-0"]),
        (Kind.HUNG, ["decode-0", "decode-1"]),
        (Kind.STALLED, ["decode-0 prefill-0"]),
    ],
)
def test_wait_beyond_the_bound_may_have_a_cause_that_lasts(run, kind, names):
    for name in names:
        run.trouble(kind, name, 10.2, 60.0)
    assert wait_for(run, bound_s(run.plan) + 1.0) == []


def test_wait_for_a_worker_that_computes_for_others_has_a_cause(run):
    step_s = next(worker.step_s for worker in run.plan.workers if worker.engine_id == "decode-0")
    for number in range(int(3 * bound_s(run.plan) / step_s)):
        run.now = 10.2 + number * step_s
        run.troubles.note_step("decode-0")
    assert wait_for(run, bound_s(run.plan) + 1.0) == []
