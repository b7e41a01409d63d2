"""Plans for situations that are rare in ordinary ones, and the choice of the plan that ``kvferry sim`` plays for a seed.

In a race plan most reads race with the reuse of their blocks, in some by the same prompt; in a lease plan the reader's clock
jumps to the ends of its leases.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from random import Random

from msgspec.structs import replace as replace_struct

from kvferry.sim.draw_plan import FIRST_REQUEST_S, draw_plan
from kvferry.sim.faults import Fault, FaultEvent
from kvferry.sim.plan import ClusterPlan

_RACE_SHARE = 0.25  # of the seeds without given kinds of faults
_REPEATED_SHARE, _LEASE_SHARE = 0.3, 0.3  # of these, runs that repeat the same prompts, and lease plans
_LEASES_END_EVERY_S = 0.3  # in a race plan
_LEASE_S, _LEASE_DEADLINE_S = 2.0, 8.0  # in a lease plan
_AGE_OF_LEASE_S = 0.4  # at the jump, or less: the next renewal is under way


def draw_any_plan(seed: int, chosen: Collection[Fault] | None = None) -> ClusterPlan:
    """Return the plan of a seed: an ordinary plan, or a race; with ``chosen`` kinds of faults always an ordinary one."""
    is_race = chosen is None and Random(f"{seed}/race").random() < _RACE_SHARE
    if not is_race:
        return draw_plan(seed, chosen)
    share = Random(f"{seed}/race kind").random()
    if share < _REPEATED_SHARE:
        return _with_repeated_prompts(draw_race_plan(seed))
    return draw_lease_plan(seed) if share < _REPEATED_SHARE + _LEASE_SHARE else draw_race_plan(seed)


def draw_race_plan(seed: int, async_scheduling: bool | None = None) -> ClusterPlan:
    """Return a run in which most reads race with the reuse of their blocks: only seals prevent wrong tokens.

    The prefill worker has room for one prompt, gets one after the other, and its clock jumps past the end of every lease.
    """
    random = Random(seed)
    plan = draw_plan(seed, (Fault.JUMP, Fault.STALL, Fault.PRESSURE, Fault.SLOW), async_scheduling)
    workers = {worker.role: worker for worker in plan.workers}
    prefill = replace(workers["prefill"], step_s=random.choice((0.1, 0.3, 0.6)))
    decode = replace(workers["decode"], num_blocks=60, step_s=0.005)
    plan.faults.events = [
        FaultEvent(tick * _LEASES_END_EVERY_S, Fault.JUMP, (prefill.engine_id,), plan.config.connector.lease_s + 1.0)
        for tick in range(5, 40)
    ]
    plan.faults.quiet_at = 40 * _LEASES_END_EVERY_S
    plan.faults.reads.row_s = 0.005
    plan.faults.reads.stall_rate, plan.faults.reads.stall_s = 0.7, random.choice((0.5, 1.5))
    requests = [
        replace(request, at=FIRST_REQUEST_S + 0.2 * index, n=1, policy=None) for index, request in enumerate(plan.requests)
    ]
    return replace(plan, workers=(prefill, decode), requests=tuple(requests))


def _with_repeated_prompts(plan: ClusterPlan) -> ClusterPlan:
    """Return a race in which two prompts alternate and no prefix is shared: blocks get their old content again.

    A tier needs the prefix cache; with one the plan stays as it is.
    """
    if plan.tier is not None:
        return plan
    config = replace_struct(plan.config, cache=replace_struct(plan.config.cache, enable_prefix_caching=False))
    pair = sorted(plan.requests, key=lambda request: len(request.prompt_token_ids))[-2:]
    requests = [replace(pair[index % 2], name=each.name, at=each.at) for index, each in enumerate(plan.requests)]
    return replace(plan, config=config, requests=tuple(requests))


def draw_lease_plan(seed: int) -> ClusterPlan:
    """Return a run in which the clocks of the readers jump, so that the rest of a lease may not outlast the next read."""
    plan = draw_plan(seed, (Fault.JUMP,))
    connector = replace_struct(
        plan.config.connector,
        transfer_deadline_s=_LEASE_DEADLINE_S,
        lease_s=_LEASE_S,
        lease_renew_interval_s=_LEASE_S / 4,
        lease_max_s=4 * _LEASE_S,
    )
    readers = [worker.engine_id for worker in plan.workers if worker.role == "decode"]
    plan.faults.events = [
        FaultEvent(FIRST_REQUEST_S + tick * _LEASES_END_EVERY_S, Fault.JUMP, (reader,), _LEASE_S - _AGE_OF_LEASE_S)
        for tick in range(30)
        for reader in readers
    ]
    plan.faults.quiet_at = FIRST_REQUEST_S + 30 * _LEASES_END_EVERY_S
    plan.faults.reads.row_s, plan.faults.network.delay_s = 0.1, 0.05
    requests = [replace(request, at=FIRST_REQUEST_S + 0.4 * index) for index, request in enumerate(plan.requests)]
    config = replace_struct(plan.config, connector=connector)
    return replace(plan, config=config, requests=tuple(requests), max_rows_per_read=1)
