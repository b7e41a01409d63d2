"""The life of all requests between the workers: a synchronous state machine without I/O.

Owns which worker has which request, what is to be aborted, renewed or released, who takes over from a worker that fails, and
what the client is told. Knows nothing of text (``router.openai.postprocess``), HTTP or sockets. Worker frames come in as
messages; actions go out and ``router.dispatch.core`` passes them on. A request always ends with exactly one ``Ended``, and a
failure is delivered before it.

What becomes of a request whose worker is lost, makes no progress, or fails it in a way that another may not:

| the client has       | it goes on                                                                                     |
|----------------------|------------------------------------------------------------------------------------------------|
| nothing yet          | from the beginning: on another pair, or a worker that serves alone                             |
| the first token      | on another decode worker with the same handoff, or without one if its prefill worker is lost |
| more                 | on another decode worker, which computes prompt and output so far: a *replay*                  |

If nobody can take it, it stays with a worker that has only stalled, and waits for a successor of one that was lost
(``router.dispatch.waiting``). What costs it one of its retries, and what does not, is said by ``router.dispatch.retries``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from core.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    KVFerryError,
    NoWorker,
    Overloaded,
    PeerUnreachable,
    ProtocolError,
    RequestError,
    TransferTimeout,
    WorkerStalled,
    fallback_reason,
)
from core.wire.kv import KVHandoff
from core.wire.messages import Abort, EncodeDone, EncodeFailed, ErrorInfo, PrefillDone, Release, Renew, RequestFailed, Tokens
from router.dispatch import retries
from router.dispatch.attempts import Attempts
from router.dispatch.encode_legs import EncodeLegs
from router.dispatch.inflight import InflightCounts
from router.dispatch.members import Encoder, Member, Worker, WorkerKey
from router.dispatch.membership import Left, Membership
from router.dispatch.pair_health import PairHealth
from router.dispatch.placement import Placement
from router.dispatch.policy import Route, why_not_read
from router.dispatch.request_state import (
    NO_PREFILL,
    Deliver,
    DispatchAction,
    EncodeEnded,
    Ended,
    Phase,
    RequestState,
    Retried,
    Send,
    open_request,
)
from router.dispatch.restarts import Restarts
from router.dispatch.types import Submission, Update
from router.dispatch.waiting import Waiting
from router.dispatch.worker_messages import (
    TokensLost,
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
        self._requests: dict[str, RequestState] = {}
        self._attempts = Attempts()
        self.restarts = Restarts(worker_wait_s)
        self._waiting = Waiting(self.restarts)
        self._pairs = PairHealth()
        self._placement = Placement(membership, self._inflight, self._pairs)

    def __len__(self) -> int:
        return len(self._requests)

    def count(self, phase: Phase) -> int:
        """Return how many requests are in a phase."""
        return sum(request.phase is phase for request in self._requests.values())

    @property
    def num_waiting(self) -> int:
        """Return how many requests wait for a worker."""
        return len(self._waiting)

    def find_requests(self, wire_ids: Iterable[str]) -> list[str]:
        """Return the ids of the requests whose present attempts have these names on the wire, each once."""
        return self._attempts.find_requests(wire_ids)

    # ---- clients -----------------------------------------------------------------------------------------------------

    def submit(self, submission: Submission, now: float, avoid: frozenset[WorkerKey] = frozenset()) -> list[DispatchAction]:
        """Start a request, at workers in ``avoid`` only if nobody else is there.

        Raises:
            Overloaded: this router has as many requests as it may have, or every worker that could take it is full.
            NoWorker: no route takes it at the moment.
            ContextTooLong: no route can hold prompt and output.
            InvalidRequest: no route can hold so many choices.
        """
        if len(self._requests) >= self._max_requests:
            raise Overloaded(f"the router serves {len(self._requests)} requests, its limit: try again later")
        request = open_request(submission, now, self._request_timeout_s)
        request.avoid |= avoid
        route = self._placement.route(request, now)
        self._requests[request.request_id] = request
        return self._start(request, route, now)

    def fail_attempt(self, wire_id: str, error: KVFerryError, now: float) -> list[DispatchAction]:
        """End a request whose message cannot be sent to anybody; unknown ids are ignored."""
        request = self._attempts.get(wire_id)
        return self._fail(request, error, now) if request is not None else []

    def abort(self, request_id: str, reason: str, now: float) -> list[DispatchAction]:
        """End a request in whatever phase it is; unknown ids are ignored."""
        request = self._requests.get(request_id)
        if request is None:
            return []
        error = ErrorInfo.of(Cancelled(f"the request was aborted: {reason}"))
        return self._fail_with(request, error, now, reason=reason)

    def fail(self, request_id: str, error: KVFerryError, now: float) -> list[DispatchAction]:
        """End a request that this router cannot go on with; unknown ids are ignored."""
        request = self._requests.get(request_id)
        return self._fail(request, error, now) if request is not None else []

    def finish_choice(self, request_id: str, index: int, now: float) -> list[DispatchAction]:
        """Note that a choice ended by its text (a stop string), which no worker can know."""
        request = self._requests.get(request_id)
        if request is None or request.finish_reasons[index] is not None:
            return []
        request.finish_reasons[index] = "stop"
        if request.is_finished:
            return [*self._stop_workers(request, "stop"), self._end(request, now)]
        self._inflight.shrink(request, request.decode, len(request.live_choices))
        abort = Abort(request_ids=(f"{request.wire_id}/{index}",), reason="stop")
        return [Send(request.current, abort)] if request.current else []

    # ---- workers -----------------------------------------------------------------------------------------------------

    def on_prefill_done(self, sender: Worker, message: PrefillDone, now: float) -> list[DispatchAction]:
        """Deliver the first tokens and hand the request over to a decode worker."""
        request = self._attempts.get(message.request_id)
        if request is None or request.phase is not Phase.PREFILL or request.prefill != sender.key:
            # Crossed with an abort or a retry: nobody will read the handoff.
            return [*_release(sender.key, message.kv_handoff)]
        request.handoff = message.kv_handoff
        problem = find_prefill_done_problem(message, sender, request)
        if problem:
            return self._fail(request, ProtocolError(f"prefill worker {sender.key.engine_id}: {problem}"), now)
        sender.progress.on_success()
        actions: list[DispatchAction] = [Deliver(request.request_id, apply_prefill_done(request, message, now))]
        if request.is_finished:
            return [*actions, *_release(sender.key, message.kv_handoff), self._end(request, now)]
        self._inflight.free(request, sender.key)
        return actions + self._hand_over(request, now)

    def on_tokens(self, sender: Worker, tokens: Sequence[Tokens], now: float) -> list[DispatchAction]:
        """Deliver the tokens of one engine step, one update per request."""
        actions: list[DispatchAction] = []
        updates: dict[str, Update] = {}
        for item in tokens:
            request = self._attempts.get(item.request_id)
            if request is None or request.decode != sender.key or request.phase in (Phase.ENCODE, Phase.PREFILL):
                actions += self._unexpected(sender, item.request_id, now)
                continue
            update = updates.get(request.request_id) or Update()
            try:
                apply_tokens(request, item, update, now)
            except TokensLost as error:
                if request.request_id in updates:
                    actions.append(Deliver(request.request_id, updates.pop(request.request_id)))
                is_free = self._membership.pauses.is_settling(now)  # then the router may not have taken them in time
                actions += self._retry(request, ErrorInfo.of(error), now, is_gone=False, is_free=is_free)
            except ProtocolError as error:
                updates.pop(request.request_id, None)
                actions += self._fail(request, error, now)
            else:
                self._pairs.learn(request, item.usage.kv_transfer if item.usage else None, now)
                updates[request.request_id] = update
        for request_id, update in updates.items():
            actions.append(Deliver(request_id, update))
            request = self._requests[request_id]
            if request.is_finished:
                sender.progress.on_success()
                actions.append(self._end(request, now))
            else:
                self._inflight.shrink(request, request.decode, len(request.live_choices))
        return actions

    def on_request_failed(self, sender: Worker, message: RequestFailed, now: float) -> list[DispatchAction]:
        """Go on elsewhere, or tell the client. A prefill worker's failure counts only until the first token."""
        error = message.error
        sender.note_failure(error)
        request = self._attempts.get(message.request_id)
        if request is None or sender.key != request.current:
            return []
        is_pause = retries.is_blameless(error) or retries.is_premature(request, error, now)
        if is_pause or retries.is_worth_a_retry(error):
            return self._retry(request, error, now, is_gone=True, is_free=is_pause)
        if request.is_leg_handed_over and request.prefill is not None:  # the client wanted the error
            self._pairs.note((request.prefill, sender.key), fallback_reason(error.code), now)
        return self._fail_with(request, name_image(request.submission, error), now, gone=sender.key)

    def on_rejected(self, sender: Member, error: ErrorInfo, now: float) -> list[DispatchAction]:
        """Fail what the worker may have been sent in vain: requests of which it has not shown a token."""
        if isinstance(sender, Encoder):
            waiting = [
                request for request in self._requests.values() if request.encoding and sender.key in request.encoding.waiting
            ]
            failures = [RequestFailed(request_id=request.wire_id, error=error) for request in waiting]
            return [action for failure in failures for action in self.on_encode_failed(sender, failure, now)]
        affected = [request for request in self._requests.values() if not request.shown and request.current == sender.key]
        return [action for request in affected for action in self._fail_with(request, error, now)]

    def on_left(self, left: Left, now: float) -> list[DispatchAction]:
        """Let the requests of a lost worker go on without it."""
        key = left.worker.key
        if not left.is_back:
            self._pairs.forget(key)
        affected = [request for request in self._requests.values() if key in request.workers]
        return [action for request in affected for action in self._lose(request, left, now)]

    def on_joined(self, member: Member, now: float) -> list[DispatchAction]:
        """Let requests that wait go on. A process that is back has not failed: what its loss has cost is given back."""
        if isinstance(member, Worker):
            self.restarts.on_joined(member, now)
        for request in self._requests.values():
            request.blamed = [key for key in request.blamed if key != member.key]
        return self.place_waiting(now)

    def on_pause(self, lateness_s: float) -> None:
        """The router stood still for so long: requests get that time back, but for what their clients have set themselves."""
        self._waiting.pardon(lateness_s)
        for request in self._requests.values():
            if request.encoding is not None:
                request.encoding.deadline += lateness_s
            if not request.has_own_deadline:
                request.deadline += lateness_s
                request.pardoned_s += lateness_s

    def on_timer(self, now: float) -> list[DispatchAction]:
        """End requests that are out of time; keep handoffs alive until they are accepted; try those that wait again."""
        self.restarts.look(self._membership.workers, now)
        actions: list[DispatchAction] = []
        for request in list(self._requests.values()):
            if now >= request.deadline:
                error = DeadlineExceeded(f"the request took longer than {request.deadline - request.arrival:g} s")
                actions += self._fail(request, error, now)
            elif request.phase is Phase.ENCODE and request.encoding is not None and now >= request.encoding.deadline:
                actions += self._encode_legs.give_up_all(request, TransferTimeout.code)
                actions += self._end_encode_leg(request, now)
            else:
                actions += self._leave_unresponsive(request, now)
        return [*actions, *self._renewals(now), *self.place_waiting(now)]

    def _renewals(self, now: float) -> list[Send]:
        due: dict[WorkerKey, list[str]] = {}
        for request in self._requests.values():
            if request.phase is Phase.HANDOFF and request.handoff and request.prefill and now >= request.renew_at:
                due.setdefault(request.prefill, []).append(request.handoff.transfer_id)
                request.renew_at = now + _renew_interval(request.handoff)
        return [Send(worker, Renew(transfer_ids=tuple(ids))) for worker, ids in due.items()]

    def place_waiting(self, now: float) -> list[DispatchAction]:
        """Give requests that wait to workers that have room by now; call it when there may be some."""
        return [action for request in self._waiting.requests() for action in self._go_on(request, now)]

    # ---- the two legs ------------------------------------------------------------------------------------------------

    def _start(self, request: RequestState, route: Route, now: float) -> list[DispatchAction]:
        """Give a request to a pair, or to an aggregated worker, from its beginning; its images first to who embeds them."""
        request.prefill = route.prefill.key if route.prefill else None
        request.decode = route.decode.key
        request.fallback_reason = NO_PREFILL if route.is_degraded else ""
        first = route.workers[0]
        request.model_fingerprint = first.facts.model_fingerprint
        self._attempts.begin(request)
        for worker in route.workers:
            self._inflight.take(request, worker, request.submission.n)
        request.phase = Phase.ENCODE
        encodes = self._encode_legs.begin(request, first, now)
        return [*encodes] if encodes else [self._begin_prompt(request, now)]

    def _begin_prompt(self, request: RequestState, now: float) -> Send:
        """Give the request to the first worker of its route."""
        request.phase = Phase.PREFILL if request.prefill else Phase.DECODE
        assert request.current is not None, f"{request.request_id} has no route"
        return Send(request.current, new_generate(request, now))

    def _go_on(self, request: RequestState, now: float) -> list[DispatchAction]:
        """Give a request that has no worker to one, from where it is, or let it wait."""
        return self._hand_over(request, now) if request.num_output_tokens else self._start_again(request, now)

    def _start_again(self, request: RequestState, now: float) -> list[DispatchAction]:
        """Begin from the start: the client has nothing yet."""
        try:
            route = self._placement.route(request, now)
        except (NoWorker, Overloaded) as error:
            if request.setback is not None and request.setback.code == Overloaded.code:
                return self._fail_with(request, request.setback, now)  # it was never let in
            return self._wait(request, error, now)
        except RequestError as error:
            return self._fail_with(request, request.setback or ErrorInfo.of(error), now)
        self._waiting.leave(request)
        return self._start(request, route, now)

    def _hand_over(self, request: RequestState, now: float) -> list[DispatchAction]:
        """Give a request with its output so far to a decode worker, or let it wait for one."""
        if request.phase is not Phase.HANDOFF and request.handoff is not None:
            request.renew_at = now + _renew_interval(request.handoff)
        request.phase = Phase.HANDOFF
        try:
            decode = self._placement.decode(request, now)
        except (NoWorker, Overloaded) as error:
            return self._wait(request, error, now)
        self._waiting.leave(request)
        actions = self._keep_or_release_handoff(request, decode)
        request.decode = decode.key
        request.is_leg_handed_over = request.handoff is not None
        self._inflight.take(request, decode, len(request.live_choices))
        return [*actions, Send(decode.key, resuming_generate(request, now))]

    def _keep_or_release_handoff(self, request: RequestState, decode: Worker) -> list[Send]:
        """Release the handoff if the worker that goes on cannot read it."""
        if request.handoff is None:
            return []
        problem = why_not_read(self._membership.get(request.prefill), decode)
        if problem is None:
            return []
        releases = _release(request.prefill, request.handoff)
        request.handoff = None
        request.fallback_reason = fallback_reason(problem.code)
        return releases

    def _wait(self, request: RequestState, error: NoWorker | Overloaded, now: float) -> list[DispatchAction]:
        """Keep a request until somebody can go on with it; end it if nobody has come for too long."""
        is_only_busy = isinstance(error, Overloaded) or self._placement.may_resume(request)
        too_long = self._waiting.stay(request, error, now, is_only_busy=is_only_busy)
        return self._fail(request, too_long, now) if too_long is not None else []

    # ---- the encode leg ----------------------------------------------------------------------------------------------

    def on_encode_done(self, sender: Encoder, message: EncodeDone, now: float) -> list[DispatchAction]:
        """Note where embeddings lie, and go on with the request if that was all it waited for."""
        request = self._attempts.get(message.request_id)
        ended = self._encode_legs.on_done(request, sender.key, message) if request is not None else None
        return self._after_encode(request, ended, now) if request is not None and ended is not None else []

    def on_encode_failed(self, sender: Encoder, message: EncodeFailed | RequestFailed, now: float) -> list[DispatchAction]:
        """Go on without these embeddings; only an image that nobody could embed ends the request."""
        error = message.error
        sender.note_failure(error)
        request = self._attempts.get(message.request_id)
        ended = self._encode_legs.give_up(request, sender.key, error.code) if request is not None else None
        if request is None or ended is None:
            return []
        if isinstance(message, EncodeFailed) and error.code == InvalidRequest.code:
            return [ended, *self._fail_with(request, name_image(request.submission, error, message.media_index), now)]
        return self._after_encode(request, ended, now)

    def _after_encode(self, request: RequestState, ended: EncodeEnded, now: float) -> list[DispatchAction]:
        """Begin with the prompt once nobody is waited for."""
        if request.phase is not Phase.ENCODE or (request.encoding is not None and request.encoding.waiting):
            return [ended]
        return [ended, *self._end_encode_leg(request, now)]

    def _end_encode_leg(self, request: RequestState, now: float) -> list[DispatchAction]:
        """Begin with the prompt: on the reserved route, or on another if its workers have left meanwhile."""
        request.accounts.encode_s = now - request.arrival
        workers = [self._membership.get(key) for key in (request.prefill, request.decode) if key is not None]
        if workers and all(worker is not None and not worker.is_closed for worker in workers):
            return [self._begin_prompt(request, now)]
        self._inflight.free_all(request)
        request.prefill = request.decode = None
        return self._start_again(request, now)

    # ---- setbacks ----------------------------------------------------------------------------------------------------

    def _lose(self, request: RequestState, left: Left, now: float) -> list[DispatchAction]:
        """Let a worker go that the request counts on, now or later."""
        key = left.worker.key
        if request.phase is Phase.ENCODE:
            return self._lose_while_encoding(request, left, now)
        if request.current == key:
            role = "prefill" if request.phase is Phase.PREFILL else "decode"
            error = PeerUnreachable(f"{role} worker {key.engine_id} was lost: {left.reason}")
            return self._retry(request, ErrorInfo.of(error), now, is_gone=not left.is_back, is_free=left.is_back)
        if request.decode == key and not left.is_back:  # another one is chosen when the prompt is computed
            request.decode = None
            self._inflight.free(request, key)
        return []  # a decode worker finds out by itself whether it still needs the prefill worker

    def _lose_while_encoding(self, request: RequestState, left: Left, now: float) -> list[DispatchAction]:
        """Wait no more for a lost encode worker; a lost worker of the route is replaced when its turn comes."""
        key = left.worker.key
        ended = self._encode_legs.give_up(request, key, PeerUnreachable.code)
        if ended is not None:
            return self._after_encode(request, ended, now)
        if not left.is_back:
            request.prefill = request.decode = None
        return []

    def _leave_unresponsive(self, request: RequestState, now: float) -> list[DispatchAction]:
        """Take a request from a worker of which nothing can be expected now, if another one can go on with it."""
        worker = self._membership.get(request.current)
        why = worker.why_unresponsive if worker is not None else ""
        if not why or not self._placement.can_move(request, now):
            return []
        return self._retry(request, ErrorInfo.of(WorkerStalled(why)), now, is_gone=False, is_free=True)

    def _retry(
        self, request: RequestState, error: ErrorInfo, now: float, *, is_gone: bool, is_free: bool = False
    ) -> list[DispatchAction]:
        """Go on with a request that its present worker has failed: elsewhere, or once there is somebody; or end it.

        ``is_gone`` says that the worker holds the request no more, and need not be told; ``is_free`` that neither it nor the
        request is at fault.
        """
        failed = request.current
        assert failed is not None, f"{request.request_id} has no worker that could have failed it"
        kind = retries.kind_of(request)
        actions: list[DispatchAction] = []
        if not is_gone:
            actions.append(Send(failed, Abort(request_ids=(request.wire_id,), reason=error.code)))
        is_refusal = retries.is_free(request, error)
        is_blameless = is_free and retries.take_free_retry(request, error)
        if not is_refusal and not is_blameless:
            request.blamed.append(failed)
        request.avoid.add(failed)
        self._begin_attempt(request, error, now)
        if len(request.blamed) > self._max_retries:
            return actions + self._fail_with(request, error, now)
        next_actions = self._go_on(request, now)
        if request.error is None:
            if is_refusal:
                request.num_refusals += 1
            else:
                request.retried.append(kind)
            actions.append(Retried(request.request_id, kind, error, failed, request.current))
        return actions + next_actions

    def _begin_attempt(self, request: RequestState, error: ErrorInfo, now: float) -> None:
        """Give the request a new name on the wire, and let go of the workers that it had."""
        self._attempts.begin_next(request, now)
        request.setback = error
        request.shown.clear()
        request.decode = None
        if request.phase is Phase.PREFILL:
            request.prefill = None
        self._inflight.free_all(request)

    # ---- ends --------------------------------------------------------------------------------------------------------

    def _unexpected(self, sender: Worker, wire_id: str, now: float) -> list[DispatchAction]:
        """Stop a worker that is at work on something nobody waits for."""
        if not self._attempts.take_abort(wire_id, now):
            return []
        return [Send(sender.key, Abort(request_ids=(wire_id,), reason="unknown"))]

    def _fail(self, request: RequestState, error: KVFerryError, now: float) -> list[DispatchAction]:
        return self._fail_with(request, ErrorInfo.of(error), now)

    def _fail_with(
        self, request: RequestState, error: ErrorInfo, now: float, *, gone: WorkerKey | None = None, reason: str = ""
    ) -> list[DispatchAction]:
        """Stop every leg but the one that is ``gone``, and tell the client."""
        request.error = error
        stops = [action for action in self._stop_workers(request, reason or error.code) if action.worker != gone]
        return [*stops, Deliver(request.request_id, Update(error=error)), self._end(request, now)]

    def _stop_workers(self, request: RequestState, reason: str) -> list[Send]:
        """Abort the leg that has the request; release a handoff that nobody may have read."""
        current = request.current
        aborts = [Send(current, Abort(request_ids=(request.wire_id,), reason=reason))] if current else []
        return [*aborts, *self._encode_legs.aborts(request, reason), *_release(request.prefill, request.handoff)]

    def _end(self, request: RequestState, now: float) -> Ended:
        del self._requests[request.request_id]
        self._waiting.leave(request)
        self._attempts.end(request, now)
        self._inflight.free_all(request)
        return Ended(request, now)


def _release(prefill: WorkerKey | None, handoff: KVHandoff | None) -> list[Send]:
    return [Send(prefill, Release(transfer_ids=(handoff.transfer_id,)))] if prefill and handoff else []


def _renew_interval(handoff: KVHandoff) -> float:
    return handoff.lease_ms / 3000  # a third of the lease in seconds: two renewals may get lost
