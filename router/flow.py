"""The life of each request between the workers: a synchronous state machine without I/O.

    submit ─► PREFILL ──first tokens──► HANDOVER ──first tokens of D──► DECODE ─► ended
        └────────────────────────────── aggregated worker ────────────────┘

Owns which worker has which request, what is to be aborted, renewed or released, and what the client is told. Knows nothing of
text (``router.output``), HTTP or sockets. Worker frames come in as messages; actions go out and ``router.machine`` passes
them on. A request always ends with exactly one ``Ended``, and a failure is delivered before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from core.errors import Cancelled, DeadlineExceeded, KVFerryError, Overloaded, PeerUnreachable, ProtocolError
from core.wire.kv import KVHandoff
from core.wire.messages import (
    Abort,
    ChoiceStart,
    ErrorInfo,
    FinishReason,
    Generate,
    PrefillDone,
    Release,
    Renew,
    RequestFailed,
    RouterMessage,
    Tokens,
    Usage,
)
from router.cluster import Cluster, Left, Worker, WorkerKey
from router.news import ChoiceUpdate, PromptReport, Submission, Update
from router.policy import Route, choose_decode, choose_route

_MAX_REMEMBERED = 4096  # ended requests whose late tokens are expected and need no second abort


class Phase(Enum):
    """Who is at work on a request."""

    PREFILL = "prefill"
    HANDOVER = "handover"  # the decode worker has it, but a choice has not shown a token yet
    DECODE = "decode"


@dataclass(slots=True)
class Flow:
    """One request on its way. ``output_token_ids`` has one list per choice."""

    submission: Submission
    phase: Phase
    prefill: WorkerKey | None
    decode: WorkerKey | None
    arrival: float
    deadline: float
    output_token_ids: list[list[int]]
    finish_reasons: list[FinishReason | None]
    has_report: bool = False
    shown: set[int] = field(default_factory=set)  # choices of which the decode worker has shown a token
    handoff: KVHandoff | None = None
    renew_at: float = 0.0
    first_token_at: float | None = None
    error: ErrorInfo | None = None
    counted: list[Worker] = field(default_factory=list)  # workers whose num_inflight holds this request

    @property
    def request_id(self) -> str:
        """The id on the wire."""
        return self.submission.request_id

    @property
    def is_finished(self) -> bool:
        """True if every choice has ended."""
        return None not in self.finish_reasons

    @property
    def num_output_tokens(self) -> int:
        """Over all choices."""
        return sum(map(len, self.output_token_ids))


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to a worker."""

    worker: WorkerKey
    message: RouterMessage


@dataclass(frozen=True, slots=True)
class Deliver:
    """Give the client news."""

    request_id: str
    update: Update


@dataclass(frozen=True, slots=True)
class Ended:
    """The request has left; ``flow.error`` says why if it did not end well."""

    flow: Flow
    now: float


FlowAction = Send | Deliver | Ended


