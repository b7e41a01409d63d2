"""Messages of the request plane, between the router and the workers.

The router binds a ZeroMQ ROUTER socket; every worker connects a DEALER to every router address and registers itself. Every
message is encoded by ``core.wire.codec``, with a version byte and a size cap. Only the token stream is ``array_like``: it is
the hot path, and a golden-bytes test pins it.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from core.errors import KVFerryError
from core.tracing import TraceContext
from core.wire.contents import ContentPart, ContentReport
from core.wire.early import MeetProducer, PrefillProgress, PullEarly
from core.wire.engine_calls import EngineCall, EngineReply
from core.wire.kv import KVHandoff, KVLayoutInfo, KVSource, KVVerify
from core.wire.limits import (
    MAX_NUM_FEATURES,
    ChoiceIndex,
    Count,
    Fraction,
    HttpStatus,
    Media,
    MediaIndex,
    Milliseconds,
    Name,
    NumChoices,
    Positive,
    Text,
    TokenId,
    Unsigned64,
    WholeMilliseconds,
)
from core.wire.media import ECSource, MMFeature
from core.wire.sampling import SamplingParams

Role = Literal["prefill", "decode", "aggregated", "encode"]
FinishReason = Literal["stop", "length", "abort", "error"]
LoadFailurePolicy = Literal["recompute", "fail"]

# Of one request. ``Media`` are raw files by ``MMFeature.media_index``; empty for files that are not sent.
MMFeatures = Annotated[tuple[MMFeature, ...], msgspec.Meta(max_length=MAX_NUM_FEATURES)]
MediaFiles = Annotated[tuple[Media, ...], msgspec.Meta(max_length=MAX_NUM_FEATURES)]
ContentParts = Annotated[tuple[ContentPart, ...], msgspec.Meta(max_length=64)]
ECSources = Annotated[tuple[ECSource, ...], msgspec.Meta(max_length=MAX_NUM_FEATURES)]


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error of ``core.errors`` as a message."""

    code: Name
    message: str
    http_status: HttpStatus = 500
    retryable: bool = False
    param: str | None = None
    retry_after_s: Count = 0  # when another try may succeed; 0 = unknown

    @classmethod
    def of(cls, error: KVFerryError) -> ErrorInfo:
        """Return the message for an error of the tree."""
        return cls(
            code=error.code,
            message=error.message,
            http_status=error.http_status,
            retryable=error.retryable,
            param=error.param,
            retry_after_s=error.retry_after_s,
        )


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: the token itself first, then the top-N in order.

    ``token_ids[0]`` is the sampled (or prompt) token with its rank in ``rank``; ``logprobs`` has the same length.
    """

    token_ids: tuple[TokenId, ...]
    logprobs: tuple[float, ...]
    rank: Count

    def __post_init__(self) -> None:
        if not self.token_ids or len(self.token_ids) != len(self.logprobs):
            raise ValueError("token_ids and logprobs are empty or differ in length")


# ---- worker → router -------------------------------------------------------------------------------------------------


class Register(msgspec.Struct, frozen=True, kw_only=True, tag="reg", omit_defaults=True):
    """A worker introduces itself; repeated until a ``Registered`` comes back, and after every reconnect.

    Holds the facts that decide a handshake of two workers (``core.wire.pairing``), so that the router pairs none in vain.
    """

    engine_id: Name
    incarnation: Unsigned64
    role: Role
    model: Name
    model_fingerprint: bytes
    layout: KVLayoutInfo
    max_model_len: Positive
    max_num_seqs: Positive
    num_blocks: Positive
    max_num_choices: Count = 0  # the limit, waiting ones included; more are refused. 0 = not reported
    connector: Text = ""
    transports: tuple[str, ...] = ()  # that work there, in its order of preference as a reader
    host_id: Text = ""  # equal on two workers that share memory and a pid namespace
    kv_verify: KVVerify = "auto"  # what it verifies of its reads
    has_digests: bool = False  # its seals hold digests
    prefix_address: Text = ""  # where workers ask it for beginnings of prompts; empty = it serves none
    ops_address: Text = ""
    pid: Count = 0
    ec_connector: Text = ""  # by which it reads embeddings of encode workers; empty = it computes all of them
    version: Text = ""  # of the package it runs, for display
    start_ms: WholeMilliseconds = 0  # from the start of its process to here; 0 = not reported
    is_supervised: bool = False  # a supervisor restarts it when it ends
    leaves_first_token: bool = False  # a prefill worker that samples none: the decode worker does
    has_patience: bool = False  # it serves by priority, and heeds the patience of prompts
    has_fair_shares: bool = False  # the tenants of its waiting prompts take turns
    takes_calls: bool = False  # it passes ``EngineCall`` on to the API of its engine
    splits_output: bool = False  # that engine separates reasoning from the text of every chat
    content_parts: ContentParts = ()  # the sets of blocks that it reports; empty = its pool, with full attention
    can_switch_role: bool = False  # it serves requests of every role but encode, and heeds ``SwitchRole``
    home_role: Role | None = None  # it was started in; None = not reported
    num_switches: Count = 0  # of its role since its start: a registration with fewer is older than one with more
    reads_early: bool = False  # a decode worker that takes ``PullEarly``
    control_address: Text = ""  # where readers of its handoffs connect; empty = nowhere, or it does not say
    meets_producers: bool = False  # it takes ``MeetProducer``
    takeover: Count = 0  # number by which this link came into use after a lost one; 0 = it did not
    is_spare: bool = False  # the worker has another link to this router in use


class RegisterEncoder(msgspec.Struct, frozen=True, kw_only=True, tag="regenc", omit_defaults=True):
    """An encode worker introduces itself, as by ``Register``; it has no KV cache, so there are fewer fields."""

    engine_id: Name
    incarnation: Unsigned64
    model: Name
    model_fingerprint: bytes
    ec_connector: Name  # by which its embeddings are read
    max_num_images: Positive  # the limit, waiting ones included; more are refused
    host_id: Text = ""  # equal on two workers that share memory and a pid namespace
    ops_address: Text = ""
    pid: Count = 0
    version: Text = ""  # as that of ``Register``, like the two below
    takeover: Count = 0
    is_spare: bool = False


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="hb", omit_defaults=True):
    """A worker is alive, how loaded it is, and whether its engine makes progress. Sent about every second.

    By the three times and ``core.wire.progress`` the router judges whether the engine has stalled. ``is_warming_up`` holds
    during the first step of a size, which may take any time. ``num_reports`` shows a router whether it has missed a
    ``ContentReport``.
    """

    engine_id: Name
    incarnation: Unsigned64
    num_running: Count = 0
    num_waiting: Count = 0
    kv_cache_usage: Fraction = 0.0  # 0..1
    num_leased_blocks: Count = 0
    is_draining: bool = False
    stalled_ms: Milliseconds = 0.0  # since the engine's last progress while it has work; 0 without work
    slowest_step_ms: Milliseconds = 0.0  # of the last minute, first steps of a size apart
    predicted_step_ms: Milliseconds = 0.0  # of the step in hand
    is_warming_up: bool = False
    num_reports: Count = 0  # sent to this router since its ``Registered``
    num_queued_tokens_of_others: Count = 0  # of prompts that other routers have sent, and that have no first token yet
    number: Count = 0  # of this heartbeat, of those to all routers
    num_switches: Count = 0  # as that of ``Register``
    num_of_former_role: Count = 0  # requests that it took in another role than the present one
    is_planner: bool = False  # this router may change its role
    num_other_routers: Count = 0  # that have taken the worker in, as has the router that this is for
    router_rank: Count = 0  # of the latter among them, in the order of their ids
    num_queued_prompts_of_others: Count = 0  # that ``num_queued_tokens_of_others`` are of; 0 beside tokens = not told


class Goodbye(msgspec.Struct, frozen=True, kw_only=True, tag="bye", omit_defaults=True):
    """A worker leaves on purpose; it has nothing in flight any more."""

    engine_id: Name
    incarnation: Unsigned64


class SwitchRefused(msgspec.Struct, frozen=True, kw_only=True, tag="norole", omit_defaults=True):
    """A worker keeps its role; the error says why. A switch that it makes is answered by ``Register``, with the new role."""

    engine_id: Name
    incarnation: Unsigned64
    error: ErrorInfo


class PrefillChoice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The first token of one choice. ``finish_reason`` is set if the choice ended with it."""

    index: ChoiceIndex
    token_id: TokenId
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: TokenId | None = None  # the stop token id, if one ended it


