"""Where a request goes: its route, its decode worker after the first token, and whether another worker could take it over.

Derives a request's ``Demand``; ``router.dispatch.policy`` chooses workers by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from core.errors import NoWorker, Overloaded, PeerUnreachable, RequestError, WorkerStalled
from core.kv.hashing import ExtraKey
from core.request import extra_keys_of, reads_prefix_cache
from core.wire.kv import KVSource
from router.dispatch.inflight import InflightCounts
from router.dispatch.members import GenerationWorker, WorkerKey
from router.dispatch.membership import Membership
from router.dispatch.offers import WorkerOffer, report, source_of
from router.dispatch.pair_health import PairHealth
from router.dispatch.policy import Demand, Route, choose_decode, choose_route, choose_successor, computing, local_candidates
from router.dispatch.request_state import Placed, RequestPhase, RequestState, open_request
from router.dispatch.restarts import Restarts
from router.dispatch.route_costs import RouteCosts
from router.dispatch.sources import PrefixHolder, message_of, others_than
from router.dispatch.types import Submission
from router.routing import affinity
from router.routing.cost import dislike_ms

_Offers = dict[WorkerKey, WorkerOffer]
_Prompt = tuple[Sequence[int], Sequence[ExtraKey] | None]  # without keys it reads no cache


@dataclass(frozen=True, slots=True)
class Found:
    """A route, what was compared, and by how many ms of cost the request's session may prefer another worker."""

    route: Route
    offers: _Offers
    slack_ms: float

    @property
    def offer(self) -> WorkerOffer | None:
        """What the prompt costs on this route; None if it was chosen by load."""
        return self.offers.get(self.route.workers[0].key)


