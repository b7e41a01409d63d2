"""Which role each worker had at what time, and the check that no planner takes the last worker of a role away."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Set

from core.wire.messages import Role

LEARN_ROLE_S = 2.0  # from a switch until every router that hears the worker knows it


class RoleHistory:
    """The roles of a run's workers, by their registrations. ``now`` is the loop's time."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._changes: defaultdict[str, list[tuple[float, Role]]] = defaultdict(list)
        self._lives: defaultdict[str, list[int]] = defaultdict(list)  # incarnations, the latest last
        self._planned: set[tuple[str, float]] = set()  # switches by planners: worker, when
        self._abandoned: list[str] = []
        self.num_switches = 0
        self.num_planned = 0

    def note(self, name: str, incarnation: int, role: Role) -> None:
        """Record a worker's registration; a new process may begin with another role than its predecessor had.

        A process that another one has replaced may still try to register; routers refuse it while the newer one lives.
        """
        lives = self._lives[name]
        if incarnation not in lives:
            lives.append(incarnation)
        if incarnation != lives[-1]:
            return
        changes = self._changes[name]
        if not changes or changes[-1][1] != role:
            self.num_switches += bool(changes)
            changes.append((self._now(), role))

    def note_planned(self, name: str, incarnation: int) -> None:
        """Check the switch, just recorded, of a worker that a planner has ordered: it must not have been the role's last."""
        if incarnation != self._lives[name][-1]:
            return
        self.num_planned += 1
        at, before = self._changes[name][-1][0], self._changes[name][-2][1]
        self._planned.add((name, at))
        if not any(self._counts_as(other, before, at) for other in self._changes if other != name):
            self._abandoned.append(f"{name}: a planner made the last {before} worker {self._changes[name][-1][1]}")

    def _counts_as(self, name: str, role: Role, at: float) -> bool:
        """Return True if a planner could take a worker for one of this role at a time.

        It has it, or has left it a moment ago without a planner's order: by command, or as a new process.
        """
        changes = self._changes[name]
        if changes[-1][1] == role:
            return True
        left_at = changes[-1][0]
        is_planned = (name, left_at) in self._planned
        return len(changes) > 1 and changes[-2][1] == role and at - left_at <= LEARN_ROLE_S and not is_planned

    def find_abandoned(self) -> list[str]:
        """Return the switches by planners that left a role without workers."""
        return self._abandoned

    def has_switched(self, name: str) -> bool:
        """Return True if a worker had more than one role."""
        return len(self._changes[name]) > 1

    def between(self, name: str, first: Role, since: float, until: float) -> Set[Role]:
        """Return the roles that a worker had in a period; ``first`` is the one before its first registration."""
        found: set[Role] = set()
        role, start = first, float("-inf")
        for at, following in (*self._changes[name], (float("inf"), first)):
            if start <= until and at > since:
                found.add(role)
            role, start = following, at
        return found
