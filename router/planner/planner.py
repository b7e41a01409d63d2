"""The planner loop: looks at the roles every few seconds, and orders one switch at a time.

Owns time: how long a reason has lasted, when the last switch was, and the switch under way. The load of the roles comes from
``router.planner.loads``, the choice from ``router.planner.choice``. Callers pass the time, in seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from core.config_router import PlannerSection
from core.log import event
from core.wire.messages import Role, SwitchRole
from router.dispatch.members import GenerationWorker, WorkerKey
from router.planner.choice import Limits, Stay, Switch, choose
from router.planner.loads import PLANNED_ROLES, RoleLoad, RoleLoads

logger = logging.getLogger(__name__)

_MAX_HEARTBEAT_AGE = 2.0  # intervals; a worker that was last heard before that is left alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A switch that the planner has ordered, and what became of it; ``outcome`` is "ordered" until that is known."""

    at: float
    engine_id: str
    before: Role
    role: Role
    reason: str
    outcome: str = "ordered"


@dataclass(frozen=True, slots=True)
class Order:
    """Send this to the worker."""

    worker: GenerationWorker
    message: SwitchRole


class Planner:
    """The planner of one router. ``why_idle`` says why it orders nothing at the moment."""

    def __init__(
        self, section: PlannerSection, loads: RoleLoads, heartbeat_interval_s: float, heartbeat_timeout_s: float
    ) -> None:
        self.is_enabled = section.enabled
        self.last: Decision | None = None
        self.why_idle = "it has not looked yet" if section.enabled else "router.planner.enabled = false"
        self.loads = loads
        self._section = section
        self._limits = Limits(low=section.low, least={"prefill": section.min_prefill, "decode": section.min_decode})
        self._fresh_s = _MAX_HEARTBEAT_AGE * heartbeat_interval_s
        self._patience_s = heartbeat_timeout_s
        self._next_look = 0.0
        self._since: tuple[object, float] | None = None  # what calls for a switch, and since when
        self._ordered: tuple[WorkerKey, int] | None = None  # the switch under way: worker, and its switches before

    def owned(self, workers: Iterable[GenerationWorker], now: float) -> list[GenerationWorker]:
        """Return the workers whose roles this router may change now: they have said so lately, with their present role."""
        return [worker for worker in workers if not worker.is_closed and self._owns(worker, now)]

    def _owns(self, worker: GenerationWorker, now: float) -> bool:
        heartbeat = worker.heartbeat
        return (
            worker.facts.can_switch_role
            and heartbeat is not None
            and heartbeat.is_planner
            and heartbeat.num_switches == worker.facts.num_switches
            and now - worker.heartbeat_at <= self._fresh_s
        )

    # ---- time --------------------------------------------------------------------------------------------------------

    def on_timer(self, workers: Sequence[GenerationWorker], now: float, *, is_settling: bool) -> list[Order]:
        """Look at the roles if it is time; return the switch to order. While this router settles after a pause, do nothing."""
        if not self.is_enabled:
            return []
        self._give_up_if_unanswered(now)
        if is_settling:
            self._since, self.why_idle = None, "this router was paused a moment ago"
            return []
        if now < self._next_look:
            return []
        self._next_look = now + self._section.interval_s
        return self._look(workers, now)

    def _look(self, workers: Sequence[GenerationWorker], now: float) -> list[Order]:
        owned = self.owned(workers, now)
        fixed = [worker for worker in workers if not worker.facts.can_switch_role and not worker.is_closed]
        if not owned:
            self._since, self.why_idle = None, "no worker that can switch has given this router the right to decide"
            return []
        choice = choose(self.measure(workers, now), owned, fixed, self._limits)
        if isinstance(choice, Stay):
            self._since, self.why_idle = None, choice.reason
            return []
        if self._since is None or self._since[0] != choice.kind:
            self._since = (choice.kind, now)
        why_wait = self._why_wait(self._since[1], now)
        if why_wait:
            self.why_idle = f"{choice.reason}; {why_wait}"
            return []
        return [self._order(choice, now)]

    def measure(self, workers: Sequence[GenerationWorker], now: float) -> Mapping[Role, RoleLoad]:
        """Return the load of every role."""
        return {role: self.loads.of(role, workers, now) for role in PLANNED_ROLES}

    def _why_wait(self, since: float, now: float) -> str:
        section = self._section
        if self._ordered is not None:
            return "a switch is under way"
        if now < since + section.hold_s:
            return f"that has to last for {section.hold_s:g} s"
        if self.last is not None and now < self.last.at + section.cooldown_s:
            return f"the last switch was less than {section.cooldown_s:g} s ago"
        return ""

    def _order(self, choice: Switch, now: float) -> Order:
        worker = choice.worker
        assert worker.heartbeat is not None, "it is owned"
        self._since, self.why_idle = None, "a switch is under way"
        self._ordered = (worker.key, worker.facts.num_switches)
        self.last = Decision(at=now, engine_id=worker.key.engine_id, before=worker.role, role=choice.role, reason=choice.reason)
        message = SwitchRole(
            role=choice.role,
            incarnation=worker.key.incarnation,
            num_switches=worker.facts.num_switches,
            heartbeat=worker.heartbeat.number,
            reason=choice.reason,
        )
        return Order(worker, message)

    # ---- what becomes of a switch ------------------------------------------------------------------------------------

    def on_switched(self, worker: GenerationWorker) -> None:
        """A worker has another role, by this router's order or by another cause."""
        if self._is_ordered(worker.key) and self.last is not None:
            is_ours = worker.role == self.last.role
            self._end("done" if is_ours else f"overtaken: the worker has become {worker.role}")

    def on_refused(self, worker: WorkerKey, message: str) -> None:
        """A worker keeps its role."""
        if self._is_ordered(worker):
            self._end(f"refused: {message}")

    def on_left(self, worker: WorkerKey) -> None:
        """A worker is gone."""
        if self._is_ordered(worker):
            self._end("overtaken: the worker was lost")

    def _give_up_if_unanswered(self, now: float) -> None:
        if self._ordered is not None and self.last is not None and now > self.last.at + self._patience_s:
            self._end("unanswered")

    def _is_ordered(self, worker: WorkerKey) -> bool:
        return self._ordered is not None and self._ordered[0] == worker

    def _end(self, outcome: str) -> None:
        assert self.last is not None, "there was an order"
        self.last, self._ordered = replace(self.last, outcome=outcome), None
        last = self.last
        fields = {"engine_id": last.engine_id, "before": last.before, "role": last.role, "reason": last.reason}
        logger.info(event("planned_switch", **fields, outcome=outcome))
