"""The disk tier: a segment log (``kvstore.segments``) with the interface of a tier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from core.ids import IdSource
from kvstore.segments import SegmentLog
from kvstore.tiers.base import Tier, TierBlock


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """Folder and size. ``sync`` flushes every block to the device before it counts as stored."""

    folder: Path
    capacity_bytes: int
    segment_bytes: int
    sync: bool = False


class DiskTier(Tier):
    """Keeps blocks in files; finds them again after a restart.

    Raises: ConfigError if the folder cannot be used, or another process uses it.
    """

    name = "disk"

    def __init__(self, options: DiskOptions, ids: IdSource) -> None:
        self._log = SegmentLog(options.folder, options.capacity_bytes, options.segment_bytes, ids, sync=options.sync)

    def knows(self, key: bytes) -> bool:
        """Look up the index."""
        return key in self._log

    def locate(self, keys: Sequence[bytes]) -> list[bool]:
        """Look up the index."""
        return [key in self._log for key in keys]

    def load(self, key: bytes, target: memoryview) -> TierBlock | None:
        """Read a record."""
        record = self._log.read(key, target)
        return None if record is None else TierBlock(record.num_bytes, record.seal)

    def save(self, key: bytes, seal: bytes, block: memoryview) -> bool:
        """Append a record."""
        return self._log.append(key, seal, block)

    def remove(self, key: bytes) -> None:
        """Forget the block; its bytes are deleted with their file."""
        self._log.remove(key)

    def occupancy(self) -> tuple[int, int]:
        """Return the number of blocks and the size of the files."""
        return len(self._log), self._log.used_bytes

    def limit_bytes(self) -> int:
        """Return the capacity, or what the file system can hold if that is less."""
        return self._log.limit_bytes

    def num_lost_blocks(self) -> int:
        """Return the number of blocks whose file could not be read."""
        return self._log.num_lost

    def close(self) -> None:
        """Close the files."""
        self._log.close()
