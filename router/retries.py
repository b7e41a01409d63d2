"""Whether a request that a worker has failed may go on elsewhere. Pure functions.

Knows errors and budgets, no workers: ``router.flows`` asks, ``router.policy`` says who comes next.
"""

from __future__ import annotations

from core.errors import (
    CorruptBlock,
    LayoutMismatch,
    LeaseExpired,
    NotFound,
    NoWorker,
    Overloaded,
    PeerUnreachable,
    StaleBlock,
    StoreError,
    TransferError,
    TransferTimeout,
    Unavailable,
)
from core.wire.messages import ErrorInfo
from router.flow import Flow, RetryKind

# A worker says so if it cannot take the request now; nothing has been computed.
_REFUSALS = frozenset({NoWorker.code, Overloaded.code})

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


def counts(flow: Flow, error: ErrorInfo) -> bool:
    """True if going on after this error uses up a part of the request's budget.

    Once the client has a token, a decode worker without room costs nothing: the request waits for its turn.
    """
    return not (is_refusal(error) and flow.num_output_tokens)


def kind_of(flow: Flow) -> RetryKind:
    """Return what a retry in the request's present state is called."""
    if not flow.num_output_tokens:
        return "prefill"
    return "replay" if flow.has_decoded else "handover"
