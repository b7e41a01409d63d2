"""The memory tier: an index of blocks by packed key, over the slots of the arena and an eviction policy.

It knows no clients, messages or lower tiers. A block that is not saved in a lower tier yet is ``is_dirty`` and is not evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from core.errors import Full
from kvstore.arena import Arena
from kvstore.eviction import EvictionPolicy


@dataclass(slots=True, eq=False)
class Resident:
    """A block in the arena. ``is_ready`` is False while it is being written, until it is committed."""

    key: bytes
    slot: int
    generation: int
    num_bytes: int
    seal: bytes = b""
    is_ready: bool = False
    is_dirty: bool = False


class MemoryTier:
    """Blocks in an arena, by packed key."""

    def __init__(self, arena: Arena, policy: EvictionPolicy[bytes]) -> None:
        self.arena = arena
        self._policy = policy
        self._residents: dict[bytes, Resident] = {}
        self.on_forgotten: Callable[[bytes], None] = lambda key: None  # of a readable block
        self.num_evicted = 0
        self.num_dirty = 0
        self._num_evictable = 0  # readable, clean and not pinned: without any, the policy need not look through all blocks

    def __len__(self) -> int:
        return len(self._residents)

    def find(self, key: bytes) -> Resident | None:
        """Return the block if it can be read."""
        resident = self._residents.get(key)
        return resident if resident is not None and resident.is_ready else None

    def is_incoming(self, key: bytes) -> bool:
        """Return whether this block is being written."""
        resident = self._residents.get(key)
        return resident is not None and not resident.is_ready

    def reserve(self, key: bytes, num_bytes: int) -> Resident:
        """Reserve a slot for this block; evicts a block if no slot is free.

        Raises:
            Full: no block can be evicted, or the block is larger than a slot.
        """
        assert key not in self._residents, "a block has one slot"
        if not self.arena.num_free and num_bytes <= self.arena.slot_bytes:
            self._evict_one()
        slot = self.arena.reserve(num_bytes)
        resident = self._residents[key] = Resident(key, slot, self.arena.generation(slot), num_bytes)
        return resident

    def resize(self, resident: Resident, num_bytes: int) -> None:
        """Set the size of a block that is being written; at most the reserved size."""
        self.arena.resize(resident.slot, num_bytes)
        resident.num_bytes = num_bytes

    def commit(self, resident: Resident, seal: bytes, *, is_dirty: bool = False) -> None:
        """Make a written block readable."""
        self.arena.commit(resident.slot, seal)
        resident.seal = seal
        resident.is_ready = True
        resident.is_dirty = is_dirty
        self.num_dirty += is_dirty
        self._policy.insert(resident.key)
        self._num_evictable += self._is_evictable(resident)

    def abandon(self, resident: Resident) -> None:
        """Forget a block that is being written. The slot stays reserved for its writer until ``give_back``."""
        if self._residents.get(resident.key) is resident:
            del self._residents[resident.key]

    def give_back(self, resident: Resident) -> None:
        """Free the slot of an abandoned block after its writer has stopped."""
        self.arena.free(resident.slot)

    def use(self, keys: Sequence[bytes]) -> None:
        """Record a use of these blocks, given in the order of their prompt, in the eviction policy."""
        for key in reversed(keys):
            self._policy.use(key)

    def pin(self, resident: Resident) -> None:
        """Pin a block: it keeps its content until ``unpin``."""
        self._num_evictable -= self._is_evictable(resident)
        self.arena.pin(resident.slot)

    def unpin(self, resident: Resident) -> None:
        """Remove one pin."""
        self.arena.unpin(resident.slot)
        self._num_evictable += self._is_evictable(resident)

    def drop(self, key: bytes) -> bool:
        """Forget a block that failed verification; new gets miss it. Return False if it is unknown."""
        resident = self.find(key)
        if resident is None:
            return False
        self._policy.remove(key)
        self._forget(resident)
        return True

    def mark_clean(self, resident: Resident) -> None:
        """Mark a block as saved, or as refused by every lower tier: it can be evicted."""
        if resident.is_dirty:
            self.num_dirty -= 1
            resident.is_dirty = False
            self._num_evictable += self._is_evictable(resident)

    def content(self, resident: Resident) -> memoryview:
        """Return the writable bytes of a block."""
        return self.arena.content(resident.slot, resident.num_bytes)

    def dirty(self) -> Iterator[Resident]:
        """Yield the dirty blocks, roughly in the order of eviction."""
        for key in self._policy.candidates():
            resident = self._residents[key]
            if resident.is_dirty:
                yield resident

    def _evict_one(self) -> None:
        victim = self._policy.evict(self._can_evict) if self._num_evictable else None
        if victim is None:
            raise Full(f"all {self.arena.num_slots} blocks of the arena are in use")
        self.num_evicted += 1
        self._forget(self._residents[victim])

    def _can_evict(self, key: bytes) -> bool:
        resident = self._residents[key]
        return not resident.is_dirty and not self.arena.is_pinned(resident.slot)

    def _is_evictable(self, resident: Resident) -> bool:
        return self.find(resident.key) is resident and self._can_evict(resident.key)

    def _forget(self, resident: Resident) -> None:
        self.mark_clean(resident)
        self._num_evictable -= self._is_evictable(resident)
        del self._residents[resident.key]
        self.arena.free(resident.slot)
        self.on_forgotten(resident.key)
