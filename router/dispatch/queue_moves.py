"""Moves prompts that wait in a long queue to workers that are nearly idle: they have joined, recovered, or got less work.

Owns when that pays. No worker has failed, so it costs no retry. A prompt moves once, and stays if another worker would not be
sooner by far: predictions err, and its worker may hold a part of it. Each worker is given about a second of work, and more once
that is done; the next move sees the ones before it, and another router hears of them before it has sent much.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from core.wire.messages import Abort
from router.dispatch.attempts import Attempts
from router.dispatch.inflight import InflightCounts
from router.dispatch.members import GenerationWorker, WorkerKey
from router.dispatch.membership import Membership
from router.dispatch.placement import Found, Placement
from router.dispatch.request_state import DispatchAction, Moved, RequestPhase, RequestState, SendToWorker
from router.dispatch.route_costs import MOVED, RouteCosts
from router.dispatch.wait_estimate import WaitEstimates
from router.dispatch.waiting import Waiting
from router.routing.cost import REUSE_WEIGHT

LEAST_GAIN_S = 3.0  # and a second more for each other router, which may give the same worker a second of work meanwhile
LEAST_RATIO = 2.0  # of the time until the prompt is computed where it is, to that at the other worker
NEARLY_IDLE_S = 1.0
MOST_MOVES = 8  # per tick
_MOST_IN_VAIN = 4  # prompts that are looked at per tick, and stay
_LONG_TOKENS = 32_768  # of a prompt take as long to look up as one prompt more
_LOOK_AGAIN_S = 2.0  # after the first look at a prompt in vain, twice as long after each further one
_MAX_DOUBLINGS = 4


@dataclass(frozen=True, slots=True)
class Queues:
    """How long prompts wait: as predicted (``costs``), else by the pace of each worker so far (``estimates``)."""

    costs: RouteCosts
    estimates: WaitEstimates

    def wait_s(self, worker: GenerationWorker, now: float) -> float:
        """Return how long a new prompt waits at a worker for all others."""
        return self.costs.wait_s(worker, now) if self.costs.is_enabled else self.estimates.work_s(worker.key, now)

    def is_unknown(self, worker: GenerationWorker) -> bool:
        """Return True if a worker has prompts whose times are not known."""
        others = worker.heartbeat.num_queued_tokens_of_others if worker.heartbeat is not None else 0
        return not self.costs.is_enabled and (others > 0 or self.estimates.is_unknown(worker.key))

    def num_prompts(self, worker: WorkerKey) -> int:
        """Return how many prompts of this router a worker has yet to compute."""
        return self.estimates.num_prompts(worker)

    def last_first(self, worker: WorkerKey) -> Iterable[str]:
        """Return the wire ids of the prompts of this router at a worker, the one that it will compute last first."""
        return self.costs.backlog(worker).last_first() if self.costs.is_enabled else self.estimates.last_first(worker)

    def begun(self, worker: WorkerKey) -> str | None:
        """Return the wire id of the prompt that a worker computes now as predicted; None where that is not known."""
        return self.costs.backlog(worker).running

    def times_s(self, request: RequestState, source: GenerationWorker, found: Found, now: float) -> tuple[float, float, float]:
        """Return when a prompt is computed if it stays, and on a route; and what the latter costs later prompts."""
        wire_id, tenant = request.wire_id, request.submission.tenant
        prompt, offer = self.costs.backlog(source.key).prompts.get(wire_id), found.offer
        if prompt is not None and offer is not None:
            lost_ms = REUSE_WEIGHT * max(0.0, offer.own_ms - prompt.predicted_ms)  # as in the score of a placement
            left_s = self.costs.left_s(source, wire_id, now, tenant, request.placed.prompt_until - now)
            return left_s, offer.ttft_ms / 1e3, lost_ms / 1e3
        left_s = self.estimates.left_s(wire_id, now, tenant if source.facts.has_fair_shares else None)
        wait_s = self.estimates.work_s(found.route.workers[0].key, now)
        return left_s, wait_s + self.estimates.own_s(wire_id), 0.0


class QueueMoves:
    """Finds the prompts that should move. Times are seconds of the router's clock, and gains are seconds."""

    def __init__(
        self,
        membership: Membership,
        attempts: Attempts,
        waiting: Waiting,
        inflight: InflightCounts,
        placement: Placement,
        queues: Queues,
    ) -> None:
        self._membership = membership
        self._attempts = attempts
        self._waiting = waiting
        self._inflight = inflight
        self._placement = placement
        self._queues = queues
        self._in_vain_at: dict[WorkerKey, float] = {}  # when the looks of a tick have ended at a worker in vain

    def find(self, now: float) -> Iterator[tuple[RequestState, Found, float]]:
        """Yield the prompts that should move, where to, and what that gains; each moves before the next is looked for.

        Prompts that stay hide no others: they are asked ever less often, and their worker's turn is the last for a while.
        """
        workers = self._membership.workers
        crowded = self._crowded(workers, now)
        if not crowded or self._membership.pauses.is_settling(now) or not self._idle(workers, now):
            return
        num_moves = num_in_vain = 0
        self._in_vain_at = {key: at for key, at in self._in_vain_at.items() if now < at + _LOOK_AGAIN_S}
        for source in sorted(crowded, key=lambda worker: self._turn(worker, now)):
            for request in self._unbegun(source, now):
                idle = self._idle(workers, now)
                if not idle or num_moves >= MOST_MOVES:
                    return
                if num_in_vain >= _MOST_IN_VAIN:
                    self._in_vain_at[source.key] = now
                    return
                found = self._placement.find_among(request, idle, now, self._waiting.kept_from(request, now))
                gain_s = self._gain_s(request, source, found, now) if found is not None else 0.0
                if found is None or not gain_s:
                    _let_stay(request, now)
                    num_in_vain += 1 + len(request.submission.prompt_token_ids) // _LONG_TOKENS
                    continue
                num_moves += 1
                source.num_moved += 1
                yield request, found, gain_s

    def leave(self, request: RequestState, found: Found, gain_s: float, now: float) -> list[DispatchAction]:
        """Take a prompt away from its worker; its next attempt begins on the route that was found."""
        former = request.current
        assert former is not None, f"{request.request_id} waits in no queue"
        abort = SendToWorker(former, Abort(request_ids=(request.wire_id,), reason=MOVED))
        request.has_moved = request.standing.was_admitted = True
        self._attempts.begin_next(request, request.attempt.previous_error, now)
        request.attempt.is_move = True
        self._inflight.free_all(request)
        route = self._placement.take(request, found, now)
        return [abort, Moved(request.request_id, former, route.workers[0].key, gain_s)]

    # ---- workers -----------------------------------------------------------------------------------------------------

    def _idle(self, workers: Iterable[GenerationWorker], now: float) -> frozenset[WorkerKey]:
        """Return the workers that compute prompts for others and will soon have none."""
        able = (worker for worker in workers if worker.role != "decode" and not worker.is_closed and not worker.is_reserve)
        return frozenset(worker.key for worker in able if self._is_idle(worker, now))

    def _is_idle(self, worker: GenerationWorker, now: float) -> bool:
        if worker.num_present >= worker.num_slots or worker.is_refusing or self._queues.is_unknown(worker):
            return False
        if worker.role != "prefill" and worker.num_waiting > self._queues.num_prompts(worker.key):
            return False  # some wait for slots or blocks of running requests, not for prompts to be computed
        return self._queues.wait_s(worker, now) < NEARLY_IDLE_S

    def _crowded(self, workers: Iterable[GenerationWorker], now: float) -> list[GenerationWorker]:
        """Return the workers with a long queue; one that makes no progress is left by other rules."""
        able = (worker for worker in workers if worker.num_waiting > worker.num_moved and not worker.why_unresponsive)
        return [worker for worker in able if self._queues.wait_s(worker, now) >= LEAST_GAIN_S]

    def _turn(self, worker: GenerationWorker, now: float) -> tuple[float, float]:
        """Return the order of a source: the most crowded first, then those that were looked at in vain, the latest last."""
        return self._in_vain_at.get(worker.key, -math.inf), -self._queues.wait_s(worker, now)

    # ---- prompts -----------------------------------------------------------------------------------------------------

    def _unbegun(self, worker: GenerationWorker, now: float) -> Iterator[RequestState]:
        """Yield the prompts that a worker has most probably not begun, by its last heartbeat, and that may move; last first.

        So many have begun at most as do not surely wait. Which ones is not known where tenants have fair shares, or where some
        have priority: the worker computes those of one tenant and priority in order, so as many of each may be begun.
        """
        names, num_waiting = list(self._queues.last_first(worker.key)), _num_surely_waiting(worker)
        if num_waiting <= 0:
            return
        num_begun = max(len(names) - num_waiting, worker.num_running if worker.role == "prefill" else 0, 1)
        begun = self._queues.begun(worker.key)
        requests = [request for name in names if (request := self._attempts.get(name)) and request.current == worker.key]
        if worker.facts.has_patience:
            requests.sort(key=lambda request: -request.submission.priority)
        num_left = Counter(_order_of(request, worker) for request in requests)
        for request in requests:
            order = _order_of(request, worker)
            if num_left[order] > num_begun and request.wire_id != begun and _may_move(request, now):
                yield request
            num_left[order] -= 1

    def _gain_s(self, request: RequestState, source: GenerationWorker, found: Found, now: float) -> float:
        """Return how much sooner a prompt would be computed on a route; 0 if that is not worth a move."""
        left_s, there_s, lost_s = self._queues.times_s(request, source, found, now)
        gain_s = left_s - there_s - lost_s
        return gain_s if gain_s >= self._least_gain_s() and left_s >= LEAST_RATIO * there_s else 0.0

    def _least_gain_s(self) -> float:
        """Return the least gain of a move beside the other routers, as any worker tells: one that joins has not told yet."""
        heartbeats = (worker.heartbeat for worker in self._membership.workers)
        num_others = max((heartbeat.num_other_routers for heartbeat in heartbeats if heartbeat is not None), default=0)
        return LEAST_GAIN_S + num_others * NEARLY_IDLE_S


