"""Draws the switches of roles of a run: by command at any time, and by planners that look often and wait for little."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from msgspec.structs import replace as replace_struct

from core.config import KVFerryConfig
from core.config_router import PlannerSection
from core.worker.role_switch import SWITCH_ROLES
from kvferry.sim.faults import Fault, FaultEvent, FaultSchedule
from kvferry.sim.plan import WorkerPlan

_PERIOD, _PLACE = 8, 3  # the seeds with switches, which are not those that recorded defects are known to be found by
_ABLE_SHARE = 0.85  # of the workers of such a run
_PLANNER_SHARE = 0.5
_MAX_SWITCHES = 6


def draw_switches(
    seed: int,
    workers: tuple[WorkerPlan, ...],
    config: KVFerryConfig,
    faults: FaultSchedule,
    moments: Sequence[float],
    *,
    is_wanted: bool | None,
) -> tuple[tuple[WorkerPlan, ...], KVFerryConfig]:
    """Return workers and settings of a run with switches, and add these to its faults; None = the seed decides."""
    random = Random(f"{seed}/switch")
    is_drawn = seed % _PERIOD == _PLACE
    if not (is_drawn if is_wanted is None else is_wanted):
        return workers, config
    workers = tuple(replace(worker, can_switch_role=random.random() < _ABLE_SHARE) for worker in workers)
    able = [worker.engine_id for worker in workers if worker.can_switch_role]
    has_planner = random.random() < _PLANNER_SHARE
    events = [
        FaultEvent(random.choice(moments) + random.uniform(-0.2, 2.0), Fault.SWITCH, (random.choice(able), role))
        for role in random.choices(SWITCH_ROLES, k=random.randint(0 if has_planner else 1, _MAX_SWITCHES) if able else 0)
    ]
    faults.add(frozenset({Fault.SWITCH}), events)
    if has_planner:
        planner = PlannerSection(
            enabled=True,
            interval_s=0.5,
            max_wait_s=random.choice((0.02, 0.2)),
            low=0.95,
            hold_s=random.choice((0.1, 1.0)),
            cooldown_s=random.choice((0.1, 2.0)),
        )
        config = replace_struct(config, router=replace_struct(config.router, planner=planner))
    return workers, config
