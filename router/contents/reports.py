"""Follows the workers' reports of their contents: what is known of each, and of which a snapshot is needed.

A report out of order, of another incarnation or with more keys than the worker has blocks makes its contents unknown until the
next snapshot. Unknown contents count as none: that costs time only.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from sys import byteorder

from core.wire.contents import ContentReport
from router.contents.index import ContentIndex
from router.dispatch.members import WorkerKey

ContentGroup = tuple[bytes, int]  # model fingerprint and block size: workers with the same names for the same blocks


@dataclass(slots=True)
class _Worker:
    group: ContentGroup
    num_blocks: int
    num_received: int = 0
    is_known: bool = False


class ReportedContents:
    """The contents of all workers that report them."""

    def __init__(self) -> None:
        self._workers: dict[WorkerKey, _Worker] = {}
        self._indexes: dict[ContentGroup, ContentIndex[WorkerKey]] = {}

    def join(self, worker: WorkerKey, group: ContentGroup, num_blocks: int) -> None:
        """Expect reports of this worker, from number 0 on; what was known of it is forgotten."""
        self.leave(worker)
        self._workers[worker] = _Worker(group, num_blocks)

    def leave(self, worker: WorkerKey) -> None:
        """Forget a worker."""
        state = self._workers.pop(worker, None)
        if state is None:
            return
        self._forget(worker, state)
        if all(other.group != state.group for other in self._workers.values()):
            self._indexes.pop(state.group, None)

    def is_known(self, worker: WorkerKey) -> bool:
        """Return True if the worker's contents are known as of its last report."""
        state = self._workers.get(worker)
        return state is not None and state.is_known

    def has_reported(self, worker: WorkerKey) -> bool:
        """Return True if the worker has sent a report since it joined."""
        state = self._workers.get(worker)
        return state is not None and state.num_received > 0

    @property
    def num_blocks(self) -> int:
        """How many blocks of all workers are known."""
        return sum(map(len, self._indexes.values()))

    @property
    def num_unknown_workers(self) -> int:
        """How many workers have reported and must send a snapshot."""
        return sum(state.num_received > 0 and not state.is_known for state in self._workers.values())

    def needs_snapshot(self, worker: WorkerKey, num_sent: int) -> bool:
        """Return True if a worker that has sent so many reports must send everything: some were lost, or are not believed."""
        state = self._workers.get(worker)
        if state is None:
            return False
        if state.num_received != num_sent:
            self.distrust(worker)
            state.num_received = num_sent
        return num_sent > 0 and not state.is_known

    def distrust(self, worker: WorkerKey) -> None:
        """Drop the contents of a worker whose claims do not hold, until its next snapshot."""
        state = self._workers.get(worker)
        if state is not None:
            self._forget(worker, state)

    def on_report(self, report: ContentReport) -> None:
        """Apply a report. Those of unknown workers are ignored."""
        worker = WorkerKey(report.engine_id, report.incarnation)
        state = self._workers.get(worker)
        if state is None:
            return
        if report.number != state.num_received and not report.is_snapshot:
            self._forget(worker, state)
        state.num_received = report.number + 1
        if report.is_snapshot:
            self._forget(worker, state)
            state.is_known = True
        if not state.is_known:
            return
        index = self._indexes.setdefault(state.group, ContentIndex())
        index.remove(worker, _keys(report.removed))
        index.add(worker, _keys(report.stored))
        if index.num_keys(worker) > state.num_blocks:
            self._forget(worker, state)

    def num_blocks_held(self, group: ContentGroup, keys: Sequence[int]) -> dict[WorkerKey, int]:
        """Return how many leading blocks each worker of a group holds, for those that hold any."""
        index = self._indexes.get(group)
        return index.num_blocks_held(keys) if index is not None else {}

    def contents(self, worker: WorkerKey) -> set[int]:
        """Return the keys of one worker. Slow; for checks."""
        state = self._workers.get(worker)
        index = self._indexes.get(state.group) if state is not None else None
        return set(index.contents(worker)) if index is not None else set()

    def _forget(self, worker: WorkerKey, state: _Worker) -> None:
        if state.is_known and state.group in self._indexes:
            self._indexes[state.group].forget(worker)
        state.is_known = False


def _keys(joined: bytes) -> array[int]:
    keys = array("Q")
    keys.frombytes(joined)
    if byteorder == "big":
        keys.byteswap()
    return keys
