"""Attempts and their names on the wire: which request each name belongs to, and which attempts have ended.

Each attempt of a request has its own name (``RequestState.wire_id``), so a worker's late message about an earlier attempt
changes nothing. The names of ended attempts are kept for a while, because late tokens for them are expected.
"""

from __future__ import annotations

from collections.abc import Iterable

from core.wire.messages import Abort, ErrorInfo
from router.dispatch.members import WorkerKey
from router.dispatch.request_state import RequestState, SendToWorker

_MAX_REMEMBERED = 4096  # names of ended attempts
_ABORT_AGAIN_S = 2.0  # a worker that still sends tokens this long after an abort did not receive it


class Attempts:
    """The current attempts of all requests. Times are seconds of the router's clock."""

    def __init__(self) -> None:
        self._requests: dict[str, RequestState] = {}
        self._ended = EndedNames()

    def __len__(self) -> int:
        return len(self._requests)

    def get(self, wire_id: str) -> RequestState | None:
        """Return the request whose current attempt has this name."""
        return self._requests.get(wire_id)

    def find_requests(self, wire_ids: Iterable[str]) -> list[str]:
        """Return the ids of the requests whose current attempts have these names, each once."""
        return list(dict.fromkeys(self._requests[wire_id].request_id for wire_id in wire_ids if wire_id in self._requests))

    def begin(self, request: RequestState) -> None:
        """Register the name of a request's current attempt. Idempotent."""
        self._requests[request.wire_id] = request

    def begin_next(self, request: RequestState, previous_error: ErrorInfo | None, now: float) -> None:
        """End the current attempt of a request because of ``previous_error``, and begin the next one under a new name."""
        self.end(request, now)
        request.attempt = request.next_attempt(previous_error)
        self.begin(request)

    def end(self, request: RequestState, now: float) -> None:
        """Forget the name of a request's current attempt; late messages about it are ignored."""
        del self._requests[request.wire_id]
        self._ended.add(request.wire_id, now)

    def stop_stale(self, wire_id: str, worker: WorkerKey, now: float) -> list[SendToWorker]:
        """Abort a stale attempt at a worker that still sends tokens of it."""
        return self._ended.stop(wire_id, worker, now)


class EndedNames:
    """Names of attempts or calls that have ended, and when each was aborted last. Times are seconds of the router's clock."""

    def __init__(self) -> None:
        self._aborted_at: dict[str, float] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._aborted_at)

    def stop(self, wire_id: str, worker: WorkerKey, now: float) -> list[SendToWorker]:
        """Abort what has ended, or is not known, at a worker that still answers.

        Answers that were in flight when the last abort was sent cause no second one.
        """
        aborted_at = self._aborted_at.get(wire_id)
        if aborted_at is not None and now < aborted_at + _ABORT_AGAIN_S:
            return []
        self.add(wire_id, now)
        return [SendToWorker(worker, Abort(request_ids=(wire_id,), reason="unknown"))]

    def add(self, wire_id: str, now: float) -> None:
        """Record the end of an attempt or a call, or an abort after it."""
        self._aborted_at.pop(wire_id, None)
        self._aborted_at[wire_id] = now
        while len(self._aborted_at) > _MAX_REMEMBERED:
            del self._aborted_at[next(iter(self._aborted_at))]
