"""The file at the end of a segment log: starts it, writes records to it, and closes it.

This module owns the only descriptor that stays open, and the names of new files; it knows no index, limit or other files. The
first page of a file is written together with its first record, so a file to which no write has succeeded is empty. Such a file
is deleted when the log leaves it. If that fails as well, the file stays in the log, and can be started again.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from core.ids import IdSource
from core.rate_limit import LimitedLog
from kvstore.segment_file import (
    NONCE_BYTES,
    RECORD_HEADER_BYTES,
    Record,
    encode_file_header,
    encode_record_header,
    opened,
)


@dataclass(slots=True, eq=False)
class Segment:
    """A file of the log, with those of its records that are in the index."""

    path: Path
    nonce: bytes
    end: int  # 0 = nothing is written yet
    records: dict[bytes, Record] = field(default_factory=dict)
    retry_at: float = 0.0  # when its deletion may be tried again; 0 = none has failed


class SegmentWriter:
    """Starts files in a folder and writes at the end of the last one.

    ``discard`` deletes a file without a record.
    """

    def __init__(
        self, folder: Path, ids: IdSource, discard: Callable[[Segment], None], limited_log: LimitedLog, *, sync: bool
    ) -> None:
        self._folder = folder
        self._ids = ids
        self._discard = discard
        self._limited_log = limited_log
        self._sync = sync
        self._fd = -1
        self.active: Segment | None = None  # the file that is open
        self.last_number = 0

    def start(self) -> Segment:
        """Leave the active file and start a new one. Raises: OSError."""
        self.last_number += 1
        return self._open(Segment(self._folder / f"segment-{self.last_number:012}.kv", b"", 0), os.O_CREAT | os.O_EXCL)

    def restart(self, segment: Segment) -> Segment:
        """Leave the active file and start this one again, in which nothing is written. Raises: OSError."""
        return self._open(segment, os.O_TRUNC)

    def _open(self, segment: Segment, flags: int) -> Segment:
        self.leave()
        self._fd = os.open(segment.path, flags | os.O_RDWR | os.O_CLOEXEC, 0o600)
        segment.nonce = self._ids.bits(8 * NONCE_BYTES).to_bytes(NONCE_BYTES, "little")
        segment.retry_at = 0.0
        self.active = segment
        return segment

    def is_deleted(self) -> bool:
        """Return whether the active file was deleted meanwhile. Raises: OSError."""
        return os.fstat(self._fd).st_nlink == 0

    def write(self, record: Record, block: memoryview) -> None:
        """Write at the end of the active file. The rest of a failed write is cut off; if that fails, the file is left.

        Raises: OSError.
        """
        segment = self.active
        assert segment is not None
        padding = bytes(record.end - record.offset - RECORD_HEADER_BYTES - block.nbytes)
        pieces: list[bytes | memoryview] = [encode_record_header(segment.nonce, record), block, padding]
        if not segment.end:
            pieces.insert(0, encode_file_header(segment.nonce))
        try:
            _write_whole(self._fd, pieces, segment.end)
            if self._sync:
                self._flush(is_new=not segment.end)
        except OSError:
            try:
                os.ftruncate(self._fd, segment.end)
            except OSError:
                self.leave()
                segment.end = record.end  # the rest may be there, and counts
            raise

    def leave(self) -> None:
        """Close the active file for writing; never raises."""
        segment, self.active = self.active, None
        if segment is None:
            return
        try:
            os.close(self._fd)
        except OSError as error:  # of an earlier write, as some file systems report it; digests show which blocks it has cost
            self._limited_log.warning("kvstore_segment_close_failed", path=segment.path, error=error.strerror or error)
        if not segment.end:
            self._discard(segment)

    def _flush(self, *, is_new: bool) -> None:
        """Make what was written survive a loss of power, and the name of a new file as well."""
        os.fdatasync(self._fd)
        if is_new:
            with opened(self._folder, os.O_RDONLY | os.O_DIRECTORY) as folder:
                os.fsync(folder)


def _write_whole(fd: int, pieces: Sequence[bytes | memoryview], offset: int) -> None:
    """Write all bytes. A short write goes on, since only the next one tells why: no room, the limit of a file, a failure."""
    num_left = sum(memoryview(piece).nbytes for piece in pieces)
    while num_left:
        num_written = os.pwritev(fd, pieces, offset)
        if not num_written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        num_left -= num_written
        offset += num_written
        if num_left:
            pieces = [memoryview(b"".join(pieces))[num_written:]]
