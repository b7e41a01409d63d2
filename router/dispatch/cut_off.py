"""Which requests workers would serve whose connections were found lost after a pause of the router, once they reconnect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from core.errors import RequestError
from router.dispatch.members import GenerationWorker
from router.dispatch.policy import Demand, choose_route
from router.dispatch.types import Submission
from router.dispatch.wait_estimate import WaitEstimates


def would_serve(
    members: Sequence[GenerationWorker], estimates: WaitEstimates, submission: Submission, budget_s: float, now: float
) -> bool:
    """Return True if a new request would have a route with room by a member that is cut off, and begin within ``budget_s``."""
    cut_off = {worker.key for worker in members if worker.cut_peer is not None}
    workers = [replace(worker, cut_peer=None) if worker.key in cut_off else worker for worker in members]
    demand = Demand(num_tokens=submission.num_tokens, num_choices=submission.n, model_fingerprint=submission.model_fingerprint)
    try:
        late = estimates.too_late(workers, demand, budget_s, now, submission.tenant)
        route = choose_route(workers, replace(demand, avoid=late))
    except RequestError:
        return False
    return route.workers[0].key not in late and any(worker.key in cut_off for worker in route.workers)