class Flows:
    """All requests of this router. Times are seconds of one monotonic clock."""

    def __init__(self, cluster: Cluster, request_timeout_s: float, max_requests: int) -> None:
        self._cluster = cluster
        self._request_timeout_s = request_timeout_s
        self._max_requests = max_requests
        self._flows: dict[str, Flow] = {}
        self._ended: dict[str, None] = {}  # insertion order = age
        self._num_picks = 0

    def __len__(self) -> int:
        return len(self._flows)

    def count(self, phase: Phase) -> int:
        """Return how many requests are in a phase."""
        return sum(flow.phase is phase for flow in self._flows.values())

    # ---- clients -----------------------------------------------------------------------------------------------------

    def submit(self, submission: Submission, now: float) -> list[FlowAction]:
        """Start a request.

        Raises:
            Overloaded: this router has as many requests as it may have.
            NoWorker: no route takes it at the moment.
            ContextTooLong: no route can hold prompt and output.
        """
        if len(self._flows) >= self._max_requests:
            raise Overloaded(f"the router serves {len(self._flows)} requests, its limit: try again later")
        route = choose_route(self._cluster.workers, submission.num_tokens)
        flow = self._open(submission, route, now)
        return [self._generate_first(flow, now)]

    def fail(self, request_id: str, error: KVFerryError, now: float) -> list[FlowAction]:
        """End a request that cannot go on for a reason outside the workers; unknown ids are ignored."""
        flow = self._flows.get(request_id)
        return self._fail(flow, error, now) if flow is not None else []

    def abort(self, request_id: str, reason: str, now: float) -> list[FlowAction]:
        """End a request in whatever phase it is; unknown ids are ignored."""
        flow = self._flows.get(request_id)
        if flow is None:
            return []
        error = ErrorInfo.of(Cancelled(f"the request was aborted: {reason}"))
        return self._fail_with(flow, error, now, reason=reason)

    def finish_choice(self, request_id: str, index: int, now: float) -> list[FlowAction]:
        """Note that a choice ended by its text (a stop string), which no worker can know."""
        flow = self._flows.get(request_id)
        if flow is None or flow.finish_reasons[index] is not None:
            return []
        flow.finish_reasons[index] = "stop"
        if flow.is_finished:
            return [*self._stop_workers(flow, "stop"), self._end(flow, now)]
        worker = flow.prefill if flow.phase is Phase.PREFILL else flow.decode
        abort = Abort(request_ids=(f"{request_id}/{index}",), reason="stop")
        return [Send(worker, abort)] if worker else []

    # ---- workers -----------------------------------------------------------------------------------------------------

    def on_prefill_done(self, sender: Worker, message: PrefillDone, now: float) -> list[FlowAction]:
        """Deliver the first tokens and hand the request over to its decode worker."""
        flow = self._flows.get(message.request_id)
        if flow is None or flow.phase is not Phase.PREFILL or flow.prefill != sender.key:
            # Crossed with an abort: nobody will read the hand-over.
            return [*_release(sender.key, message.kv_handoff)]
        flow.handoff = message.kv_handoff
        problem = _check_prefill_done(message, sender, flow)
        if problem:
            return self._fail(flow, ProtocolError(f"prefill worker {sender.key.engine_id}: {problem}"), now)
        actions: list[FlowAction] = [self._first_tokens(flow, message, now)]
        if flow.is_finished:
            return [*actions, *_release(sender.key, message.kv_handoff), self._end(flow, now)]
        self._uncount(flow, sender)
        return actions + self._hand_over(flow, sender, now)

    def on_tokens(self, sender: Worker, tokens: Sequence[Tokens], now: float) -> list[FlowAction]:
        """Deliver the tokens of one engine step, one update per request."""
        actions: list[FlowAction] = []
        updates: dict[str, Update] = {}
        for item in tokens:
            flow = self._flows.get(item.request_id)
            if flow is None or flow.decode != sender.key or flow.phase is Phase.PREFILL:
                actions += self._unexpected(sender, item.request_id)
                continue
            try:
                self._apply(flow, item, updates, now)
            except ProtocolError as error:
                updates.pop(item.request_id, None)
                actions += self._fail(flow, error, now)
        for request_id, update in updates.items():
            actions.append(Deliver(request_id, update))
            flow = self._flows[request_id]
            if flow.is_finished:
                actions.append(self._end(flow, now))
        return actions

    def on_request_failed(self, sender: Worker, message: RequestFailed, now: float) -> list[FlowAction]:
        """Tell the client, and let the other leg go. A prefill worker's failure counts only until the first token."""
        flow = self._flows.get(message.request_id)
        if flow is None or sender.key != (flow.prefill if flow.phase is Phase.PREFILL else flow.decode):
            return []
        return self._fail_with(flow, message.error, now, gone=sender.key)

    def on_rejected(self, sender: Worker, error: ErrorInfo, now: float) -> list[FlowAction]:
        """Fail what the worker may have been sent in vain: requests of which it has not shown a token."""
        waiting = (Phase.PREFILL, Phase.HANDOVER)
        flows = [
            flow
            for flow in self._flows.values()
            if flow.phase in waiting and not flow.shown and self._current(flow) == sender.key
        ]
        return [action for flow in flows for action in self._fail_with(flow, error, now)]

    def on_left(self, left: Left, now: float) -> list[FlowAction]:
        """Fail the requests that the lost worker was at work on; the others go on without it."""
        key = left.worker.key
        flows = [flow for flow in self._flows.values() if key in (flow.prefill, flow.decode)]
        return [action for flow in flows for action in self._lose(flow, left, now)]

    def on_timer(self, now: float) -> list[FlowAction]:
        """End requests that are out of time; keep hand-overs alive until they are accepted."""
        actions: list[FlowAction] = []
        renewals: dict[WorkerKey, list[str]] = {}
        for flow in list(self._flows.values()):
            if now >= flow.deadline:
                error = DeadlineExceeded(f"the request took longer than {self._request_timeout_s:g} s")
                actions += self._fail(flow, error, now)
            elif flow.phase is Phase.HANDOVER and flow.handoff and flow.prefill and now >= flow.renew_at:
                renewals.setdefault(flow.prefill, []).append(flow.handoff.transfer_id)
                flow.renew_at = now + _renew_interval(flow.handoff)
        actions += [Send(worker, Renew(transfer_ids=tuple(ids))) for worker, ids in renewals.items()]
        return actions

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _open(self, submission: Submission, route: Route, now: float) -> Flow:
        flow = Flow(
            submission=submission,
            phase=Phase.PREFILL if route.prefill else Phase.DECODE,
            prefill=route.prefill.key if route.prefill else None,
            decode=route.decode.key,
            arrival=now,
            deadline=now + self._request_timeout_s,
            output_token_ids=[[] for _ in range(submission.n)],
            finish_reasons=[None] * submission.n,
        )
        self._flows[flow.request_id] = flow
        for worker in route.workers:
            self._count(flow, worker)
        return flow

    def _generate_first(self, flow: Flow, now: float) -> Send:
        wanted = flow.submission
        is_handed_over = flow.phase is Phase.PREFILL
        message = Generate(
            request_id=wanted.request_id,
            prompt_token_ids=wanted.prompt_token_ids,
            sampling=wanted.sampling,
            n=wanted.n,
            handoff=is_handed_over,
            priority=wanted.priority,
            cache_salt=wanted.cache_salt,
            deadline_ms=_left_ms(flow, now),
        )
        worker = self._current(flow)
        assert worker is not None
        return Send(worker, message)

    def _first_tokens(self, flow: Flow, message: PrefillDone, now: float) -> Deliver:
        flow.first_token_at = now
        flow.has_report = True
        updates = []
        for choice in message.choices:
            logprobs = (choice.logprobs,) if choice.logprobs is not None else None
            update = ChoiceUpdate(choice.index, (choice.token_id,), logprobs, choice.finish_reason, choice.stop_reason)
            updates.append(update)
            flow.output_token_ids[choice.index].append(choice.token_id)
            flow.finish_reasons[choice.index] = choice.finish_reason
        report = PromptReport(message.num_cached_tokens, message.prompt_logprobs, message.queue_ms, message.prefill_ms)
        return Deliver(flow.request_id, Update(choices=updates, prompt=report))

    def _hand_over(self, flow: Flow, prefill: Worker, now: float) -> list[FlowAction]:
        """Send the request, its output so far and the hand-over to a decode worker."""
        wanted = flow.submission
        try:
            decode = self._decode_worker(flow, prefill)
        except KVFerryError as error:
            return self._fail(flow, error, now)
        assert flow.handoff is not None
        flow.phase = Phase.HANDOVER
        flow.renew_at = now + _renew_interval(flow.handoff)
        message = Generate(
            request_id=wanted.request_id,
            prompt_token_ids=wanted.prompt_token_ids,
            sampling=wanted.sampling,
            n=wanted.n,
            kv_handoff=flow.handoff,
            choices=tuple(
                ChoiceStart(index=index, output_token_ids=tuple(output))
                for index, output in enumerate(flow.output_token_ids)
                if flow.finish_reasons[index] is None
            ),
            priority=wanted.priority,
            cache_salt=wanted.cache_salt,
            deadline_ms=_left_ms(flow, now),
        )
        return [Send(decode.key, message)]

    def _decode_worker(self, flow: Flow, prefill: Worker) -> Worker:
        """Return the worker that was chosen at submission, or another one if it takes nothing any more."""
        reserved = self._cluster.get(flow.decode)
        if reserved is not None and not reserved.is_draining:
            return reserved
        if reserved is not None:
            self._uncount(flow, reserved)
        decode = choose_decode(self._cluster.workers, prefill, flow.submission.num_tokens)
        flow.decode = decode.key
        self._count(flow, decode)
        return decode

    def _apply(self, flow: Flow, item: Tokens, updates: dict[str, Update], now: float) -> None:
        """Add one choice's tokens to its request's update.

        Raises:
            ProtocolError: the message cannot be right; a gap means that tokens were lost on the way.
        """
        if item.index >= flow.submission.n:
            raise ProtocolError(f"tokens of choice {item.index} of {flow.submission.n}")
        output = flow.output_token_ids[item.index]
        if item.position > len(output):
            raise ProtocolError(f"tokens {len(output)} to {item.position - 1} of choice {item.index} were lost on the way")
        if item.logprobs is not None and len(item.logprobs) != len(item.token_ids):
            raise ProtocolError("token_ids and logprobs differ in length")
        if item.finish_reason in ("abort", "error"):
            raise ProtocolError(f"the worker ended choice {item.index} by itself ({item.finish_reason})")
        self._note_shown(flow, item.index)
        update = updates.setdefault(flow.request_id, Update())
        self._apply_usage(flow, item.usage, update)
        if flow.finish_reasons[item.index] is not None:
            return  # ended by a stop string; these tokens were under way
        num_known = len(output) - item.position  # tokens of a repeated message
        token_ids = item.token_ids[num_known:]
        logprobs = item.logprobs[num_known:] if item.logprobs is not None else None
        if token_ids and flow.first_token_at is None:
            flow.first_token_at = now
        output.extend(token_ids)
        flow.finish_reasons[item.index] = item.finish_reason
        update.choices.append(ChoiceUpdate(item.index, token_ids, logprobs, item.finish_reason, item.stop_reason))

    def _note_shown(self, flow: Flow, index: int) -> None:
        """Count the hand-over as read once every choice that goes on has shown a token: until then its lease is kept."""
        flow.shown.add(index)
        if all(index in flow.shown for index, reason in enumerate(flow.finish_reasons) if reason is None):
            flow.phase = Phase.DECODE

    def _apply_usage(self, flow: Flow, usage: Usage | None, update: Update) -> None:
        if usage is None:
            return
        update.kv_transfer = usage.kv_transfer
        if not flow.has_report:  # of an aggregated worker; with a pair, the prefill worker has said it
            flow.has_report = True
            update.prompt = PromptReport(usage.num_cached_tokens, usage.prompt_logprobs)

    def _current(self, flow: Flow) -> WorkerKey | None:
        """Return the worker that has to show the next token."""
        return flow.prefill if flow.phase is Phase.PREFILL else flow.decode

    def _lose(self, flow: Flow, left: Left, now: float) -> list[FlowAction]:
        """Let a worker go that the request counts on, now or later."""
        key = left.worker.key
        if self._current(flow) == key:
            role = "prefill" if flow.phase is Phase.PREFILL else "decode"
            error = PeerUnreachable(f"{role} worker {key.engine_id} was lost: {left.reason}")
            return self._fail(flow, error, now)
        if left.is_back:
            return []
        if flow.prefill == key:
            flow.prefill = None  # the decode worker finds out by itself whether it still needs it
        else:
            flow.decode = None  # another one is chosen when the prompt is computed
            self._uncount(flow, left.worker)
        return []

    def _unexpected(self, sender: Worker, request_id: str) -> list[FlowAction]:
        """Stop a worker that is at work on something nobody waits for, once."""
        if request_id in self._ended:
            return []
        self._remember(request_id)
        return [Send(sender.key, Abort(request_ids=(request_id,), reason="unknown"))]

    def _fail(self, flow: Flow, error: KVFerryError, now: float) -> list[FlowAction]:
        return self._fail_with(flow, ErrorInfo.of(error), now)

    def _fail_with(
        self, flow: Flow, error: ErrorInfo, now: float, *, gone: WorkerKey | None = None, reason: str = ""
    ) -> list[FlowAction]:
        """Stop every leg but the one that is ``gone``, and tell the client. A retry elsewhere would start here."""
        flow.error = error
        stops = [action for action in self._stop_workers(flow, reason or error.code) if action.worker != gone]
        return [*stops, Deliver(flow.request_id, Update(error=error)), self._end(flow, now)]

    def _stop_workers(self, flow: Flow, reason: str) -> list[Send]:
        """Abort the legs that have the request; release a hand-over that nobody may have read."""
        abort = Abort(request_ids=(flow.request_id,), reason=reason)
        if flow.phase is Phase.PREFILL:
            return [Send(flow.prefill, abort), *_release(flow.prefill, flow.handoff)] if flow.prefill else []
        sends = [Send(flow.decode, abort)] if flow.decode else []
        if flow.prefill and flow.phase is Phase.HANDOVER:
            sends += _release(flow.prefill, flow.handoff)
        return sends

    def _end(self, flow: Flow, now: float) -> Ended:
        del self._flows[flow.request_id]
        self._remember(flow.request_id)
        for worker in list(flow.counted):
            self._uncount(flow, worker)
        return Ended(flow, now)

    def _remember(self, request_id: str) -> None:
        self._ended[request_id] = None
        while len(self._ended) > _MAX_REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def _count(self, flow: Flow, worker: Worker) -> None:
        self._num_picks += 1
        worker.last_picked = self._num_picks
        worker.num_inflight += 1
        flow.counted.append(worker)

    def _uncount(self, flow: Flow, worker: Worker) -> None:
        if worker in flow.counted:
            flow.counted.remove(worker)
            worker.num_inflight -= 1


def _release(prefill: WorkerKey, handoff: KVHandoff | None) -> list[Send]:
    return [Send(prefill, Release(transfer_ids=(handoff.transfer_id,)))] if handoff is not None else []


def _renew_interval(handoff: KVHandoff) -> float:
    return handoff.lease_ms / 3000  # a third of the lease in seconds: two renewals may get lost


def _left_ms(flow: Flow, now: float) -> int:
    return max(1, round((flow.deadline - now) * 1000))


def _check_prefill_done(message: PrefillDone, sender: Worker, flow: Flow) -> str | None:
    """Say what is wrong with the message as an answer to this request; None if nothing is."""
    if sorted(choice.index for choice in message.choices) != list(range(flow.submission.n)):
        return "first tokens do not cover every choice once"
    if any(choice.finish_reason in ("abort", "error") for choice in message.choices):
        return "it ended a choice by itself"
    handoff = message.kv_handoff
    if handoff is None:
        is_over = all(choice.finish_reason for choice in message.choices)
        return None if is_over else "a choice goes on, but there is no hand-over"
    if (handoff.engine_id, handoff.incarnation) != sender.key:
        return f"its hand-over names another worker, {handoff.engine_id}"
    return None
