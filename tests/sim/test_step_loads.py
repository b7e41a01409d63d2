"""A connector that loads within a step: good loads are used, bad ones are computed again, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.sim.client import Client
from kvferry.sim.cluster import SimCluster
from kvferry.sim.draw_plan import draw_plan
from kvferry.sim.faults import Fault
from kvferry.sim.oracle import CausalOracle
from kvferry.sim.race_plan import draw_any_plan
from kvferry.sim.request_path import WorkerTurn
from kvferry.sim.runs import Summary
from kvferry.sim.troubles import Kind, Troubles


@pytest.mark.slow
def test_loads_within_a_step_are_drawn_for_some_seeds_and_told():
    plans = [plan for plan in map(draw_any_plan, range(100)) if Fault.STEP_LOAD in plan.kinds]
    assert 3 < len(plans) < 30
    for plan in plans:
        assert any(line.startswith("loads within a step") for line in plan.describe())


def test_loads_within_a_step_change_nothing_else_of_a_plan():
    for seed in range(10):
        without, plan = draw_plan(seed, (Fault.ABORT,)), draw_plan(seed, (Fault.ABORT, Fault.STEP_LOAD))
        assert plan.step_loads is not None
        assert (plan.requests, plan.workers, plan.config) == (without.requests, without.workers, without.config)
        assert plan.faults.events == without.faults.events


@pytest.mark.slow
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_bad_loads_within_a_step_change_no_answer(async_scheduling, first_seeds):
    runs = Summary()
    for seed in first_seeds(10, 20):
        runs.add(SimCluster(draw_plan(seed, (Fault.STEP_LOAD,), async_scheduling)).run())
    assert not runs.failures, [(failure.seed, failure.violations) for failure in runs.failures]
    assert 0 < runs.happened["bad_step_loads"] < runs.happened["step_loads"]
    assert set(runs.outcomes) <= {"ok", "transfer_error", "encoder_input_missing"}
    assert runs.outcomes["ok"] > 10 * runs.outcomes["transfer_error"]


@pytest.mark.parametrize(
    ("request_name", "worker", "is_explained"),
    [("own", "decode-0", True), ("other", "decode-0", False), ("own", "decode-1", False)],
)
def test_only_its_own_bad_load_is_a_cause_of_an_error(request_name, worker, is_explained):
    plan = draw_plan(0, (Fault.STEP_LOAD,))
    request = replace(plan.requests[0], policy="fail")
    client, now = Client(request, lambda violation: None), [request.at]
    troubles = Troubles(lambda: now[0])
    client.path.turns.append(WorkerTurn("decode-0", "decode", request.at))
    troubles.note(Kind.BAD_LOAD, (worker, request.name if request_name == "own" else "r99"), 0.0)
    client.end("transfer_error", "", request.at + 0.1)
    assert (CausalOracle(plan, troubles).judge(client) == []) == is_explained
