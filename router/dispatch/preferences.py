"""Which workers this router prefers while there are other routers: their next prompts should go to different workers.

Two routers hear of each other's prompts with the workers' heartbeats only. Between two heartbeats both would choose the same
idle worker. So each router prefers its share of the workers of a role: the workers say how many routers they serve, and which
place this router has among them, and all routers know the same order of workers. A single router prefers none.
"""

from __future__ import annotations

from core.wire.messages import Heartbeat, Role
from router.dispatch.members import GenerationWorker, WorkerKey
from router.routing.cost import preference_of


class RouterPreferences:
    """The preferences of one router, from the membership and the heartbeats of its workers."""

    def __init__(self) -> None:
        self._roles: dict[WorkerKey, Role] = {}
        self._rank = 0  # of this router
        self._num_routers = 1
        self._disliked: frozenset[WorkerKey] | None = frozenset()  # None = to be found again

    @property
    def disliked(self) -> frozenset[WorkerKey]:
        """The workers that other routers prefer; none if there is no other router."""
        if self._disliked is None:
            self._disliked = self._find_disliked()
        return self._disliked

    def join(self, worker: GenerationWorker) -> None:
        """Count a new member, or one that has another role."""
        self._roles[worker.key] = worker.role
        self._disliked = None

    def forget(self, worker: WorkerKey) -> None:
        """Forget a worker that has left."""
        self._roles.pop(worker, None)
        self._disliked = None

    def on_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Learn how many routers there are; the latest heartbeat counts. Workers of earlier releases tell of one."""
        place = heartbeat.router_rank, heartbeat.num_other_routers + 1
        if place != (self._rank, self._num_routers):
            self._rank, self._num_routers = place
            self._disliked = None

    def _find_disliked(self) -> frozenset[WorkerKey]:
        names: dict[Role, list[WorkerKey]] = {}
        for key, role in self._roles.items() if self._num_routers > 1 else ():
            names.setdefault(role, []).append(key)
        return frozenset(
            key
            for keys in names.values()
            for place, key in enumerate(sorted(keys))
            if preference_of(place, self._rank, self._num_routers)
        )
