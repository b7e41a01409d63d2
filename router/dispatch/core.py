"""The whole router without I/O: membership and dispatcher behind one door.

Owns the order in which the two state machines see an event. ``router.dispatch.worker_gateway`` runs it on real sockets, the
simulation under a virtual clock: messages and times go in, actions come out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from core.config import RouterSection
from core.errors import KVFerryError, NoWorker, ProtocolError, VersionMismatch
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
    RouterMessage,
    Tokens,
    WorkerMessage,
)
from core.wire.version import VersionRefuser
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.members import Encoder, Worker
from router.dispatch.membership import Joined, Left, Membership, MembershipAction, Reply, Resumed, Stalled
from router.dispatch.policy import Demand, max_model_len, why_not_ready
from router.dispatch.request_state import Deliver, DispatchAction, EncodeEnded, Ended, Retried, Send
from router.dispatch.types import Submission
from router.dispatch.wait_estimate import WaitEstimates


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLimits:
    """What the router's state machines need of the configuration; seconds and requests."""

    heartbeat_interval_s: float
    heartbeat_timeout_s: float
    request_timeout_s: float
    max_requests: int
    max_retries: int = 2  # per request
    worker_wait_s: float = 10.0  # how long a request that has begun waits for a worker to go on with it
    encode_timeout_s: float = 20.0  # how long a request waits for the embeddings of its images

    @classmethod
    def of(cls, config: RouterSection) -> RouterLimits:
        """Return the limits that a router is configured with."""
        return cls(
            heartbeat_interval_s=config.heartbeat_interval_s,
            heartbeat_timeout_s=config.heartbeat_timeout_s,
            request_timeout_s=config.request_timeout_s,
            max_requests=config.max_requests,
            max_retries=config.max_retries,
            worker_wait_s=config.worker_wait_s,
            encode_timeout_s=config.images.encode_timeout_s,
        )

    @property
    def tick_s(self) -> float:
        """How long the router may sleep between two calls of ``on_timer``."""
        return min(self.heartbeat_interval_s, self.heartbeat_timeout_s) / 4


@dataclass(frozen=True, slots=True)
class Transmit:
    """Send a message to a connection."""

    peer: bytes
    message: RouterMessage


@dataclass(frozen=True, slots=True)
class RefuseVersion:
    """Send a frame that is of no version (``core.wire.version``) to a connection."""

    peer: bytes
    frame: bytes


Action = Transmit | RefuseVersion | Deliver | EncodeEnded | Retried | Ended | Joined | Left | Stalled | Resumed
_RequestMessage = PrefillDone | RequestFailed | EncodeDone | EncodeFailed | list[Tokens]


