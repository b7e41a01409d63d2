"""Which workers hold which blocks: one entry per key, with the set of its holders.

A key is 8 bytes of the hash chain's value at the end of a block, so it names the whole prefix up to there. Equal sets of
holders are stored once. 64 bits are enough to choose a worker: a collision costs time only, since workers compare whole hashes.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Hashable, Iterable, Iterator, Sequence
from sys import getsizeof
from typing import Generic, TypeVar

import numpy as np

from router.contents.table import KeyTable

MAX_HOLDERS = 65_535  # workers at a time

Worker = TypeVar("Worker", bound=Hashable)


class ContentIndex(Generic[Worker]):
    """The keys of all workers with one block size and one model."""

    def __init__(self) -> None:
        self._table = KeyTable()
        self._sets = _HolderSets()
        self._numbers: dict[Worker, int] = {}
        self._workers: list[Worker | None] = []  # by number
        self._num_keys: list[int] = []  # by number
        self._free: list[int] = []  # numbers of forgotten workers

    def __len__(self) -> int:
        """The number of entries: keys of each worker, added up."""
        return sum(self._num_keys)

    @property
    def num_bytes(self) -> int:
        """Bytes of the table and of the sets, without Python's own lists and dicts of workers."""
        return self._table.num_bytes + self._sets.num_bytes

    def num_keys(self, worker: Worker) -> int:
        """Return how many keys a worker holds."""
        number = self._numbers.get(worker)
        return 0 if number is None else self._num_keys[number]

    def add(self, worker: Worker, keys: Iterable[int]) -> None:
        """Record that a worker holds these blocks; those known already stay.

        Raises: ValueError for more workers than ``MAX_HOLDERS``.
        """
        number = self._number(worker)
        for key in filter(None, keys):
            before = self._table.get(key)
            after = self._sets.with_holder(before, number)
            if after != before:
                self._num_keys[number] += 1
                self._table.set(key, after)

    def remove(self, worker: Worker, keys: Iterable[int]) -> None:
        """Record that a worker no longer holds these blocks; unknown ones are ignored."""
        number = self._numbers.get(worker)
        if number is None:
            return
        for key in keys:
            before = self._table.get(key)
            after = self._sets.without_holder(before, number)
            if after != before:
                self._num_keys[number] -= 1
                self._table.set(key, after)

    def forget(self, worker: Worker) -> None:
        """Forget a worker and all that it holds. Time grows with the index, about 3 ms per million slots."""
        number = self._numbers.pop(worker, None)
        if number is None:
            return
        if self._num_keys[number]:
            self._table.replace_values(self._sets.drop_holder(number))
        self._workers[number], self._num_keys[number] = None, 0
        self._free.append(number)

    def num_blocks_held(self, keys: Sequence[int]) -> dict[Worker, int]:
        """Return how many leading blocks of a prompt each worker holds, for the workers that hold any."""
        held: dict[Worker, int] = {}
        alive, alive_set = frozenset[int](), 0
        for depth, found in enumerate(self._table.find(keys)):
            if found == alive_set and depth:
                continue  # all that are alive hold this block, too
            holders = self._sets.members(found)
            left = holders if not depth else alive & holders
            for number in alive - left:
                held[self._worker(number)] = depth
            if not left:
                return held
            alive, alive_set = left, found
        return held | {self._worker(number): len(keys) for number in alive}

    def is_held(self, key: int) -> bool:
        """Return True if any worker holds a block."""
        return self._table.get(key) != 0

    def holds(self, worker: Worker, key: int) -> bool:
        """Return True if a worker holds a block."""
        number = self._numbers.get(worker)
        return number is not None and number in self._sets.members(self._table.get(key))

    def contents(self, worker: Worker) -> Iterator[int]:
        """Return the keys of one worker, in no order. Slow; for tests and checks."""
        number = self._numbers.get(worker)
        if number is not None:
            yield from (key for key, holders in self._table.items() if number in self._sets.members(holders))

    def _worker(self, number: int) -> Worker:
        worker = self._workers[number]
        assert worker is not None, "a forgotten worker is in no set"
        return worker

    def _number(self, worker: Worker) -> int:
        number = self._numbers.get(worker)
        if number is None:
            if not self._free and len(self._workers) == MAX_HOLDERS:
                raise ValueError(f"more than {MAX_HOLDERS} workers")
            if not self._free:
                self._free.append(len(self._workers))
                self._workers.append(None)
                self._num_keys.append(0)
            number = self._free.pop()
            self._workers[number] = worker
            self._numbers[worker] = number
        return number


class _HolderSets:
    """Sets of worker numbers, each stored once, named by a number; 0 is the empty set. A set that no key uses is dropped."""

    def __init__(self) -> None:
        self._sets: list[bytes] = [b""]  # the sorted worker numbers of each, as 16-bit integers
        self._names: dict[bytes, int] = {b"": 0}
        self._num_uses: array[int] = array("I", [0])
        self._free: list[int] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of the sets and of their names."""
        return getsizeof(self._names) + getsizeof(self._sets) + sum(map(getsizeof, self._names))

    def members(self, name: int) -> frozenset[int]:
        """Return the workers of a set."""
        return frozenset(memoryview(self._sets[name]).cast("H"))

    def with_holder(self, name: int, number: int) -> int:
        """Move one key to the set with this worker; return that set's name."""
        members = array("H", self._sets[name])
        if number in members:
            return name
        insort(members, number)
        return self._move(name, members.tobytes())

    def without_holder(self, name: int, number: int) -> int:
        """Move one key to the set without this worker; return that set's name."""
        members = array("H", self._sets[name])
        if number not in members:
            return name
        members.remove(number)
        return self._move(name, members.tobytes())

    def drop_holder(self, number: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        """Take a worker out of all sets; return the new name of each set by its old name."""
        new_names = np.arange(len(self._sets), dtype=np.uint32)
        for name in range(1, len(self._sets)):
            members = array("H", self._sets[name])
            if self._num_uses[name] and number in members:
                members.remove(number)
                num_uses = self._num_uses[name]
                new_names[name] = self._move(name, members.tobytes(), num_uses)
        return new_names

    def _move(self, before: int, members: bytes, num_keys: int = 1) -> int:
        """Move keys from one set to another."""
        after = self._names.get(members)
        if after is None:
            after = self._new(members)
        if after:
            self._num_uses[after] += num_keys
        if before:
            self._num_uses[before] -= num_keys
            if not self._num_uses[before]:
                del self._names[self._sets[before]]
                self._sets[before] = b""
                self._free.append(before)
        return after

    def _new(self, members: bytes) -> int:
        name = self._free.pop() if self._free else len(self._sets)
        if name == len(self._sets):
            self._sets.append(b"")
            self._num_uses.append(0)
        self._sets[name] = members
        self._names[members] = name
        return name
