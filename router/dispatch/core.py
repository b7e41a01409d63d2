"""The whole router without I/O: membership and dispatcher behind one interface.

Owns the order in which the two state machines handle an event. Messages and times go in, actions come out; the worker gateway
runs it on real sockets, the simulation on a virtual clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from core.config_router import PlannerSection, RouterSection
from core.errors import (
    DeadlineUnreachable,
    KVFerryError,
    NoWorker,
    Overloaded,
    ProtocolError,
    RequestError,
    VersionMismatch,
)
from core.ids import router_id
from core.wire.contents import ContentReport
from core.wire.early import PrefillProgress
from core.wire.engine_calls import EngineCall, EngineReply
from core.wire.messages import (
    EncodeDone,
    EncodeFailed,
    ErrorInfo,
    Goodbye,
    Heartbeat,
    PrefillDone,
    Refused,
    Register,
    RegisterEncoder,
    Rejected,
    RequestFailed,
    Role,
    RouterMessage,
    SwitchRefused,
    Tokens,
    WorkerMessage,
)
from core.wire.version import VersionRefuser
from router.dispatch.cut_off import CutOff
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.engine_calls import Answered, EngineCalls
from router.dispatch.members import EncodeWorker, GenerationWorker, Member, WorkerKey
from router.dispatch.membership import Joined, Left, Membership, MembershipAction, ReplyToPeer, Resumed, Stalled, Switched
from router.dispatch.policy import Demand, longest_model_len, max_model_len, why_not_ready
from router.dispatch.request_state import (
    Deliver,
    DeliverTokens,
    DispatchAction,
    EncodeEnded,
    Ended,
    Moved,
    Retried,
    SendToWorker,
)
from router.dispatch.types import Submission, time_is_over
from router.planner.loads import RoleLoads
from router.planner.planner import Planner


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLimits:
    """The settings that the state machines need."""

    heartbeat_interval_s: float
    heartbeat_timeout_s: float
    request_timeout_s: float
    max_requests: int
    max_retries: int = 2  # per request
    worker_wait_s: float = 10.0  # how long a started request waits for a worker that can continue it
    encode_timeout_s: float = 20.0  # how long a request waits for the embeddings of its images
    routing: str = "predicted"  # how routes are chosen: by predicted time, or by load
    local_prefill_itl_ms: float = 0.0  # of requests beside a prompt that their decode worker computes; 0 = it computes none
    planner: PlannerSection = field(default_factory=PlannerSection)

    @classmethod
    def of(cls, config: RouterSection) -> RouterLimits:
        """Return the limits of a configuration."""
        return cls(
            heartbeat_interval_s=config.heartbeat_interval_s,
            heartbeat_timeout_s=config.heartbeat_timeout_s,
            request_timeout_s=config.request_timeout_s,
            max_requests=config.max_requests,
            max_retries=config.max_retries,
            worker_wait_s=config.worker_wait_s,
            encode_timeout_s=config.images.encode_timeout_s,
            routing=config.routing,
            local_prefill_itl_ms=config.local_prefill_itl_ms,
            planner=config.planner,
        )

    @property
    def tick_s(self) -> float:
        """The longest time between two calls of ``on_timer``."""
        return min(self.heartbeat_interval_s, self.heartbeat_timeout_s) / 4


@dataclass(frozen=True, slots=True)
class Transmit:
    """Send a message to a connection."""

    peer: bytes
    message: RouterMessage


@dataclass(frozen=True, slots=True)
class RefuseVersion:
    """Send a version refusal, whose format all versions share (``core.wire.version``), to a connection."""

    peer: bytes
    frame: bytes


_Change = Joined | Left | Stalled | Resumed | Switched
Action = Transmit | RefuseVersion | Deliver | DeliverTokens | Answered | EncodeEnded | Retried | Moved | Ended | _Change
_Step = DispatchAction | Answered
_RequestMessage = PrefillProgress | PrefillDone | RequestFailed | EncodeDone | EncodeFailed | EngineReply | list[Tokens]


class RouterCore:
    """Membership and dispatcher. ``router_id`` is new at every start of the router."""

    def __init__(self, model: str, router_id: str, limits: RouterLimits) -> None:
        is_predicted = limits.routing == "predicted"
        self.membership = Membership(
            model,
            router_id,
            limits.heartbeat_interval_s,
            limits.heartbeat_timeout_s,
            takes_contents=is_predicted,
            plans_roles=limits.planner.enabled,
        )
        self.num_openings = 0  # how often a worker has begun to take requests, with room that no earlier request may move to
        self.calls = EngineCalls(self.membership)
        self._cut_off = CutOff()
        self._refuser = VersionRefuser()
        self._request_timeout_s = limits.request_timeout_s
        self._max_requests = limits.max_requests
        self._tick_s = limits.tick_s
        self._must_probe = False  # a connection was found lost since the last probe
        self._probed_at = -math.inf
        self.dispatcher = Dispatcher(
            self.membership,
            request_timeout_s=limits.request_timeout_s,
            max_requests=limits.max_requests,
            max_retries=limits.max_retries,
            worker_wait_s=limits.worker_wait_s,
            encode_timeout_s=limits.encode_timeout_s,
        )
        self.route_costs, self.wait_estimates = self.dispatcher.route_costs, self.dispatcher.wait_estimates
        self.route_costs.is_enabled = is_predicted
        self.route_costs.max_local_itl_ms = limits.local_prefill_itl_ms
        self.route_costs.observes_steps = limits.planner.enabled and limits.planner.max_itl_ms > 0
        loads = RoleLoads(self.route_costs, self.wait_estimates, limits.planner.max_wait_s, limits.planner.max_itl_ms)
        self.planner = Planner(limits.planner, loads, limits.heartbeat_interval_s, limits.heartbeat_timeout_s)

    @property
    def max_model_len(self) -> int:
        """The longest context of any route, in tokens; 0 without a route."""
        return max_model_len(self.membership.workers)

    def longest_model_len(self, now: float) -> int:
        """The longest context of any route that there is, or that workers now closed or away may soon offer; in tokens."""
        return longest_model_len(self.membership.workers, self.dispatcher.restarts.absent(now))

    @property
    def not_ready_reason(self) -> str | None:
        """Why no request can be served; None if requests can be served."""
        return why_not_ready(self.membership.workers)

    def is_settling(self, now: float) -> bool:
        """True if this router was just paused, so that workers may reconnect soon."""
        return self.membership.pauses.is_settling(now)

    def may_serve_soon(self, submission: Submission, error: RequestError, now: float, num_waiting: int | None) -> bool:
        """Return True if this router was just paused, and workers that may reconnect soon would serve a refused request.

        If the others are full, or too late for it, a worker that is cut off must be neither. Those that wait for workers,
        ``num_waiting``, count towards this router's limit; None = the request is one of them already.
        """
        if not self.is_settling(now):
            return False
        if isinstance(error, NoWorker):
            return True
        if not isinstance(error, Overloaded | DeadlineUnreachable):
            return False
        is_at_limit = num_waiting is not None and len(self.dispatcher.requests) + num_waiting >= self._max_requests
        if is_at_limit or not self.membership.has_cut_off:
            return False
        budget_s = submission.budget_s(self._request_timeout_s)
        return self._cut_off.would_serve(self.membership.workers, self.wait_estimates, submission, budget_s, now)

    def is_route_expected(self, now: float) -> bool:
        """True if there is no route, but this router was just paused, so that workers may reconnect soon."""
        return self.is_settling(now) and self.not_ready_reason is not None

    def retry_after_s(self, now: float) -> int:
        """Return after how many seconds a client that found no route should retry."""
        self.dispatcher.restarts.look(self.membership.workers, now)
        return self.dispatcher.restarts.retry_after_s(now)

    # ---- workers -----------------------------------------------------------------------------------------------------

    def on_message(self, peer: bytes, message: WorkerMessage | list[Tokens], now: float) -> list[Action]:
        """Handle a message of a worker."""
        match message:
            case Register() | RegisterEncoder() | Heartbeat():
                return self._on_sign_of_life(peer, message, now)
            case Goodbye():
                return self._after(self.membership.on_goodbye(message), now)
        sender = self.membership.by_peer(peer)
        if sender is None:
            return [_refuse(peer, ErrorInfo(code="not_registered", message="register first", http_status=400, retryable=True))]
        self.membership.touch(sender, now)
        if isinstance(message, ContentReport):
            self.route_costs.on_report(sender.key, message)
            return []
        if isinstance(message, SwitchRefused):
            self.planner.on_refused(sender.key, message.error.message)
            return []
        if isinstance(message, Rejected):
            failed = self.dispatcher.on_rejected(sender, message.error, now)
            return self._resolve([*failed, *self.calls.on_rejected(sender.key, message.error, now)], now)
        if isinstance(sender, GenerationWorker):
            return self._resolve(self._on_worker_message(sender, message, now), now)
        assert isinstance(sender, EncodeWorker)
        return self._resolve(self._on_encoder_message(sender, message, now), now)

    def on_malformed(self, peer: bytes, error: ProtocolError, now: float) -> list[Action]:
        """Refuse a frame. If a member sent it, a message is lost: its requests move on now, not at their deadline."""
        sender = self.membership.by_peer(peer)
        actions: list[Action] = []
        if sender is not None:
            actions = self._after(self.membership.on_broken(sender, f"it sent a bad frame: {error.message}"), now)
        if isinstance(error, VersionMismatch):
            frame = self._refuser.answer(peer, error, now)
            return actions if frame is None else [*actions, RefuseVersion(peer, frame)]
        refusal = ErrorInfo(code=error.code, message=error.message, http_status=400)
        return [*actions, _refuse(peer, refusal)]

    def on_unreachable(self, peer: bytes, now: float) -> list[Action]:
        """Drop the worker whose connection no longer accepts messages.

        After a pause of this router all may have closed theirs. One that is found lost has the others probed, so that none of
        its requests goes to one after the other of them; what is found soon after a probe waits for the next.
        """
        worker = self.membership.by_peer(peer)
        was_connected = worker is not None and worker.cut_peer is None
        actions = self._after(self.membership.on_unreachable(peer, now), now)
        if was_connected and worker is not None and worker.cut_peer is not None:
            self._must_probe = True
        return [*actions, *self._probe_if_due(now)]

    def _probe_if_due(self, now: float) -> list[Action]:
        if not self._must_probe or now - self._probed_at < self._tick_s:
            return []
        self._must_probe, self._probed_at = False, now
        return self.probe_connections()

    def probe_connections(self) -> list[Action]:
        """Send every worker a message without effect; sending fails on a lost connection, and so detects it."""
        connected = (worker for worker in self.membership.members if worker.cut_peer is None)
        return [Transmit(worker.peer, self.membership.welcome_of(worker)) for worker in connected]

    # ---- clients -----------------------------------------------------------------------------------------------------

    def submit(self, submission: Submission, now: float) -> list[Action]:
        """Start a request. Raises the RequestError that refuses it."""
        demand = Demand(num_tokens=submission.num_tokens, model_fingerprint=submission.model_fingerprint)
        budget_s = submission.budget_s(self._request_timeout_s)
        if budget_s <= 0:
            is_own = submission.timeout_s is not None and submission.timeout_s <= self._request_timeout_s
            raise time_is_over(budget_s + submission.spent_s, is_own=is_own)
        try:
            late = self.wait_estimates.too_late(self.membership.workers, demand, budget_s, now, submission.tenant)
        except DeadlineUnreachable:
            if not self.dispatcher.placement.would_be_local(submission, now, self._request_timeout_s):
                raise
            late = frozenset()
        try:
            return self._resolve(self.dispatcher.submit(submission, now, late), now)
        except NoWorker as error:
            error.retry_after_s = self.retry_after_s(now)
            raise

    def abort(self, request_id: str, reason: str, now: float) -> list[Action]:
        """End a request in any phase."""
        return self._resolve(self.dispatcher.abort(request_id, reason, now), now)

    def fail(self, request_id: str, error: KVFerryError, now: float) -> list[Action]:
        """End a request or a call that this router cannot continue."""
        if request_id in self.calls:
            return self._resolve(self.calls.give_up(request_id, error, now), now)
        return self._resolve(self.dispatcher.fail(request_id, error, now), now)

    def fail_attempt(self, wire_id: str, error: KVFerryError, now: float) -> list[Action]:
        """End a request or a call whose message cannot be sent to any worker."""
        if wire_id in self.calls:
            return self._resolve(self.calls.fail(wire_id, ErrorInfo.of(error), now), now)
        return self._resolve(self.dispatcher.fail_attempt(wire_id, error, now), now)

    def finish_choice(self, request_id: str, index: int, now: float) -> list[Action]:
        """End a choice at a stop string."""
        return self._resolve(self.dispatcher.finish_choice(request_id, index, now), now)

    def check_room_for_call(self) -> None:
        """Check that a body for an engine can be served beside the requests and calls that there are. Begin its call at once.

        Raises:
            Overloaded: this router has reached its limit.
        """
        num_open = len(self.dispatcher.requests) + len(self.calls)
        if num_open >= self._max_requests:
            raise Overloaded(f"the router serves {num_open} requests, its limit: try again later")

    def begin_call(self, call: EngineCall, worker: GenerationWorker, now: float) -> list[Action]:
        """Send a call to a worker's engine."""
        return self._resolve(self.calls.begin(call, worker, now), now)

    def abort_call(self, request_id: str, now: float) -> list[Action]:
        """End a call; does nothing after its end."""
        return self._resolve(self.calls.abort(request_id, "client", now), now)

    def on_timer(self, now: float) -> list[Action]:
        """Handle what is due: silent workers, deadlines, renewals, long queues. Call it several times per heartbeat."""
        self._cut_off.forget()
        changes = self.membership.on_timer(now)
        if self.membership.pauses.lateness_s:
            self.dispatcher.on_pause(self.membership.pauses.lateness_s, now)
            self.wait_estimates.on_pause(self.membership.pauses.lateness_s, now)
        due = [*self.dispatcher.on_timer(now), *self.calls.on_timer(now)]
        orders = self.planner.on_timer(self.membership.workers, now, is_settling=self.membership.pauses.is_settling(now))
        sent: list[Action] = [Transmit(order.worker.peer, order.message) for order in orders]
        actions = self._after(changes, now) + self._resolve(due, now) + sent
        for moved in self.dispatcher.move_queued(now):
            actions += self._resolve(moved, now)
        return actions + self._probe_if_due(now)

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _on_sign_of_life(self, peer: bytes, message: Register | RegisterEncoder | Heartbeat, now: float) -> list[Action]:
        """Handle a registration or a heartbeat. It may be the first by which the worker takes requests, in its present role."""
        key = WorkerKey(message.engine_id, message.incarnation)
        before = _role_taken(self.membership.member(key))
        if isinstance(message, Heartbeat):
            actions = self._on_heartbeat(peer, message, now)
        else:
            actions = self._after(self.membership.on_register(peer, message, now), now)
        role = _role_taken(self.membership.member(key))
        if role is None or role == before:
            return actions
        self._cut_off.forget()
        placed = self._resolve(self.dispatcher.place_waiting(now), now)
        # Those with workers that make no progress move at the next tick, by when many of these have returned.
        self.num_openings += not any(worker.num_inflight and worker.why_unresponsive for worker in self.membership.workers)
        return actions + placed

    def _on_heartbeat(self, peer: bytes, message: Heartbeat, now: float) -> list[Action]:
        """Answer a heartbeat; the answer asks for a snapshot if the worker's contents are not known."""
        actions = self._after(self.membership.on_heartbeat(peer, message, now), now)
        worker = self.membership.get(WorkerKey(message.engine_id, message.incarnation))
        if worker is None or not self.route_costs.on_heartbeat(worker, message, now):
            return actions
        welcome = self.membership.welcome_of(worker)
        request = Transmit(peer, msgspec.structs.replace(welcome, needs_snapshot=True))
        return [request if action == Transmit(peer, welcome) else action for action in actions]

    def _on_worker_message(self, sender: GenerationWorker, message: _RequestMessage, now: float) -> Sequence[_Step]:
        match message:
            case PrefillDone():
                sender.progress.on_answer(now)
                self.wait_estimates.on_first_token(message.request_id, now)
                tells_queue = not sender.facts.leaves_first_token  # a vLLM server does not say how long a prompt has waited
                self.route_costs.on_prefill_done(message, now, tells_queue=tells_queue)
                return self.dispatcher.on_prefill_done(sender, message, now)
            case PrefillProgress():
                sender.progress.on_answer(now)
                return self.dispatcher.on_prefill_progress(sender, message)
            case EngineReply():
                return self.calls.on_reply(sender.key, message, now)
            case RequestFailed() if message.request_id in self.calls:
                sender.note_failure(message.error)
                return self.calls.on_failed(sender.key, message, now)
            case RequestFailed():
                self.wait_estimates.drop(message.request_id, now)
                self.route_costs.drop(message.request_id, now)
                return self.dispatcher.on_request_failed(sender, message, now)
            case list():
                sender.progress.on_answer(now)
                self.route_costs.on_step(sender.key, now)
                # The stream of a vLLM server tells what it found in its cache only at its end.
                tells_hits = not sender.facts.takes_calls
                for item in message:
                    if item.is_whole:  # its time is that of all tokens
                        self.wait_estimates.drop(item.request_id, now)
                    else:
                        self.wait_estimates.on_first_token(item.request_id, now)
                    self.route_costs.on_tokens(item, now, tells_hits=tells_hits)
                return self.dispatcher.on_tokens(sender, message, now)
            case _:
                return []  # only encode workers answer encode requests

    def _on_encoder_message(self, sender: EncodeWorker, message: _RequestMessage, now: float) -> list[DispatchAction]:
        match message:
            case EncodeDone():
                sender.progress.on_answer(now)
                sender.progress.on_success()
                return self.dispatcher.on_encode_done(sender, message, now)
            case EncodeFailed() | RequestFailed():
                return self.dispatcher.on_encode_failed(sender, message, now)
            case _:
                return []  # encode workers generate no tokens

    def _after(self, actions: Sequence[MembershipAction], now: float) -> list[Action]:
        """Resolve the actions of the membership, and pass joins and losses to the dispatcher, losses first.

        Replies go out before everything else: a worker knows which router has taken it in before that router's first request.
        """
        replies = [action for action in actions if isinstance(action, ReplyToPeer)]
        result: list[Action] = [Transmit(reply.peer, reply.message) for reply in replies]
        for action in actions:
            if isinstance(action, ReplyToPeer):
                continue
            result.append(action)
            if isinstance(action, Left):
                if not action.is_back:
                    self.planner.on_left(action.worker.key)
                self.wait_estimates.forget(action.worker.key)
                self.route_costs.forget(action.worker.key)
                result += self._resolve([*self.dispatcher.on_left(action, now), *self.calls.on_left(action, now)], now)
            if isinstance(action, Switched):
                self.planner.on_switched(action.worker)
                self.route_costs.on_switched(action.worker)
            joined = action.worker if isinstance(action, Joined) or (isinstance(action, Left) and action.is_back) else None
            if isinstance(joined, GenerationWorker):
                self.route_costs.join(joined)
        for action in actions:
            if isinstance(action, Joined):
                result += self._resolve(self.dispatcher.on_joined(action.worker, now), now)
            elif isinstance(action, Switched):
                result += self._resolve(self.dispatcher.place_waiting(now), now)
        return result

    def _resolve(self, actions: Sequence[_Step], now: float) -> list[Action]:
        """Replace worker keys by their connections, and drop messages to workers that have left.

        The end of a request makes room for those that wait.
        """
        result: list[Action] = []
        for action in actions:
            if not isinstance(action, SendToWorker):
                result.append(action)
                self._note_end(action)
                continue
            worker = self.membership.member(action.worker)
            if worker is not None:
                self.wait_estimates.on_sent(action.worker, action.message, now)
                if isinstance(worker, GenerationWorker):
                    self.route_costs.on_sent(worker, action.message, now)
                result.append(Transmit(worker.peer, action.message))
        if self.dispatcher.num_waiting and any(isinstance(action, Ended) for action in actions):
            result += self._resolve(self.dispatcher.place_waiting(now), now)
        return result

    def _note_end(self, action: _Step) -> None:
        """Learn how long requests hold their places at decode workers."""
        if isinstance(action, Ended) and action.request.error is None and action.request.first_token_at is not None:
            self.planner.loads.on_decoded(action.now - action.request.first_token_at)


def _role_taken(member: Member | None) -> Role | None:
    """Return in which role a member takes requests; None if it takes none."""
    return None if member is None or member.is_closed or member.is_refusing else member.role


def requests_of(message: WorkerMessage | list[Tokens]) -> list[str]:
    """Return the router's ids of the requests and calls that a message names, by any of their attempts, each once."""
    match message:
        case PrefillProgress() | EngineReply() | PrefillDone() | RequestFailed() | EncodeDone() | EncodeFailed():
            return [router_id(message.request_id)]
        case list():
            return list(dict.fromkeys(router_id(item.request_id) for item in message))
        case _:
            return []


def _refuse(peer: bytes, error: ErrorInfo) -> Transmit:
    return Transmit(peer, Refused(error=error))
