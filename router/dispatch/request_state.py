"""The state of one request, and the actions that the dispatcher returns.

Owns the types. ``router.dispatch.dispatcher`` moves a request from phase to phase; ``router.dispatch.worker_messages`` builds
and applies its messages.

    submit ─► ENCODE ─► PREFILL ──first tokens──► HANDOFF ──first tokens of D──► DECODE ─► ended
                  └────────────────────── aggregated worker ────────────────────────┘

A request with images begins in ENCODE if there is an encode worker. An *attempt* is a prefill leg, a decode leg, or a prefill
leg and the decode leg after it. Each attempt after the first has its own name on the wire, so a late message about an earlier
attempt changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from core.errors import DeadlineExceeded
from core.wire.kv import KVHandoff, KVSource
from core.wire.media import ECSource
from core.wire.messages import ErrorInfo, FinishReason, RouterMessage, TransferUsage
from router.dispatch.members import Member, WorkerKey
from router.dispatch.retries import Retries, RetryKind
from router.dispatch.timing import FirstTokenTiming, RoutingReport, SecondTokenTiming, total_cost
from router.dispatch.types import Submission, Update, time_is_over, token_update

LOCAL_PREFILL = "local"  # the outcome of a handoff that was not needed: the decode worker computed the prompt sooner
NO_PREFILL = "no_prefill"  # the ``fallback_reason`` of a request that a decode worker serves alone


class RequestPhase(Enum):
    """Which worker has the request."""

    ENCODE = "encode"  # encode workers; those of the other legs are reserved
    PREFILL = "prefill"
    HANDOFF = "handoff"  # until every choice has a token of this decode leg; also while the request waits for a decode worker
    DECODE = "decode"


BEFORE_DECODE = (RequestPhase.ENCODE, RequestPhase.PREFILL)


@dataclass(frozen=True, slots=True)
class InflightCount:
    """Choices or images of a request that are counted in a worker's ``num_inflight``."""

    worker: Member
    count: int
    is_reserved: bool = False  # also in its ``num_reserved``


@dataclass(slots=True)
class Encoding:
    """The encode leg of a request. ``waiting`` maps workers without an answer to the identifiers requested of them.

    ``untold`` are those whose answer no worker has been told of, or only workers that refused the prompt: only this router can
    release these embeddings. ``told`` are those whose answer went out with the last prompt for the first time. All know the
    request as ``wire_id``, the name of the attempt that asked them.
    """

    deadline: float
    wire_id: str
    told: list[WorkerKey] = field(default_factory=list)
    untold: list[WorkerKey] = field(default_factory=list)
    waiting: dict[WorkerKey, frozenset[bytes]] = field(default_factory=dict)


@dataclass(slots=True)
class Measurements:
    """The measurements of one request."""

    arrival: float
    encode_s: float | None = None  # the wait for encode workers; None without them
    first_token_at: float | None = None
    first_token: FirstTokenTiming | None = None  # if it came from a prefill worker
    second_token: SecondTokenTiming | None = None
    pulled_tokens: int = 0  # that the worker which computed the prompt loaded from another one
    hit_tokens: int | None = None  # as the worker that computed the prompt reported
    alone_ttft_ms: float | None = None  # if the first token came from a worker that serves it alone
    costs: dict[int, tuple[int, TransferUsage]] = field(default_factory=dict)  # by choice: (number of the attempt, its cost)
    prefill_loss: TransferUsage | None = None  # what the prefill worker recomputed after a tier lost it

    @property
    def handoff_cost(self) -> TransferUsage:
        """The cost reported by decode and aggregated workers."""
        return total_cost(cost for _, cost in self.costs.values())

    @property
    def cost(self) -> TransferUsage:
        """The cost reported by all workers. The reason of a failed handoff takes precedence over that of a tier."""
        return total_cost([self.handoff_cost, self.prefill_loss or TransferUsage()])


@dataclass(slots=True)
class Attempt:
    """One attempt to serve a request. A retry replaces it with a new one, whose ``previous_error`` is the cause.

    A move of its prompt does, too; nothing has failed then, and the error before it stays.
    """

    number: int = 1
    prefill: WorkerKey | None = None
    decode: WorkerKey | None = None  # reserved during PREFILL; None while the request waits for one
    previous_error: ErrorInfo | None = None
    announces: bool = False  # the prefill worker reports its progress
    early_decode: WorkerKey | None = None  # the decode worker that reads the prompt's KV meanwhile
    has_handoff: bool = False  # the decode worker was given the handoff
    shown: set[int] = field(default_factory=set)  # choices with a token of this decode leg
    is_move: bool = False  # its prompt has left the queue of a worker that was not at fault
    is_judged: bool = False  # its pair of workers has been judged by the first report


