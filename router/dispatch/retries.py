"""Whether a request may be retried on another worker after a failure, and whether the retry costs budget.

Owns what the failures of workers have cost one request. Knows neither its phase nor its messages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from core.errors import (
    CorruptBlock,
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

RetryKind = Literal["prefill", "handoff", "replay"]

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


@dataclass(slots=True)
class Retries:
    """The retries of one request, and the workers that caused them. Times are seconds of the router's clock."""

    blamed: list[WorkerKey] = field(default_factory=list)  # the workers whose failures count against its retries
    free: dict[str | WorkerKey, int] = field(
        default_factory=dict
    )  # since its last token, by reason; by worker those of its grammar
    kinds: list[RetryKind] = field(default_factory=list)  # of all retries, without refusals
    num_refusals: int = 0  # by decode workers that were full or draining, or could not compile its grammar then
    avoid: set[WorkerKey] = field(default_factory=set)  # workers that failed it
    refusing_until: dict[WorkerKey, float] = field(default_factory=dict)  # when workers that refused only it are asked again

    def take_free(self, error: ErrorInfo, failed: WorkerKey) -> bool:
        """Use a free retry; return False if the request has had too many since its last token.

        The limit ends a request that stalls every engine, or that keeps moving between workers without a token. Each worker may
        refuse its grammar as often as if there was no other.
        """
        if is_of_one_request(error):
            return self._count(failed) <= _FREE_IN_A_ROW
        limit = _FREE_IN_A_ROW if error.code != WorkerStalled.code else _FREE_STALLS_IN_A_ROW
        reason = _REFUSAL if is_refusal(error) else error.code
        return self._count(reason) <= limit

    def forgive(self, returned: WorkerKey) -> None:
        """Give back the retries that the loss of a process has cost which is there again, unless that has come too often."""
        if returned in self.blamed and self._count(_RETURN) <= _FREE_IN_A_ROW:
            self.blamed = [key for key in self.blamed if key != returned]

    def pause(self, refusing: WorkerKey, now: float) -> None:
        """Do not ask a worker for a while that has just refused only this request; for longer each time."""
        self.refusing_until[refusing] = now + _PAUSE_S * 2.0 ** min(self.free[refusing] - 1, _MAX_DOUBLINGS)

    def refusing(self, now: float) -> frozenset[WorkerKey]:
        """Return the workers that have refused only this request, and are not asked again yet."""
        return frozenset(key for key, until in self.refusing_until.items() if now < until)

    def on_token(self) -> None:
        """Count the free retries anew."""
        self.free.clear()

    def _count(self, reason: str | WorkerKey) -> int:
        """Count one more for this reason, or worker, and return how many there have been since the request's last token."""
        number = self.free.get(reason, 0) + 1
        self.free[reason] = number
        return number
