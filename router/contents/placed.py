"""What the router knows of the workers' caches from its own placements: a prompt that was sent to a worker is cached there.

Two estimates by the keys of prompts (``router.contents.keys``). ``PendingPrefixes`` bridges the time until a worker reports the
blocks of a prompt, so the requests of a burst meet each other. ``PlacedPrefixes`` stands in for workers that report nothing; it
is bounded by each worker's capacity. A key names a whole prefix, and a worker that has a key has all shorter ones of that
prompt, so the length of a hit is found by bisection.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Worker = TypeVar("Worker", bound=Hashable)


@dataclass(frozen=True, slots=True)
class _Pending(Generic[Worker]):
    worker: Worker
    keys: Sequence[int]


class PendingPrefixes(Generic[Worker]):
    """The prompts at each worker whose blocks it has not reported yet."""

    def __init__(self) -> None:
        self._prompts: dict[str, _Pending[Worker]] = {}
        self._computed: dict[Worker, dict[str, None]] = {}  # they are in the worker's next report
        self._counts: dict[Worker, dict[int, int]] = {}  # by key, its prompts

    def __len__(self) -> int:
        """The number of prompts."""
        return len(self._prompts)

    def add(self, request_id: str, worker: Worker, keys: Sequence[int]) -> None:
        """Record that a prompt was sent; a known id is replaced. A prompt without keys leaves nothing to find."""
        self.drop(request_id)
        if not keys:
            return
        self._prompts[request_id] = _Pending(worker, keys)
        counts = self._counts.setdefault(worker, {})
        for key in keys:
            counts[key] = counts.get(key, 0) + 1

    def on_computed(self, request_id: str) -> None:
        """Record that the prompt is computed: the worker's next report tells what is left of it. Unknown ids are ignored."""
        pending = self._prompts.get(request_id)
        if pending is not None:
            self._computed.setdefault(pending.worker, {})[request_id] = None

    def on_reported(self, worker: Worker) -> None:
        """Drop the computed prompts of a worker that has reported."""
        for request_id in self._computed.pop(worker, {}):
            self.drop(request_id)

    def drop(self, request_id: str) -> None:
        """Forget a prompt. Unknown ids are ignored."""
        pending = self._prompts.pop(request_id, None)
        if pending is None:
            return
        self._computed.get(pending.worker, {}).pop(request_id, None)
        counts = self._counts[pending.worker]
        for key in pending.keys:
            counts[key] -= 1
            if not counts[key]:
                del counts[key]
        if not counts:
            del self._counts[pending.worker]

    def forget(self, worker: Worker) -> None:
        """Forget a worker."""
        self._counts.pop(worker, None)
        self._computed.pop(worker, None)
        self._prompts = {name: pending for name, pending in self._prompts.items() if pending.worker != worker}

    def num_blocks_held(self, keys: Sequence[int]) -> dict[Worker, int]:
        """Return how many leading blocks of a prompt each worker has or computes, for the workers that have any."""
        return _depths(self._counts, keys)


class PlacedPrefixes(Generic[Worker]):
    """The prompts that were sent to each worker, up to its capacity; the least recently used keys are evicted first."""

    def __init__(self) -> None:
        self._held: dict[Worker, dict[int, None]] = {}  # least recently used first

    def __len__(self) -> int:
        """The number of keys of all workers."""
        return sum(map(len, self._held.values()))

    def add(self, worker: Worker, keys: Sequence[int], num_blocks: int) -> None:
        """Count a prompt as held by a worker with so many blocks. The ends of prompts are evicted before their beginnings."""
        held = self._held.setdefault(worker, {})
        for key in reversed(keys[:num_blocks]):
            held.pop(key, None)
            held[key] = None
        while len(held) > num_blocks:
            del held[next(iter(held))]

    def forget(self, worker: Worker) -> None:
        """Forget a worker and all that it held."""
        self._held.pop(worker, None)

    def num_blocks_held(self, keys: Sequence[int]) -> dict[Worker, int]:
        """Return how many leading blocks of a prompt each worker holds, for the workers that hold any."""
        return _depths(self._held, keys)


def _depths(held: dict[Worker, dict[int, int]] | dict[Worker, dict[int, None]], keys: Sequence[int]) -> dict[Worker, int]:
    if not keys:
        return {}
    first = keys[0]
    return {worker: _depth(found, keys) for worker, found in held.items() if first in found}


def _depth(found: Collection[int], keys: Sequence[int]) -> int:
    """Return how many leading keys are in a set that has, with each key, all earlier ones."""
    return bisect_left(keys, True, key=lambda key: key not in found)