@dataclass(slots=True)
class Deadline:
    """When a request ends at the latest, in seconds of the router's clock."""

    at: float
    is_own: bool = False  # set by the client, not by the router
    extended_s: float = 0.0  # by pauses of the router

    def extend(self, pause_s: float) -> None:
        """Extend it by a pause of the router, unless the client set it."""
        if not self.is_own:
            self.at += pause_s
            self.extended_s += pause_s


@dataclass(slots=True)
class RoomStanding:
    """How a request that looks for room stands to others that do."""

    is_held: bool = False  # it came when everything was full, and no worker has it
    was_held: bool = False  # ... and is held again if the worker that it was given to refuses it, or is lost
    was_admitted: bool = False  # it may have been: a worker began it, failed it otherwise than for lack of room, or was lost
    waits_since: float = 0.0  # start of its wait for a worker, less the router's pauses

    @property
    def gives_way(self) -> bool:
        """True if it takes no room that is kept for others. One that a worker may have had does, if it has lost that worker."""
        return not self.was_admitted

    @property
    def may_wait(self) -> bool:
        """True if it waits for room when a worker refuses it, instead of being refused itself."""
        return self.was_held or self.was_admitted


@dataclass(slots=True)
class Placed:
    """What is known of a request's latest placement. Times and costs only where they are predicted."""

    routing: RoutingReport | None = None
    source: KVSource | None = None  # where the worker may load the beginning of the prompt
    prompt_until: float = 0.0  # when the prompt will be computed; 0 = not known
    patience_ms: float = 0.0  # how long shorter prompts that come later may be computed first
    stays_until: float = 0.0  # when it is asked again whether another worker would be much sooner
    num_stays: int = 0  # how often that was asked in vain


