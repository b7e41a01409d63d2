"""Requests and the types of one engine step, exchanged by the scheduler, the runner and the connectors.

Torch-free. Only the engine thread touches these objects. Names and meanings follow vLLM V1.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

from core.kv.hashing import BlockHasher, ExtraKey, RequestKeys
from core.token_ids import pack_token_ids
from core.tracing import TraceContext
from core.wire.kv import KVHandoff, KVSource
from core.wire.media import ECSource, MMFeature
from core.wire.messages import ErrorInfo, FinishReason, LoadFailurePolicy, TokenLogprobs, TransferUsage
from core.wire.sampling import SamplingParams

if TYPE_CHECKING:
    from core.grammar.compiled import CompiledGrammar


class RequestStatus(IntEnum):
    """The state of a request. The order matters: everything after ``PREEMPTED`` is finished."""

    WAITING = 0
    WAITING_FOR_GRAMMAR = 1
    WAITING_FOR_REMOTE_KVS = 2
    RUNNING = 3
    PREEMPTED = 4
    FINISHED_STOPPED = 5
    FINISHED_LENGTH_CAPPED = 6
    FINISHED_ABORTED = 7
    FINISHED_ERROR = 8

    @property
    def is_finished(self) -> bool:
        """True once the request has left the scheduler's queues for good."""
        return self > RequestStatus.PREEMPTED


FINISH_REASONS: dict[RequestStatus, FinishReason] = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
}


@dataclass(frozen=True, slots=True)
class PrefillStats:
    """The source of the prompt's KV: a snapshot at first admission, never changed afterwards, taken once.

    The three counts are non-negative and ``num_local_cached_tokens + num_external_cached_tokens <= num_prompt_tokens``.
    """

    num_prompt_tokens: int
    num_local_cached_tokens: int
    num_external_cached_tokens: int
    queue_s: float = field(default=0.0, compare=False)  # from arrival at this worker to that admission

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were not computed here."""
        return self.num_local_cached_tokens + self.num_external_cached_tokens


@dataclass(frozen=True, slots=True)
class FirstTokenTimes:
    """The parts of the time to the first token on this worker; they add up to it."""

    wait_s: float  # from arrival until its first tokens were scheduled, a load included
    compute_s: float  # from there until its first output


@dataclass(slots=True, kw_only=True)  # not frozen: setting that many fields of a frozen instance takes 2 us more
class NewRequest:
    """The input for a ``Request``: one choice of one ``Generate`` message. Never changed.

    ``output_token_ids`` are the tokens that other workers have already generated. ``stop_token_ids`` holds every token that
    ends the text, end-of-sequence included unless the client asked to ignore it.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    output_token_ids: Sequence[int] = ()
    choice_index: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    arrival_time: float = 0.0
    patience_s: float = 0.0  # by priority, it is served as if it had arrived so much later
    tenant: int = 0  # whose requests take turns with those of others; 0 = without an API key
    cache_salt: str = ""
    needs_handoff: bool = False  # prefill worker: keep the blocks for a reader and describe them
    announces: bool = False  # prefill worker: report the prompt's sealed prefix after each chunk
    kv_handoff: KVHandoff | None = None  # decode worker: the place of the prompt's KV
    kv_source: KVSource | None = None  # a worker that may hold the beginning of the prompt
    early_pull: str = ""  # decode worker: the early pull that it ends
    is_early: bool = False  # not a request: the prompt, or more sealed blocks, of the early pull ``request_id``
    kv_load_failure_policy: LoadFailurePolicy | None = None  # None = the engine's own
    deadline: float | None = None  # when the request's budget ends, on the engine's clock
    mm_features: Sequence[MMFeature] = ()  # in the order of the prompt, not overlapping
    media: Sequence[bytes] = ()  # raw files by ``MMFeature.media_index``; missing or empty for files that are not here
    ec_sources: Sequence[ECSource] = ()  # where embeddings of these items can be read
    engine_request: bytes = b""  # for an engine with an API of its own, as in ``Generate``
    trace: TraceContext | None = None  # of the router's leg, for an engine that records spans of its own


