"""How much a segment log may keep: the configured capacity, or what its file system holds if that is less.

Owns the measurement and the one warning. Measured at the start, for each new file, after a write that found no room, and for
each write while the limit is too small for a single record, so the limit also grows again when others leave room. A quota is
not seen in the measurement: there, smaller files are what ``on_full`` changes, so that each refused write costs a small part of
the blocks. Called by ``kvstore.segments`` only.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from core.log import event

_log = logging.getLogger(__name__)

MIN_SEGMENTS = 4  # that the space is cut into at least


class DiskSpace:
    """The limit of all files of a folder together, and of one of them."""

    def __init__(self, folder: Path, capacity_bytes: int, segment_bytes: int) -> None:
        self._folder = folder
        self._capacity_bytes = capacity_bytes
        self._max_segment_bytes = segment_bytes
        self._is_told = False
        self.limit_bytes = capacity_bytes

    @property
    def segment_bytes(self) -> int:
        """Size at which a file is followed by a new one."""
        return min(self._max_segment_bytes, self.limit_bytes // MIN_SEGMENTS)

    def measure(self, used_bytes: int) -> None:
        """Set the limit to what the file system can hold of the folder; ``used_bytes`` are there already.

        Raises:
            OSError: the file system does not answer.
        """
        state = os.statvfs(self._folder)
        self.limit_bytes = min(self._capacity_bytes, used_bytes + state.f_bavail * state.f_frsize)
        if self.limit_bytes < self._capacity_bytes:
            self._tell()

    def on_full(self, used_bytes: int) -> None:
        """Adapt to a write that has found no room."""
        self._max_segment_bytes = max(1, min(self._max_segment_bytes, used_bytes // MIN_SEGMENTS))
        self._tell()
        self.measure(used_bytes)

    def _tell(self) -> None:
        if self._is_told:
            return
        self._is_told = True
        _log.warning(
            event(
                "kvstore_disk_too_small",
                folder=self._folder,
                disk_bytes=self._capacity_bytes,
                usable_bytes=self.limit_bytes,
                fix="lower kvstore.disk_bytes, or give the file system more room; until then the oldest blocks go earlier",
            )
        )
