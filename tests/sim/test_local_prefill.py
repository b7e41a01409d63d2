"""Decode workers of simulated clusters compute prompts themselves while others wait for one slow prefill worker."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec.structs import replace as replace_struct

from kvferry.sim.cluster import SimCluster
from kvferry.sim.draw_plan import draw_plan
from kvferry.sim.faults import Fault
from kvferry.sim.plan import ClusterPlan

pytestmark = pytest.mark.slow

FAULTS = (Fault.CRASH, Fault.FREEZE, Fault.DRAIN, Fault.CUT)


def crowded(seed: int, kinds: tuple[Fault, ...]) -> ClusterPlan:
    """Return a run whose requests come at three moments, to a prefill worker that is slower than all decode workers."""
    plan = draw_plan(seed, kinds)
    prefill = next(replace(worker, step_s=0.2) for worker in plan.workers if worker.role == "prefill")
    decodes = [replace(worker, num_blocks=200, step_s=0.01) for worker in plan.workers if worker.role == "decode"]
    left_out = {worker.engine_id for worker in plan.workers} - {worker.engine_id for worker in (prefill, *decodes)}
    events = [event for event in plan.faults.events if not left_out.intersection(event.targets)]
    requests = [replace(request, at=2.0 + 3.0 * (number % 3)) for number, request in enumerate(plan.requests)]
    router = replace_struct(plan.config.router, local_prefill_itl_ms=1000.0)
    config = replace_struct(plan.config, router=router)
    faults = replace(plan.faults, events=events)
    return replace(plan, config=config, workers=(prefill, *decodes), faults=faults, requests=tuple(requests))


def played(seeds: range, kinds: tuple[Fault, ...]) -> int:
    """Play the runs, none of which may be wrong; return how many prompts decode workers have computed."""
    results = [SimCluster(crowded(seed, kinds)).run() for seed in seeds]
    assert [(result.seed, result.violations) for result in results if result.violations] == []
    return sum(result.happened["local_prefills"] for result in results)


def test_prompts_are_computed_locally_and_every_answer_is_right():
    assert played(range(3), ()) > 0


@pytest.mark.full
@pytest.mark.parametrize("kinds", [(), FAULTS], ids=["calm", "faults"])
@pytest.mark.parametrize("start", range(0, 200, 50))
def test_more_prompts_are_computed_locally(start, kinds):
    assert played(range(start, start + 50), kinds) > 0
