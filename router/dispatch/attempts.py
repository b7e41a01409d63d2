"""The names of requests on the wire: of which request each is, and which are over.

Every try of a request has a name of its own (``Flow.wire_id``), so that nothing a worker says of an earlier one is taken for
news. Owns what each name stands for, and for a while those whose late tokens are expected. Knows nothing of workers or
messages: ``router.dispatch.dispatcher`` calls it.
"""

from __future__ import annotations

from collections.abc import Iterable

from router.dispatch.request_state import Flow

_MAX_REMEMBERED = 4096  # names of tries that are over
_ABORT_AGAIN_S = 2.0  # a worker that still sends tokens so long after an abort has not got it


class Tries:
    """The present tries of all requests. Times are seconds of the router's clock."""

    def __init__(self) -> None:
        self._flows: dict[str, Flow] = {}
        self._aborted_at: dict[str, float] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._flows)

    def get(self, wire_id: str) -> Flow | None:
        """Return the request whose present try has this name."""
        return self._flows.get(wire_id)

    def find_requests(self, wire_ids: Iterable[str]) -> list[str]:
        """Return the ids of the requests whose present tries have these names, each once."""
        return list(dict.fromkeys(self._flows[wire_id].request_id for wire_id in wire_ids if wire_id in self._flows))

    def begin(self, flow: Flow) -> None:
        """Know a request by the name of its present try. Idempotent."""
        self._flows[flow.wire_id] = flow

    def begin_next(self, flow: Flow, now: float) -> None:
        """End the present try of a request, and give it a new name."""
        self.end(flow, now)
        flow.num_tries += 1
        self.begin(flow)

    def end(self, flow: Flow, now: float) -> None:
        """Let the name of a request's present try mean nothing any more."""
        del self._flows[flow.wire_id]
        self._note_abort(flow.wire_id, now)

    def take_abort(self, wire_id: str, now: float) -> bool:
        """Say whether who is at work on something that nobody waits for is to be told, which is noted.

        What was under way when it was told is no news.
        """
        aborted_at = self._aborted_at.get(wire_id)
        if aborted_at is not None and now < aborted_at + _ABORT_AGAIN_S:
            return False
        self._note_abort(wire_id, now)
        return True

    def _note_abort(self, wire_id: str, now: float) -> None:
        self._aborted_at.pop(wire_id, None)
        self._aborted_at[wire_id] = now
        while len(self._aborted_at) > _MAX_REMEMBERED:
            del self._aborted_at[next(iter(self._aborted_at))]
