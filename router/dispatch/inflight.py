"""Counts of what this router has in flight at each worker; heartbeats report the same load later.

Owns ``Member.num_inflight``: choices at prefill, decode and aggregated workers, images at encode workers; of these
``Member.num_reserved`` and ``Member.reserved_until``, at decode workers; and ``Member.num_inflight_tokens``, the most tokens of
these choices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from router.dispatch.members import Member, WorkerKey
from router.dispatch.request_state import InflightCount, RequestState


class InflightCounts:
    """Adds and removes counts. Picks are numbered, so that of equally loaded workers the one picked least recently is next."""

    def __init__(self) -> None:
        self._num_picks = 0

    def take(self, request: RequestState, worker: Member, count: int, *, is_reserved: bool = False) -> None:
        """Count ``count`` choices or images of a request at a worker, in place of what was counted there before.

        With ``is_reserved`` they are not there yet: another worker computes the prompt.
        """
        self.free(request, worker.key)
        self._num_picks += 1
        worker.last_picked = self._num_picks
        worker.num_inflight += count
        worker.num_inflight_tokens += count * request.submission.num_tokens
        if is_reserved:
            worker.num_reserved += count
            worker.reserved_until[request.request_id] = request.placed.prompt_until
        request.inflight[worker.key] = InflightCount(worker, count, is_reserved)

    def shrink(self, request: RequestState, key: WorkerKey | None, count: int) -> None:
        """Reduce the count at a worker to ``count`` if it is higher."""
        held = request.inflight.get(key) if key is not None else None
        if held is not None and count < held.count:
            held.worker.num_inflight -= held.count - count
            held.worker.num_inflight_tokens -= (held.count - count) * request.submission.num_tokens
            held.worker.num_reserved -= held.count - count if held.is_reserved else 0
            request.inflight[held.worker.key] = InflightCount(held.worker, count, held.is_reserved)

    @contextmanager
    def without(self, request: RequestState) -> Iterator[None]:
        """Leave out the counts of a request that looks for another route, on which it would free them."""
        held = list(request.inflight.values())
        _add(request, held, -1)
        try:
            yield
        finally:
            _add(request, held, 1)

    def free(self, request: RequestState, key: WorkerKey) -> None:
        """Remove the count at a worker, if there is one."""
        held = request.inflight.pop(key, None)
        if held is not None:
            held.worker.num_inflight -= held.count
            held.worker.num_inflight_tokens -= held.count * request.submission.num_tokens
            if held.is_reserved:
                held.worker.num_reserved -= held.count
                held.worker.reserved_until.pop(request.request_id, None)

    def free_all(self, request: RequestState) -> None:
        """Remove all counts of a request."""
        for key in list(request.inflight):
            self.free(request, key)


def _add(request: RequestState, counts: Iterable[InflightCount], sign: int) -> None:
    """Add counts of a request to those of its workers, or with -1 subtract them."""
    for held in counts:
        held.worker.num_inflight += sign * held.count
        held.worker.num_inflight_tokens += sign * held.count * request.submission.num_tokens
        held.worker.num_reserved += sign * held.count if held.is_reserved else 0
