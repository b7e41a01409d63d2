"""Moves all requests between the workers: a synchronous state machine without I/O.

Owns which worker has which request, when to abort, renew or release, which worker takes over after a failure, and the updates
for the client. Works in token ids. Worker messages go in, actions come out. A request ends with one ``Ended``, after its error.

A request is retried if its worker is lost, makes no progress, or fails it with an error that another worker may not have:

| the client has   | the request continues                                                                                |
|------------------|------------------------------------------------------------------------------------------------------|
| no token         | from the beginning, on another pair or on a worker that serves alone                                 |
| the first token  | on another decode worker with the same handoff, or by recomputation if the prefill worker was lost   |
| more tokens      | on another decode worker, which recomputes prompt and output so far: a *replay*                      |

If no other worker can take it, it stays with a worker that has only stalled, and waits for the successor of a lost one
(``router.dispatch.waiting``). ``router.dispatch.retries`` decides which failures cost one of its retries.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from core.errors import (
    Cancelled,
    InvalidRequest,
    KVFerryError,
    NoWorker,
    Overloaded,
    PeerUnreachable,
    ProtocolError,
    RequestError,
    TransferTimeout,
    fallback_reason,
)
from core.wire.early import PrefillProgress
from core.wire.messages import Abort, EncodeDone, EncodeFailed, ErrorInfo, PrefillDone, RequestFailed, Tokens
from router.dispatch.attempts import Attempts
from router.dispatch.early_pulls import EarlyPullRelay
from router.dispatch.encode_legs import EncodeLegs
from router.dispatch.handoffs import Handoffs, release
from router.dispatch.inflight import InflightCounts
from router.dispatch.members import EncodeWorker, GenerationWorker, Member, WorkerKey, is_of_one_request
from router.dispatch.membership import Left, Membership
from router.dispatch.open_requests import OpenRequests
from router.dispatch.pair_health import PairHealth
from router.dispatch.placement import Placement
from router.dispatch.policy import Route
from router.dispatch.queue_moves import QueueMoves, Queues
from router.dispatch.request_state import (
    BEFORE_DECODE,
    NO_PREFILL,
    Deliver,
    DeliverTokens,
    DispatchAction,
    EncodeEnded,
    RequestPhase,
    RequestState,
    Retried,
    SendToWorker,
    open_request,
)
from router.dispatch.restarts import Restarts
from router.dispatch.retries import is_blameless, is_refusal, is_worth_a_retry
from router.dispatch.route_costs import RouteCosts
from router.dispatch.shares import EXTRA_SHARE, TenantShares
from router.dispatch.types import Submission, Update
from router.dispatch.wait_estimate import WaitEstimates
from router.dispatch.waiting import Waiting
from router.dispatch.worker_messages import (
    TokensLost,
    apply_plain_token,
    apply_prefill_done,
    apply_tokens,
    find_prefill_done_problem,
    name_image,
    new_generate,
    resuming_generate,
)


class Dispatcher:
    """All requests of this router. Times are seconds of one monotonic clock."""

    def __init__(
        self,
        membership: Membership,
        *,
        request_timeout_s: float,
        max_requests: int,
        max_retries: int = 2,
        worker_wait_s: float = 10.0,
        encode_timeout_s: float = 20.0,
    ) -> None:
        self._membership = membership
        self._inflight = InflightCounts()
        self._encode_legs = EncodeLegs(membership, self._inflight, encode_timeout_s)
        self._request_timeout_s = request_timeout_s
        self._max_requests = max_requests
        self._max_retries = max_retries
        self._attempts = Attempts()
        self.restarts = Restarts(worker_wait_s)
        self._shares = TenantShares()
        self._waiting = Waiting(membership, self.restarts, self._shares)
        self._pairs = PairHealth()
        self._handoffs = Handoffs(membership)
        self._early_pulls = EarlyPullRelay(membership)
        self._open = OpenRequests(
            self._attempts, self._waiting, self._shares, self._inflight, self._encode_legs, self._early_pulls
        )
        self.requests = self._open.by_id
        self.route_costs = RouteCosts()
        self.wait_estimates = WaitEstimates()
        self.placement = Placement(membership, self.restarts, self._inflight, self._pairs, self.route_costs)
        queues = Queues(self.route_costs, self.wait_estimates)
        self._moves = QueueMoves(membership, self._attempts, self._waiting, self._inflight, self.placement, queues)

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def num_waiting(self) -> int:
        """The number of requests that wait for a worker."""
        return len(self._waiting)

    def find_requests(self, wire_ids: Iterable[str]) -> list[str]:
        """Return the ids of the requests whose current attempts have these names on the wire, each once."""
        return self._attempts.find_requests(wire_ids)

    # ---- clients -----------------------------------------------------------------------------------------------------

    def submit(self, submission: Submission, now: float, avoid: frozenset[WorkerKey] = frozenset()) -> list[DispatchAction]:
        """Start a request, on workers in ``avoid`` only as a last resort.

        If every worker is full, or this router, the request of a tenant below its fair share waits for room.

        Raises:
            Overloaded: this router has reached its limit of requests, or every worker that could take it is full.
            NoWorker: no route takes it now.
            ContextTooLong: no route can hold prompt and output, now or soon.
            InvalidRequest: no route can hold so many choices.
        """
        may_wait, num_open = self._shares.is_below(submission.tenant), len(self.requests)
        if num_open >= self._max_requests + (self._max_requests // EXTRA_SHARE if may_wait else 0):
            raise Overloaded(f"the router serves {num_open} requests, its limit: try again later")
        request = open_request(submission, now, self._request_timeout_s)
        request.retries.avoid |= avoid
        try:
            route = self.placement.route(request, now, self._waiting.kept_from(request, now))
        except Overloaded as error:
            if not may_wait:
                raise
            self._open.add(request)
            request.standing.is_held = request.standing.was_held = True
            return [*self._wait(request, error, now), *self.place_waiting(now)]
        self._open.add(request)
        return self._start(request, route, now)

    def fail_attempt(self, wire_id: str, error: KVFerryError, now: float) -> list[DispatchAction]:
        """End a request whose message cannot be sent to any worker; unknown ids are ignored."""
        request = self._attempts.get(wire_id)
        return self._open.fail(request, error, now) if request is not None else []

    def abort(self, request_id: str, reason: str, now: float) -> list[DispatchAction]:
        """End a request in any phase; unknown ids are ignored."""
        request = self.requests.get(request_id)
        if request is None:
            return []
        return self._open.fail_with(request, ErrorInfo.of(Cancelled(f"the request was aborted: {reason}")), now, reason=reason)

    def fail(self, request_id: str, error: KVFerryError, now: float) -> list[DispatchAction]:
        """End a request that this router cannot continue; unknown ids are ignored."""
        request = self.requests.get(request_id)
        return self._open.fail(request, error, now) if request is not None else []

    def finish_choice(self, request_id: str, index: int, now: float) -> list[DispatchAction]:
        """End a choice at a stop string; workers know only tokens and cannot find it."""
        request = self.requests.get(request_id)
        if request is None or request.finish_reasons[index] is not None:
            return []
        request.finish_reasons[index] = "stop"
        if request.is_finished:
            return self._open.stop(request, "stop", now)
        self._inflight.shrink(request, request.attempt.decode, request.num_live_choices)
        abort = Abort(request_ids=(f"{request.wire_id}/{index}",), reason="stop")
        return [SendToWorker(request.current, abort)] if request.current else []

    # ---- workers -----------------------------------------------------------------------------------------------------

    def on_prefill_progress(self, sender: GenerationWorker, message: PrefillProgress) -> list[SendToWorker]:
        """Let the decode worker read what is sealed of a prompt."""
        return self._early_pulls.pass_on(sender, self._attempts.get(message.request_id), message)

    def on_prefill_done(self, sender: GenerationWorker, message: PrefillDone, now: float) -> list[DispatchAction]:
        """Deliver the first tokens and send the request to a decode worker."""
        request = self._attempts.get(message.request_id)
        if request is None or request.phase is not RequestPhase.PREFILL or request.attempt.prefill != sender.key:
            # It crossed an abort or a retry: no worker will read the handoff.
            return [*release(sender.key, message.kv_handoff)]
        request.handoff = message.kv_handoff
        problem = find_prefill_done_problem(message, sender, request)
        if problem:
            return self._open.fail(request, ProtocolError(f"prefill worker {sender.key.engine_id}: {problem}"), now)
        sender.progress.on_success()
        actions: list[DispatchAction] = [Deliver(request.request_id, apply_prefill_done(request, message, now))]
        if request.is_finished:
            actions += self._early_pulls.stop(request)
            return [*actions, *release(sender.key, message.kv_handoff), self._open.end(request, now)]
        self._inflight.free(request, sender.key)
        return actions + self._send_to_decode(request, now)

    def on_tokens(self, sender: GenerationWorker, tokens: Sequence[Tokens], now: float) -> list[DispatchAction]:
        """Deliver the tokens of one engine step: those that end nothing together, others in one update per request."""
        plain: list[tuple[str, tuple[int, ...]]] = []
        actions: list[DispatchAction] = []
        updates: dict[str, Update] = {}
        for item in tokens:
            request = self._attempts.get(item.request_id)
            if request is None or request.attempt.decode != sender.key or request.phase in BEFORE_DECODE:
                actions += self._attempts.stop_stale(item.request_id, sender.key, now)
                continue
            if request.request_id not in updates and apply_plain_token(request, item):
                plain.append((request.request_id, item.token_ids))
                continue
            update = updates.get(request.request_id) or Update()
            try:
                apply_tokens(request, item, update, now)
            except TokensLost as error:
                if request.request_id in updates:
                    actions.append(Deliver(request.request_id, updates.pop(request.request_id)))
                is_free = self._membership.pauses.is_settling(now)  # then this router may have received them too late
                actions += self._retry(request, ErrorInfo.of(error), now, is_gone=False, is_free=is_free)
            except ProtocolError as error:
                updates.pop(request.request_id, None)
                actions += self._open.fail(request, error, now)
            else:
                self._pairs.learn(request, item.usage.kv_transfer if item.usage else None, now)
                updates[request.request_id] = update
        for request_id, update in updates.items():
            actions.append(Deliver(request_id, update))
            request = self.requests[request_id]
            if request.is_finished:
                sender.progress.on_success()
                actions.append(self._open.end(request, now))
            else:
                self._inflight.shrink(request, request.attempt.decode, request.num_live_choices)
        return [DeliverTokens(plain), *actions] if plain else actions  # first: a request's later tokens are in an update

    def on_request_failed(self, sender: GenerationWorker, message: RequestFailed, now: float) -> list[DispatchAction]:
        """Retry on another worker, or fail the request. A prefill worker's failure counts only before the first token."""
        error = message.error
        sender.note_failure(error)
        request = self._attempts.get(message.request_id)
        if request is None or sender.key != request.current:
            return []
        is_pause = is_blameless(error) or request.is_premature(error, now)
        if is_pause or is_worth_a_retry(error):
            return self._retry(request, error, now, is_gone=True, is_free=is_pause)
        if request.attempt.has_handoff and request.attempt.prefill is not None:  # under the policy "fail"
            self._pairs.note((request.attempt.prefill, sender.key), fallback_reason(error.code), now)
        told = name_image(request.submission, request.in_words_of_limit(error))
        return self._open.fail_with(request, told, now, gone=sender.key)

    def on_rejected(self, sender: Member, error: ErrorInfo, now: float) -> list[DispatchAction]:
        """Retry the requests that the rejected message, which names none, may have been about: those without a token here."""
        if isinstance(sender, EncodeWorker):
            waiting = [each for each in self.requests.values() if each.encoding and sender.key in each.encoding.waiting]
            failures = [RequestFailed(request_id=request.wire_id, error=error) for request in waiting]
            return [action for failure in failures for action in self.on_encode_failed(sender, failure, now)]
        affected = [each for each in self.requests.values() if not each.attempt.shown and each.current == sender.key]
        return [action for request in affected for action in self._retry(request, error, now, is_gone=False)]

    def on_left(self, left: Left, now: float) -> list[DispatchAction]:
        """Continue the requests of a lost worker on others."""
        key = left.worker.key
        self._handoffs.forget(key)
        if not left.is_back:
            self._pairs.forget(key)
            if isinstance(left.worker, GenerationWorker):
                self.restarts.on_left(left.worker, now)
        affected = [request for request in self.requests.values() if key in request.workers]
        return [action for request in affected for action in self._on_worker_lost(request, left, now)]

    def on_joined(self, member: Member, now: float) -> list[DispatchAction]:
        """Place waiting requests. A process that returns has not failed: requests get back the retries that its loss cost."""
        if isinstance(member, GenerationWorker):
            self.restarts.on_joined(member, now)
        for request in self.requests.values():
            request.retries.forgive(member.key)
        return self.place_waiting(now)

    def on_pause(self, lateness_s: float, now: float) -> None:
        """Extend deadlines by a pause of the router of this many seconds that ends now, except those that clients set."""
        self._waiting.exclude_pause(lateness_s, now)
        for request in self.requests.values():
            request.extend(min(lateness_s, now - request.arrival))  # less for those that came while the pause ended

    def on_timer(self, now: float) -> list[DispatchAction]:
        """End requests at their deadline, renew the leases of handoffs, and place waiting requests."""
        self.restarts.look(self._membership.workers, now)
        actions: list[DispatchAction] = []
        for request in list(self.requests.values()):
            if now >= request.deadline.at:
                actions += self._open.fail(request, request.time_is_over(), now)
            elif request.encoding is not None and request.encoding.waiting and now >= request.encoding.deadline:
                actions += self._encode_legs.give_up_all(request, TransferTimeout.code)
                actions += self._end_encode_leg(request, now)
            else:
                actions += self._move(request, now)
        actions += [*self._handoffs.renewals(self.requests.values(), now), *self.place_waiting(now)]
        for request, why in self._waiting.not_tried:
            actions += self._wait(request, why, now)
        return actions

    def place_waiting(self, now: float) -> list[DispatchAction]:
        """Give waiting requests to workers that have room now."""
        return [action for request in self._waiting.turns(now) for action in self._continue(request, now)]

    def move_queued(self, now: float) -> Iterator[list[DispatchAction]]:
        """Move prompts from long queues to nearly idle workers. The actions of each are sent before the next is looked for."""
        for request, found, gain_s in self._moves.find(now):
            yield [*self._moves.leave(request, found, gain_s, now), *self._start(request, found.route, now)]

    # ---- prefill and decode legs -------------------------------------------------------------------------------------

    def _start(self, request: RequestState, route: Route, now: float) -> list[DispatchAction]:
        """Start a request on a route, from its beginning: first at encode workers if it has images for them."""
        request.standing.is_held = False
        request.attempt.prefill = route.prefill.key if route.prefill else None
        request.attempt.decode = route.decode.key
        request.attempt.announces = self._early_pulls.is_wanted(route.decode, route.prefill)
        request.fallback_reason = NO_PREFILL if route.is_degraded else ""
        request.is_local = route.is_local
        first = route.workers[0]
        request.model_fingerprint = first.facts.model_fingerprint
        self._attempts.begin(request)
        for worker in route.workers:
            self._inflight.take(request, worker, request.submission.n, is_reserved=worker is not first)
        request.phase = RequestPhase.ENCODE
        return [*(self._encode_legs.begin(request, first, now) or self._send_prompt(request, now))]

    def _send_prompt(self, request: RequestState, now: float) -> list[SendToWorker]:
        """Send the prompt to the first worker of the route; let the second get to know it meanwhile."""
        request.phase = RequestPhase.PREFILL if request.attempt.prefill else RequestPhase.DECODE
        assert request.current is not None, f"{request.request_id} has no route"
        self._encode_legs.on_prompt_sent(request)
        return [SendToWorker(request.current, new_generate(request, now)), *self._handoffs.introduce(request)]

    def _continue(self, request: RequestState, now: float) -> list[DispatchAction]:
        """Continue a request without a worker from its current output or handoff, or let it wait."""
        return self._send_to_decode(request, now) if request.has_begun else self._restart(request, now)

    def _restart(self, request: RequestState, now: float) -> list[DispatchAction]:
        """Start a request again from its beginning, before its first token."""
        kept = self._waiting.kept_from(request, now) if request.standing.gives_way else frozenset[WorkerKey]()
        try:
            self.placement.check_room(request, now, kept)
            route = self.placement.route(request, now, kept)
        except (NoWorker, Overloaded) as error:
            previous = request.attempt.previous_error
            if previous is not None and previous.code == Overloaded.code and not request.standing.may_wait:
                if isinstance(error, NoWorker) or not self._shares.is_below(request.submission.tenant, is_open=True):
                    return self._open.fail_with(request, previous, now)
                request.standing.was_held = True  # as it would have been if it had come now
            request.standing.is_held = request.standing.was_held
            return self._wait(request, error, now)
        except RequestError as error:
            return self._open.fail_with(request, request.attempt.previous_error or ErrorInfo.of(error), now)
        self._waiting.remove(request)
        return self._start(request, route, now)

    def _send_to_decode(self, request: RequestState, now: float) -> list[DispatchAction]:
        """Send a request with its output so far to a decode worker, or let it wait for one."""
        self._handoffs.begin(request, now)
        try:
            decode = self.placement.decode(request, now)
        except (NoWorker, Overloaded) as error:
            return self._wait(request, error, now)
        self._waiting.remove(request)
        actions = self._early_pulls.stop(request, decode.key) + self._handoffs.keep_or_release(request, decode)
        request.attempt.decode = decode.key
        request.attempt.has_handoff = request.handoff is not None
        request.placed.source = self.placement.source_for(request, decode)
        self._inflight.take(request, decode, request.num_live_choices)
        return [*actions, SendToWorker(decode.key, resuming_generate(request, now))]

    def _wait(self, request: RequestState, error: NoWorker | Overloaded, now: float) -> list[DispatchAction]:
        """Let a request wait for a worker; end it if it has waited too long."""
        is_only_busy = isinstance(error, Overloaded) or self.placement.may_resume(request)
        too_long = self._waiting.keep(request, error, now, is_only_busy=is_only_busy)
        return self._open.fail(request, too_long, now) if too_long is not None else []

    # ---- the encode leg ----------------------------------------------------------------------------------------------

    def on_encode_done(self, sender: EncodeWorker, message: EncodeDone, now: float) -> list[DispatchAction]:
        """Record the sources of embeddings, and send the prompt if this was the last answer."""
        for error in message.errors:
            sender.note_failure(error)
        request = self._attempts.get(message.request_id)
        ended = self._encode_legs.on_done(request, sender.key, message) if request is not None else []
        return self._after_encode(request, ended, now) if request is not None and ended else []

    def on_encode_failed(self, sender: EncodeWorker, message: EncodeFailed | RequestFailed, now: float) -> list[DispatchAction]:
        """Continue without these embeddings; only an invalid image ends the request."""
        error = message.error
        sender.note_failure(error)
        request = self._attempts.get(message.request_id)
        ended = self._encode_legs.give_up(request, sender.key, error.code) if request is not None else None
        if request is None or ended is None:
            return []
        if isinstance(message, EncodeFailed) and error.code == InvalidRequest.code:
            return [ended, *self._open.fail_with(request, name_image(request.submission, error, message.media_index), now)]
        return self._after_encode(request, [ended], now)

    def _after_encode(self, request: RequestState, ended: list[EncodeEnded], now: float) -> list[DispatchAction]:
        """Send the prompt once all encode workers have answered."""
        if request.phase is not RequestPhase.ENCODE or (request.encoding is not None and request.encoding.waiting):
            return [*ended]
        return [*ended, *self._end_encode_leg(request, now)]

    def _end_encode_leg(self, request: RequestState, now: float) -> list[DispatchAction]:
        """Send the prompt on the reserved route, or on another one if a reserved worker is no longer available."""
        request.measurements.encode_s = now - request.arrival
        workers = [self._membership.get(key) for key in (request.attempt.prefill, request.attempt.decode) if key is not None]
        if workers and all(worker is not None and not worker.is_closed for worker in workers):
            return [*self._send_prompt(request, now)]
        self._inflight.free_all(request)
        request.attempt.prefill = request.attempt.decode = None
        request.standing.was_admitted = True  # as after the loss of a worker that has got the prompt
        return self._restart(request, now)

    # ---- retries -----------------------------------------------------------------------------------------------------

    def _on_worker_lost(self, request: RequestState, left: Left, now: float) -> list[DispatchAction]:
        """Continue a request without a lost worker that had it or was reserved for it."""
        key = left.worker.key
        if request.phase is RequestPhase.ENCODE:
            return self._on_lost_while_encoding(request, left, now)
        if request.current == key:
            role = "prefill" if request.phase is RequestPhase.PREFILL else "decode"
            error = ErrorInfo.of(PeerUnreachable(f"{role} worker {key.engine_id} was lost: {left.reason}"))
            return self._retry(request, error, now, is_gone=not left.is_back, is_free=left.is_back or request.was_safe)
        if request.attempt.decode == key and not left.is_back:  # another one is chosen after the prompt is computed
            request.attempt.decode = None
            self._inflight.free(request, key)
        return []  # the decode worker detects by itself whether it still needs the lost prefill worker

    def _on_lost_while_encoding(self, request: RequestState, left: Left, now: float) -> list[DispatchAction]:
        """Stop waiting for a lost encode worker; a lost worker of the route is replaced after the encode leg."""
        key = left.worker.key
        ended = self._encode_legs.give_up(request, key, PeerUnreachable.code)
        if ended is not None:
            stops = self._encode_legs.stop(request, key, PeerUnreachable.code) if left.is_back else []
            return [*stops, *self._after_encode(request, [ended], now)]
        if not left.is_back:
            request.attempt.prefill = request.attempt.decode = None
        return []

    def _move(self, request: RequestState, now: float) -> list[DispatchAction]:
        """Move a request to another worker if its own one makes no progress."""
        why = self.placement.why_move(request, now)
        return self._retry(request, ErrorInfo.of(why), now, is_gone=False, is_free=True) if why is not None else []

    def _retry(
        self, request: RequestState, error: ErrorInfo, now: float, *, is_gone: bool, is_free: bool = False
    ) -> list[DispatchAction]:
        """Retry a request after its current worker failed it, or let it wait, or end it if its retries are used up.

        With ``is_gone`` the worker no longer has the request and gets no abort. With ``is_free`` neither the worker nor the
        request is at fault, and the retry costs no budget; nor does one after a refusal.
        """
        failed = request.current
        assert failed is not None, f"{request.request_id} has no worker that could have failed it"
        kind = request.retry_kind
        actions: list[DispatchAction] = [*self._early_pulls.stop(request)]
        if not is_gone:
            actions.append(SendToWorker(failed, Abort(request_ids=(request.wire_id,), reason=error.code)))
        is_refused, is_of_one, was_safe = is_refusal(error), is_of_one_request(error), request.was_safe
        is_refused_leg = is_refused and request.has_begun and not request.attempt.shown  # after tokens it is a replay
        request.standing.was_admitted |= error.code != Overloaded.code
        is_full_for_one_that_waits = error.code == Overloaded.code and request.standing.may_wait
        waits_for_room = (is_refused_leg or is_full_for_one_that_waits) and not is_of_one  # to its deadline
        if is_refused and not request.has_begun:
            self._encode_legs.on_prompt_refused(request)
        if not waits_for_room and not ((is_free or is_refused) and request.retries.take_free(error, failed)):
            request.retries.blamed.append(failed)
        if is_of_one:
            request.retries.pause(failed, now)
        request.retries.avoid.add(failed)
        self._attempts.begin_next(request, error, now)
        self._inflight.free_all(request)
        if len(request.retries.blamed) > self._max_retries:
            return actions + self._open.fail_with(request, error, now)
        next_actions = self._continue(request, now)
        if request.error is None:
            if is_refused_leg:
                request.retries.num_refusals += 1
            elif not (is_refused and was_safe):
                request.retries.kinds.append(kind)
            actions.append(Retried(request.request_id, kind, error, failed, request.current))
        return actions + next_actions
