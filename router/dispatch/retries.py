"""Whether a request that a worker has failed may go on elsewhere. Pure functions.

Knows errors and budgets, no workers: ``router.dispatch.dispatcher`` asks, ``router.dispatch.policy`` says who comes next.
"""

from __future__ import annotations

from core.errors import (
    CorruptBlock,
    DeadlineExceeded,
    LayoutMismatch,
    LeaseExpired,
    NotFound,
    NoWorker,
    Overloaded,
    PeerUnreachable,
    RouterSilent,
    StaleBlock,
    StoreError,
    TransferError,
    TransferTimeout,
    Unavailable,
    WorkerStalled,
)
from core.wire.messages import ErrorInfo
from router.dispatch.request_state import RequestState, RetryKind

# A worker says so if it cannot take the request now; nothing has been computed.
_REFUSALS = frozenset({NoWorker.code, Overloaded.code})

_PAUSES = frozenset({RouterSilent.code, WorkerStalled.code})
_FREE_IN_A_ROW = 16
_FREE_STALLS_IN_A_ROW = 2

# A worker only ends a request by these under the policy "fail", by which the client asks to be told.
_LOAD_FAILURES = frozenset(
    kind.code
    for kind in (
        TransferError,
        PeerUnreachable,
        TransferTimeout,
        LayoutMismatch,
        LeaseExpired,
        StaleBlock,
        CorruptBlock,
        StoreError,
        NotFound,
        Unavailable,
    )
)


def is_refusal(error: ErrorInfo) -> bool:
    """True if the worker had no room for the request, or takes none any more."""
    return error.code in _REFUSALS


def is_worth_a_retry(error: ErrorInfo) -> bool:
    """True if another worker may succeed where one has failed the request with this error."""
    return error.retryable and error.code not in _LOAD_FAILURES


def is_free(request: RequestState, error: ErrorInfo) -> bool:
    """True if the request costs nothing by this error: once the client has a token, it waits for its turn."""
    return is_refusal(error) and bool(request.num_output_tokens)


def is_blameless(error: ErrorInfo) -> bool:
    """True if neither the request nor the worker's process has failed: a pause of either side, which costs no retry."""
    return error.code in _PAUSES


def take_free_retry(request: RequestState, error: ErrorInfo) -> bool:
    """Use a retry that costs none of the budget; False if there were too many since the request's last token.

    So a request that makes every engine hang, or that two sides hand to and fro, ends.
    """
    limit = _FREE_IN_A_ROW if error.code != WorkerStalled.code else _FREE_STALLS_IN_A_ROW
    number = request.free_retries.get(error.code, 0)
    request.free_retries[error.code] = number + 1
    return number < limit


def is_premature(request: RequestState, error: ErrorInfo, now: float) -> bool:
    """True if a worker's deadline has ended a request that has got more time since, as the router had stood still."""
    return error.code == DeadlineExceeded.code and request.pardoned_s > 0 and now < request.deadline


def kind_of(request: RequestState) -> RetryKind:
    """Return what a retry in the request's present state is called."""
    if not request.num_output_tokens:
        return "prefill"
    return "replay" if request.has_decoded else "handoff"
