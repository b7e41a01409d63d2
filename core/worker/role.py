"""What a role does with a worker's requests: the interface between ``core.worker.serving`` and each role.

Owns the types in between. Handlers are pure: messages and engine outputs in, new requests and replies out, no sockets, no
threads, no clock of their own. ``prefill.role``, ``decode.role`` and ``encode.role`` implement them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from core.errors import InvalidRequest
from core.request import EngineCoreOutput, NewRequest
from core.wire.early import PrefillProgress, PullEarly
from core.wire.media import ECSource
from core.wire.messages import (
    EncodeDone,
    EncodeFailed,
    EncodeRequest,
    ErrorInfo,
    Generate,
    PrefillDone,
    RequestFailed,
    Tokens,
)
from core.wire.sampling import SamplingParams

Reply = PrefillProgress | PrefillDone | RequestFailed | EncodeDone | EncodeFailed | Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """The properties of the engine that a handler needs."""

    max_model_len: int  # tokens, prompt and output together
    eos_token_ids: frozenset[int]


@dataclass(slots=True)
class RoleOutput:
    """The consequences of an event.

    ``new_requests`` go to the engine now. ``ended`` names the requests that get no more replies, ``abort_ids`` the engine
    requests to abort, ``release_transfer_ids`` the handoffs and ``release_sources`` the embeddings that are not read any more.
    """

    replies: list[Reply] = field(default_factory=list)
    new_requests: list[NewRequest] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    abort_ids: list[str] = field(default_factory=list)
    release_transfer_ids: list[str] = field(default_factory=list)
    release_sources: list[ECSource] = field(default_factory=list)


class RoleHandler(ABC):
    """Turns requests of routers into requests of the engine, and the engine's outputs into replies."""

    @abstractmethod
    def on_generate(self, message: Generate, now: float) -> list[NewRequest]:
        """Accept a request and return the engine requests to start now, each for one choice, named by ``choice_id``.

        Those of other choices may follow in ``RoleOutput.new_requests``: a prompt that is computed here is computed once, and
        they begin when the first one's prompt is in the prefix cache.

        Raises:
            RequestError: this role cannot serve it; nothing is kept.
        """

    def on_encode(self, message: EncodeRequest, now: float) -> list[NewRequest]:
        """Accept images to embed for other workers, and return the engine requests, one per image, named by ``choice_id``.

        Raises:
            RequestError: this role cannot serve it; nothing is kept.
        """
        raise InvalidRequest("this worker embeds no images for others")

    def on_pull_early(self, message: PullEarly, now: float) -> RoleOutput:
        """The prompt of a request that will follow is computed and sealed up to here. Never refused: it may be ignored."""
        return RoleOutput()

    @abstractmethod
    def on_outputs(self, outputs: Sequence[EngineCoreOutput], now: float) -> RoleOutput:
        """Process the outputs of one engine step; outputs of unknown requests are ignored."""

    @abstractmethod
    def on_abort(self, request_id: str) -> RoleOutput:
        """Forget a request in any state, without a reply. Idempotent."""

    def on_timer(self, now: float) -> RoleOutput:
        """End what is due."""
        return RoleOutput()

    def next_timer(self) -> float | None:
        """Return when ``on_timer`` has something to do; None = not before another event."""
        return None

    def on_abort_choice(self, request_id: str, index: int) -> RoleOutput:
        """Stop one choice, because the router has seen its end in the text. Idempotent."""
        return RoleOutput()


def choice_id(request_id: str, index: int) -> str:
    """Return the name of one choice of a request inside the worker."""
    return f"{request_id}/{index}"


def split_choice_id(engine_request_id: str) -> tuple[str, int]:
    """Return request id and choice index of a name made by ``choice_id``; index -1 if it is no such name."""
    request_id, _, index = engine_request_id.rpartition("/")
    return request_id, int(index) if index.isdecimal() else -1


def request_of_choice(message: Generate, index: int, sampling: SamplingParams, facts: EngineFacts, now: float) -> NewRequest:
    """Return the engine request of one choice: the fields of the message, and the role's ``sampling``."""
    return NewRequest(
        request_id=choice_id(message.request_id, index),
        prompt_token_ids=message.prompt_token_ids,
        sampling=sampling,
        choice_index=index,
        stop_token_ids=_stop_token_ids(message, facts),
        priority=message.priority,
        arrival_time=now,
        patience_s=message.patience_ms / 1e3,
        tenant=message.tenant,
        cache_salt=message.cache_salt,
        kv_handoff=message.kv_handoff,
        kv_source=message.kv_source,
        kv_load_failure_policy=message.kv_load_failure_policy,
        deadline=deadline_of(message, now),
        mm_features=message.mm_features,
        media=message.media,
        ec_sources=message.ec_sources,
        engine_request=message.engine_request,
        trace=message.trace,
    )


def deadline_of(message: Generate | EncodeRequest, now: float) -> float | None:
    """Return when the request's time budget ends on this worker's clock; None if it has none."""
    return now + message.deadline_ms / 1e3 if message.deadline_ms else None


def output_error(output: EngineCoreOutput) -> ErrorInfo | None:
    """Return the engine's error of a request, None without one; an end without a reason is an internal error."""
    if output.error is not None:
        return output.error
    if output.finish_reason in {"error", "abort"}:
        return ErrorInfo(code="internal_error", message=f"the engine ended the request with {output.finish_reason!r}")
    return None


def _stop_token_ids(message: Generate, facts: EngineFacts) -> frozenset[int]:
    """Return every token that ends the text: the client's, and the model's own unless the client ignores them."""
    chosen = frozenset(message.sampling.stop_token_ids)
    return chosen if message.sampling.ignore_eos else chosen | facts.eos_token_ids
