"""The size limit of a segment log: the configured capacity, or the room in its file system if that is less.

The file system is measured at the start, for each new file, after a write that found no room, and for each write while the
limit is too small for a single record, so the limit grows again when room becomes free. The measurement does not show a quota:
there ``on_full`` makes the files smaller, so that each refused write costs a small part of the blocks. They grow again with
what the log holds.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from core.log import event

_log = logging.getLogger(__name__)

MIN_SEGMENTS = 4  # at least, in the space


class DiskSpace:
    """The limit of all files of a folder together, and of one of them."""

    def __init__(self, folder: Path, capacity_bytes: int, segment_bytes: int) -> None:
        self._folder = folder
        self._capacity_bytes = capacity_bytes
        self._full_segment_bytes = segment_bytes
        self._max_segment_bytes = segment_bytes  # less after a write that has found no room
        self._has_warned = False
        self.limit_bytes = capacity_bytes

    @property
    def segment_bytes(self) -> int:
        """Size at which a new file is started."""
        return min(self._max_segment_bytes, self.limit_bytes // MIN_SEGMENTS)

    def measure(self, used_bytes: int) -> None:
        """Set the limit to what the file system can hold of the folder, and let files grow with the log.

        ``used_bytes`` is the current size of the log.

        Raises:
            OSError: the file system does not answer.
        """
        state = os.statvfs(self._folder)
        self.limit_bytes = min(self._capacity_bytes, used_bytes + state.f_bavail * state.f_frsize)
        self._max_segment_bytes = min(self._full_segment_bytes, max(self._max_segment_bytes, used_bytes // MIN_SEGMENTS))
        if self.limit_bytes < self._capacity_bytes:
            self._warn()

    def on_full(self, used_bytes: int) -> None:
        """Adapt to a write that has found no room."""
        self._max_segment_bytes = max(1, min(self._max_segment_bytes, used_bytes // MIN_SEGMENTS))
        self._warn()
        self.measure(used_bytes)

    def _warn(self) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        _log.warning(
            event(
                "kvstore_disk_too_small",
                folder=self._folder,
                disk_bytes=self._capacity_bytes,
                usable_bytes=self.limit_bytes,
                fix="lower kvstore.disk_bytes, or give the file system more room; until then the oldest blocks go earlier",
            )
        )
