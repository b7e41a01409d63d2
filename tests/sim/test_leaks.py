"""After the last request nothing of any is left, also where no gauge looks: tables, queues, in-flight counts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvferry.sim.cluster import SimCluster
from kvferry.sim.draw_plan import draw_plan
from kvferry.sim.encoder import SimEncoder
from kvferry.sim.faults import Fault
from kvferry.sim.router import SimRouter
from kvferry.sim.worker import SimWorker

pytestmark = pytest.mark.slow

SCHEDULER = (
    "requests",
    "running",
    "waiting",
    "kv_holding_waiting",
    "inflight_prefills",
    "finished_req_ids",
    "finished_recving_kv_req_ids",
    "failed_recving_kv_req_ids",
    "awaiting_recving",
    "awaiting_sending",
    "transfer_usage",
    "rolled_back",
    "empty_handed",
    "quarantined",
    "recompute_ownership",
    "inflight_steps",
)


def tables_of_worker(worker: SimWorker | SimEncoder) -> Iterator[tuple[object, str]]:
    yield worker.state.serving, "requests"
    yield worker.state.serving.requests, "num_choices"
    yield worker.state.serving.requests._deadlines, "_live"
    if isinstance(worker, SimEncoder):
        yield from ((worker.engine.core, name) for name in ("_images", "_requests", "_queue"))
        return
    core = worker.engine.core
    yield from ((core.scheduler.state, name) for name in SCHEDULER)
    encoder = core.scheduler.state.encoder
    yield encoder, "_unavailable"
    yield encoder.cache, "_held"
    yield worker.model.encoder, "_requests"
    yield from ((worker.handler, name) for name in ("_live", "_followers") if hasattr(worker.handler, name))
    yield worker.model, "_batch"
    connector = worker.connector
    if connector is not None:
        yield from ((connector.scheduler, name) for name in ("_offers", "_loading", "_refs", "_readers"))
        yield from ((connector._executor, name) for name in ("_reads", "_read_ids"))
        yield connector.agent.consumer.loads, "_loads"
        yield connector.agent.consumer._reads, "_loads"
        yield connector.agent.consumer._reads.quarantine, "_reads"
        yield connector.agent.consumer.leases, "_leases"
        yield connector.agent.producer.leases, "_leases"
        yield connector.worker, "_reports"


def tables_of_router(router: SimRouter) -> Iterator[tuple[object, str]]:
    yield from ((router.core.dispatcher, name) for name in ("requests", "_attempts", "_waiting"))
    yield from ((worker, "num_inflight") for worker in router.core.membership.workers)


@pytest.mark.parametrize("kinds", [None, (Fault.ABORT,), (Fault.STALL, Fault.READ_ERROR), (Fault.CUT, Fault.CRASH)], ids=str)
def test_nothing_is_left(kinds, first_seeds):
    for seed in first_seeds(8, 15):
        cluster = SimCluster(draw_plan(seed, kinds))
        cluster.run()
        alive = [worker for worker in cluster.workers.values() if worker.host.process.is_alive and not worker.is_stopped]
        tables = [table for worker in alive for table in tables_of_worker(worker)]
        tables += [table for router in cluster.routers.values() for table in tables_of_router(router)]
        left = {f"{type(owner).__name__}.{name}": getattr(owner, name) for owner, name in tables if getattr(owner, name)}
        assert not left, f"seed {seed}"
