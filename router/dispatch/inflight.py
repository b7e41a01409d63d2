"""Places of requests at workers: what the router itself has given them, of which their heartbeats tell later.

Owns the counts in ``Member.num_inflight``. Knows nothing of messages: ``router.dispatch.dispatcher`` and
``router.dispatch.encode_legs`` call it.
"""

from __future__ import annotations

from router.dispatch.members import Member, WorkerKey
from router.dispatch.request_state import Claim, Flow


class Claims:
    """Takes and frees places; picks are numbered, so that of equals the one longest not picked is next."""

    def __init__(self) -> None:
        self._num_picks = 0

    def take(self, flow: Flow, worker: Member, count: int) -> None:
        """Count choices, or images, of a request at a worker; a claim that it has there already is replaced."""
        self.free(flow, worker.key)
        self._num_picks += 1
        worker.last_picked = self._num_picks
        worker.num_inflight += count
        flow.claims[worker.key] = Claim(worker, count)

    def shrink(self, flow: Flow, key: WorkerKey | None, count: int) -> None:
        """Keep no more than ``count`` places at a worker."""
        claim = flow.claims.get(key) if key is not None else None
        if claim is not None and count < claim.count:
            claim.worker.num_inflight -= claim.count - count
            flow.claims[claim.worker.key] = Claim(claim.worker, count)

    def free(self, flow: Flow, key: WorkerKey) -> None:
        """Give up the places at a worker, if there are any."""
        claim = flow.claims.pop(key, None)
        if claim is not None:
            claim.worker.num_inflight -= claim.count

    def free_all(self, flow: Flow) -> None:
        """Give up all places of a request."""
        for key in list(flow.claims):
            self.free(flow, key)