class Request:
    """One sequence from admission to its last token.

    ``num_computed_tokens`` is optimistic: it advances when a step is scheduled, before the step has run.
    ``num_in_flight_tokens`` are scheduled tokens whose step has not been processed yet; ``num_output_placeholders`` are output
    tokens that these steps sample, if the next step is scheduled before they are known. ``block_hashes`` holds one 16-byte
    chain value per full run of ``hash_block_size`` tokens and grows with the tokens. ``mm_end`` is the position after the last
    token of its media, 0 without any: once so much is computed, no embedding is needed any more.

    ``prompt`` are the tokens of the prompt, packed, which become the request's; None = pack them here.
    Raises: ValueError for a token id below 0 or above that of int32.
    """

    __slots__ = (
        "_hasher",
        "all_token_ids",
        "announces",
        "arrival_time",
        "block_hashes",
        "cache_salt",
        "choice_index",
        "deadline",
        "early_pull",
        "ec_sources",
        "extra_keys",
        "first_scheduled_time",
        "grammar",
        "has_failed_embedding",
        "has_failed_load",
        "has_optional_load",
        "is_early",
        "kv_handoff",
        "kv_load_failure_policy",
        "kv_source",
        "max_tokens",
        "media",
        "mm_end",
        "mm_features",
        "needs_handoff",
        "num_charged_tokens",
        "num_computed_tokens",
        "num_in_flight_tokens",
        "num_lost_grammars",
        "num_output_placeholders",
        "num_output_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_received_output_tokens",
        "num_tokens",
        "patience_s",
        "prefill_stats",
        "priority",
        "request_id",
        "sampling",
        "skip_reading_prefix_cache",
        "status",
        "stop_reason",
        "stop_token_ids",
        "tenant",
    )

    def __init__(self, new: NewRequest, hasher: BlockHasher | None, prompt: array[int] | None = None) -> None:
        self.request_id = new.request_id
        self.sampling = new.sampling
        self.grammar: CompiledGrammar | None = None  # of its structured output, once it is compiled
        self.num_lost_grammars = 0  # full while it ran
        self.choice_index = new.choice_index
        self.priority = new.priority
        self.arrival_time = new.arrival_time
        self.patience_s = new.patience_s
        self.tenant = new.tenant
        self.num_charged_tokens = 0  # to its tenant, by its queue
        self.cache_salt = new.cache_salt
        self.stop_token_ids = new.stop_token_ids
        self.max_tokens = new.sampling.max_tokens
        self.needs_handoff = new.needs_handoff
        self.announces = new.announces
        self.early_pull = new.early_pull
        self.is_early = new.is_early  # it holds blocks that are loaded for another request, and never runs
        self.kv_handoff = new.kv_handoff
        self.kv_source = new.kv_source
        self.kv_load_failure_policy = new.kv_load_failure_policy
        self.deadline = new.deadline
        self.mm_features = tuple(new.mm_features)
        self.mm_end = self.mm_features[-1].end if self.mm_features else 0
        self.media = tuple(new.media)
        self.ec_sources: Mapping[bytes, ECSource] = {source.seal.identifier: source for source in new.ec_sources}

        self.all_token_ids = pack_token_ids(new.prompt_token_ids) if prompt is None else prompt
        self.num_prompt_tokens = len(self.all_token_ids)
        self.all_token_ids.extend(new.output_token_ids)
        self.num_tokens = len(self.all_token_ids)
        self.num_output_tokens = self.num_tokens - self.num_prompt_tokens
        self.num_received_output_tokens = self.num_output_tokens  # that other workers have generated

        self.status = RequestStatus.WAITING
        self.stop_reason: int | None = None
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.num_output_placeholders = 0
        self.num_preemptions = 0
        self.has_failed_load = False  # then nothing is loaded for it any more
        self.has_optional_load = False  # its load only saves time: what fails of it is computed, under any policy
        self.has_failed_embedding = False  # then no embedding is loaded for it any more
        self.prefill_stats: PrefillStats | None = None
        self.first_scheduled_time: float | None = None  # of its first tokens here, on the engine's clock
        self.skip_reading_prefix_cache = not reads_prefix_cache(new.sampling)

        self._hasher = hasher
        self.extra_keys = extra_keys_of(self.mm_features, new.cache_salt)
        self.block_hashes: list[bytes] = []
        self.update_block_hashes()

    @property
    def output_token_ids(self) -> list[int]:
        """The output so far, other workers' tokens included (a copy)."""
        return self.all_token_ids[self.num_prompt_tokens :].tolist()

    def has_media(self, index: int) -> bool:
        """True if the file of feature ``index`` is here, so that its embeddings can be computed on this worker."""
        media_index = self.mm_features[index].media_index
        return media_index < len(self.media) and bool(self.media[media_index])

    def append_output_token(self, token_id: int) -> None:
        """Append one sampled token and, where it completes a run of ``hash_block_size``, its hash."""
        self.all_token_ids.append(token_id)
        self.num_tokens += 1
        self.num_output_tokens += 1
        if self._hasher is not None and self.num_tokens % self._hasher.hash_block_size == 0:
            self.update_block_hashes()

    def update_block_hashes(self) -> None:
        """Append the hashes of all runs that are full by now."""
        if self._hasher is not None:
            self._hasher.extend(self.block_hashes, self.all_token_ids, self.extra_keys)

    def take_prefill_stats(self) -> PrefillStats | None:
        """Return the snapshot of the first admission, the first time only."""
        stats, self.prefill_stats = self.prefill_stats, None
        return stats

    def __repr__(self) -> str:
        return f"Request({self.request_id} {self.status.name} {self.num_computed_tokens}/{self.num_tokens})"


