"""Which workers this router prefers while there are other routers: their next prompts should go to different workers.

Two routers hear of each other's prompts with the workers' heartbeats only. Between two heartbeats both would choose the same
idle worker. So each router prefers its share of the workers of a role: the workers say how many routers they serve, and which
place this router has among them, and all routers know the same order of workers. A single router prefers none.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from core.wire.messages import Heartbeat, Role
from router.dispatch.members import GenerationWorker, WorkerKey
from router.routing.cost import dislike_of

_ALONE = (0, 1)


class RouterPreferences:
    """The preferences of one router, from the membership and the heartbeats of its workers.

    Each worker's own word counts for it: during a rolling upgrade some tell of no other router yet.
    """

    def __init__(self) -> None:
        self._roles: dict[WorkerKey, Role] = {}
        self._views: dict[WorkerKey, tuple[int, int]] = {}  # by worker: the place of this router, and how many there are
        self._places: dict[WorkerKey, int] | None = {}  # of the workers in the order of their role; None = to be found again
        self._disliked: set[WorkerKey] = set()

    @property
    def disliked(self) -> Set[WorkerKey]:
        """The workers that other routers prefer; none if there is no other router."""
        if self._places is None:
            self._places = _places_of(self._roles)
            self._disliked = {key for key in self._views if self._is_disliked(key)}
        return self._disliked

    def join(self, worker: GenerationWorker) -> None:
        """Count a new member, or one that has another role."""
        self._roles[worker.key] = worker.role
        self._places = None

    def forget(self, worker: WorkerKey) -> None:
        """Forget a worker that has left."""
        self._roles.pop(worker, None)
        self._views.pop(worker, None)
        self._places = None

    def on_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Learn how many routers a worker serves. Workers of earlier releases tell of one."""
        worker = WorkerKey(heartbeat.engine_id, heartbeat.incarnation)
        view = heartbeat.router_rank, heartbeat.num_other_routers + 1
        if view == self._views.get(worker, _ALONE):
            return
        self._views[worker] = view
        if self._places is None:
            return
        if self._is_disliked(worker):
            self._disliked.add(worker)
        else:
            self._disliked.discard(worker)

    def _is_disliked(self, worker: WorkerKey) -> bool:
        assert self._places is not None, "the workers are in order"
        rank, num_routers = self._views[worker]
        place = self._places.get(worker)
        return place is not None and dislike_of(place, rank, num_routers) > 0


def _places_of(roles: Mapping[WorkerKey, Role]) -> dict[WorkerKey, int]:
    """Return the place of each worker among those of its role, in an order that all routers know."""
    names: dict[Role, list[WorkerKey]] = {}
    for key, role in roles.items():
        names.setdefault(role, []).append(key)
    return {key: place for keys in names.values() for place, key in enumerate(sorted(keys))}