def _num_surely_waiting(worker: GenerationWorker) -> int:
    """Return how many prompts of this router wait at a worker, at least: all that other routers have there may wait, too."""
    heartbeat = worker.heartbeat
    if heartbeat is None or (heartbeat.num_queued_tokens_of_others and not heartbeat.num_queued_prompts_of_others):
        return 0
    return heartbeat.num_waiting - worker.num_moved - heartbeat.num_queued_prompts_of_others


def _order_of(request: RequestState, worker: GenerationWorker) -> tuple[int, int]:
    """Return what is equal for prompts that a worker begins in the order in which they are due."""
    wanted, facts = request.submission, worker.facts
    return wanted.tenant if facts.has_fair_shares else 0, wanted.priority if facts.has_patience else 0


def _let_stay(request: RequestState, now: float) -> None:
    """Note that a prompt was asked in vain."""
    request.placed.stays_until = now + _LOOK_AGAIN_S * 2.0 ** min(request.placed.num_stays, _MAX_DOUBLINGS)
    request.placed.num_stays += 1


def _may_move(request: RequestState, now: float) -> bool:
    """Return True if a prompt has not moved, and its worker has neither said that it has begun it, nor got embeddings for it.

    The worker releases these when it is told to stop, and another one would have to compute them.
    """
    is_begun = request.has_begun or request.attempt.early_decode is not None
    is_embedded = request.phase is RequestPhase.ENCODE or bool(request.ec_sources)
    return not (is_begun or is_embedded or request.has_moved or now < request.placed.stays_until)
