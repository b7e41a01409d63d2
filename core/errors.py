"""Every error that kvferry raises on purpose, as one tree.

    KVFerryError
    ├── ConfigError                a wrong configuration key or value; names the field and the fix
    ├── RequestError               this request cannot be served
    │   ├── InvalidRequest         400  malformed or unsupported input; ``param`` names the field
    │   │   └── ContextTooLong     400  prompt (+ max_tokens) exceeds what the model or the pool can hold
    │   ├── ModelNotFound          404
    │   ├── Overloaded             429  admission refused for now
    │   │   └── OutOfResources     503  the machine is short of descriptors, memory or processes
    │   ├── NoWorker               503  no worker can serve it at the moment
    │   ├── DeadlineUnreachable    503  what is queued takes longer than the request may
    │   ├── EncoderInputMissing    503  embeddings of an image cannot be had, and the image is not at hand
    │   ├── WorkerStalled          503  the engine of the worker that has it makes no progress
    │   ├── RouterSilent           503  the worker gave it up: it took its router for dead
    │   ├── DeadlineExceeded       504  the request's own budget is used up
    │   └── Cancelled              499  the client went away, or an operator aborted it
    ├── TransferError              a handoff of KV blocks failed
    │   ├── PeerUnreachable · TransferTimeout · LayoutMismatch · LeaseExpired · StaleBlock · CorruptBlock
    ├── StoreError                 a KV store or tier failed
    │   ├── NotFound · Unavailable · Full
    ├── ProtocolError              a peer broke the wire protocol
    │   └── VersionMismatch        it speaks another version of it; both are named
    ├── EngineDead                 the engine thread has ended; the worker must restart
    ├── RoleSwitchRefused          409  a worker keeps its role
    ├── ConnectorUnavailable       a connector or transport cannot run here (library or device missing)
    └── StartFailed                a process of a local cluster did not start, or did not become ready

``code`` is stable: it is the label of the error counter and the ``code`` of an HTTP error body. ``retryable`` says whether
the same request may succeed on another worker or later. Errors cross processes as ``core.wire.messages.ErrorInfo``.
They are caught in three places only: request boundary, transfer boundary, worker main loop.
"""

from __future__ import annotations

from typing import ClassVar


class KVFerryError(Exception):
    """Base of all errors of kvferry."""

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: int = 0) -> None:
        super().__init__(message)
        self.message = message
        self.param = param  # the configuration key or request field at fault, if any
        self.retry_after_s = retry_after_s  # when another try may succeed; 0 = unknown


class ConfigError(KVFerryError):
    """A configuration key or value is wrong; the message names its path, the value and what is allowed."""

    code = "config_error"


class RequestError(KVFerryError):
    """Base of errors that end one request."""

    code = "request_error"


class InvalidRequest(RequestError):
    """The client's request is malformed or unsupported."""

    code = "invalid_request"
    http_status = 400


class ContextTooLong(InvalidRequest):
    """Prompt and output together exceed the context length, or can never fit the KV pool."""

    code = "context_length_exceeded"


class ModelNotFound(RequestError):
    """The request names a model that this cluster does not serve."""

    code = "model_not_found"
    http_status = 404


class Overloaded(RequestError):
    """Admission is refused for now; the client should retry."""

    code = "overloaded"
    http_status = 429
    retryable = True


class OutOfResources(Overloaded):
    """The machine is short of what the request needs, as file descriptors, for now; no rate of the client's is to blame."""

    http_status = 503


class NoWorker(RequestError):
    """No worker, or no compatible pair of workers, can take the request at the moment."""

    code = "no_worker"
    http_status = 503
    retryable = True


class EncoderInputMissing(RequestError):
    """The embeddings of an image cannot be had here: they did not arrive intact, and the image is not at hand or not usable."""

    code = "encoder_input_missing"
    http_status = 503
    retryable = True


class DeadlineUnreachable(RequestError):
    """The request would still wait when its time is up; ``retry_after_s`` says when that may change."""

    code = "deadline_unreachable"
    http_status = 503
    retryable = True


class WorkerStalled(RequestError):
    """The engine of the worker that has the request makes no progress, though its process lives."""

    code = "worker_stalled"
    http_status = 503
    retryable = True


