"""Which requests workers would serve whose connections were found lost after a pause of the router, once they reconnect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from core.errors import RequestError
from router.dispatch.members import GenerationWorker
from router.dispatch.policy import Demand, choose_route
from router.dispatch.types import Submission
from router.dispatch.wait_estimate import WaitEstimates


class CutOff:
    """Whether workers that are cut off would serve requests that others cannot.

    Many prompts may ask at once, each after a refusal, and to compare workers that are all open takes several times as long as
    the refusal. So what one of them was told holds to the next change for those alike that need no more.
    """

    def __init__(self) -> None:
        # By tenant, choices and weights: for how many tokens there is room, and after what wait in seconds.
        self._known: dict[tuple[int, int, bytes], tuple[int, float]] = {}

    def forget(self) -> None:
        """Forget what others were told."""
        self._known.clear()

    def would_serve(
        self, members: Sequence[GenerationWorker], estimates: WaitEstimates, wanted: Submission, budget_s: float, now: float
    ) -> bool:
        """Return True if a new request would have a route with room by one that is cut off, and begin within ``budget_s``."""
        demand = Demand(num_tokens=wanted.num_tokens, num_choices=wanted.n, model_fingerprint=wanted.model_fingerprint)
        cut_off = {worker.key for worker in members if worker.cut_peer is not None}
        if not any(worker.key in cut_off and _has_room(worker, demand) for worker in members):
            return False
        kind = (wanted.tenant, wanted.n, wanted.model_fingerprint)
        num_tokens, wait_s = self._known.get(kind, (0, 0.0))
        if demand.num_tokens <= num_tokens and wait_s <= budget_s:
            return True
        workers = [replace(worker, cut_peer=None) if worker.key in cut_off else worker for worker in members]
        try:
            late = estimates.too_late(workers, demand, budget_s, now, wanted.tenant)
            route = choose_route(workers, replace(demand, avoid=late))
        except RequestError:
            return False
        first = route.workers[0]
        if first.key in late or not any(worker.key in cut_off for worker in route.workers):
            return False
        fair_to = wanted.tenant if first.facts.has_fair_shares else None
        self._known[kind] = demand.num_tokens, estimates.wait_s(first.key, now, fair_to)
        return True


def _has_room(worker: GenerationWorker, demand: Demand) -> bool:
    is_of_model = demand.model_fingerprint in (b"", worker.facts.model_fingerprint)
    return is_of_model and demand.num_tokens <= worker.facts.max_model_len and demand.has_room(worker)
