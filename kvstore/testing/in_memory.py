"""Parts of a store without files and shared memory, for tests and the simulation."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.arena import Arena
from kvstore.messages import ArenaFile
from kvstore.tiers.base import Tier, TierBlock


class MappableArena(Arena):
    """An arena of this process that claims that other processes can map it."""

    def describe(self) -> ArenaFile:
        """Return a file that nothing can map."""
        return ArenaFile(pid=1, fd=0, inode=1, num_bytes=self._memory.nbytes)


class DictTier(Tier):
    """A tier in a dictionary; with ``must_be_asked`` it behaves like Redis."""

    name = "dict"

    def __init__(self, *, must_be_asked: bool = False) -> None:
        self.values: dict[bytes, tuple[bytes, bytearray]] = {}
        self._must_be_asked = must_be_asked

    def knows(self, key: bytes) -> bool | None:
        """Look up, unless only ``locate`` may."""
        return None if self._must_be_asked else key in self.values

    def locate(self, keys: Sequence[bytes]) -> list[bool]:
        """Look up."""
        return [key in self.values for key in keys]

    def load(self, key: bytes, target: memoryview) -> TierBlock | None:
        """Copy out."""
        if key not in self.values:
            return None
        seal, content = self.values[key]
        target[: len(content)] = content
        return TierBlock(len(content), seal)

    def save(self, key: bytes, seal: bytes, block: memoryview) -> bool:
        """Copy in."""
        self.values.setdefault(key, (seal, bytearray(block)))
        return True

    def remove(self, key: bytes) -> None:
        """Forget."""
        self.values.pop(key, None)

    def close(self) -> None:
        """Keep everything: it outlives the store."""
