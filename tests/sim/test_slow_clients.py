"""Slow clients: a router buffers for them, disconnects those that stop for too long, and no other client is affected."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.sim.client import Client
from kvferry.sim.cluster import SimCluster
from kvferry.sim.draw_plan import draw_plan
from kvferry.sim.faults import Fault
from kvferry.sim.oracle import CausalOracle
from kvferry.sim.plan import ClusterPlan, RequestPlan
from kvferry.sim.race_plan import draw_any_plan
from kvferry.sim.router import SimRouter
from kvferry.sim.runs import Summary, run_seeds
from kvferry.sim.slow_reading import SEND_TIMEOUT_S, Reading
from kvferry.sim.troubles import Troubles
from kvferry.sim.worker import SimWorker

ABORT_BOUND_S = 2.0  # a step and some frames


def slow(plan: ClusterPlan) -> list[RequestPlan]:
    return [request for request in plan.requests if request.reading is not None]


@pytest.mark.slow
def test_slow_clients_are_drawn_for_some_seeds_and_told():
    plans = [plan for plan in map(draw_any_plan, range(100)) if Fault.SLOW_CLIENT in plan.kinds]
    assert 3 < len(plans) < 30
    for plan in plans:
        assert any("reads every" in line for line in plan.describe())


def test_slow_clients_change_nothing_else_of_a_plan():
    for seed in range(10):
        without, plan = draw_plan(seed, (Fault.ABORT,)), draw_plan(seed, (Fault.ABORT, Fault.SLOW_CLIENT))
        assert slow(plan)
        assert tuple(replace(request, reading=None) for request in plan.requests) == without.requests
        assert (plan.workers, plan.faults.events) == (without.workers, without.faults.events)


@pytest.fixture(scope="module")
def runs(first_seeds) -> Summary:
    return run_seeds(first_seeds(10, 20), (Fault.SLOW_CLIENT,))


@pytest.mark.slow
def test_slow_clients_get_their_answers_or_are_cut(runs):
    assert not runs.failures, [(failure.seed, failure.violations) for failure in runs.failures]
    assert 0 < runs.happened["cut_clients"] < runs.happened["slow_clients"]
    assert runs.outcomes["cancelled"] == runs.happened["cut_clients"]


@pytest.mark.slow
def test_workers_give_up_the_request_of_a_client_that_was_cut(monkeypatch, first_seeds):
    held_before, held_after = [], []
    real = SimRouter._end_request

    def held(cluster: SimCluster, client: Client) -> list[str]:
        workers = [worker for worker in cluster.workers.values() if isinstance(worker, SimWorker)]
        return [
            name for worker in workers for name in worker.engine.core.scheduler.requests if name.startswith(client.plan.name)
        ]

    for seed in first_seeds(10, 20):
        cluster = SimCluster(draw_plan(seed, (Fault.SLOW_CLIENT, Fault.SLOW)))

        def end_request(self, client, cluster=cluster):
            held_before.extend(held(cluster, client))
            real(self, client)
            cluster.loop.call_later(ABORT_BOUND_S, lambda: held_after.extend(held(cluster, client)))

        monkeypatch.setattr(SimRouter, "_end_request", end_request)
        assert not cluster.run().violations
    assert held_before
    assert not held_after


@pytest.mark.parametrize(
    ("since_last_read_s", "stopped_at", "is_explained"), [(3.0, 7.0, True), (2.0, 7.0, False), (3.0, 11.0, False)]
)
def test_cut_has_a_cause_only_while_the_client_has_stopped(since_last_read_s, stopped_at, is_explained):
    plan = draw_plan(0, (Fault.SLOW_CLIENT,))
    reading = Reading(read_s=0.1, stops_at=stopped_at, stop_s=2 * SEND_TIMEOUT_S, room=1)
    client = Client(replace(plan.requests[0], reading=reading), lambda violation: None)
    client.path.note_output(6.0)
    client.was_cut, client.last_read_at = True, 10.0 - since_last_read_s
    client.end("cancelled", "", 10.0)
    assert (CausalOracle(plan, Troubles(lambda: 0.0)).judge(client) == []) == is_explained
