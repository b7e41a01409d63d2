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
from router.dispatch.attempts import Tries
from router.dispatch.encode_legs import EncodeLegs
from router.dispatch.inflight import Claims
from router.dispatch.members import Encoder, Member, Worker, WorkerKey
from router.dispatch.membership import Cluster, Left
from router.dispatch.pair_health import PairHealth
from router.dispatch.placement import Placement
from router.dispatch.policy import Route, why_not_read
from router.dispatch.request_state import (
    NO_PREFILL,
    Deliver,
    EncodeEnded,
    Ended,
    Flow,
    FlowAction,
    Phase,
    Retried,
    Send,
    open_flow,
)
from router.dispatch.restarts import Restarts
from router.dispatch.types import Submission, Update
from router.dispatch.waiting import Waiting
from router.dispatch.worker_messages import (
    TokensLost,
    apply_first_tokens,
    apply_tokens,
    find_problem,
    first_message,
    name_image,
    successor_message,
)


class Flows:
    """All requests of this router. Times are seconds of one monotonic clock."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        request_timeout_s: float,
        max_requests: int,
        max_retries: int = 2,
        worker_wait_s: float = 10.0,
        encode_timeout_s: float = 20.0,
    ) -> None:
        self._cluster = cluster
        self._claims = Claims()
        self._encode_legs = EncodeLegs(cluster, self._claims, encode_timeout_s)
        self._request_timeout_s = request_timeout_s
        self._max_requests = max_requests
        self._max_retries = max_retries
        self._flows: dict[str, Flow] = {}
        self._tries = Tries()
        self.restarts = Restarts(worker_wait_s)
        self._waiting = Waiting(self.restarts)
        self._pairs = PairHealth()
        self._placement = Placement(cluster, self._claims, self._pairs)

    def __len__(self) -> int:
        return len(self._flows)

    def count(self, phase: Phase) -> int:
        """Return how many requests are in a phase."""
        return sum(flow.phase is phase for flow in self._flows.values())

    @property
    def num_waiting(self) -> int:
        """Return how many requests wait for a worker."""
        return len(self._waiting)

    def find_requests(self, wire_ids: Iterable[str]) -> list[str]:
        """Return the ids of the requests whose present tries have these names on the wire, each once."""
        return self._tries.find_requests(wire_ids)

    # ---- clients -----------------------------------------------------------------------------------------------------

    def submit(self, submission: Submission, now: float, avoid: frozenset[WorkerKey] = frozenset()) -> list[FlowAction]:
        """Start a request, at workers in ``avoid`` only if nobody else is there.

        Raises:
            Overloaded: this router has as many requests as it may have, or every worker that could take it is full.
            NoWorker: no route takes it at the moment.
            ContextTooLong: no route can hold prompt and output.
            InvalidRequest: no route can hold so many choices.
        """
        if len(self._flows) >= self._max_requests:
            raise Overloaded(f"the router serves {len(self._flows)} requests, its limit: try again later")
        flow = open_flow(submission, now, self._request_timeout_s)
        flow.avoid |= avoid
        route = self._placement.route(flow, now)
        self._flows[flow.request_id] = flow
        return self._start(flow, route, now)

    def fail_try(self, wire_id: str, error: KVFerryError, now: float) -> list[FlowAction]:
        """End a request whose message cannot be sent to anybody; unknown ids are ignored."""
        flow = self._tries.get(wire_id)
        return self._fail(flow, error, now) if flow is not None else []

    def abort(self, request_id: str, reason: str, now: float) -> list[FlowAction]:
        """End a request in whatever phase it is; unknown ids are ignored."""
        flow = self._flows.get(request_id)
        if flow is None:
            return []
        error = ErrorInfo.of(Cancelled(f"the request was aborted: {reason}"))
        return self._fail_with(flow, error, now, reason=reason)

    def fail(self, request_id: str, error: KVFerryError, now: float) -> list[FlowAction]:
        """End a request that this router cannot go on with; unknown ids are ignored."""
        flow = self._flows.get(request_id)
        return self._fail(flow, error, now) if flow is not None else []

    def finish_choice(self, request_id: str, index: int, now: float) -> list[FlowAction]:
        """Note that a choice ended by its text (a stop string), which no worker can know."""
        flow = self._flows.get(request_id)
        if flow is None or flow.finish_reasons[index] is not None:
            return []
        flow.finish_reasons[index] = "stop"
        if flow.is_finished:
            return [*self._stop_workers(flow, "stop"), self._end(flow, now)]
        self._claims.shrink(flow, flow.decode, len(flow.live_choices))
        abort = Abort(request_ids=(f"{flow.wire_id}/{index}",), reason="stop")
        return [Send(flow.current, abort)] if flow.current else []

    # ---- workers -----------------------------------------------------------------------------------------------------

    def on_prefill_done(self, sender: Worker, message: PrefillDone, now: float) -> list[FlowAction]:
        """Deliver the first tokens and hand the request over to a decode worker."""
        flow = self._tries.get(message.request_id)
        if flow is None or flow.phase is not Phase.PREFILL or flow.prefill != sender.key:
            # Crossed with an abort or a retry: nobody will read the handoff.
            return [*_release(sender.key, message.kv_handoff)]
        flow.handoff = message.kv_handoff
        problem = find_problem(message, sender, flow)
        if problem:
            return self._fail(flow, ProtocolError(f"prefill worker {sender.key.engine_id}: {problem}"), now)
        sender.progress.on_success()
        actions: list[FlowAction] = [Deliver(flow.request_id, apply_first_tokens(flow, message, now))]
        if flow.is_finished:
            return [*actions, *_release(sender.key, message.kv_handoff), self._end(flow, now)]
        self._claims.free(flow, sender.key)
        return actions + self._hand_over(flow, now)

    def on_tokens(self, sender: Worker, tokens: Sequence[Tokens], now: float) -> list[FlowAction]:
        """Deliver the tokens of one engine step, one update per request."""
        actions: list[FlowAction] = []
        updates: dict[str, Update] = {}
        for item in tokens:
            flow = self._tries.get(item.request_id)
            if flow is None or flow.decode != sender.key or flow.phase in (Phase.ENCODE, Phase.PREFILL):
                actions += self._unexpected(sender, item.request_id, now)
                continue
            update = updates.get(flow.request_id) or Update()
            try:
                apply_tokens(flow, item, update, now)
            except TokensLost as error:
                if flow.request_id in updates:
                    actions.append(Deliver(flow.request_id, updates.pop(flow.request_id)))
                is_free = self._cluster.pauses.is_settling(now)  # then the router may not have taken them in time
                actions += self._retry(flow, ErrorInfo.of(error), now, is_gone=False, is_free=is_free)
            except ProtocolError as error:
                updates.pop(flow.request_id, None)
                actions += self._fail(flow, error, now)
            else:
                self._pairs.learn(flow, item.usage.kv_transfer if item.usage else None, now)
                updates[flow.request_id] = update
        for request_id, update in updates.items():
            actions.append(Deliver(request_id, update))
            flow = self._flows[request_id]
            if flow.is_finished:
                sender.progress.on_success()
                actions.append(self._end(flow, now))
            else:
                self._claims.shrink(flow, flow.decode, len(flow.live_choices))
        return actions

    def on_request_failed(self, sender: Worker, message: RequestFailed, now: float) -> list[FlowAction]:
        """Go on elsewhere, or tell the client. A prefill worker's failure counts only until the first token."""
        error = message.error
        sender.note_failure(error)
        flow = self._tries.get(message.request_id)
        if flow is None or sender.key != flow.current:
            return []
        is_pause = retries.is_blameless(error) or retries.is_premature(flow, error, now)
        if is_pause or retries.is_worth_a_retry(error):
            return self._retry(flow, error, now, is_gone=True, is_free=is_pause)
        if flow.is_leg_handed_over and flow.prefill is not None:  # the client wanted the error
            self._pairs.note((flow.prefill, sender.key), fallback_reason(error.code), now)
        return self._fail_with(flow, name_image(flow.submission, error), now, gone=sender.key)

    def on_rejected(self, sender: Member, error: ErrorInfo, now: float) -> list[FlowAction]:
        """Fail what the worker may have been sent in vain: requests of which it has not shown a token."""
        if isinstance(sender, Encoder):
            waiting = [flow for flow in self._flows.values() if flow.encoding and sender.key in flow.encoding.waiting]
            failures = [RequestFailed(request_id=flow.wire_id, error=error) for flow in waiting]
            return [action for failure in failures for action in self.on_encode_failed(sender, failure, now)]
        flows = [flow for flow in self._flows.values() if not flow.shown and flow.current == sender.key]
        return [action for flow in flows for action in self._fail_with(flow, error, now)]

    def on_left(self, left: Left, now: float) -> list[FlowAction]:
        """Let the requests of a lost worker go on without it."""
        key = left.worker.key
        if not left.is_back:
            self._pairs.forget(key)
        flows = [flow for flow in self._flows.values() if key in flow.workers]
        return [action for flow in flows for action in self._lose(flow, left, now)]

    def on_joined(self, member: Member, now: float) -> list[FlowAction]:
        """Let requests that wait go on. A process that is back has not failed: what its loss has cost is given back."""
        if isinstance(member, Worker):
            self.restarts.on_joined(member, now)
        for flow in self._flows.values():
            flow.blamed = [key for key in flow.blamed if key != member.key]
        return self.place_waiting(now)

    def on_pause(self, lateness_s: float) -> None:
        """The router stood still for so long: requests get that time back, but for what their clients have set themselves."""
        self._waiting.pardon(lateness_s)
        for flow in self._flows.values():
            if flow.encoding is not None:
                flow.encoding.deadline += lateness_s
            if not flow.has_own_deadline:
                flow.deadline += lateness_s
                flow.pardoned_s += lateness_s

    def on_timer(self, now: float) -> list[FlowAction]:
        """End requests that are out of time; keep handoffs alive until they are accepted; try those that wait again."""
        self.restarts.look(self._cluster.workers, now)
        actions: list[FlowAction] = []
        for flow in list(self._flows.values()):
            if now >= flow.deadline:
                error = DeadlineExceeded(f"the request took longer than {flow.deadline - flow.arrival:g} s")
                actions += self._fail(flow, error, now)
            elif flow.phase is Phase.ENCODE and flow.encoding is not None and now >= flow.encoding.deadline:
                actions += self._encode_legs.give_up_all(flow, TransferTimeout.code)
                actions += self._end_encode_leg(flow, now)
            else:
                actions += self._leave_unresponsive(flow, now)
        return [*actions, *self._renewals(now), *self.place_waiting(now)]

    def _renewals(self, now: float) -> list[Send]:
        due: dict[WorkerKey, list[str]] = {}
        for flow in self._flows.values():
            if flow.phase is Phase.HANDOFF and flow.handoff and flow.prefill and now >= flow.renew_at:
                due.setdefault(flow.prefill, []).append(flow.handoff.transfer_id)
                flow.renew_at = now + _renew_interval(flow.handoff)
        return [Send(worker, Renew(transfer_ids=tuple(ids))) for worker, ids in due.items()]

    def place_waiting(self, now: float) -> list[FlowAction]:
        """Give requests that wait to workers that have room by now; call it when there may be some."""
        return [action for flow in self._waiting.flows() for action in self._go_on(flow, now)]

    # ---- the two legs ------------------------------------------------------------------------------------------------

    def _start(self, flow: Flow, route: Route, now: float) -> list[FlowAction]:
        """Give a request to a pair, or to an aggregated worker, from its beginning; its images first to who embeds them."""
        flow.prefill = route.prefill.key if route.prefill else None
        flow.decode = route.decode.key
        flow.fallback_reason = NO_PREFILL if route.is_degraded else ""
        first = route.workers[0]
        flow.model_fingerprint = first.facts.model_fingerprint
        self._tries.begin(flow)
        for worker in route.workers:
            self._claims.take(flow, worker, flow.submission.n)
        flow.phase = Phase.ENCODE
        encodes = self._encode_legs.begin(flow, first, now)
        return [*encodes] if encodes else [self._begin_prompt(flow, now)]

    def _begin_prompt(self, flow: Flow, now: float) -> Send:
        """Give the request to the first worker of its route."""
        flow.phase = Phase.PREFILL if flow.prefill else Phase.DECODE
        assert flow.current is not None, f"{flow.request_id} has no route"
        return Send(flow.current, first_message(flow, now))

    def _go_on(self, flow: Flow, now: float) -> list[FlowAction]:
        """Give a request that has no worker to one, from where it is, or let it wait."""
        return self._hand_over(flow, now) if flow.num_output_tokens else self._start_again(flow, now)

    def _start_again(self, flow: Flow, now: float) -> list[FlowAction]:
        """Begin from the start: the client has nothing yet."""
        try:
            route = self._placement.route(flow, now)
        except (NoWorker, Overloaded) as error:
            if flow.setback is not None and flow.setback.code == Overloaded.code:
                return self._fail_with(flow, flow.setback, now)  # it was never let in
            return self._wait(flow, error, now)
        except RequestError as error:
            return self._fail_with(flow, flow.setback or ErrorInfo.of(error), now)
        self._waiting.leave(flow)
        return self._start(flow, route, now)

    def _hand_over(self, flow: Flow, now: float) -> list[FlowAction]:
        """Give a request with its output so far to a decode worker, or let it wait for one."""
        if flow.phase is not Phase.HANDOFF and flow.handoff is not None:
            flow.renew_at = now + _renew_interval(flow.handoff)
        flow.phase = Phase.HANDOFF
        try:
            decode = self._placement.decode(flow, now)
        except (NoWorker, Overloaded) as error:
            return self._wait(flow, error, now)
        self._waiting.leave(flow)
        actions = self._keep_or_release_handoff(flow, decode)
        flow.decode = decode.key
        flow.is_leg_handed_over = flow.handoff is not None
        self._claims.take(flow, decode, len(flow.live_choices))
        return [*actions, Send(decode.key, successor_message(flow, now))]

    def _keep_or_release_handoff(self, flow: Flow, decode: Worker) -> list[Send]:
        """Release the handoff if the worker that goes on cannot read it."""
        if flow.handoff is None:
            return []
        problem = why_not_read(self._cluster.get(flow.prefill), decode)
        if problem is None:
            return []
        releases = _release(flow.prefill, flow.handoff)
        flow.handoff = None
        flow.fallback_reason = fallback_reason(problem.code)
        return releases

    def _wait(self, flow: Flow, error: NoWorker | Overloaded, now: float) -> list[FlowAction]:
        """Keep a request until somebody can go on with it; end it if nobody has come for too long."""
        is_only_busy = isinstance(error, Overloaded) or self._placement.may_resume(flow)
        too_long = self._waiting.stay(flow, error, now, is_only_busy=is_only_busy)
        return self._fail(flow, too_long, now) if too_long is not None else []

    # ---- the encode leg ----------------------------------------------------------------------------------------------

    def on_encode_done(self, sender: Encoder, message: EncodeDone, now: float) -> list[FlowAction]:
        """Note where embeddings lie, and go on with the request if that was all it waited for."""
        flow = self._tries.get(message.request_id)
        ended = self._encode_legs.on_done(flow, sender.key, message) if flow is not None else None
        return self._after_encode(flow, ended, now) if flow is not None and ended is not None else []

    def on_encode_failed(self, sender: Encoder, message: EncodeFailed | RequestFailed, now: float) -> list[FlowAction]:
        """Go on without these embeddings; only an image that nobody could embed ends the request."""
        error = message.error
        sender.note_failure(error)
        flow = self._tries.get(message.request_id)
        ended = self._encode_legs.give_up(flow, sender.key, error.code) if flow is not None else None
        if flow is None or ended is None:
            return []
        if isinstance(message, EncodeFailed) and error.code == InvalidRequest.code:
            return [ended, *self._fail_with(flow, name_image(flow.submission, error, message.media_index), now)]
        return self._after_encode(flow, ended, now)

    def _after_encode(self, flow: Flow, ended: EncodeEnded, now: float) -> list[FlowAction]:
        """Begin with the prompt once nobody is waited for."""
        if flow.phase is not Phase.ENCODE or (flow.encoding is not None and flow.encoding.waiting):
            return [ended]
        return [ended, *self._end_encode_leg(flow, now)]

    def _end_encode_leg(self, flow: Flow, now: float) -> list[FlowAction]:
        """Begin with the prompt: on the reserved route, or on another if its workers have left meanwhile."""
        flow.accounts.encode_s = now - flow.arrival
        workers = [self._cluster.get(key) for key in (flow.prefill, flow.decode) if key is not None]
        if workers and all(worker is not None and not worker.is_closed for worker in workers):
            return [self._begin_prompt(flow, now)]
        self._claims.free_all(flow)
        flow.prefill = flow.decode = None
        return self._start_again(flow, now)

    # ---- setbacks ----------------------------------------------------------------------------------------------------

    def _lose(self, flow: Flow, left: Left, now: float) -> list[FlowAction]:
        """Let a worker go that the request counts on, now or later."""
        key = left.worker.key
        if flow.phase is Phase.ENCODE:
            return self._lose_while_encoding(flow, left, now)
        if flow.current == key:
            role = "prefill" if flow.phase is Phase.PREFILL else "decode"
            error = PeerUnreachable(f"{role} worker {key.engine_id} was lost: {left.reason}")
            return self._retry(flow, ErrorInfo.of(error), now, is_gone=not left.is_back, is_free=left.is_back)
        if flow.decode == key and not left.is_back:  # another one is chosen when the prompt is computed
            flow.decode = None
            self._claims.free(flow, key)
        return []  # a decode worker finds out by itself whether it still needs the prefill worker

    def _lose_while_encoding(self, flow: Flow, left: Left, now: float) -> list[FlowAction]:
        """Wait no more for a lost encode worker; a lost worker of the route is replaced when its turn comes."""
        key = left.worker.key
        ended = self._encode_legs.give_up(flow, key, PeerUnreachable.code)
        if ended is not None:
            return self._after_encode(flow, ended, now)
        if not left.is_back:
            flow.prefill = flow.decode = None
        return []

    def _leave_unresponsive(self, flow: Flow, now: float) -> list[FlowAction]:
        """Take a request from a worker of which nothing can be expected now, if another one can go on with it."""
        worker = self._cluster.get(flow.current)
        why = worker.why_unresponsive if worker is not None else ""
        if not why or not self._placement.can_move(flow, now):
            return []
        return self._retry(flow, ErrorInfo.of(WorkerStalled(why)), now, is_gone=False, is_free=True)

    def _retry(self, flow: Flow, error: ErrorInfo, now: float, *, is_gone: bool, is_free: bool = False) -> list[FlowAction]:
        """Go on with a request that its present worker has failed: elsewhere, or once there is somebody; or end it.

        ``is_gone`` says that the worker holds the request no more, and need not be told; ``is_free`` that neither it nor the
        request is at fault.
        """
        failed = flow.current
        assert failed is not None, f"{flow.request_id} has no worker that could have failed it"
        kind = retries.kind_of(flow)
        actions: list[FlowAction] = []
        if not is_gone:
            actions.append(Send(failed, Abort(request_ids=(flow.wire_id,), reason=error.code)))
        is_refusal = retries.is_free(flow, error)
        is_blameless = is_free and retries.take_free_retry(flow, error)
        if not is_refusal and not is_blameless:
            flow.blamed.append(failed)
        flow.avoid.add(failed)
        self._begin_try(flow, error, now)
        if len(flow.blamed) > self._max_retries:
            return actions + self._fail_with(flow, error, now)
        next_actions = self._go_on(flow, now)
        if flow.error is None:
            if is_refusal:
                flow.num_refusals += 1
            else:
                flow.retried.append(kind)
            actions.append(Retried(flow.request_id, kind, error, failed, flow.current))
        return actions + next_actions

    def _begin_try(self, flow: Flow, error: ErrorInfo, now: float) -> None:
        """Give the request a new name on the wire, and let go of the workers that it had."""
        self._tries.begin_next(flow, now)
        flow.setback = error
        flow.shown.clear()
        flow.decode = None
        if flow.phase is Phase.PREFILL:
            flow.prefill = None
        self._claims.free_all(flow)

    # ---- ends --------------------------------------------------------------------------------------------------------

    def _unexpected(self, sender: Worker, wire_id: str, now: float) -> list[FlowAction]:
        """Stop a worker that is at work on something nobody waits for."""
        if not self._tries.take_abort(wire_id, now):
            return []
        return [Send(sender.key, Abort(request_ids=(wire_id,), reason="unknown"))]

    def _fail(self, flow: Flow, error: KVFerryError, now: float) -> list[FlowAction]:
        return self._fail_with(flow, ErrorInfo.of(error), now)

    def _fail_with(
        self, flow: Flow, error: ErrorInfo, now: float, *, gone: WorkerKey | None = None, reason: str = ""
    ) -> list[FlowAction]:
        """Stop every leg but the one that is ``gone``, and tell the client."""
        flow.error = error
        stops = [action for action in self._stop_workers(flow, reason or error.code) if action.worker != gone]
        return [*stops, Deliver(flow.request_id, Update(error=error)), self._end(flow, now)]

    def _stop_workers(self, flow: Flow, reason: str) -> list[Send]:
        """Abort the leg that has the request; release a handoff that nobody may have read."""
        current = flow.current
        aborts = [Send(current, Abort(request_ids=(flow.wire_id,), reason=reason))] if current else []
        return [*aborts, *self._encode_legs.aborts(flow, reason), *_release(flow.prefill, flow.handoff)]

    def _end(self, flow: Flow, now: float) -> Ended:
        del self._flows[flow.request_id]
        self._waiting.leave(flow)
        self._tries.end(flow, now)
        self._claims.free_all(flow)
        return Ended(flow, now)


def _release(prefill: WorkerKey | None, handoff: KVHandoff | None) -> list[Send]:
    return [Send(prefill, Release(transfer_ids=(handoff.transfer_id,)))] if prefill and handoff else []


def _renew_interval(handoff: KVHandoff) -> float:
    return handoff.lease_ms / 3000  # a third of the lease in seconds: two renewals may get lost