class PrefillDone(msgspec.Struct, frozen=True, kw_only=True, tag="pdone", omit_defaults=True):
    """The prompt is computed: every choice's first token, and the place of the KV. No handoff if every choice has ended.

    A worker that ``leaves_first_token`` sends no choices. Its engine does not tell how long the prompt has waited for others:
    ``prefill_ms`` includes that.
    """

    request_id: Name
    choices: tuple[PrefillChoice, ...]
    kv_handoff: KVHandoff | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    num_cached_tokens: Count = 0
    tells_hits: bool = True  # False: the engine does not say how many were cached
    queue_ms: Milliseconds = 0.0
    prefill_ms: Milliseconds = 0.0
    recomputed_tokens: Count = 0  # prompt tokens of all choices that a tier should have loaded and that were computed
    fallback_reason: Text = ""  # why the tier's load failed; empty if it did not
    kv_transfer: TransferUsage | None = None  # of blocks that it loaded from another worker or a tier


class TransferUsage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The cost of loading a request's KV, from a prefill worker or from a tier; see ``usage.kv_transfer``."""

    transport: Text = ""  # empty if nothing was transferred
    transferred_tokens: Count = 0
    transferred_bytes: Count = 0
    transfer_ms: Milliseconds = 0.0  # from the decision to load until the blocks could be used, verification apart
    verify_ms: Milliseconds = 0.0  # of seals and digests, after the last byte
    queue_ms: Milliseconds = 0.0  # on the decode worker, before its first step with the request, without the load;
    # of a prompt whose beginning a prefill worker has loaded from another worker: until that one had answered
    first_step_ms: Milliseconds = 0.0  # on the decode worker, from the start of that step to its first token
    verified_blocks: Count = 0
    early_tokens: Count = 0  # verified before the prompt was computed to its end; not among ``transferred_tokens``
    early_bytes: Count = 0  # read for them
    exposed_ms: Milliseconds = 0.0  # from the arrival of the finished prompt's request until all its KV was verified
    recomputed_tokens: Count = 0  # prompt tokens that should have been loaded and were computed
    fallback_reason: Text = ""  # why the load failed, in whole or in part; empty if it did not