def extra_keys_of(mm_features: Sequence[MMFeature], cache_salt: str) -> RequestKeys:
    """Return the keys that enter a request's block hashes in addition to tokens; see ``core.kv.hashing.block_extra_keys``."""
    keys: list[ExtraKey] = [("mm", feature.identifier, feature.offset, feature.length) for feature in mm_features]
    if cache_salt:
        keys.append(("cache_salt", cache_salt))
    return RequestKeys(keys)


def reads_prefix_cache(sampling: SamplingParams) -> bool:
    """Return whether a prompt may begin with blocks that need not be computed: cached ones, or loaded ones of tiers and peers.

    Log-probabilities of its tokens need every position computed where they are asked for. vLLM has the same rule.
    """
    return sampling.prompt_logprobs is None


# ---- scheduler → runner ----------------------------------------------------------------------------------------------


class KVConnectorMetadata:
    """Base of the message that a scheduler side sends to its worker side with every step, empty steps included."""

    __slots__ = ()


class ECConnectorMetadata:
    """Base of the message that a scheduler side sends to its worker side with every step, empty steps included."""

    __slots__ = ()


@dataclass(slots=True)
class NewRequestData:
    """A request that the runner sees for the first time, or again after a preemption.

    ``token_ids`` are prompt and output so far; ``block_ids`` one table per KV cache group. The runner copies both.
    """

    request_id: str
    token_ids: array[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    choice_index: int
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int
    stop_token_ids: frozenset[int] = frozenset()  # masked by the sampler below ``min_tokens``
    grammar: CompiledGrammar | None = None  # of its structured output
    mm_features: tuple[MMFeature, ...] = ()
    media: tuple[bytes, ...] = ()  # by ``MMFeature.media_index``; missing or empty for files that are not here


@dataclass(slots=True)
class CachedRequestData:
    """Requests that the runner already holds, as parallel lists.

    ``new_block_ids[i]`` is appended to the tables of ``req_ids[i]``; None = nothing new, which is the common case.
    """

    req_ids: list[str] = field(default_factory=list)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass(slots=True)
class SchedulerOutput:
    """The contents of one step. ``num_scheduled_tokens`` keeps scheduling order.

    ``scheduled_encoder_inputs`` names, by request, the features whose embeddings the encoder computes before the decoder runs;
    each identifier once in a step. Features that are in the encoder cache, or that the EC connector loads in this step, are not
    among them; a request that was preempted in this very step can be. The runner deletes ``free_encoder_identifiers`` from its
    cache before anything else.

    ``preempted_req_ids`` have lost their blocks, by preemption, a failed load or a full grammar. The runner drops them before
    it adds ``scheduled_new_reqs``, among which a request put back by a full grammar can be again.
    """

    scheduled_new_reqs: list[NewRequestData] = field(default_factory=list)
    scheduled_cached_reqs: CachedRequestData = field(default_factory=CachedRequestData)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    total_num_scheduled_tokens: int = 0
    finished_req_ids: set[str] = field(default_factory=set)  # left since the last step; the runner drops them
    preempted_req_ids: set[str] = field(default_factory=set)  # vLLM's name; all that have lost their blocks, see above
    has_sync_kv_loads: bool = False
    kv_connector_metadata: KVConnectorMetadata | None = None
    scheduled_encoder_inputs: dict[str, list[int]] = field(default_factory=dict)
    free_encoder_identifiers: list[bytes] = field(default_factory=list)
    ec_connector_metadata: ECConnectorMetadata | None = None
    awaits_blocks: bool = False  # it has no tokens, and the connector was about to free blocks when it was decided
    has_dropped_images: bool = False  # ready ones, for others, whose requests may then run in the next step


# ---- runner → scheduler ----------------------------------------------------------------------------------------------


class KVConnectorWorkerMetadata:
    """Base of a worker side's message to its own scheduler side, in ``KVConnectorOutput.worker_meta``."""

    __slots__ = ()


class ECConnectorWorkerMetadata:
    """Base of a worker side's message to its own scheduler side, in ``ECConnectorOutput.worker_meta``."""

    __slots__ = ()


@dataclass(slots=True)
class KVConnectorOutput:
    """The report of a connector's worker side after a step.

    ``finished_recving`` names every load that is over for its request, failed and aborted ones included. Blocks of it that may
    still be written are in ``quarantined_block_ids`` of the same output, and in ``unquarantined_block_ids`` of a later one once
    nothing can arrive any more. ``failed_recving`` maps a request id to the error of its load, of which nothing may be used;
    its id must also appear in ``finished_recving``, in this output or a later one. ``invalid_block_ids`` are single blocks
    whose content must not be used; ``load_errors`` gives the reason, per request that asked for them. ``worker_meta`` is for
    the connector's own scheduler side; the scheduler itself does not read it.
    """

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    invalid_block_ids: set[int] = field(default_factory=set)
    failed_recving: dict[str, ErrorInfo] = field(default_factory=dict)
    load_errors: dict[str, ErrorInfo] = field(default_factory=dict)
    quarantined_block_ids: set[int] = field(default_factory=set)
    unquarantined_block_ids: set[int] = field(default_factory=set)
    transfer_usage: dict[str, TransferUsage] = field(default_factory=dict)
    worker_meta: KVConnectorWorkerMetadata | None = None

    def is_empty(self) -> bool:
        """True if there is nothing to report."""
        return not (
            self.finished_sending
            or self.finished_recving
            or self.invalid_block_ids
            or self.failed_recving
            or self.load_errors
            or self.quarantined_block_ids
            or self.unquarantined_block_ids
            or self.transfer_usage
            or self.worker_meta is not None
        )


@dataclass(slots=True)
class ECConnectorOutput:
    """The report of an EC connector's worker side after a step, by identifier of the item.

    ``finished_saving`` maps items that other workers can read from now on to their sources. ``failed_loading`` were to be
    loaded and are not in the encoder cache: the runner names them in ``failed_embeddings``, too. ``worker_meta`` is for the
    connector's own scheduler side.
    """

    finished_saving: dict[bytes, ECSource] = field(default_factory=dict)
    failed_saving: dict[bytes, ErrorInfo] = field(default_factory=dict)
    finished_loading: set[bytes] = field(default_factory=set)
    failed_loading: dict[bytes, ErrorInfo] = field(default_factory=dict)
    worker_meta: ECConnectorWorkerMetadata | None = None

    def is_empty(self) -> bool:
        """True if there is nothing to report."""
        return not (
            self.finished_saving
            or self.failed_saving
            or self.finished_loading
            or self.failed_loading
            or self.worker_meta is not None
        )


@dataclass(slots=True)
class ModelRunnerOutput:
    """The result of one step.

    ``sampled_token_ids`` holds an entry for each request whose last known token was computed in the step (none for an
    unfinished prompt chunk). ``logprobs`` and ``prompt_logprobs`` only hold requests that asked for them. ``failed`` and
    ``refused`` requests got no token although it was their turn. The KV of ``failed`` ones may be corrupt, so it is evicted,
    and they end. That of ``refused`` ones is valid: they asked for something impossible and end, or their grammar is full and
    they wait for another one. ``failed_embeddings`` maps identifiers that
    are missing in the worker's encoder cache to the reasons. The step computed their tokens from placeholders: the scheduler
    discards that KV, and the tokens sampled from it.
    """

    sampled_token_ids: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, tuple[TokenLogprobs | None, ...]] = field(default_factory=dict)
    failed: dict[str, ErrorInfo] = field(default_factory=dict)
    refused: dict[str, ErrorInfo] = field(default_factory=dict)
    kv_connector_output: KVConnectorOutput | None = None
    ec_connector_output: ECConnectorOutput | None = None
    failed_embeddings: dict[bytes, ErrorInfo] = field(default_factory=dict)


