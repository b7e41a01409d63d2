"""Checks that each router knows exactly what its workers hold, and their roles, once everything has come to rest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from core.kv.content_feed import FeedPart, key_of, pool_parts
from kvferry.sim.router import SimRouter
from kvferry.sim.worker import SimWorker
from router.contents.keys import hash_keys
from router.dispatch.members import WorkerKey


def differences_of_contents(routers: Iterable[SimRouter], workers: Sequence[SimWorker]) -> list[str]:
    """Return what live routers know wrongly of the prefix caches of their live workers."""
    alive = [router for router in routers if router.host.process.is_alive and router.core.route_costs.is_enabled]
    return [difference for router in alive for difference in _differences_at(router, workers)]


def _differences_at(router: SimRouter, workers: Sequence[SimWorker]) -> list[str]:
    name, contents = router.host.process.name, router.core.route_costs.contents
    found = [f"{name}: {contents.num_pending} prompts count as under way"] if contents.num_pending else []
    for worker in workers:
        key = WorkerKey(worker.spec.engine_id, worker.incarnation)
        if not worker.is_serving or router.core.membership.get(key) is None:
            continue
        for number, part in enumerate(pool_parts(worker.engine.core.scheduler.kv_cache_manager.kv_cache_config.groups)):
            known, held = contents.reports.contents(key, number), _held(worker, part)
            if known != held:
                counts = f"knows {len(known)} blocks, {len(known - held)} of them wrongly, and misses {len(held - known)}"
                found.append(f"{name}: {counts} of part {number} of {worker.spec.engine_id}")
    return found


def differences_of_roles(routers: Iterable[SimRouter], workers: Sequence[SimWorker]) -> list[str]:
    """Return the workers that a live router takes for another role than they have."""
    found = []
    for router in [router for router in routers if router.host.process.is_alive]:
        for worker in [worker for worker in workers if worker.is_serving]:
            member = router.core.membership.get(WorkerKey(worker.spec.engine_id, worker.incarnation))
            if member is not None and member.role != worker.state.roles.role:
                roles = f"takes {worker.spec.engine_id} for {member.role}, which is {worker.state.roles.role}"
                found.append(f"{router.host.process.name}: {roles}")
    return found


def _held(worker: SimWorker, part: FeedPart) -> set[int]:
    """Return the keys of the blocks that are hits in the pool itself, in every group of a part."""
    manager = worker.engine.core.scheduler.kv_cache_manager
    blocks = [block for _, copies in manager.block_pool.cached_blocks.items() for block in copies]
    keys = [
        set(
            hash_keys(
                [key_of(block.block_hash) for block in blocks if block.group_id == group and block.block_hash is not None]
            )
        )
        for group in part.group_ids
    ]
    return set.intersection(*keys)