class Tokens(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one choice. The hot message: one per choice and step, all of one step together in one frame.

    ``position`` is the index in the output of ``token_ids[0]``, so that a receiver detects a lost or repeated message.
    """

    request_id: Name
    index: ChoiceIndex
    position: Count
    token_ids: tuple[TokenId, ...]
    finish_reason: FinishReason | None = None
    stop_reason: TokenId | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    usage: Usage | None = None

    @property
    def is_whole(self) -> bool:
        """True if several tokens are all that the choice has: they came together, long after the first one was sampled."""
        return not self.position and self.finish_reason is not None and len(self.token_ids) > 1


class Usage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The worker's account of a request; attached to the first and the last ``Tokens`` of a choice.

    ``is_late``: the last one, of an engine that only then tells how many tokens of the prompt it did not compute.
    """

    num_cached_tokens: Count = 0
    is_late: bool = False
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    kv_transfer: TransferUsage | None = None


class RequestFailed(msgspec.Struct, frozen=True, kw_only=True, tag="fail", omit_defaults=True):
    """The worker cannot continue a request; its resources there are freed."""

    request_id: Name
    error: ErrorInfo


class EncodeDone(msgspec.Struct, frozen=True, kw_only=True, tag="edone", omit_defaults=True):
    """The embeddings of these items are computed, and held for their reader. ``errors`` has one for each other item."""

    request_id: Name
    ec_sources: ECSources
    errors: Annotated[tuple[ErrorInfo, ...], msgspec.Meta(max_length=MAX_NUM_FEATURES)] = ()
    num_cached: Count = 0  # items that were not computed again
    queue_ms: Milliseconds = 0.0
    encode_ms: Milliseconds = 0.0


class EncodeFailed(msgspec.Struct, frozen=True, kw_only=True, tag="efail", omit_defaults=True):
    """An encode worker cannot embed the items of a request; it keeps nothing of it. ``media_index`` names a bad image."""

    request_id: Name
    error: ErrorInfo
    media_index: MediaIndex | None = None


class Rejected(msgspec.Struct, frozen=True, kw_only=True, tag="rej", omit_defaults=True):
    """Answer to a frame that the worker cannot decode or may not accept, and that names no request: see ``RequestFailed``."""

    error: ErrorInfo


# ---- router → worker -------------------------------------------------------------------------------------------------


class Registered(msgspec.Struct, frozen=True, kw_only=True, tag="regok", omit_defaults=True):
    """The router has the worker in its membership: the answer to ``Register`` and to every ``Heartbeat`` of a member.

    ``router_id`` is new at every start of a router. A worker that hears nothing from a router for ``heartbeat_timeout_ms``
    aborts that router's requests. A heartbeat of an unknown worker is answered by ``Refused``; the worker then registers again.
    A router that ``takes_contents`` wants ``ContentReport``; with ``needs_snapshot`` the next one must be a snapshot.
    A router that ``plans_roles`` asks to be the only one that may change the worker's role. ``num_switches`` is that of the
    latest ``Register`` which the router has: the worker repeats its registration until it is its own.
    """

    router_id: Name
    heartbeat_interval_ms: WholeMilliseconds = 1000
    heartbeat_timeout_ms: WholeMilliseconds = 5000
    takes_contents: bool = False
    takes_parts: bool = False  # of the contents; else only the first part is reported
    needs_snapshot: bool = False
    plans_roles: bool = False
    num_switches: Count = 0


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="regno", omit_defaults=True):
    """The router does not accept the worker, or its frame; the message gives the reason."""

    error: ErrorInfo


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag="gen", omit_defaults=True):
    """Serve a request.

    To a prefill worker: ``handoff`` is True, it stops after the first token of each choice. To a decode worker:
    ``kv_handoff`` is set and ``choices`` holds the output of each live choice so far; prompt and output stay apart because
    penalties, limits, usage and random position depend on it. To a worker that continues a request of a lost worker:
    ``choices`` only, and it computes everything. To an aggregated worker that begins one: none of them.
    ``deadline_ms`` is a duration from sending; 0 = none. A worker that serves by priority computes a prompt as if it had
    arrived ``patience_ms`` later. Requests of different ``tenant`` share a worker fairly.
    """

    request_id: Name
    prompt_token_ids: tuple[TokenId, ...]
    sampling: SamplingParams
    n: NumChoices = 1
    handoff: bool = False
    kv_handoff: KVHandoff | None = None
    kv_source: KVSource | None = None  # where the beginning of the prompt may be loaded from instead of being computed
    choices: tuple[ChoiceStart, ...] = ()
    priority: int = 0
    patience_ms: WholeMilliseconds = 0
    tenant: Unsigned64 = 0  # names the client's API key, without revealing it; 0 = none
    cache_salt: str = ""
    deadline_ms: WholeMilliseconds = 0
    kv_load_failure_policy: LoadFailurePolicy | None = None  # None = the worker's own
    trace: TraceContext | None = None  # of the router's leg; None = the request is not traced
    mm_features: MMFeatures = ()  # in the order of the prompt, not overlapping
    media: MediaFiles = ()
    ec_sources: ECSources = ()  # of items whose embeddings an encode worker holds
    engine_request: bytes = b""  # JSON that the engine's own API has made of the client's body; only if it ``takes_calls``
    announces: bool = False  # a prefill worker reports each sealed chunk by ``PrefillProgress``


