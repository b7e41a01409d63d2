"""Blocks on disk: a log of segment files in a folder, and the index of what is in them.

This module owns the folder and the choice of files to delete; it knows no memory, tiers or clients. ``SegmentWriter`` has the
file that is being written, the active one. Files only grow and are only deleted whole, so the process can be killed at any
byte: after a restart, every block whose ``append`` had returned is found, and a torn end is cut off. Digests in the file
written last are checked at the start, all others when a block is read. All calls come from one thread, except ``in`` and the
counts.

Only the active file stays open; every read opens its file, which takes far less time than reading a block. So the number of
files is not limited by the number of descriptors.

To make room, the log copies the blocks of the oldest file that were read since they were written to its end, up to half of the
file, and deletes the file. This is a second chance as in CLOCK, and every round frees at least half a segment.

If a file cannot be read any more (it was deleted, or the device fails), the log forgets all its blocks at the first failure:
they are misses and can be written again. If a write fails, and not for lack of room, the active file keeps its blocks, and the
next block goes to a new file. A file that cannot be deleted to make room keeps its blocks; it still counts, its deletion is
retried, and the next oldest file is deleted instead. If such files alone leave no room, the log takes no more blocks, and keeps
the others.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from core.errors import ConfigError, CorruptBlock, Unavailable
from core.ids import IdSource
from core.log import event
from core.rate_limit import LimitedLog
from kvstore.disk_space import MIN_SEGMENTS, DiskSpace
from kvstore.segment_file import (
    PAGE_BYTES,
    Record,
    decode_file_header,
    has_record,
    opened,
    read_record,
    record_bytes,
    scan_records,
)
from kvstore.segment_writer import Segment, SegmentWriter

_log = logging.getLogger(__name__)

_NAME = re.compile(r"segment-([0-9]{12})\.kv")
_RETRY_S = 10.0  # between two attempts to delete a file
_MAX_DELETIONS = 4  # attempts in a row that may fail: each can take long, and first copies blocks
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_OUR_OWN_LACK = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # of descriptors or memory, which is no fault of the file


@dataclass(slots=True)
class _Location:
    segment: Segment
    record: Record
    is_used: bool = False  # since it was written


class SegmentLog:
    """Blocks by packed key in the files of a folder. ``now`` is a monotonic clock, in seconds.

    Raises: ConfigError if the folder cannot be used, or another process uses it.
    """

    def __init__(
        self,
        folder: Path,
        capacity_bytes: int,
        segment_bytes: int,
        ids: IdSource,
        *,
        sync: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        try:
            self._folder = folder.absolute()  # also after a change of the working directory
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock_fd = self._take_lock()
        except OSError as error:
            raise self._unusable(error) from None
        self._space = DiskSpace(self._folder, capacity_bytes, min(segment_bytes, capacity_bytes // MIN_SEGMENTS))
        self._now = now
        self._limited_log = LimitedLog(_log, now)  # each deletion is retried
        self._index: dict[bytes, _Location] = {}
        self._segments: list[Segment] = []  # the oldest first; without blocks if it could not be deleted, or is new
        self._writer = SegmentWriter(self._folder, ids, self._discard, self._limited_log, sync=sync)
        self.num_torn_bytes = 0  # cut off at the start
        self.num_dropped = 0  # blocks that were deleted to make room
        self.num_lost = 0  # blocks whose file could not be read
        try:
            self._recover()
            self._space.measure(self.used_bytes)
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

    @property
    def limit_bytes(self) -> int:
        """Limit of all files: the capacity, or what the file system can hold if that is less."""
        return self._space.limit_bytes

    def append(self, key: bytes, seal: bytes, block: memoryview) -> bool:
        """Write a block; when this returns True, it survives the death of this process. False if there is no room.

        Raises:
            Unavailable: the disk fails.
        """
        if self._still_has(key):
            return True
        if not self._make_room(record_bytes(block.nbytes)):
            return False
        return self._write(key, seal, block) or (self._give_way() and self._write(key, seal, block))

    def read(self, key: bytes, target: memoryview) -> Record | None:
        """Read a block into the beginning of ``target``; None if the log lacks it.

        Raises:
            CorruptBlock: the record is damaged, or larger than ``target``.
            Unavailable: the disk fails; the blocks of a file that cannot be read are forgotten.
        """
        location = self._index.get(key)
        if location is None:
            return None
        if location.record.num_bytes > target.nbytes:
            raise CorruptBlock(f"a block of {location.record.num_bytes} bytes, and a slot has {target.nbytes}")
        location.is_used = True
        try:
            return _read(location.segment, location.record, target)
        except OSError as error:
            self._lose(location.segment, error)
            raise Unavailable(f"{location.segment.path} cannot be read: {error}") from None

    def remove(self, key: bytes) -> None:
        """Forget a block. Its bytes stay until its file is deleted, so it reappears after a restart."""
        location = self._index.pop(key, None)
        if location is not None:
            location.segment.records.pop(key, None)

    def close(self) -> None:
        """Close the files and release the folder."""
        self._writer.leave()
        self._segments.clear()
        self._index.clear()
        os.close(self._lock_fd)

    def _unusable(self, error: OSError) -> ConfigError:
        return ConfigError(f"kvstore.disk_path = {str(self._folder)!r} cannot be used: {error}", param="kvstore.disk_path")

    def _take_lock(self) -> int:
        fd = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise ConfigError(
                f"kvstore.disk_path = {str(self._folder)!r} is used by another process", param="kvstore.disk_path"
            ) from None
        except OSError:
            os.close(fd)
            raise
        return fd

    def _recover(self) -> None:
        """Find the complete records of all files; the file written last may end in a torn one."""
        found = sorted((int(match[1]), path) for path in self._folder.iterdir() if (match := _NAME.fullmatch(path.name)))
        for position, (number, path) in enumerate(found):
            self._writer.last_number = number
            try:
                self._recover_file(path, is_last=position == len(found) - 1)
            except OSError as error:  # of this file alone: the others serve
                if error.errno in _OUR_OWN_LACK:
                    raise
                stub = self._stub(path)
                self._segments.append(stub)
                self._lose(stub, error)

    def _stub(self, path: Path) -> Segment:
        """Return a segment of which only the size is known."""
        try:
            return Segment(path, b"", path.stat().st_size)
        except OSError:
            return Segment(path, b"", 0)

    def _recover_file(self, path: Path, *, is_last: bool) -> None:
        """Enter the records of a file, none of them if it fails before its end; delete a file without any."""
        with opened(path, os.O_RDWR) as fd:
            size = os.fstat(fd).st_size
            nonce = decode_file_header(os.pread(fd, PAGE_BYTES, 0))
            records = [] if nonce is None else list(scan_records(fd, nonce, check_blocks=is_last))
            end = records[-1].end if records else size
            if records:
                os.ftruncate(fd, end)  # also lengthens a file whose last padding is missing
        segment = Segment(path, nonce or b"", end)
        self._segments.append(segment)
        for record in records:
            self._enter(segment, record)
        if not records:
            self._discard(segment)
        self.num_torn_bytes += max(0, size - end)

    def _enter(self, segment: Segment, record: Record) -> None:
        earlier = self._index.get(record.key)
        if earlier is not None:
            earlier.segment.records.pop(record.key, None)
        segment.records[record.key] = record
        self._index[record.key] = _Location(segment, record)

    def _write(self, key: bytes, seal: bytes, block: memoryview) -> bool:
        """Write at the end of the log; False if the file system has no room. Raises: Unavailable."""
        try:
            self._put(key, seal, block)
        except OSError as error:
            self._no_room(error)
            return False
        return True

    def _put(self, key: bytes, seal: bytes, block: memoryview) -> None:
        """Write at the end of the log. Raises: OSError."""
        segment = self._segment_for(record_bytes(block.nbytes))
        record = Record(segment.end or PAGE_BYTES, block.nbytes, key, seal)
        self._writer.write(record, block)
        segment.end = record.end
        self._enter(segment, record)

    def _no_room(self, error: OSError) -> None:
        """Return if a write failed for want of room. After any other error a new file is started. Raises: Unavailable."""
        if error.errno not in _NO_ROOM:
            self._writer.leave()  # its descriptor, or the place of its end, may be the cause
            raise Unavailable(f"{self._folder} cannot be written: {error}") from None

    def _segment_for(self, num_bytes: int) -> Segment:
        """Return the active file; start a new one if it is full, or was deleted."""
        active = self._writer.active
        if active is not None and self._writer.is_deleted():
            self._lose(active, OSError(errno.ENOENT, "it was deleted while it was written"))
            active = None
        if active is not None and active.end + num_bytes <= max(self._space.segment_bytes, PAGE_BYTES + num_bytes):
            return active
        self._space.measure(self.used_bytes)
        return self._start()

    def _start(self) -> Segment:
        """Start a file: the last one again if it is empty and can be opened, so that files that stay do not pile up."""
        last = self._segments[-1] if self._segments else None
        if last is not None and not last.end:
            try:
                return self._writer.restart(last)
            except OSError as error:
                if error.errno in _OUR_OWN_LACK:
                    raise
        segment = self._writer.start()
        self._segments.append(segment)
        return segment

    def _make_room(self, num_bytes: int) -> bool:
        """Delete the oldest files until a record and their surviving blocks fit; False if that is impossible."""
        if num_bytes + self._reserve_bytes > self.limit_bytes:
            self._measure_again()
        reserve = self._reserve_bytes
        if num_bytes + reserve > self.limit_bytes:
            return False
        while self.used_bytes + num_bytes + reserve > self.limit_bytes:
            stuck = [segment for segment in self._segments if segment.retry_at]
            leaves_room = sum(segment.end for segment in stuck) + num_bytes + reserve <= self.limit_bytes
            if not self._reclaim_oldest(self._segments if leaves_room else stuck):  # else no other file would help
                return False
        return True

    @property
    def _reserve_bytes(self) -> int:
        """Return the room reserved for the first pages of new files, and for survivors."""
        return _reserve_bytes(self._space.segment_bytes)

    def _measure_again(self) -> None:
        """Measure the space again: a disk that had no room for a single record may have some now."""
        try:
            self._space.measure(self.used_bytes)
        except OSError as error:
            raise self._unmeasurable(error) from None

    def _unmeasurable(self, error: OSError) -> Unavailable:
        return Unavailable(f"{self._folder} cannot be measured: {error}")

    def _give_way(self) -> bool:
        """Adapt to a file system that is full before the capacity is reached; True if a deleted file makes a retry useful.

        The file that is being written may be the only one that could be deleted; then it is only closed, and deleted when the
        next block finds no room.
        """
        try:
            self._space.on_full(self.used_bytes)
        except OSError as error:
            raise self._unmeasurable(error) from None
        if self._reclaim_oldest([segment for segment in self._segments if segment is not self._writer.active]):
            return True
        self._writer.leave()
        return False

    def _still_has(self, key: bytes) -> bool:
        """Return whether a known block is in its file; if not, forget it, so that it can be written again."""
        location = self._index.get(key)
        if location is None:
            return False
        segment = location.segment
        try:
            with opened(segment.path, os.O_RDONLY) as fd:
                is_there = has_record(fd, segment.nonce, location.record)
        except OSError as error:
            self._lose(segment, error)
            if key in self._index:
                raise Unavailable(f"{segment.path} cannot be read: {error}") from None
            return False
        if not is_there:
            self.remove(key)
        return is_there

    def _lose(self, segment: Segment, error: OSError) -> None:
        """Forget the blocks of a file that cannot be read."""
        if error.errno in _OUR_OWN_LACK:
            return
        num_blocks = len(segment.records)
        _log.warning(event("kvstore_segment_lost", path=segment.path, blocks=num_blocks, error=error.strerror or error))
        self.num_lost += num_blocks
        if segment is self._writer.active:
            self._writer.leave()
        self._drop_blocks(segment)
        self._discard(segment)

    def _discard(self, segment: Segment) -> None:
        """Delete a file without blocks; if that fails, it stays in the list, and counts."""
        if self._delete(segment):
            self._forget(segment)

    def _forget(self, segment: Segment) -> None:
        """Remove a deleted file and its blocks from the index."""
        if segment in self._segments:  # it may have been lost meanwhile
            self._segments.remove(segment)
        self._drop_blocks(segment)

    def _drop_blocks(self, segment: Segment) -> None:
        for key in segment.records:
            del self._index[key]
        segment.records.clear()

    def _delete(self, segment: Segment) -> bool:
        """Delete a file; False if that fails: it still counts then, and is tried again after a while."""
        try:
            segment.path.unlink(missing_ok=True)
        except OSError as error:
            self._limited_log.warning("kvstore_segment_not_deleted", path=segment.path, error=error.strerror or error)
            segment.retry_at = self._now() + _RETRY_S
            return False
        return True

    def _reclaim_oldest(self, segments: Sequence[Segment]) -> bool:
        """Make room by the oldest of these files that can be deleted; False if that is none of the first few.

        Of those whose deletion has failed before, one goes first and the others last, so that they cannot hide all others.
        """
        now = self._now()
        fresh = [segment for segment in segments if not segment.retry_at]
        failed = sorted((segment for segment in segments if 0 < segment.retry_at <= now), key=lambda segment: segment.retry_at)
        candidates = [*failed[:1], *fresh, *failed[1:]]
        return any(self._reclaim(segment) for segment in candidates[:_MAX_DELETIONS])

    def _reclaim(self, segment: Segment) -> bool:
        """Copy the used blocks to the end of the log, then delete the file; if that is impossible, it keeps the others.

        A crash in between leaves harmless duplicates.
        """
        if segment is self._writer.active:
            self._writer.leave()
        for block, record in self._survivors(segment):
            if self.used_bytes + record_bytes(record.num_bytes) + PAGE_BYTES > self.limit_bytes:
                break
            try:
                self._put(record.key, record.seal, block)
            except OSError as error:
                if error.errno == errno.EFBIG:  # no file may become so large: it might cost each later save, too
                    self._index[record.key].is_used = False
                self._no_room(error)
                break
        if not self._delete(segment):
            return False
        self.num_dropped += len(segment.records)
        self._forget(segment)
        return True

    def _survivors(self, segment: Segment) -> Iterator[tuple[memoryview, Record]]:
        """Yield the used blocks, the newest first, up to half of a segment; what cannot be read is left out.

        Raises:
            Unavailable: the process lacks what it needs to read, which is no reason to drop the blocks.
        """
        num_left = min(self._space.segment_bytes, segment.end) // 2
        for record in reversed(list(segment.records.values())):
            num_bytes = record_bytes(record.num_bytes)
            if not self._index[record.key].is_used or num_bytes > num_left:
                continue
            try:
                block = memoryview(bytearray(record.num_bytes))
                _read(segment, record, block)
            except CorruptBlock:
                continue
            except MemoryError:
                raise Unavailable(f"{segment.path} cannot be read: no memory") from None
            except OSError as error:
                if error.errno in _OUR_OWN_LACK:
                    raise Unavailable(f"{segment.path} cannot be read: {error}") from None
                continue
            num_left -= num_bytes
            yield block, record


def least_capacity_bytes(segment_bytes: int, block_bytes: int) -> int:
    """Return the least capacity of a log with files of this size that can hold a block of this size at all."""
    least_bytes = record_bytes(block_bytes) + _reserve_bytes(0)
    # Half of a file, which is at most a quarter of the capacity: of 8 n + 1 to 8 n + 7 bytes a whole eighth, n.
    return least_bytes + min(segment_bytes // 2, (least_bytes - 1) // (2 * MIN_SEGMENTS - 1))


def _reserve_bytes(segment_bytes: int) -> int:
    return 3 * PAGE_BYTES + segment_bytes // 2


def _read(segment: Segment, record: Record, target: memoryview) -> Record:
    with opened(segment.path, os.O_RDONLY) as fd:
        return read_record(fd, segment.nonce, record.offset, record.key, target[: record.num_bytes])
