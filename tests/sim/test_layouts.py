"""Workers of a second KV layout in a cluster: none reads an unreadable layout, and every request is still answered."""

from __future__ import annotations

import pytest

import core.wire.pairing
import router.dispatch.handoffs
import router.dispatch.policy
from kvferry.sim.cluster import SimCluster
from kvferry.sim.draw_plan import draw_plan
from kvferry.sim.faults import Fault
from kvferry.sim.runs import Summary, run_seeds

LOSSES = (Fault.LAYOUT, Fault.CRASH, Fault.SLOW)


@pytest.mark.slow
def test_workers_of_another_layout_are_drawn_for_some_seeds_and_told():
    plans = [plan for plan in map(draw_plan, range(100)) if Fault.LAYOUT in plan.kinds]
    assert 0 < len(plans) < 20
    for plan in plans:
        assert any(line.startswith("prefill-") and line.endswith("layout bfloat16") for line in plan.describe())
        assert any(worker.role == "prefill" and worker.kv_dtype == "float32" for worker in plan.workers)


def test_plan_without_the_fault_is_what_it_was_with_the_others():
    plan = draw_plan(3, LOSSES)
    assert plan.workers[:-2] == draw_plan(3, LOSSES[1:]).workers or plan.workers[:-1] == draw_plan(3, LOSSES[1:]).workers


@pytest.mark.slow
def test_two_layouts_alone_change_nothing(first_seeds):
    summary = run_seeds(first_seeds(10, 20), (Fault.LAYOUT,))
    assert not summary.failures, summary.failures[0].violations
    assert set(summary.outcomes) == {"ok"}
    assert not [name for name in summary.happened if name.startswith("fallback")]


@pytest.fixture(scope="module")
def lossy_runs(first_seeds) -> Summary:
    return run_seeds(first_seeds(15, 30), LOSSES)


@pytest.mark.slow
def test_a_successor_with_another_layout_recomputes_and_gives_the_reason(lossy_runs):
    assert not lossy_runs.failures, [(failure.seed, failure.violations) for failure in lossy_runs.failures]
    assert lossy_runs.happened["fallback_layout"] > 0


@pytest.mark.slow
def test_readers_refuse_another_layout_that_their_router_pairs_them_with(monkeypatch, first_seeds):
    monkeypatch.setattr(router.dispatch.policy, "mismatch", lambda prefill, decode: None)
    runs = [SimCluster(draw_plan(seed, (Fault.LAYOUT,))).run() for seed in first_seeds(10, 20)]
    assert sum(run.happened["fallback_layout"] for run in runs) > 0
    assert set().union(*(run.outcomes for run in runs)) <= {"ok", "layout"}
    violations = [violation for run in runs for violation in run.violations]
    assert all(violation.endswith("was told to read KV of another layout") for violation in violations), violations


# ---- deliberate defects


def read_whatever_the_layout(monkeypatch) -> None:
    monkeypatch.setattr(core.wire.pairing, "check_compatible", lambda *_args, **_kwargs: None)


def name_another_reason(monkeypatch) -> None:
    monkeypatch.setattr(router.dispatch.handoffs, "fallback_reason", lambda code: "rejected")


def let_nobody_serve_alone_beside_another_layout(monkeypatch) -> None:
    """As it was when the simulation found it."""
    real = router.dispatch.policy._alone

    def alone(workers):
        members = list(workers)
        return [] if any(each.role == "prefill" and not each.is_closed for each in members) else real(members)

    monkeypatch.setattr(router.dispatch.policy, "_alone", alone)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("apply", "first"),  # played first is a seed that shows the defect
    [
        (read_whatever_the_layout, 0),
        (name_another_reason, 19),
        (let_nobody_serve_alone_beside_another_layout, 8),
    ],
)
def test_defect_is_found(apply, first, monkeypatch):
    apply(monkeypatch)
    kinds = (Fault.LAYOUT, Fault.CRASH, Fault.SLOW, Fault.DRAIN)
    assert any(not SimCluster(draw_plan(seed, kinds)).run().is_good for seed in (first, *range(40))), (
        "41 runs saw nothing wrong"
    )
