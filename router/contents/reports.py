"""Follows the workers' reports of their contents: what is known of each, and of which a snapshot is needed.

A report out of order, of another incarnation or with more keys than the worker has blocks makes its contents unknown until the
next snapshot. Unknown contents count as none: that costs time only. A worker with too many keys is asked for snapshots less and
less often, since the next one is likely to have as many, until its contents have been known for a while.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from sys import byteorder
from typing import NamedTuple

from core.log import event
from core.wire.contents import DEVICE, HOST, STORE, ContentPart, ContentReport
from router.contents.index import ContentIndex
from router.contents.windows import Window, longest_hit
from router.dispatch.members import WorkerKey

logger = logging.getLogger(__name__)

ContentGroup = tuple[bytes, int]  # model fingerprint and block size: workers with the same names for the same blocks

_POOL = (ContentPart(),)
_MEDIA = frozenset({DEVICE, HOST, STORE})
_MAX_PAUSE = 64  # heartbeats


class _Kind(NamedTuple):
    """Parts with one kind are in one index. A store's is that of all its workers."""

    group: ContentGroup
    medium: str
    window: Window | None = None
    store: str = ""
    connector: str = ""


class BlocksInTier(NamedTuple):
    """How many blocks each worker can load from one tier."""

    medium: str
    connector: str
    num_blocks: dict[WorkerKey, int]


@dataclass(slots=True)
class _Worker:
    """A worker, with the kind and the most keys of each of its parts; None for parts of an unknown medium.

    ``num_excesses`` counts how often it had more keys, until its contents have been known for as many heartbeats as the longest
    pause lasts. After each, the next ``pause`` heartbeats ask for no snapshot.
    """

    group: ContentGroup
    parts: tuple[tuple[_Kind, int] | None, ...]
    num_received: int = 0
    is_known: bool = False
    num_excesses: int = 0
    pause: int = 0
    num_known: int = 0  # heartbeats since the contents are known

    @property
    def kinds(self) -> list[_Kind]:
        return [part[0] for part in self.parts if part is not None]


