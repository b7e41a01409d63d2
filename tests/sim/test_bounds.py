"""How long the cluster takes to notice and to recover: the bounds of the table of failures, in virtual time.

Calm networks and quick steps, so that what is measured is the protocol. Each test lets one kind of fault strike and looks at
every process as much later as the bound allows.
"""

from __future__ import annotations

import dataclasses

import pytest

from kvferry.sim.cluster import RunResult, SimCluster
from kvferry.sim.draw_plan import draw_plan
from kvferry.sim.faults import Fault, FaultEvent
from kvferry.sim.plan import ClusterPlan
from kvferry.sim.worker import SimWorker

pytestmark = pytest.mark.slow

TICK_S = 0.1
DETECT_S = 1.0
STEP_S = 0.02
NETWORK_S = 0.005


@pytest.fixture(scope="module")
def seeds(first_seeds) -> range:
    return first_seeds(8, 15)


def calm_plan(seed: int, *kinds: Fault) -> ClusterPlan:
    """Return a plan with these faults, in which everything else is quick."""
    plan = draw_plan(seed, kinds)
    plan.faults.network.delay_s = plan.faults.reads.row_s = NETWORK_S
    workers = tuple(dataclasses.replace(worker, step_s=STEP_S) for worker in plan.workers if worker.role != "aggregated")
    events = [event for event in plan.faults.events if event.targets[0] in {worker.engine_id for worker in workers}]
    plan.faults.events = events
    return dataclasses.replace(plan, workers=workers)


def run(cluster: SimCluster) -> RunResult:
    result = cluster.run()
    assert not result.violations, result.violations
    return result


def alive(cluster: SimCluster) -> list[SimWorker]:
    """Return the workers with a KV pool that run now."""
    return [worker for worker in cluster.workers.values() if isinstance(worker, SimWorker) and worker.host.process.is_alive]


def test_what_a_client_leaves_is_free_within_a_second(seeds):
    num_checked = sum(leave_and_look(SimCluster(calm_plan(seed, Fault.ABORT))) for seed in seeds)
    assert num_checked > len(seeds)


def leave_and_look(cluster: SimCluster) -> int:
    leaving = [client.plan for client in cluster.clients if client.plan.abort_at is not None]

    def check(name: str) -> None:
        for worker in alive(cluster):
            held = [request_id for request_id in worker.engine.core.scheduler.requests if request_id.startswith(name)]
            assert not held, f"{worker.spec.engine_id} still holds {held}"

    for plan in leaving:
        cluster.loop.call_later(plan.abort_at + DETECT_S, lambda name=plan.name: check(name))
    run(cluster)
    return len(leaving)


def test_death_of_the_owner_ends_its_loads_within_a_second(seeds):
    num_checked = sum(kill_and_look(SimCluster(calm_plan(seed, Fault.CRASH))) for seed in seeds)
    assert num_checked > len(seeds)


def kill_and_look(cluster: SimCluster) -> int:
    events = cluster.plan.faults.events

    def check(dead: SimWorker) -> None:
        for worker in alive(cluster):
            loads = worker.connector.agent.consumer.loads
            assert not [load for load in loads if load.producer.incarnation == dead.incarnation]

    def note(name: str) -> None:
        cluster.loop.call_later(DETECT_S, lambda dead=cluster.workers[name]: check(dead))

    for event in events:
        cluster.loop.call_later(event.at, lambda name=event.targets[0]: note(name))
    run(cluster)
    return len(events)


def test_no_load_outlives_its_deadline_whatever_its_owner_does(seeds):
    for seed in seeds:
        freeze_and_look(SimCluster(calm_plan(seed, Fault.FREEZE, Fault.STALL)))


def freeze_and_look(cluster: SimCluster) -> None:
    longest_s = cluster.plan.config.connector.transfer_deadline_s + TICK_S
    readers = {worker.engine_id for worker in cluster.plan.workers if worker.role == "decode"}
    readers -= {event.targets[0] for event in cluster.plan.faults.events}  # one that is frozen itself notices later

    def check() -> None:
        for name in readers:
            worker = cluster.workers[name]
            ages = [worker.host.process.clock.now() - load.started_at for load in worker.connector.agent.consumer.loads]
            assert max(ages, default=0.0) <= longest_s
        cluster.loop.call_later(TICK_S, check)

    cluster.loop.call_later(0.0, check)
    run(cluster)


def test_a_stream_continues_within_a_second_of_the_death_of_its_decode_worker(seeds):
    num_replays = sum(kill_in_mid_stream(calm_plan(seed, Fault.CRASH)) for seed in seeds)
    assert num_replays > 0


def kill_in_mid_stream(plan: ClusterPlan) -> int:
    """Give the first decode worker a twin, and kill it while it may be streaming the longest answer."""
    slow = tuple(dataclasses.replace(worker, step_s=4 * STEP_S) for worker in plan.workers)
    mortal = next(worker for worker in slow if worker.role == "decode")
    longest = max(plan.requests, key=lambda request: len(request.expected))
    plan.faults.events = [FaultEvent(longest.at + 0.5, Fault.CRASH, (mortal.engine_id,), 1.0)]
    requests = tuple(dataclasses.replace(request, n=1, text_ends_after=None) for request in plan.requests)
    twin = dataclasses.replace(mortal, engine_id="decode-twin")
    cluster = SimCluster(dataclasses.replace(plan, workers=(*slow, twin), requests=requests))
    gaps: list[float] = []
    for client in cluster.clients:
        watch_gaps(cluster, client, gaps)
    result = run(cluster)
    assert set(result.outcomes) == {"ok"}
    assert max(gaps) < DETECT_S
    return result.happened["retry_replay"]


def watch_gaps(cluster: SimCluster, client, gaps: list[float]) -> None:
    """Collect the times between a client's updates."""
    real, last = client.on_update, []

    def on_update(update):
        gaps.extend(cluster.loop.now - before for before in last)
        last[:] = [cluster.loop.now]
        real(update)

    client.on_update = on_update