# ---- engine → worker process -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """The source of an image's embeddings on an encode worker. ``was_cached``: they were not computed again."""

    source: ECSource
    was_cached: bool
    queue_s: float  # until its turn came and it was decoded
    compute_s: float  # from there until others can read it


@dataclass(frozen=True, slots=True)
class SealedPrefix:
    """More of a prompt is sealed: its blocks from ``first_token`` on. ``ready_s`` is the predicted time until all of it is."""

    handoff: KVHandoff
    first_token: int
    ready_s: float


@dataclass(slots=True)
class EngineCoreOutput:
    """The output of a step for one request. ``finish_reason`` is set in its last one."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    prefill_stats: PrefillStats | None = None  # with the first output only
    first_token_times: FirstTokenTimes | None = None  # with the first output only
    kv_handoff: KVHandoff | None = None  # with the last output of a request that was computed for another worker
    transfer_usage: TransferUsage | None = None  # with the first output of a request whose KV was loaded
    sealed_prefix: SealedPrefix | None = None  # alone, after a chunk of a prompt whose progress is announced
    encoded: EncodedImage | None = None  # with the only output of a request that was one image to embed
    late_cached_tokens: int | None = None  # with the last output, of an engine that only then tells what it did not compute
    error: ErrorInfo | None = None
