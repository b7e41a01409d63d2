"""An index of cached prefixes that one router makes from its own placements: what it sent to a worker is cached there.

Owns an estimate, bounded by each worker's capacity; the least recently used keys are evicted first, the ends of prompts before
their beginnings. It is right while one router uses the workers, and a false hit costs time only. Keys are for one process: they
chain Python's hash of integers, which is faster than a cryptographic one.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar
from zlib import crc32

KEY_TOKENS = 64  # tokens of one key

Key = int
Worker = TypeVar("Worker", bound=Hashable)


class PrefixIndex(Protocol[Worker]):
    """Which worker holds how much of a prompt."""

    def keys(self, token_ids: Sequence[int], salt: bytes) -> Sequence[Key]:
        """Return the keys of a prompt, from its beginning; equal keys = equal prefix and salt."""

    def hits(self, keys: Sequence[Key]) -> Mapping[Worker, int]:
        """Return how many leading tokens each worker holds; workers without any may be missing."""

    def on_placed(self, worker: Worker, keys: Sequence[Key], num_capacity_tokens: int) -> None:
        """Record that a prompt was sent to a worker."""

    def on_left(self, worker: Worker) -> None:
        """Forget a worker."""


class PlacedPrefixes(Generic[Worker]):
    """The index of own placements. The last token of a prompt is always computed, so no key covers it."""

    def __init__(self) -> None:
        self._held: dict[Worker, dict[Key, None]] = {}  # least recently used first
        self._holders: dict[Key, set[Worker]] = {}

    def __len__(self) -> int:
        """The number of keys of all workers."""
        return sum(map(len, self._held.values()))

    def keys(self, token_ids: Sequence[int], salt: bytes) -> list[Key]:
        """Return one key for each whole 64 tokens; time is linear in the prompt."""
        ids = tuple(token_ids)
        chained = crc32(salt)
        keys = []
        for end in range(KEY_TOKENS, len(ids), KEY_TOKENS):
            chained = hash((chained, ids[end - KEY_TOKENS : end]))
            keys.append(chained)
        return keys

    def hits(self, keys: Sequence[Key]) -> dict[Worker, int]:
        """Return how many leading tokens each worker holds, for the workers that hold any."""
        found: dict[Worker, int] = {}
        alive = self._holders.get(keys[0], set()) if keys else set()
        for depth, key in enumerate(keys):
            left = alive & self._holders.get(key, set())
            for worker in alive - left:
                found[worker] = depth * KEY_TOKENS
            alive = left
            if not alive:
                break
        for worker in alive:
            found[worker] = len(keys) * KEY_TOKENS
        return found

    def on_placed(self, worker: Worker, keys: Sequence[Key], num_capacity_tokens: int) -> None:
        """Count the prompt as held, and the least recently used keys beyond the capacity as evicted."""
        capacity = num_capacity_tokens // KEY_TOKENS
        held = self._held.setdefault(worker, {})
        for key in reversed(keys[:capacity]):
            if key in held:
                del held[key]
            else:
                self._holders.setdefault(key, set()).add(worker)
            held[key] = None
        while len(held) > capacity:
            key = next(iter(held))
            del held[key]
            self._discard(worker, key)

    def on_left(self, worker: Worker) -> None:
        """Forget a worker and all that it held."""
        for key in self._held.pop(worker, {}):
            self._discard(worker, key)

    def _discard(self, worker: Worker, key: Key) -> None:
        holders = self._holders[key]
        holders.discard(worker)
        if not holders:
            del self._holders[key]
