"""Blocks on disk: a log of segment files in a folder, and the index of what is in them.

Owns the folder, which file is written, and which goes when there is no room. Files only grow and are only deleted whole. So a
process can be killed at any byte: what ``append`` has returned for is found again, what it has not is a torn end, which the
next start cuts off. The digests of the file written last are checked at the start, those of the others when they are read.
Knows no memory, tiers or clients. Called by ``kvstore.tiers.disk``, on one thread, except ``in`` and the counts.

Only the file that is written stays open; another is opened for each read, which costs nothing beside reading a block. So the
number of files has nothing to do with how many descriptors this process may have.

Room is made by the oldest file: what has been read since it was written is copied to the end of the log, up to half of the
file, and the file is deleted. That is a second chance as in CLOCK, and every round frees at least half a segment.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from core.errors import ConfigError, CorruptBlock, Unavailable
from core.ids import IdSource
from kvstore.segment_file import (
    NONCE_BYTES,
    PAGE_BYTES,
    RECORD_HEADER_BYTES,
    Record,
    decode_file_header,
    encode_file_header,
    encode_record_header,
    read_record,
    record_bytes,
    scan_records,
)

_NAME = re.compile(r"segment-([0-9]{12})\.kv")
_MIN_SEGMENTS = 4  # that the capacity is cut into at least


@dataclass(slots=True)
class _Segment:
    number: int
    path: Path
    nonce: bytes
    end: int
    records: dict[bytes, Record] = field(default_factory=dict)


@dataclass(slots=True)
class _Location:
    segment: _Segment
    record: Record
    is_used: bool = False  # since it was written


class SegmentLog:
    """Blocks by packed key in the files of a folder.

    Raises: ConfigError if the folder cannot be used, or another process uses it.
    """

    def __init__(self, folder: Path, capacity_bytes: int, segment_bytes: int, ids: IdSource, *, sync: bool = False) -> None:
        self._folder = folder
        self._capacity_bytes = capacity_bytes
        self._segment_bytes = min(segment_bytes, capacity_bytes // _MIN_SEGMENTS)
        self._ids = ids
        self._sync = sync
        self._index: dict[bytes, _Location] = {}
        self._segments: list[_Segment] = []  # the oldest first
        self._active: _Segment | None = None
        self._active_fd = -1
        self._last_number = 0
        self.num_torn_bytes = 0  # cut off at the start
        self.num_dropped = 0  # blocks that went to make room
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock_fd = self._take_lock()
        except OSError as error:
            raise self._unusable(error) from None
        try:
            self._recover()
        except OSError as error:
            os.close(self._lock_fd)
            raise self._unusable(error) from None

    def __contains__(self, key: bytes) -> bool:
        return key in self._index

    def __len__(self) -> int:
        return len(self._index)

    @property
    def used_bytes(self) -> int:
        """Size of all files, at most the capacity."""
        return sum(segment.end for segment in list(self._segments))

    def append(self, key: bytes, seal: bytes, block: memoryview) -> bool:
        """Write a block; when this returns True, it survives the death of this process. False if there is no room.

        Raises:
            Unavailable: the disk fails.
        """
        if key in self._index:
            return True
        if not self._make_room(record_bytes(block.nbytes)):
            return False
        return self._write(key, seal, block)

    def read(self, key: bytes, target: memoryview) -> Record | None:
        """Read a block into the beginning of ``target``; None if it is not there or does not fit.

        Raises:
            CorruptBlock: there is no such record where it was written.
            Unavailable: the disk fails.
        """
        location = self._index.get(key)
        if location is None or location.record.num_bytes > target.nbytes:
            return None
        location.is_used = True
        try:
            return _read(location.segment, location.record, target)
        except OSError as error:
            raise Unavailable(f"{location.segment.path} cannot be read: {error}") from None

    def remove(self, key: bytes) -> None:
        """Forget a block. Its bytes stay until its file goes; after a restart it is found again, and found corrupt again."""
        location = self._index.pop(key, None)
        if location is not None:
            location.segment.records.pop(key, None)

    def close(self) -> None:
        """Close the files and let others use the folder."""
        self._leave_active()
        self._segments.clear()
        self._index.clear()
        os.close(self._lock_fd)

    def _unusable(self, error: OSError) -> ConfigError:
        return ConfigError(f"kvstore.disk_path = {str(self._folder)!r} cannot be used: {error}", param="kvstore.disk_path")

    def _take_lock(self) -> int:
        fd = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise ConfigError(
                f"kvstore.disk_path = {str(self._folder)!r} is used by another process", param="kvstore.disk_path"
            ) from None
        return fd

    def _recover(self) -> None:
        """Find the complete records of all files; the file written last may end in a torn one."""
        found = sorted((int(match[1]), path) for path in self._folder.iterdir() if (match := _NAME.fullmatch(path.name)))
        for position, (number, path) in enumerate(found):
            self._last_number = number
            self._recover_file(number, path, is_last=position == len(found) - 1)

    def _recover_file(self, number: int, path: Path, *, is_last: bool) -> None:
        with _opened(path, os.O_RDWR) as fd:
            size = os.fstat(fd).st_size
            nonce = decode_file_header(os.pread(fd, PAGE_BYTES, 0))
            segment = _Segment(number, path, nonce or b"", PAGE_BYTES)
            for record in () if nonce is None else scan_records(fd, nonce, check_blocks=is_last):
                segment.end = record.end
                self._enter(segment, record)
            self.num_torn_bytes += max(0, size - segment.end)
            if not segment.records:
                path.unlink()
                return
            os.ftruncate(fd, segment.end)  # also lengthens a file whose last padding is missing
            self._segments.append(segment)

    def _enter(self, segment: _Segment, record: Record) -> None:
        earlier = self._index.get(record.key)
        if earlier is not None:
            earlier.segment.records.pop(record.key, None)
        segment.records[record.key] = record
        self._index[record.key] = _Location(segment, record)

    def _write(self, key: bytes, seal: bytes, block: memoryview) -> bool:
        try:
            segment = self._segment_for(record_bytes(block.nbytes))
            record = Record(segment.end, block.nbytes, key, seal)
            self._write_record(segment, record, block)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return False
            raise Unavailable(f"{self._folder} cannot be written: {error}") from None
        segment.end = record.end
        self._enter(segment, record)
        return True

    def _write_record(self, segment: _Segment, record: Record, block: memoryview) -> None:
        """Write at the end of the active file. What a failed write has left is removed, or another file is begun."""
        padding = bytes(record.end - record.offset - RECORD_HEADER_BYTES - block.nbytes)
        pieces: list[bytes | memoryview] = [encode_record_header(segment.nonce, record), block, padding]
        try:
            _write_whole(self._active_fd, pieces, record.offset)
            if self._sync:
                os.fdatasync(self._active_fd)
        except OSError:
            try:
                os.ftruncate(self._active_fd, segment.end)
            except OSError:
                self._leave_active()
            raise

    def _segment_for(self, num_bytes: int) -> _Segment:
        """Return the file that is written; a full one is followed by a new one."""
        active = self._active
        if active is not None and active.end + num_bytes <= max(self._segment_bytes, PAGE_BYTES + num_bytes):
            return active
        self._leave_active()
        self._last_number += 1
        path = self._folder / f"segment-{self._last_number:012}.kv"
        segment = _Segment(self._last_number, path, self._ids.bits(8 * NONCE_BYTES).to_bytes(NONCE_BYTES, "little"), PAGE_BYTES)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _write_whole(fd, [encode_file_header(segment.nonce)], 0)
            if self._sync:
                self._sync_folder(fd)
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        self._active, self._active_fd = segment, fd
        self._segments.append(segment)
        return segment

    def _leave_active(self) -> None:
        """Write no more into the file that has been written until now."""
        if self._active is not None:
            self._active = None
            os.close(self._active_fd)

    def _sync_folder(self, fd: int) -> None:
        """Make a new file's name survive a loss of power."""
        os.fsync(fd)
        with _opened(self._folder, os.O_RDONLY | os.O_DIRECTORY) as folder:
            os.fsync(folder)

    def _make_room(self, num_bytes: int) -> bool:
        """Delete the oldest files until a record fits, with room for what they hand on; False if it never fits."""
        reserve = 3 * PAGE_BYTES + self._segment_bytes // 2  # first pages of new files; survivors
        if num_bytes + reserve > self._capacity_bytes:
            return False
        while self.used_bytes + num_bytes + reserve > self._capacity_bytes:
            self._reclaim(self._segments[0])
        return True

    def _reclaim(self, segment: _Segment) -> None:
        """Hand on what was used, then delete the file. A crash in between leaves some blocks twice, which does no harm."""
        if segment is self._active:
            self._leave_active()
        for block, record in self._survivors(segment):
            if not self._write(record.key, record.seal, block):
                break
        self._segments.remove(segment)
        for key in segment.records:
            del self._index[key]
            self.num_dropped += 1
        segment.path.unlink(missing_ok=True)

    def _survivors(self, segment: _Segment) -> Iterator[tuple[memoryview, Record]]:
        """Yield what is handed on, the newest first, up to half of a segment."""
        num_left = min(self._segment_bytes, segment.end) // 2
        for record in reversed(list(segment.records.values())):
            num_left -= record_bytes(record.num_bytes) if self._index[record.key].is_used else 0
            if not self._index[record.key].is_used or num_left < 0:
                continue
            block = memoryview(bytearray(record.num_bytes))
            try:
                _read(segment, record, block)
            except (OSError, CorruptBlock):
                continue
            yield block, record


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _read(segment: _Segment, record: Record, target: memoryview) -> Record:
    with _opened(segment.path, os.O_RDONLY) as fd:
        return read_record(fd, segment.nonce, record.offset, record.key, target[: record.num_bytes])


def _write_whole(fd: int, pieces: Sequence[bytes | memoryview], offset: int) -> None:
    """Write all of it; a disk that takes only a part is full."""
    if os.pwritev(fd, pieces, offset) != sum(memoryview(piece).nbytes for piece in pieces):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
