"""A tier below a simulated store's memory that fails for a while, as a disk or a Redis server does, and then recovers.

While it is full it stores nothing new. While it is unreadable reads fail, and a disk forgets the blocks that it could not read.
A disk announces vanished blocks until one block of their file is read. The code of ``kvstore`` above it is the real one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from core.errors import Unavailable
from kvferry.sim.faults import Fault
from kvstore.testing.in_memory import DictTier
from kvstore.tiers.base import TierBlock


class SimLowerTier(DictTier):
    """A dictionary that fails on demand; with ``must_be_asked`` it behaves like Redis.

    ``now`` is the simulation's time in seconds. ``on_lost_read`` is called when a block that should be here cannot be read.
    """

    def __init__(self, now: Callable[[], float], on_lost_read: Callable[[], None], *, must_be_asked: bool) -> None:
        super().__init__(must_be_asked=must_be_asked)
        self.counts: Counter[str] = Counter()  # effects of the faults
        self._is_disk = not must_be_asked
        self._now = now
        self._on_lost_read = on_lost_read
        self._fails_until: dict[Fault, float] = {}
        self._announced: set[bytes] = set()  # blocks that have vanished, and were not read since
        self._lost: set[bytes] = set()  # all that have vanished, could not be read, or found no room

    def fail(self, kind: Fault, seconds: float) -> None:
        """Be full or unreadable for a time, or lose all blocks at once."""
        if kind is Fault.TIER_LOSS:
            self._lose_all()
        else:
            self._fails_until[kind] = max(self._fails_until.get(kind, 0.0), self._now() + seconds)

    def knows(self, key: bytes) -> bool | None:
        """Look up the index, unless only ``locate`` may."""
        if not self._is_disk:
            return None
        is_known = super().knows(key) or key in self._announced
        if not is_known and key in self._lost:
            self._on_lost_read()
        return is_known

    def locate(self, keys: Sequence[bytes]) -> list[bool]:
        """Look up; a failing server gives no answer.

        Raises:
            Unavailable: reads fail.
        """
        if not self._is_disk and self._has(Fault.TIER_UNREADABLE):
            raise self._failure("unanswered_questions")
        return [key in self.values or key in self._announced for key in keys]

    def load(self, key: bytes, target: memoryview) -> TierBlock | None:
        """Copy out.

        Raises:
            Unavailable: reads fail, or the file of the block is gone.
        """
        if self._has(Fault.TIER_UNREADABLE):
            self._on_lost_read()
            if self._is_disk:
                self._lost.add(key)
                self.values.pop(key, None)
            raise self._failure("failed_reads")
        if key in self._announced:
            self._on_lost_read()
            self._announced.clear()  # like all blocks of a file that cannot be read
            raise self._failure("vanished_reads")
        loaded = super().load(key, target)
        if loaded is None and key in self._lost:
            self._on_lost_read()
            self.counts["tier_missing_reads"] += 1
        return loaded

    def save(self, key: bytes, seal: bytes, block: memoryview) -> bool:
        """Copy in; False from a disk without room.

        Raises:
            Unavailable: a server has no room.
        """
        if self._has(Fault.TIER_FULL):
            self._lost.add(key)
            failure = self._failure("full_saves")
            if self._is_disk:
                return False
            raise failure
        self._announced.discard(key)
        return super().save(key, seal, block)

    def remove(self, key: bytes) -> None:
        """Forget."""
        self._announced.discard(key)
        super().remove(key)

    def _has(self, kind: Fault) -> bool:
        return self._now() < self._fails_until.get(kind, 0.0)

    def _lose_all(self) -> None:
        if self._is_disk:
            self._announced.update(self.values)
        self._lost.update(self.values)
        self.counts["tier_vanished_blocks"] += len(self.values)
        self.values.clear()

    def _failure(self, what: str) -> Unavailable:
        self.counts[f"tier_{what}"] += 1
        return Unavailable(f"{what} of a simulated tier")
