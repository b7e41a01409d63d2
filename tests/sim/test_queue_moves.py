"""Prompts of simulated clusters move from long queues to prefill workers that are nearly idle, amid faults."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.sim.cluster import SimCluster
from kvferry.sim.draw_plan import draw_plan
from kvferry.sim.faults import Fault
from kvferry.sim.plan import ClusterPlan
from router.dispatch import queue_moves

pytestmark = pytest.mark.slow

FAULTS = (Fault.CRASH, Fault.FREEZE, Fault.DRAIN, Fault.CUT)


def crowded(seed: int, kinds: tuple[Fault, ...]) -> ClusterPlan:
    """Return a run whose requests come at three moments, to slow workers."""
    plan = draw_plan(seed, kinds)
    workers = tuple(replace(worker, step_s=0.2) for worker in plan.workers)
    requests = tuple(replace(request, at=2.0 + 3.0 * (number % 3)) for number, request in enumerate(plan.requests))
    return replace(plan, workers=workers, requests=requests)


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """Let prompts move for little: the queues of simulated workers are short."""
    monkeypatch.setattr(queue_moves, "LEAST_GAIN_S", 0.02)
    monkeypatch.setattr(queue_moves, "LEAST_RATIO", 1.0)


def played(seeds: range, kinds: tuple[Fault, ...]) -> int:
    """Play the runs, none of which may be wrong; return how many prompts have moved."""
    results = [SimCluster(crowded(seed, kinds)).run() for seed in seeds]
    assert [(result.seed, result.violations) for result in results if result.violations] == []
    return sum(result.happened["moved"] for result in results)


def test_prompts_move_and_every_answer_is_right():
    assert played(range(10), FAULTS) > 0


@pytest.mark.full
@pytest.mark.parametrize("kinds", [(), FAULTS], ids=["calm", "faults"])
@pytest.mark.parametrize("start", range(0, 200, 50))
def test_more_prompts_move(start, kinds):
    assert played(range(start, start + 50), kinds) > 0
