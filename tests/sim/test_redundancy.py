"""One fault in a cluster that has two workers of each role: no client sees an error."""

from __future__ import annotations

import dataclasses

import pytest

from kvferry.sim.cluster import SimCluster
from kvferry.sim.draw_plan import draw_plan
from kvferry.sim.faults import Fault
from kvferry.sim.plan import ClusterPlan

pytestmark = pytest.mark.slow


def plans(kind: Fault, count: int) -> list[ClusterPlan]:
    """Return plans with two or more workers of each role, of which one meets one fault."""
    found = []
    for seed in range(1000):
        plan = draw_plan(seed, (kind,))
        roles = [worker.role for worker in plan.workers]
        events = [event for event in plan.faults.events if not set(event.targets) & set(plan.routers)]
        if min(roles.count("prefill"), roles.count("decode")) > 1 and events:
            requests = tuple(dataclasses.replace(request, policy=None) for request in plan.requests)
            faults = dataclasses.replace(plan.faults, events=events[:1])
            found.append(dataclasses.replace(plan, requests=requests, faults=faults))
        if len(found) == count:
            break
    return found


@pytest.mark.parametrize("kind", [Fault.CRASH, Fault.FREEZE, Fault.DRAIN, Fault.CUT, Fault.PARTITION])
def test_one_fault_is_hidden_from_clients(kind, first_seeds):
    for plan in plans(kind, len(first_seeds(6, 12))):
        result = SimCluster(plan).run()
        assert not result.violations, plan.describe()
        assert set(result.outcomes) == {"ok"}, [*plan.describe(), result.outcomes]