class RouterSilent(RequestError):
    """A worker has received nothing from its router for so long that it has ended the router's requests."""

    code = "router_silent"
    http_status = 503
    retryable = True


class DeadlineExceeded(RequestError):
    """The request's own time budget is used up."""

    code = "deadline_exceeded"
    http_status = 504


class Cancelled(RequestError):
    """The client disconnected or an operator aborted the request."""

    code = "cancelled"
    http_status = 499


class TransferError(KVFerryError):
    """Base of the failures of a KV handoff."""

    code = "transfer_error"
    http_status = 502
    retryable = True


class PeerUnreachable(TransferError):
    """The peer refused the connection, vanished, or never existed."""

    code = "peer_lost"


class TransferTimeout(TransferError):
    """The transfer did not end before its deadline."""

    code = "deadline"


class LayoutMismatch(TransferError):
    """The two pools differ and no converter exists; the message holds both values."""

    code = "layout"
    retryable = False


class LeaseExpired(TransferError):
    """The prefill worker no longer holds the blocks."""

    code = "lease_expired"


class StaleBlock(TransferError):
    """A block's seal is not the expected one: it was reused, or belongs to another incarnation or prompt."""

    code = "stale"


class CorruptBlock(TransferError):
    """A block's bytes do not match the digest of its seal."""

    code = "digest"


class StoreError(KVFerryError):
    """Base of the failures of a KV store or tier."""

    code = "store_error"
    retryable = True


class NotFound(StoreError):
    """The store does not hold the key."""

    code = "store_miss"


class Unavailable(StoreError):
    """The store cannot be reached."""

    code = "store_unavailable"


class Full(StoreError):
    """The store is full, and nothing may be evicted."""

    code = "store_full"


def error_codes() -> tuple[str, ...]:
    """Return the code of every error of the tree."""
    kinds = [KVFerryError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return tuple(sorted({kind.code for kind in kinds}))


def fallback_reason(code: str) -> str:
    """Return the reason under which a failed load is counted and shown, for the code of its error.

    One of: stale, digest, peer_lost, deadline, layout, rejected, store_miss, embeddings.
    """
    return _FALLBACK_REASONS.get(code, "rejected")


class ProtocolError(KVFerryError):
    """A peer sent a frame that is malformed, oversized, of another version, or out of order."""

    code = "protocol_error"
    http_status = 502


class VersionMismatch(ProtocolError):
    """A peer speaks another version of a wire protocol. ``is_refusal`` if the peer reports it: this is never answered."""

    code = "version_mismatch"

    def __init__(self, *, ours: int, theirs: int, is_refusal: bool = False) -> None:
        refusal = "refuses ours and " if is_refusal else ""
        super().__init__(
            f"the peer {refusal}speaks wire version {theirs}, which is not supported: this process speaks {ours}; "
            "run the same release on both sides (docs/operations.md, Upgrading)"
        )
        self.ours = ours
        self.theirs = theirs
        self.is_refusal = is_refusal


class EngineDead(KVFerryError):
    """The engine thread ended; the worker has to be restarted."""

    code = "engine_dead"
    http_status = 503
    retryable = True


class RoleSwitchRefused(KVFerryError):
    """A worker keeps its role: it cannot change it, or what asked for the change does not know the worker's present state."""

    code = "role_switch_refused"
    http_status = 409
    retryable = True


class ConnectorUnavailable(KVFerryError):
    """A connector or transport cannot run here; the message says what is missing."""

    code = "connector_unavailable"


class StartFailed(KVFerryError):
    """A process of a local cluster ended before it was ready, or did not become ready in time."""

    code = "start_failed"


_FALLBACK_REASONS = {
    StaleBlock.code: "stale",
    LeaseExpired.code: "stale",
    CorruptBlock.code: "digest",
    PeerUnreachable.code: "peer_lost",
    TransferTimeout.code: "deadline",
    LayoutMismatch.code: "layout",
    NotFound.code: "store_miss",
    Unavailable.code: "store_miss",
    EncoderInputMissing.code: "embeddings",
}
FALLBACK_REASONS = tuple(sorted({*_FALLBACK_REASONS.values(), "rejected"}))  # what `fallback_reason` returns