@dataclass(slots=True)
class RequestState:
    """One running request. ``output_token_ids`` has one list per choice; times are seconds of the router's clock.

    ``handoff`` is kept while it may be read: from the prefill worker's answer until every choice has a token of the decode leg,
    or until no decode worker can read it. ``fallback_reason`` is why a decode leg had no handoff.
    """

    submission: Submission
    deadline: Deadline
    measurements: Measurements
    output_token_ids: list[list[int]]
    finish_reasons: list[FinishReason | None]
    attempt: Attempt = field(default_factory=Attempt)
    phase: RequestPhase = RequestPhase.PREFILL
    model_fingerprint: bytes = b""
    placed: Placed = field(default_factory=Placed)
    encoding: Encoding | None = None  # None before its encode leg
    ec_sources: dict[bytes, ECSource] = field(default_factory=dict)  # by identifier: where embeddings can be loaded
    has_report: bool = False  # the client has got the report of its prompt
    alone_attempt: int = 0  # number of the attempt whose only worker made that report; 0 = a pair did
    has_decoded: bool = False  # a decode or aggregated worker has sent a token
    handoff: KVHandoff | None = None
    fallback_reason: str = ""
    is_local: bool = False  # its decode worker computes the prompt, since that is sooner
    has_moved: bool = False  # from a long queue to a worker that was nearly idle, which a prompt does once
    renew_at: float = 0.0  # when the lease of the handoff is renewed next
    standing: RoomStanding = field(default_factory=RoomStanding)
    retries: Retries = field(default_factory=Retries)
    inflight: dict[WorkerKey, InflightCount] = field(default_factory=dict)
    error: ErrorInfo | None = None

    @property
    def request_id(self) -> str:
        """The id inside the router."""
        return self.submission.request_id

    @property
    def wire_id(self) -> str:
        """The id of the current attempt on the wire."""
        return self.request_id if self.attempt.number == 1 else f"{self.request_id}.{self.attempt.number}"

    @property
    def current(self) -> WorkerKey | None:
        """The worker that sends the next token; None while images are embedded, or while the request waits for a worker."""
        if self.phase is RequestPhase.ENCODE:
            return None
        return self.attempt.prefill if self.phase is RequestPhase.PREFILL else self.attempt.decode

    @property
    def workers(self) -> set[WorkerKey | None]:
        """The workers that have the request or are reserved for it."""
        return {self.attempt.prefill, self.attempt.decode, *(self.encoding.waiting if self.encoding else ())}

    @property
    def has_begun(self) -> bool:
        """True if its prompt is computed: it has a token, or a handoff from a worker that leaves the first one to others."""
        return self.num_output_tokens > 0 or self.handoff is not None

    @property
    def was_safe(self) -> bool:
        """True if it waits at a worker that it has moved to: what befalls it there would not have happened without the move."""
        return self.attempt.is_move and not self.has_begun

    @property
    def is_degraded(self) -> bool:
        """True if a decode worker began it alone because no prefill worker was available."""
        return self.fallback_reason == NO_PREFILL

    def extend(self, pause_s: float) -> None:
        """Extend the deadlines by a pause of the router, except one that the client set."""
        if self.encoding is not None:
            self.encoding.deadline += pause_s
        self.deadline.extend(pause_s)

    def time_is_over(self) -> DeadlineExceeded:
        """Return the error of its deadline."""
        return time_is_over(self.deadline.at - self.arrival + self.submission.spent_s, is_own=self.deadline.is_own)

    def in_words_of_limit(self, error: ErrorInfo) -> ErrorInfo:
        """Return a worker's error; one about the deadline as the router has it, which knows who has set the limit."""
        return ErrorInfo.of(self.time_is_over()) if error.code == DeadlineExceeded.code else error

    def next_attempt(self, previous_error: ErrorInfo | None) -> Attempt:
        """Return the attempt after this one. It keeps the prefill worker if that has computed the prompt."""
        prefill = None if self.phase is RequestPhase.PREFILL else self.attempt.prefill
        return Attempt(number=self.attempt.number + 1, prefill=prefill, previous_error=previous_error)

    def is_premature(self, error: ErrorInfo, now: float) -> bool:
        """Return True if a worker ended it at a deadline that the router has since extended for its own pause."""
        return error.code == DeadlineExceeded.code and self.deadline.extended_s > 0 and now < self.deadline.at

    @property
    def retry_kind(self) -> RetryKind:
        """The kind of a retry in its current state."""
        if not self.has_begun:
            return "prefill"
        return "replay" if self.has_decoded else "handoff"

    @property
    def live_choices(self) -> list[int]:
        """The choices that have not ended."""
        return [index for index, reason in enumerate(self.finish_reasons) if reason is None]

    @property
    def num_live_choices(self) -> int:
        """How many choices have not ended."""
        return self.finish_reasons.count(None)

    @property
    def is_finished(self) -> bool:
        """True if every choice has ended."""
        return None not in self.finish_reasons

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of all choices."""
        return sum(map(len, self.output_token_ids))

    @property
    def arrival(self) -> float:
        """When it was submitted."""
        return self.measurements.arrival

    @property
    def first_token_at(self) -> float | None:
        """When the first token of any choice arrived; None before."""
        return self.measurements.first_token_at


@dataclass(frozen=True, slots=True)
class SendToWorker:
    """Send a message to a worker."""

    worker: WorkerKey
    message: RouterMessage


class Deliver(msgspec.Struct, frozen=True):
    """Pass an update to the client."""

    request_id: str
    update: Update


class DeliverTokens(msgspec.Struct, frozen=True):
    """Pass tokens of one engine step to clients whose requests have one choice, which goes on: (request id, token ids) each.

    Most tokens are such: one action for all of them saves an update for each.
    """

    tokens: Sequence[tuple[str, tuple[int, ...]]]

    def updates(self) -> Iterator[Deliver]:
        """Return an update for each, which says the same."""
        return (Deliver(request_id, token_update(token_ids)) for request_id, token_ids in self.tokens)


@dataclass(frozen=True, slots=True)
class EncodeEnded:
    """The request no longer waits for an encode worker, for images with one outcome: "done", or why there are no embeddings."""

    request_id: str
    worker: WorkerKey
    outcome: str
    num_images: int
    num_cached: int = 0


@dataclass(frozen=True, slots=True)
class Retried:
    """A worker failed the request, and the request continues; ``successor`` is None if no worker can take it now."""

    request_id: str
    kind: RetryKind
    error: ErrorInfo
    failed: WorkerKey
    successor: WorkerKey | None


@dataclass(frozen=True, slots=True)
class Moved:
    """A prompt has left the queue of a worker, which has not failed, for one that computes it ``gain_s`` sooner."""

    request_id: str
    former: WorkerKey
    successor: WorkerKey
    gain_s: float


@dataclass(frozen=True, slots=True)
class Ended:
    """The request has ended; ``request.error`` is set if it failed."""

    request: RequestState
    now: float


DispatchAction = SendToWorker | Deliver | DeliverTokens | EncodeEnded | Retried | Moved | Ended


def open_request(submission: Submission, now: float, timeout_s: float) -> RequestState:
    """Return the state of a new request."""
    return RequestState(
        submission=submission,
        deadline=Deadline(
            at=now + submission.budget_s(timeout_s),
            is_own=submission.timeout_s is not None and submission.timeout_s <= timeout_s,
        ),
        measurements=Measurements(arrival=now),
        output_token_ids=[[] for _ in range(submission.n)],
        finish_reasons=[None] * submission.n,
    )
