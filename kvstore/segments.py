"""Blocks on disk: a log of segment files in a folder, and the index of what is in them.

Owns the folder, which file is written, and which goes when there is no room. Files only grow and are only deleted whole. So a
process can be killed at any byte: what ``append`` has returned for is found again, what it has not is a torn end, which the
next start cuts off. The digests of the file written last are checked at the start, those of the others when they are read.
Knows no memory, tiers or clients. Called by ``kvstore.tiers.disk``, on one thread, except ``in`` and the counts.

Room is made by the oldest file: what has been read since it was written is copied to the end of the log, up to half of the
file, and the file is deleted. That is a second chance as in CLOCK, and every round frees at least half a segment.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
from collections.abc import Iterator
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
    fd: int
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
        self._last_number = 0
        self.num_torn_bytes = 0  # cut off at the start
        self.num_dropped = 0  # blocks that went to make room
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock_fd = self._take_lock()
            self._recover()
        except OSError as error:
            raise ConfigError(
                f"kvstore.disk_path = {str(folder)!r} cannot be used: {error}", param="kvstore.disk_path"
            ) from None

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
        segment, offset = location.segment, location.record.offset
        location.is_used = True
        try:
            return read_record(segment.fd, segment.nonce, offset, key, target[: location.record.num_bytes])
        except OSError as error:
            raise Unavailable(f"{segment.path} cannot be read: {error}") from None

    def remove(self, key: bytes) -> None:
        """Forget a block. Its bytes stay until its file goes; after a restart it is found again, and found corrupt again."""
        location = self._index.pop(key, None)
        if location is not None:
            location.segment.records.pop(key, None)

    def close(self) -> None:
        """Close the files and let others use the folder."""
        for segment in self._segments:
            os.close(segment.fd)
        self._segments.clear()
        self._index.clear()
        self._active = None
        os.close(self._lock_fd)

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
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        size = os.fstat(fd).st_size
        nonce = decode_file_header(os.pread(fd, PAGE_BYTES, 0))
        segment = _Segment(number, path, fd, nonce or b"", PAGE_BYTES)
        for record in () if nonce is None else scan_records(fd, nonce, check_blocks=is_last):
            segment.end = record.end
            self._enter(segment, record)
        self.num_torn_bytes += max(0, size - segment.end)
        if not segment.records:
            os.close(fd)
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
        segment = self._segment_for(record_bytes(block.nbytes))
        record = Record(segment.end, block.nbytes, key, seal)
        padding = bytes(record.end - record.offset - RECORD_HEADER_BYTES - block.nbytes)
        pieces: list[bytes | memoryview] = [encode_record_header(segment.nonce, record), block, padding]
        try:
            num_written = os.pwritev(segment.fd, pieces, record.offset)
            if num_written != record.end - record.offset:
                raise OSError(errno.ENOSPC, "the disk is full")
            if self._sync:
                os.fdatasync(segment.fd)
        except OSError as error:
            self._cut_off(segment)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return False
            raise Unavailable(f"{segment.path} cannot be written: {error}") from None
        segment.end = record.end
        self._enter(segment, record)
        return True

    def _cut_off(self, segment: _Segment) -> None:
        """Remove what a failed write has left; if that fails as well, go on in another file."""
        try:
            os.ftruncate(segment.fd, segment.end)
        except OSError:
            self._active = None

    def _segment_for(self, num_bytes: int) -> _Segment:
        """Return the file that is written; a full one is followed by a new one."""
        active = self._active
        if active is not None and active.end + num_bytes <= max(self._segment_bytes, PAGE_BYTES + num_bytes):
            return active
        self._last_number += 1
        path = self._folder / f"segment-{self._last_number:012}.kv"
        nonce = self._ids.bits(8 * NONCE_BYTES).to_bytes(NONCE_BYTES, "little")
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            os.pwrite(fd, encode_file_header(nonce), 0)
            if self._sync:
                self._sync_folder(fd)
        except OSError as error:
            raise Unavailable(f"{path} cannot be made: {error}") from None
        self._active = _Segment(self._last_number, path, fd, nonce, PAGE_BYTES)
        self._segments.append(self._active)
        return self._active

    def _sync_folder(self, fd: int) -> None:
        """Make a new file's name survive a loss of power."""
        os.fsync(fd)
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

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
            self._active = None
        for block, record in self._survivors(segment):
            if not self._write(record.key, record.seal, block):
                break
        self._segments.remove(segment)
        for key in segment.records:
            del self._index[key]
            self.num_dropped += 1
        os.close(segment.fd)
        with contextlib.suppress(FileNotFoundError):
            segment.path.unlink()

    def _survivors(self, segment: _Segment) -> Iterator[tuple[memoryview, Record]]:
        """Yield what is handed on, the newest first, up to half of a segment."""
        num_left = min(self._segment_bytes, segment.end) // 2
        for record in reversed(list(segment.records.values())):
            num_left -= record_bytes(record.num_bytes) if self._index[record.key].is_used else 0
            if not self._index[record.key].is_used or num_left < 0:
                continue
            block = memoryview(bytearray(record.num_bytes))
            try:
                read_record(segment.fd, segment.nonce, record.offset, record.key, block)
            except (OSError, CorruptBlock):
                continue
            yield block, record
