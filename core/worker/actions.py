"""The actions of the worker's state machine, carried out in order.

Owns the types between the synchronous protocol (``core.worker.state``) and its driver: ``core.worker.process`` in a process,
the simulation under a virtual clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from core.engine.step_watch import StepReading
from core.request import NewRequest
from core.wire.early import MeetProducer
from core.wire.engine_calls import EngineCall
from core.wire.kv import KVHandoff
from core.wire.media import ECSource
from core.wire.messages import Release, Renew, Tokens, WorkerMessage


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message, or the tokens of one step in one frame, to the router of a link."""

    link: str
    message: WorkerMessage | list[Tokens]


@dataclass(frozen=True, slots=True)
class SubmitAdd:
    """Pass new requests to the engine."""

    requests: list[NewRequest]


@dataclass(frozen=True, slots=True)
class SubmitCall:
    """Post to the engine's API. Its replies come as ``EngineReply``, or one ``RequestFailed``."""

    call: EngineCall


@dataclass(frozen=True, slots=True)
class SubmitAbort:
    """Stop requests of the engine, or calls of its API."""

    engine_request_ids: list[str]


@dataclass(frozen=True, slots=True)
class EndUnanswered:
    """These requests end without a reply, because their router is gone. ``outcome`` is the one in the log."""

    request_ids: tuple[str, ...]
    outcome: str


@dataclass(frozen=True, slots=True)
class ReleaseTransfers:
    """Release handoffs that will not be read."""

    transfer_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReleaseEmbeddings:
    """End these leases of embeddings, which will not be read."""

    sources: tuple[ECSource, ...]


@dataclass(frozen=True, slots=True)
class ExpectTransfer:
    """A request that is on its way to the engine may load this handoff. The engine's output for it comes after this."""

    handoff: KVHandoff


@dataclass(frozen=True, slots=True)
class MeetWorker:
    """A handoff of this worker is about to come."""

    producer: MeetProducer


@dataclass(frozen=True, slots=True)
class RenewTransfers:
    """Extend the leases of handoffs."""

    transfer_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """End the process with this exit code, once everything before it is sent."""

    exit_code: int


Action = (
    Send
    | SubmitAdd
    | SubmitCall
    | SubmitAbort
    | EndUnanswered
    | MeetWorker
    | ExpectTransfer
    | ReleaseTransfers
    | ReleaseEmbeddings
    | RenewTransfers
    | Stop
)


def for_connector(message: MeetProducer | Release | Renew) -> Action:
    """Return what a router's message asks of the connector alone."""
    match message:
        case MeetProducer():
            return MeetWorker(message)
        case Release():
            return ReleaseTransfers(message.transfer_ids)
        case Renew():
            return RenewTransfers(message.transfer_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """The load and progress of the engine, as reported to the routers.

    ``longest_lease_s``: how long readers may need its blocks.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    num_leased_blocks: int = 0
    longest_lease_s: float = 0.0
    progress: StepReading = field(default_factory=StepReading)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """How many choices a worker holds at most, and how long it takes to leave."""

    max_num_seqs: int
    max_waiting_requests: int
    drain_timeout_s: float
