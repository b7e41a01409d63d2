"""Which worker should take which role now. Pure functions without time: ``router.planner.planner`` waits until a reason lasts.

A role with fewer workers than its least number gets one of the other, however loaded that is, if that has more than its own
least number. Else a role that needs more workers than it has gets one, if the other can spare one. A worker away from the role
that it was started in returns once its present role can spare it. Aggregated workers are left alone.

A role keeps at least one worker, and every worker that has a partner for handoffs keeps one. For that only workers count that
take requests and whose role no other router may change: see ``core.worker.role_switch``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from core.wire.messages import Role
from router.dispatch.members import GenerationWorker, WorkerKey
from router.dispatch.policy import can_hand_over
from router.planner.loads import RoleLoad

_OTHER: Mapping[Role, Role] = {"prefill": "decode", "decode": "prefill"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """``low`` is the most load of each worker of a role that gives one away; the least numbers of workers are per role."""

    low: float
    least: Mapping[Role, int]


@dataclass(frozen=True, slots=True)
class Switch:
    """Give a worker this role. ``kind`` names the cause, and stays the same while figures in ``reason`` change."""

    worker: GenerationWorker
    role: Role
    reason: str

    @property
    def kind(self) -> tuple[Role, bool]:
        """The direction, and whether the worker returns to the role that it was started in."""
        return self.role, self.worker.facts.home_role == self.role


@dataclass(frozen=True, slots=True)
class Stay:
    """No worker should switch."""

    reason: str


def choose(
    loads: Mapping[Role, RoleLoad], owned: Sequence[GenerationWorker], fixed: Sequence[GenerationWorker], limits: Limits
) -> Switch | Stay:
    """Return the switch that the loads call for, or why there is none.

    ``owned`` are the workers that this router may switch, ``fixed`` those that none may.
    """
    below = [role for role in _OTHER if loads[role].num_available < limits.least[role]]
    in_need = below or [role for role in _OTHER if loads[role].load >= 1.0]
    if len(in_need) > 1:
        return Stay(f"both roles need more workers: {_describe(loads, 'prefill')}; {_describe(loads, 'decode')}")
    if in_need:
        (role,) = in_need
        return _give(role, loads, owned, fixed, limits)
    for worker in owned:
        home = worker.facts.home_role
        if home is None or _OTHER.get(home) != worker.role or not _can_spare(worker.role, loads, limits):
            continue
        if _keeps_partners(worker, home, (*owned, *fixed), limits):
            return Switch(worker, home, f"{_describe(loads, worker.role)}: it can return a worker of {home}")
    return Stay(f"{_describe(loads, 'prefill')}; {_describe(loads, 'decode')}")


def _give(
    role: Role,
    loads: Mapping[Role, RoleLoad],
    owned: Sequence[GenerationWorker],
    fixed: Sequence[GenerationWorker],
    limits: Limits,
) -> Switch | Stay:
    """Return the switch of the least loaded worker of the other role to a role in need."""
    giver = _OTHER[role]
    reason = _describe(loads, role)
    if loads[giver].num_available <= limits.least[giver]:
        return Stay(f"{reason}, and {giver} can spare none: it has its least number, or fewer")
    if loads[role].num_available >= limits.least[role] and not _can_spare(giver, loads, limits):
        return Stay(f"{reason}, and {giver} can spare none: its load without one would be {loads[giver].without_one():.2f}")
    able = [worker for worker in owned if worker.role == giver and _keeps_partners(worker, role, (*owned, *fixed), limits)]
    if not able:
        return Stay(f"{reason}, and no worker of {giver} can switch without leaving too few behind")
    chosen = min(able, key=lambda worker: (worker.facts.home_role != role, worker.load, worker.kv_load, worker.key))
    return Switch(chosen, role, reason)


def _can_spare(role: Role, loads: Mapping[Role, RoleLoad], limits: Limits) -> bool:
    load = loads[role]
    return load.num_available > limits.least[role] and load.without_one() <= limits.low


def _keeps_partners(moved: GenerationWorker, role: Role, counted: Iterable[GenerationWorker], limits: Limits) -> bool:
    """Return True if enough workers stay in its present role and every worker, itself included, keeps a partner."""
    members = list(counted)
    before = {worker.key: worker.role for worker in members}
    after = before | {moved.key: role}
    if sum(each == moved.role for each in after.values()) < limits.least[moved.role]:
        return False
    paired = [worker for worker in members if worker is moved or _has_partner(worker, before, members)]
    return all(_has_partner(worker, after, members) for worker in paired if after[worker.key] in _OTHER)


def _has_partner(worker: GenerationWorker, roles: Mapping[WorkerKey, Role], members: Iterable[GenerationWorker]) -> bool:
    own = roles[worker.key]
    others = [each for each in members if own in _OTHER and roles[each.key] == _OTHER[own]]
    if own == "prefill":
        return any(can_hand_over(worker.facts, other.facts) for other in others)
    return any(can_hand_over(other.facts, worker.facts) for other in others)


def _describe(loads: Mapping[Role, RoleLoad], role: Role) -> str:
    load = loads[role]
    return f"{role} needs {load.demanded:.2f} of {load.num_available} workers, wait {load.wait_s:.2f} s"