class ChoiceStart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One choice that a decode worker continues."""

    index: ChoiceIndex
    output_token_ids: tuple[TokenId, ...]


class EncodeRequest(msgspec.Struct, frozen=True, kw_only=True, tag="enc", omit_defaults=True):
    """Embed the items of a request and hold them for its prefill worker. An ``Abort`` ends it, too.

    Features with the same identifier are one item. ``deadline_ms`` is a duration from sending; 0 = none.
    """

    request_id: Name
    mm_features: MMFeatures
    media: MediaFiles
    priority: int = 0
    deadline_ms: WholeMilliseconds = 0
    trace: TraceContext | None = None  # as that of ``Generate``


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort", omit_defaults=True):
    """Stop these requests in any state, and free what they hold. Idempotent."""

    request_ids: tuple[Name, ...]
    reason: Text = "client"


class Release(msgspec.Struct, frozen=True, kw_only=True, tag="rel", omit_defaults=True):
    """Router → prefill worker: these handoffs will not be read. Idempotent."""

    transfer_ids: tuple[Name, ...]


class Renew(msgspec.Struct, frozen=True, kw_only=True, tag="ren", omit_defaults=True):
    """Router → prefill worker: keep these handoffs until the decode worker has accepted them."""

    transfer_ids: tuple[Name, ...]


class Drain(msgspec.Struct, frozen=True, kw_only=True, tag="drain", omit_defaults=True):
    """Take no new request, finish what runs, then say goodbye."""

    deadline_ms: WholeMilliseconds = 0


class SwitchRole(msgspec.Struct, frozen=True, kw_only=True, tag="role", omit_defaults=True):
    """Take requests of another role from now on; those of the present one, and their leases, run to their end.

    It is refused unless it names the present life and role of the worker, and a heartbeat that the worker has sent shortly
    before: what the router knows of the worker, and of its own right to change its role, is no older than that.
    """

    role: Role
    incarnation: Unsigned64
    num_switches: Count
    heartbeat: Count  # its ``number``
    reason: Text = ""


# A frame of the request plane holds one of these, or a list of ``Tokens`` (see ``core.wire.codec``).
WorkerMessage = (
    Register
    | RegisterEncoder
    | Heartbeat
    | ContentReport
    | Goodbye
    | SwitchRefused
    | PrefillProgress
    | PrefillDone
    | RequestFailed
    | EncodeDone
    | EncodeFailed
    | EngineReply
    | Rejected
)
RouterMessage = (
    Registered
    | Refused
    | Generate
    | MeetProducer
    | PullEarly
    | EncodeRequest
    | EngineCall
    | Abort
    | Release
    | Renew
    | Drain
    | SwitchRole
)
