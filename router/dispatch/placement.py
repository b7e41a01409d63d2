"""Where a request goes: its route, the decode worker of its second leg, and whether somebody could take it over.

Owns what of a request a choice depends on. Who suits is said by ``router.dispatch.policy``; what is sent is up to
``router.dispatch.dispatcher``.
"""

from __future__ import annotations

from core.errors import NoWorker, Overloaded, RequestError
from router.dispatch.inflight import Claims
from router.dispatch.members import Worker
from router.dispatch.membership import Cluster
from router.dispatch.pair_health import PairHealth
from router.dispatch.policy import Demand, Route, choose_decode, choose_route, choose_successor
from router.dispatch.request_state import Flow


class Placement:
    """Chooses for single requests. ``pairs`` says which handoffs fail lately."""

    def __init__(self, cluster: Cluster, claims: Claims, pairs: PairHealth) -> None:
        self._cluster = cluster
        self._claims = claims
        self._pairs = pairs

    def route(self, flow: Flow, now: float) -> Route:
        """Return who serves the request from its beginning. Raises: what ``choose_route`` does."""
        return choose_route(self._cluster.workers, self._demand(flow, now))

    def decode(self, flow: Flow, now: float) -> Worker:
        """Return the worker that was reserved at submission, else one for the handoff, else one that computes all itself.

        Raises:
            NoWorker: there is none that could ever take it.
            Overloaded: all of them are full.
        """
        reserved = self._cluster.get(flow.decode)
        if reserved is not None and not reserved.is_closed and not reserved.is_refusing:
            return reserved
        if flow.decode is not None:
            self._claims.free(flow, flow.decode)
            flow.decode = None
        prefill = self._cluster.get(flow.prefill) if flow.handoff is not None else None
        workers, demand = self._cluster.workers, self._demand(flow, now)
        try:
            if prefill is not None:
                return choose_decode(workers, prefill, demand)
        except (NoWorker, Overloaded):
            pass  # somebody else may do without the handoff
        return choose_successor(workers, flow.model_fingerprint, demand)

    def can_move(self, flow: Flow, now: float) -> bool:
        """True if another worker could take the request over at once."""
        try:
            if flow.num_output_tokens:
                choose_successor(self._cluster.workers, flow.model_fingerprint, self._demand(flow, now))
            else:
                self.route(flow, now)
        except RequestError:
            return False
        return True

    def may_resume(self, flow: Flow) -> bool:
        """True if a worker that could go on with the request is a member, although nothing can be expected of it now."""
        return any(
            worker.why_unresponsive and worker.role != "prefill" and worker.facts.model_fingerprint == flow.model_fingerprint
            for worker in self._cluster.workers
        )

    def _demand(self, flow: Flow, now: float) -> Demand:
        return Demand(
            num_tokens=flow.submission.num_tokens,
            num_choices=len(flow.live_choices),
            avoid=frozenset(flow.avoid),
            model_fingerprint=flow.submission.model_fingerprint,
            bad_pairs=self._pairs.bad(now),
        )
