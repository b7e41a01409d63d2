"""Whether a request may be retried on another worker after a failure, and whether the retry costs budget.

``take_free_retry`` and ``forgive`` count in the request; the others change nothing.
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
from router.dispatch.members import WorkerKey, is_of_one_request
from router.dispatch.request_state import RequestState, RetryKind

# The worker cannot take the request now. It has computed nothing, unless its drain took too long or the request's grammar could
# not be had once more.
_REFUSALS = frozenset({NoWorker.code, Overloaded.code})
_REFUSAL = "refusal"  # the reason under which both are counted
_RETURN = "return"  # that under which losses are counted whose processes came back

_PAUSES = frozenset({RouterSilent.code, WorkerStalled.code})
_FREE_IN_A_ROW = 16
_FREE_STALLS_IN_A_ROW = 2

# A worker's free refusals of a request's grammar take three minutes: longer than all that may wait there take CPU time
# (``core.grammar.compiler``).
_PAUSE_S = 0.5
_MAX_DOUBLINGS = 5

# A worker ends a request with one of these only under the load failure policy "fail", which asks for the error.
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
    """Return True if the worker had no room for the request, or takes no requests any more."""
    return error.code in _REFUSALS


def is_worth_a_retry(error: ErrorInfo) -> bool:
    """Return True if another worker may succeed after this error."""
    return error.retryable and error.code not in _LOAD_FAILURES


def is_blameless(error: ErrorInfo) -> bool:
    """Return True for a pause of the router or the worker: neither has failed, so the retry costs no budget."""
    return error.code in _PAUSES


def take_free_retry(request: RequestState, error: ErrorInfo, failed: WorkerKey) -> bool:
    """Use a free retry; return False if the request has had too many since its last token.

    The limit ends a request that stalls every engine, or that keeps moving between workers without a token. Each worker may
    refuse its grammar as often as if there was no other.
    """
    if is_of_one_request(error):
        return _count(request, failed) <= _FREE_IN_A_ROW
    limit = _FREE_IN_A_ROW if error.code != WorkerStalled.code else _FREE_STALLS_IN_A_ROW
    reason = _REFUSAL if is_refusal(error) else error.code
    return _count(request, reason) <= limit


def pause_s(request: RequestState, failed: WorkerKey) -> float:
    """Return for how many seconds a worker that has just refused only this request is not asked again; more each time."""
    return _PAUSE_S * 2.0 ** min(request.free_retries[failed] - 1, _MAX_DOUBLINGS)


def forgive(request: RequestState, returned: WorkerKey) -> None:
    """Give back the retries that the loss of a process has cost which is there again, unless that has come too often."""
    if returned in request.blamed and _count(request, _RETURN) <= _FREE_IN_A_ROW:
        request.blamed = [key for key in request.blamed if key != returned]


def is_premature(request: RequestState, error: ErrorInfo, now: float) -> bool:
    """Return True if a worker ended the request at a deadline that the router has since extended for its own pause."""
    return error.code == DeadlineExceeded.code and request.extended_s > 0 and now < request.deadline


def kind_of(request: RequestState) -> RetryKind:
    """Return the kind of a retry in the request's current state."""
    if not request.has_begun:
        return "prefill"
    return "replay" if request.has_decoded else "handoff"


def _count(request: RequestState, reason: str | WorkerKey) -> int:
    """Count one more for this reason, or worker, and return how many there have been since the request's last token."""
    number = request.free_retries.get(reason, 0) + 1
    request.free_retries[reason] = number
    return number
