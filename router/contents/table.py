"""A map from 64-bit keys to 32-bit values in 12 bytes per slot, for millions of keys.

Keys are parts of cryptographic hashes, so their bits are the hash. Open addressing with linear probing, in many small tables,
so that no insertion waits for more than one of them to grow. Tables without a key are one shared table, so that few keys take
little memory and little time.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

_NUM_TABLES_BITS = 10
_TABLE_MASK = (1 << _NUM_TABLES_BITS) - 1
_LEAST_SLOTS = 8
_FULLEST = 0.7  # share of slots that are used or were
_FULLEST_REBUILT = 0.45


class KeyTable:
    """Keys are 1 to 2^64 - 1; key 0 is never stored. A value of 0 is the same as no entry."""

    def __init__(self) -> None:
        self._keys = [array("Q", bytes(8 * _LEAST_SLOTS))] * (1 << _NUM_TABLES_BITS)
        self._values = [array("I", bytes(4 * _LEAST_SLOTS))] * (1 << _NUM_TABLES_BITS)
        self._num_used = [0] * (1 << _NUM_TABLES_BITS)  # slots with a key, also if its value is 0; 0 = the table is shared

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots, without those of the shared table."""
        return sum(12 * len(keys) for keys, num_used in zip(self._keys, self._num_used, strict=True) if num_used)

    def get(self, key: int) -> int:
        """Return the value of a key, 0 without one."""
        number = key & _TABLE_MASK
        return self._values[number][self._slot(number, key)]

    def find(self, keys: Iterable[int]) -> Iterator[int]:
        """Yield the value of each key, 0 without one: ``get`` without its calls, for a prompt's thousands of keys."""
        tables, values = self._keys, self._values
        for key in keys:
            number = key & _TABLE_MASK
            slots = tables[number]
            mask = len(slots) - 1
            slot = (key >> _NUM_TABLES_BITS) & mask
            while (found := slots[slot]) != key and found:
                slot = (slot + 1) & mask
            yield values[number][slot]

    def set(self, key: int, value: int) -> None:
        """Set the value of a key; 0 removes it."""
        number = key & _TABLE_MASK
        slot = self._slot(number, key)
        if not self._keys[number][slot]:
            if not (key and value):
                return
            if not self._num_used[number]:
                self._keys[number], self._values[number] = self._keys[number][:], self._values[number][:]
            self._keys[number][slot] = key
            self._num_used[number] += 1
        self._values[number][slot] = value
        if self._num_used[number] > _FULLEST * len(self._keys[number]):
            self._rebuild(number)

    def replace_values(self, new_values: npt.NDArray[np.uint32]) -> None:
        """Replace each value v by ``new_values[v]``; entry 0 is 0."""
        for values, num_used in zip(self._values, self._num_used, strict=True):
            if num_used:
                view = np.frombuffer(values, dtype=np.uint32)
                view[:] = new_values[view]

    def items(self) -> Iterator[tuple[int, int]]:
        """Every key with its value, in no order."""
        for keys, values, num_used in zip(self._keys, self._values, self._num_used, strict=True):
            if num_used:
                yield from ((key, value) for key, value in zip(keys, values, strict=True) if value)

    def _slot(self, number: int, key: int) -> int:
        """Return the slot of a key, or the one where it belongs."""
        keys = self._keys[number]
        mask = len(keys) - 1
        slot = (key >> _NUM_TABLES_BITS) & mask
        while (found := keys[slot]) != key and found:
            slot = (slot + 1) & mask
        return slot

    def _rebuild(self, number: int) -> None:
        """Move the live entries of one table to a new one with room for as many."""
        live = [(key, value) for key, value in zip(self._keys[number], self._values[number], strict=True) if value]
        num_slots = _LEAST_SLOTS
        while len(live) > _FULLEST_REBUILT * num_slots:
            num_slots *= 2
        self._keys[number], self._values[number] = array("Q", bytes(8 * num_slots)), array("I", bytes(4 * num_slots))
        self._num_used[number] = len(live)
        for key, value in live:
            slot = self._slot(number, key)
            self._keys[number][slot], self._values[number][slot] = key, value
