"""The load of a role as several routers measure it, each by its own prompts."""

from __future__ import annotations

import pytest

from core.wire.messages import Generate
from core.wire.sampling import SamplingParams
from router.dispatch.route_costs import RouteCosts
from router.dispatch.wait_estimate import WaitEstimates
from router.planner.loads import RoleLoads
from tests.router.planner.test_choice import cluster

NOW = 10.0


class RouterLoads:
    """What one router measures of prefill, by the prompts that it sends; each is computed at once."""

    def __init__(self, workers):
        self.workers = workers
        self.costs = RouteCosts()
        self.loads = RoleLoads(self.costs, WaitEstimates(), max_wait_s=1.0, max_itl_ms=0.0)

    def send(self, number):
        prompt, name = tuple(range(1000 * number, 1000 * (number + 1))), f"r{number}"
        message = Generate(request_id=name, prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=5), handoff=True)
        self.costs.on_sent(self.workers[0], message, NOW)
        self.costs.drop(name, NOW)

    def of(self, role):
        return self.loads.of(role, self.workers, NOW)


@pytest.mark.parametrize("role", ["prefill", "aggregated"])
def test_offered_work_of_several_routers_adds_up_to_the_demand_that_one_would_have(role):
    """The chart's scaler asks for the larger of the largest demand and the sum of what is offered."""
    workers = cluster("p" if role == "prefill" else "a")
    one, *several = (RouterLoads(workers) for _ in range(3))
    for number in range(8):
        one.send(number)
        several[number % 2].send(number)
    whole, parts = one.of(role), [each.of(role) for each in several]
    assert max(part.demanded for part in parts) == pytest.approx(whole.demanded / 2)
    assert max([*(part.demanded for part in parts), sum(part.offered for part in parts)]) == pytest.approx(whole.demanded)


def test_decode_workers_are_measured_by_what_they_report_to_every_router():
    measured = RouterLoads(cluster("pd"))
    measured.send(1)
    assert measured.of("decode").offered == 0.0