class Placement:
    """Chooses workers for one request at a time. ``pairs`` knows whose handoffs failed recently, ``costs`` predicts times."""

    def __init__(
        self, membership: Membership, restarts: Restarts, inflight: InflightCounts, pairs: PairHealth, costs: RouteCosts
    ) -> None:
        self._membership = membership
        self._restarts = restarts
        self._costs = costs
        self._inflight = inflight
        self._pairs = pairs

    def route(self, request: RequestState, now: float, kept: frozenset[WorkerKey] = frozenset()) -> Route:
        """Return the workers that serve the request from its beginning, none of ``kept``, whose room is for others.

        Raises the errors of ``choose_route``.
        """
        if self._membership.pauses.is_settling(now):  # there may be none now, and the request looks again and again
            self.check_room(request, now, kept)
        return self.take(request, self._find(request, now, kept), now)

    def take(self, request: RequestState, found: Found, now: float) -> Route:
        """Record a route as the request's, and return it."""
        offer = found.offer
        request.placed = Placed()
        if offer is not None:
            routing = report(offer, found.offers.values(), is_local=found.route.is_local, slack_ms=found.slack_ms)
            request.placed = Placed(routing, source_of(offer), now + offer.ttft_ms / 1e3, offer.patience_ms)
            self._costs.on_chosen(offer)
        return found.route

    def find_among(
        self, request: RequestState, targets: frozenset[WorkerKey], now: float, kept: frozenset[WorkerKey] = frozenset()
    ) -> Found | None:
        """Return a good route of a prompt that has a worker, on which one of ``targets`` computes it at once; None without one.

        What it costs is asked last, since a long prompt takes long. A worker that has failed it comes after the others, not one
        whose failure counts, nor a pair with failing handoffs. It may take the place again that it has at a decode worker.
        """
        with self._inflight.without(request):
            return self._find_among(request, targets - set(request.retries.blamed), now, kept - request.inflight.keys())

    def _find_among(
        self, request: RequestState, targets: frozenset[WorkerKey], now: float, kept: frozenset[WorkerKey]
    ) -> Found | None:
        workers, num_tokens = self._membership.workers, len(request.submission.prompt_token_ids)
        able = {worker.key for worker in workers if worker.key in targets and worker.has_blocks_for(num_tokens)}
        others = {worker.key for worker in workers if worker.role != "decode" and worker.key not in able}
        demand = replace(self._demand(request, now), kept=kept | others)
        try:
            if choose_route(workers, demand).workers[0].key not in able:
                return None
            found = self._find(request, now, demand.kept)
        except RequestError:
            return None
        first, last = found.route.workers[0], found.route.decode
        return found if first.key in able and (first.key, last.key) not in demand.bad_pairs else None

    def check_room(self, request: RequestState, now: float, kept: frozenset[WorkerKey] = frozenset()) -> None:
        """Check that ``route`` would find one. What the prompt costs at each worker is not asked, since a long one takes long.

        Raises the errors of ``choose_route``.
        """
        demand = replace(self._demand(request, now), kept=kept)
        choose_route(self._membership.workers, demand, self._restarts.absent(now))

    def _find(self, request: RequestState, now: float, kept: frozenset[WorkerKey] = frozenset()) -> Found:
        workers, wanted = self._membership.workers, request.submission
        reads_cache = reads_prefix_cache(wanted.sampling)
        extra_keys = extra_keys_of(wanted.mm_features, wanted.cache_salt) if reads_cache else None
        offers = self._costs.offers(
            computing(workers), wanted.prompt_token_ids, extra_keys, now, members=workers, tenant=wanted.tenant
        )
        if not wanted.affinity:  # a session has the same worker at every router
            offers = self._with_preference(offers)
        costs = {key: offer.score for key, offer in offers.items()}
        able = {w.key: offers[w.key] for w in workers if w.key in offers and not w.is_closed and w.has_room(wanted.n)}
        slack_ms = affinity.slack_ms((offer.score, offer.own_ms) for offer in able.values()) if wanted.affinity else 0.0
        if slack_ms:
            crowded = affinity.crowded({w.key: w.load for w in workers if w.key in able})
            costs |= affinity.with_preference({key: costs[key] for key in able}, slack_ms, _session_of(request), crowded)
        demand = replace(self._demand(request, now), costs=costs, kept=kept)
        route = choose_route(workers, demand, self._restarts.absent(now))
        may_shorten = (
            self._costs.max_local_itl_ms and not wanted.mm_features
        )  # an encode worker's embeddings go to the other one
        if may_shorten and route.prefill is not None and route.prefill.key in offers:
            demand = replace(demand, model_fingerprint=route.prefill.facts.model_fingerprint)
            route, offers = self._shorten(route, demand, offers, (wanted.prompt_token_ids, extra_keys), now, wanted.tenant)
        return Found(route, offers, slack_ms)

    def _with_preference(self, offers: _Offers) -> _Offers:
        """Return the offers with this router's preference among similar workers in their scores."""
        disliked = self._costs.preferences.disliked & offers.keys()
        if not disliked:
            return offers
        worse: dict[int, WorkerOffer] = {}  # by identity: most workers of a large cluster share one offer
        for key in disliked:
            offer = offers[key]
            if id(offer) not in worse:
                worse[id(offer)] = replace(offer, score=offer.score + dislike_ms(offer.own_ms))
        return {**offers, **{key: worse[id(offers[key])] for key in disliked}}

    def would_be_local(self, submission: Submission, now: float, limit_s: float) -> bool:
        """Return True if a decode worker would compute a new request's prompt at once, the first token within its time.

        Every request may take at most ``limit_s``. Under overload most requests are refused, so no placement is tried if no
        decode worker could begin the prompt.
        """
        if not self._costs.max_local_itl_ms or submission.mm_features:
            return False
        request = open_request(submission, now, limit_s)
        able = local_candidates(self._membership.workers, None, self._demand(request, now))
        if all(self._costs.wait_s(worker, now) for worker in able):
            return False
        try:
            found = self._find(request, now)
        except RequestError:
            return False
        return found.route.is_local and found.offers[found.route.decode.key].ttft_ms <= submission.budget_s(limit_s) * 1e3

    def _shorten(
        self, route: Route, demand: Demand, offers: _Offers, prompt: _Prompt, now: float, tenant: int
    ) -> tuple[Route, _Offers]:
        """Return the route of a decode worker that computes the prompt itself, if that is sooner, with all offers compared."""
        assert route.prefill is not None, "its caller has checked"
        workers = local_candidates(self._membership.workers, route.prefill, demand)
        local_offers = self._costs.offers(workers, *prompt, now, self._membership.workers, tenant)
        chosen = self._costs.choose_local(workers, local_offers, offers[route.prefill.key], now)
        if chosen is None:
            return route, offers
        return Route(None, chosen, is_local=True), {**offers, **local_offers}

    def decode(self, request: RequestState, now: float) -> GenerationWorker:
        """Return the decode worker reserved at submission, else one that can load the handoff, else one that recomputes.

        Raises:
            NoWorker: no worker could ever take the request.
            Overloaded: all workers that could take it are full.
        """
        reserved = self._membership.get(request.attempt.decode)
        if reserved is not None and not reserved.is_closed and not reserved.is_refusing:
            return reserved
        if request.attempt.decode is not None:
            self._inflight.free(request, request.attempt.decode)
            request.attempt.decode = None
        prefill = self._membership.get(request.attempt.prefill) if request.handoff is not None else None
        workers, demand = self._membership.workers, self._demand(request, now)
        try:
            if prefill is not None:
                return choose_decode(workers, prefill, demand)
        except (NoWorker, Overloaded):
            pass  # another worker may serve without the handoff
        return choose_successor(workers, request.model_fingerprint, demand)

    def source_for(self, request: RequestState, decode: GenerationWorker) -> KVSource | None:
        """Return where a decode worker may load the prompt again if it loses it: its prefill worker, then who holds most."""
        wanted, prefill = request.submission, self._membership.get(request.attempt.prefill)
        if not decode.facts.prefix_address:
            return None
        extra_keys = extra_keys_of(wanted.mm_features, wanted.cache_salt)
        most = self._costs.source_for(decode, wanted.prompt_token_ids, extra_keys, self._membership.workers)
        if request.handoff is None or not isinstance(prefill, GenerationWorker) or not prefill.facts.prefix_address:
            return most
        num_tokens = len(wanted.prompt_token_ids)
        first = message_of(PrefixHolder(prefill, num_tokens), self._costs.prefill_time(decode).ms(num_tokens, 0))
        return msgspec.structs.replace(first, others=others_than(first, most))

    def why_move(self, request: RequestState, now: float) -> PeerUnreachable | WorkerStalled | None:
        """Return why a request should leave its worker for another one that can take it; None if it should stay.

        The worker makes no progress, or is cut off; or readers keep its blocks, which moves a prompt once.
        """
        worker = self._membership.get(request.current)
        if worker is None:
            return None
        if why := worker.why_unresponsive:
            reason = PeerUnreachable if worker.cut_peer is not None else WorkerStalled
            return reason(why) if self.can_move(request, now) else None
        may_move = request.phase is RequestPhase.PREFILL and WorkerStalled.code not in request.retries.free
        why = worker.why_full(now) if may_move else ""
        return WorkerStalled(why) if why and self.can_begin_elsewhere(request, worker.key, now) else None

    def can_move(self, request: RequestState, now: float) -> bool:
        """Return True if another worker could take over the request now."""
        try:
            if request.has_begun:
                choose_successor(self._membership.workers, request.model_fingerprint, self._demand(request, now))
            else:
                self.check_room(request, now)
        except RequestError:
            return False
        return True

    def can_begin_elsewhere(self, request: RequestState, full: WorkerKey, now: float) -> bool:
        """Return True if a worker other than ``full`` that has not had the request has room for its prompt beside leases."""
        demand = self._demand(request, now)
        demand = replace(demand, avoid=demand.avoid | {full})
        try:
            first = choose_route(self._membership.workers, demand).workers[0]
        except RequestError:
            return False
        return first.key not in demand.avoid and first.has_unleased_blocks(demand.num_prompt_tokens)

    def may_resume(self, request: RequestState) -> bool:
        """Return True if a member could continue the request after it recovers from its stall or lost connection."""
        return any(
            worker.why_unresponsive and worker.role != "prefill" and worker.facts.model_fingerprint == request.model_fingerprint
            for worker in self._membership.workers
        )

    def _demand(self, request: RequestState, now: float) -> Demand:
        return Demand(
            num_tokens=request.submission.num_tokens,
            num_prompt_tokens=len(request.submission.prompt_token_ids),
            num_choices=request.num_live_choices,
            avoid=frozenset(request.retries.avoid),
            refusing=request.retries.refusing(now),
            model_fingerprint=request.submission.model_fingerprint,
            bad_pairs=self._pairs.bad(now),
        )


def _session_of(request: RequestState) -> bytes:
    """Return what names the request's session; sessions of different API keys have nothing to do with each other."""
    return request.submission.tenant.to_bytes(8, "big") + request.submission.affinity.encode()