class ReportedContents:
    """The contents of all workers that report them."""

    def __init__(self) -> None:
        self._workers: dict[WorkerKey, _Worker] = {}
        self._indexes: dict[_Kind, ContentIndex[WorkerKey]] = {}

    def join(self, worker: WorkerKey, group: ContentGroup, num_blocks: int, parts: Sequence[ContentPart] = ()) -> None:
        """Expect reports of this worker, from number 0 on; what was known of it is forgotten."""
        self.leave(worker)
        self._workers[worker] = _Worker(group, tuple(_known_part(group, part, num_blocks) for part in parts or _POOL))

    def leave(self, worker: WorkerKey) -> None:
        """Forget a worker."""
        state = self._workers.pop(worker, None)
        if state is None:
            return
        self._forget(worker, state)
        for kind in state.kinds:
            if not any(kind in other.kinds for other in self._workers.values()):
                self._indexes.pop(kind, None)

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
        """How many blocks of all workers are known, each once for every part."""
        return sum(map(len, self._indexes.values()))

    @property
    def num_unknown_workers(self) -> int:
        """How many workers have reported and must send a snapshot."""
        return sum(state.num_received > 0 and not state.is_known for state in self._workers.values())

    def needs_snapshot(self, worker: WorkerKey, num_sent: int) -> bool:
        """Return True if a worker that has sent so many reports must send everything: some were lost, or are not believed.

        Call it for each heartbeat.
        """
        state = self._workers.get(worker)
        if state is None:
            return False
        if state.num_received != num_sent:
            self.distrust(worker)
            state.num_received = num_sent
        if state.is_known:
            state.num_known += 1
            if state.num_known >= _MAX_PAUSE:
                state.num_excesses = 0
        if state.is_known or not num_sent:
            return False
        is_paused = state.pause > 0
        state.pause -= is_paused
        return not is_paused

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
        part = state.parts[report.part] if report.part < len(state.parts) else None
        if not state.is_known or part is None:
            return
        kind, num_blocks = part
        index = self._indexes.get(kind)
        if index is None:
            index = self._indexes[kind] = ContentIndex()
        index.remove(worker, _keys(report.removed))
        index.add(worker, _keys(report.stored))
        if index.num_keys(worker) > num_blocks:
            self._forget(worker, state)
            self._note_excess(worker, state, num_blocks)

    def num_blocks_held(self, group: ContentGroup, keys: Sequence[int]) -> dict[WorkerKey, int]:
        """Return how many leading blocks of a prompt are hits in the pool of each worker of a group, for those that have any.

        Of a hybrid model a prefix is a hit only if the windows of its layers are there, too.
        """
        index = self._indexes.get(_Kind(group, DEVICE))
        found = index.num_blocks_held(keys) if index is not None else {}
        windows = {kind for kind in self._indexes if kind.group == group and kind.window is not None}
        return self._within_windows(windows, keys, found) if windows else found

    def num_blocks_in_tiers(
        self, group: ContentGroup, keys: Sequence[int], hits: Mapping[WorkerKey, int]
    ) -> Iterator[BlocksInTier]:
        """Yield for each tier how many blocks after its hits each worker of a group can load from there."""
        for kind, index in self._indexes.items():
            if kind.group != group or kind.medium == DEVICE:
                continue
            by_depth: dict[int, list[WorkerKey]] = {}
            for worker, state in self._workers.items():
                if kind in state.kinds:
                    by_depth.setdefault(hits.get(worker, 0), []).append(worker)
            num_blocks: dict[WorkerKey, int] = {}
            for depth, workers in by_depth.items():
                if kind.store:
                    held = dict.fromkeys(workers, sum(1 for _ in takewhile(index.is_held, keys[depth:])))
                else:
                    held = index.num_blocks_held(keys[depth:])
                num_blocks |= {worker: held[worker] for worker in workers if held.get(worker)}
            yield BlocksInTier(kind.medium, kind.connector, num_blocks)

    def contents(self, worker: WorkerKey, part: int = 0) -> set[int]:
        """Return the keys of one part of a worker. Slow; for checks."""
        state = self._workers.get(worker)
        known = state.parts[part] if state is not None else None
        index = self._indexes.get(known[0]) if known is not None else None
        return set(index.contents(worker)) if index is not None else set()

    def _within_windows(
        self, windows: Iterable[_Kind], keys: Sequence[int], found: Mapping[WorkerKey, int]
    ) -> dict[WorkerKey, int]:
        """Return the hits of workers with windows, given how many leading blocks of the other layers they have."""
        bounded = dict(found)
        for worker, state in self._workers.items():
            kinds = [kind for kind in state.kinds if kind in windows] if state.is_known else []
            is_all_windows = all(kind.window is not None for kind in state.kinds if kind.medium == DEVICE)
            depth = len(keys) if is_all_windows else found.get(worker, 0)
            if kinds and depth:
                checks = [(kind.window, partial(_holds, self._indexes[kind], worker, keys)) for kind in kinds if kind.window]
                bounded[worker] = longest_hit(depth, state.group[1], checks)
        return {worker: depth for worker, depth in bounded.items() if depth}

    def _note_excess(self, worker: WorkerKey, state: _Worker, num_blocks: int) -> None:
        if not state.num_excesses:
            fields = {"worker": worker.engine_id, "num_blocks": num_blocks}
            logger.warning(event("contents_exceed_cache", **fields, reason="it reports more blocks than it has"))
        state.num_excesses += 1
        state.pause = min(_MAX_PAUSE, 2**state.num_excesses)

    def _forget(self, worker: WorkerKey, state: _Worker) -> None:
        for kind in state.kinds if state.is_known else ():
            if kind in self._indexes:
                self._indexes[kind].forget(worker)
        state.is_known = False
        state.num_known = 0


def _holds(index: ContentIndex[WorkerKey], worker: WorkerKey, keys: Sequence[int], position: int) -> bool:
    return index.holds(worker, keys[position])


def _known_part(group: ContentGroup, part: ContentPart, num_blocks: int) -> tuple[_Kind, int] | None:
    if part.medium not in _MEDIA:
        return None
    window = Window(part.window, part.is_chunked) if part.window else None
    return _Kind(group, part.medium, window, part.store, part.connector), part.num_blocks or num_blocks


def _keys(joined: bytes) -> array[int]:
    keys = array("Q")
    keys.frombytes(joined)
    if byteorder == "big":
        keys.byteswap()
    return keys