class RouterCore:
    """Membership and dispatcher. ``router_id`` is new at every start of the router."""

    def __init__(self, model: str, router_id: str, limits: RouterLimits) -> None:
        self.membership = Membership(model, router_id, limits.heartbeat_interval_s, limits.heartbeat_timeout_s)
        self.wait_estimates = WaitEstimates()
        self._refuser = VersionRefuser()
        self._request_timeout_s = limits.request_timeout_s
        self.dispatcher = Dispatcher(
            self.membership,
            request_timeout_s=limits.request_timeout_s,
            max_requests=limits.max_requests,
            max_retries=limits.max_retries,
            worker_wait_s=limits.worker_wait_s,
            encode_timeout_s=limits.encode_timeout_s,
        )

    @property
    def max_model_len(self) -> int:
        """Tokens that the longest route holds, 0 if there is none."""
        return max_model_len(self.membership.workers)

    @property
    def not_ready_reason(self) -> str | None:
        """What is missing to serve a request; None if nothing is."""
        return why_not_ready(self.membership.workers)

    @property
    def is_route_expected(self) -> bool:
        """True if no request has a route now, but a worker that this router's own pause has cut off may be back in a moment."""
        return self.not_ready_reason is not None and any(worker.cut_peer is not None for worker in self.membership.workers)

    def retry_after_s(self, now: float) -> int:
        """Return when a client that finds no route had better come again."""
        self.dispatcher.restarts.look(self.membership.workers, now)
        return self.dispatcher.restarts.retry_after_s(now)

    # ---- workers -----------------------------------------------------------------------------------------------------

    def on_message(self, peer: bytes, message: WorkerMessage | list[Tokens], now: float) -> list[Action]:
        """Handle what a worker sent."""
        match message:
            case Register() | RegisterEncoder():
                return self._after(self.membership.on_register(peer, message, now), now)
            case Heartbeat():
                return self._after(self.membership.on_heartbeat(peer, message, now), now)
            case Goodbye():
                return self._after(self.membership.on_goodbye(message), now)
        sender = self.membership.by_peer(peer)
        if sender is None:
            return [_refuse(peer, ErrorInfo(code="not_registered", message="register first", http_status=400, retryable=True))]
        self.membership.touch(sender, now)
        if isinstance(message, Rejected):
            return self._resolve(self.dispatcher.on_rejected(sender, message.error, now), now)
        if isinstance(sender, Worker):
            return self._resolve(self._on_worker_message(sender, message, now), now)
        assert isinstance(sender, Encoder)
        return self._resolve(self._on_encoder_message(sender, message, now), now)

    def requests_of(self, message: WorkerMessage | list[Tokens]) -> list[str]:
        """Return the requests that a message is about, by their ids inside the router."""
        match message:
            case PrefillDone() | RequestFailed() | EncodeDone() | EncodeFailed():
                return self.dispatcher.find_requests([message.request_id])
            case list():
                return self.dispatcher.find_requests([item.request_id for item in message])
            case _:
                return []

    def on_malformed(self, peer: bytes, error: ProtocolError, now: float) -> list[Action]:
        """Refuse a frame. A worker that sent it has lost us something: its requests fail now, not at their deadline."""
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
        """Give up the worker behind a connection that no longer takes messages."""
        worker = self.membership.by_peer(peer)
        return self._after(self.membership.on_unreachable(worker, now), now) if worker is not None else []

    def greet_all(self) -> list[Action]:
        """Say something harmless to every worker: a connection that is gone shows when a message cannot be sent."""
        return [Transmit(worker.peer, self.membership.welcome) for worker in self.membership.members]

    # ---- clients -----------------------------------------------------------------------------------------------------

    def submit(self, submission: Submission, now: float) -> list[Action]:
        """Start a request. Raises the RequestError that refuses it."""
        demand = Demand(num_tokens=submission.num_tokens, model_fingerprint=submission.model_fingerprint)
        late = self.wait_estimates.too_late(self.membership.workers, demand, submission.budget_s(self._request_timeout_s), now)
        try:
            return self._resolve(self.dispatcher.submit(submission, now, late), now)
        except NoWorker as error:
            error.retry_after_s = self.retry_after_s(now)
            raise

    def abort(self, request_id: str, reason: str, now: float) -> list[Action]:
        """End a request in whatever phase it is."""
        return self._resolve(self.dispatcher.abort(request_id, reason, now), now)

    def fail(self, request_id: str, error: KVFerryError, now: float) -> list[Action]:
        """End a request that this router cannot go on with."""
        return self._resolve(self.dispatcher.fail(request_id, error, now), now)

    def fail_attempt(self, wire_id: str, error: KVFerryError, now: float) -> list[Action]:
        """End a request whose message cannot be sent to any worker."""
        return self._resolve(self.dispatcher.fail_attempt(wire_id, error, now), now)

    def finish_choice(self, request_id: str, index: int, now: float) -> list[Action]:
        """Note that a choice ended by its text."""
        return self._resolve(self.dispatcher.finish_choice(request_id, index, now), now)

    def on_timer(self, now: float) -> list[Action]:
        """Do what is due: dead workers, deadlines, renewals. Call it several times per heartbeat."""
        changes = self.membership.on_timer(now)
        if self.membership.pauses.lateness_s:
            self.dispatcher.on_pause(self.membership.pauses.lateness_s)
            self.wait_estimates.on_pause(self.membership.pauses.lateness_s)
        return self._after(changes, now) + self._resolve(self.dispatcher.on_timer(now), now)

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _on_worker_message(self, sender: Worker, message: _RequestMessage, now: float) -> list[DispatchAction]:
        match message:
            case PrefillDone():
                sender.progress.on_answer(now)
                self.wait_estimates.on_first_token(message.request_id, now)
                return self.dispatcher.on_prefill_done(sender, message, now)
            case RequestFailed():
                self.wait_estimates.drop(message.request_id, now)
                return self.dispatcher.on_request_failed(sender, message, now)
            case list():
                sender.progress.on_answer(now)
                for item in message:
                    self.wait_estimates.on_first_token(item.request_id, now)
                return self.dispatcher.on_tokens(sender, message, now)
            case _:
                return []  # it embeds nothing for others

    def _on_encoder_message(self, sender: Encoder, message: _RequestMessage, now: float) -> list[DispatchAction]:
        match message:
            case EncodeDone():
                sender.progress.on_answer(now)
                sender.progress.on_success()
                return self.dispatcher.on_encode_done(sender, message, now)
            case EncodeFailed() | RequestFailed():
                return self.dispatcher.on_encode_failed(sender, message, now)
            case _:
                return []  # it generates nothing

    def _after(self, actions: Sequence[MembershipAction], now: float) -> list[Action]:
        """Let the dispatcher see who came and left before anyone acts on it."""
        result: list[Action] = []
        for action in actions:
            if isinstance(action, Reply):
                result.append(Transmit(action.peer, action.message))
                continue
            result.append(action)
            if isinstance(action, Left):
                self.wait_estimates.forget(action.worker.key)
                result += self._resolve(self.dispatcher.on_left(action, now), now)
        for action in actions:
            if isinstance(action, Joined):
                result += self._resolve(self.dispatcher.on_joined(action.worker, now), now)
        return result

    def _resolve(self, actions: Sequence[DispatchAction], now: float) -> list[Action]:
        """Replace worker names by their connections; what would go to a worker that has left is dropped."""
        result: list[Action] = []
        for action in actions:
            if not isinstance(action, Send):
                result.append(action)
                continue
            worker = self.membership.member(action.worker)
            if worker is not None:
                self.wait_estimates.on_sent(action.worker, action.message, now)
                result.append(Transmit(worker.peer, action.message))
        return result


def _refuse(peer: bytes, error: ErrorInfo) -> Transmit:
    return Transmit(peer, Refused(error=error))
