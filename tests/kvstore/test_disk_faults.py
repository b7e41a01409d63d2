"""A disk tier heals itself: lost files, failing reads, file systems that are too small, files that stay."""

import errno
import logging
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from core.errors import Unavailable
from core.testing.clock import FakeClock
from kvstore.segments import _MAX_DELETIONS, _RETRY_S
from tests.kvstore.disk_logs import RECORD, append, blocks_of, fail, files_of, is_open, knows, open_log, path_of, read


@pytest.fixture
def log(tmp_path):
    log = open_log(tmp_path)
    yield log
    log.close()


def test_blocks_of_a_deleted_file_are_misses_after_the_first_failure(log, tmp_path):
    blocks = blocks_of(9)
    assert all(append(log, block) for block in blocks)
    files_of(tmp_path)[0].unlink()
    with pytest.raises(Unavailable, match="cannot be read"):
        read(log, blocks[0])
    assert knows(log, blocks) == [False] * 3 + [True] * 6
    assert read(log, blocks[1]) is None
    assert read(log, blocks[3]) == bytes(blocks[3].content)
    assert (log.num_lost, log.used_bytes) == (3, sum(path.stat().st_size for path in files_of(tmp_path)))


def test_saved_means_written_also_when_the_file_has_gone(tmp_path):
    log, blocks = open_log(tmp_path), blocks_of(5)
    assert all(append(log, block) for block in blocks)
    for path in files_of(tmp_path):  # the one that is being written included
        path.unlink()
    assert all(append(log, block) for block in blocks)
    assert [read(log, block) for block in blocks] == [bytes(block.content) for block in blocks]
    log.close()
    again = open_log(tmp_path)
    assert knows(again, blocks) == [True] * 5
    again.close()


def test_no_block_goes_into_a_deleted_file(tmp_path):
    log, (first, second) = open_log(tmp_path), blocks_of(2)
    append(log, first)
    files_of(tmp_path)[0].unlink()
    assert append(log, second)
    log.close()
    log = open_log(tmp_path)
    assert knows(log, [first, second]) == [False, True]
    log.close()


def test_saved_means_written_also_when_the_record_was_overwritten(log, tmp_path):
    (block,) = blocks_of(1)
    append(log, block)
    files_of(tmp_path)[0].write_bytes(bytes(files_of(tmp_path)[0].stat().st_size))
    assert append(log, block)
    assert read(log, block) == bytes(block.content)


def test_blocks_of_a_file_that_fails_to_read_are_misses(log, tmp_path, monkeypatch):
    blocks = blocks_of(6)
    assert all(append(log, block) for block in blocks)
    fail(monkeypatch, os, "preadv", errno.EIO)
    with pytest.raises(Unavailable):
        read(log, blocks[0])
    monkeypatch.undo()
    assert knows(log, blocks) == [False] * 3 + [True] * 3
    assert len(files_of(tmp_path)) == 1
    assert append(log, blocks[0])
    assert read(log, blocks[0]) == bytes(blocks[0].content)


def test_lack_of_descriptors_loses_no_block(log, monkeypatch):
    (block,) = blocks_of(1)
    append(log, block)
    fail(monkeypatch, os, "open", errno.EMFILE)
    with pytest.raises(Unavailable):
        read(log, block)
    with pytest.raises(Unavailable):
        append(log, block)
    monkeypatch.undo()
    assert read(log, block) == bytes(block.content)


def test_lack_of_descriptors_drops_no_used_block(tmp_path, monkeypatch):
    log, (favourite, *blocks) = open_log(tmp_path, 40 * RECORD), blocks_of(100)
    append(log, favourite)
    read(log, favourite)
    while log.used_bytes <= 36 * RECORD:
        assert append(log, blocks.pop())
    first = files_of(tmp_path)[0]
    fail(monkeypatch, os, "open", errno.EMFILE, lambda path, *_: path == first)
    with pytest.raises(Unavailable, match="cannot be read"):
        append(log, blocks[0])
    monkeypatch.undo()
    assert append(log, blocks[0])
    assert not first.exists()
    assert read(log, favourite) == bytes(favourite.content)
    log.close()


def test_file_that_cannot_be_opened_at_the_start_costs_its_blocks_only(tmp_path, monkeypatch):
    log, blocks = open_log(tmp_path), blocks_of(6)
    assert all(append(log, block) for block in blocks)
    log.close()
    first = files_of(tmp_path)[0]
    fail(monkeypatch, os, "open", errno.EIO, lambda path, *_: path == first)
    log = open_log(tmp_path)
    assert knows(log, blocks) == [False] * 3 + [True] * 3
    log.close()


@pytest.mark.parametrize("call", ["pread", "ftruncate"])
def test_file_that_fails_in_the_middle_of_the_start_leaves_no_block_behind(tmp_path, monkeypatch, call):
    log, blocks = open_log(tmp_path), blocks_of(6)
    assert all(append(log, block) for block in blocks)
    log.close()
    first = files_of(tmp_path)[0]

    def is_late(fd, *position):
        return path_of(fd) == str(first) and (call == "ftruncate" or position[1] >= 2 * RECORD)

    fail(monkeypatch, os, call, errno.EIO, is_late)
    log = open_log(tmp_path)
    monkeypatch.undo()
    assert knows(log, blocks) == [False] * 3 + [True] * 3
    assert append(log, blocks[0])
    assert read(log, blocks[0]) == bytes(blocks[0].content)
    log.close()


# ---- no room ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "kvferry-test", folder], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def kept_after(folder, num_blocks, fill=0):
    """Save blocks into a store that may hold more than its disk, and return which are there, and the log's limit."""
    log = open_log(folder, capacity=64 << 20, segment_bytes=16 << 20)
    if fill:
        (folder / "of-somebody-else").write_bytes(bytes(fill))
    blocks = blocks_of(num_blocks)
    saved = [append(log, block) for block in blocks]
    kept = [read(log, block) == bytes(block.content) for block in blocks]
    limit = log.limit_bytes
    log.close()
    return saved, kept, limit


def test_file_system_smaller_than_the_capacity_keeps_the_newest(small_disk, caplog):
    saved, kept, limit = kept_after(small_disk, 1000)
    assert all(saved)
    assert kept == sorted(kept)
    assert (1 << 20) * 0.5 < sum(kept) * RECORD < limit <= 1 << 20
    (line,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "kvstore_disk_too_small" in line.getMessage()
    assert "lower kvstore.disk_bytes" in line.getMessage()


def test_room_that_others_take_is_released(small_disk, caplog):
    saved, kept, limit = kept_after(small_disk, 1000, fill=700 << 10)
    assert sum(saved) >= 990, "a block or two finds no room before older ones have gone"
    assert kept[-1]
    assert limit <= (1 << 20) - (700 << 10)
    assert len([record for record in caplog.records if "kvstore_disk_too_small" in record.getMessage()]) == 1


def test_limit_grows_again_when_others_leave_room(small_disk):
    other = small_disk / "of-somebody-else"
    other.write_bytes(bytes(700 << 10))
    log = open_log(small_disk)
    assert log.limit_bytes <= 324 << 10
    other.unlink()
    assert all(append(log, block) for block in blocks_of(150))
    assert log.used_bytes > 324 << 10
    log.close()


def test_disk_that_was_full_at_the_start_is_used_once_others_leave_room(tmp_path, monkeypatch):
    free_pages = 0
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=free_pages, f_frsize=4096))
    log, (first, second) = open_log(tmp_path), blocks_of(2)
    assert not append(log, first)
    free_pages = 1024
    assert append(log, second)
    log.close()


def test_disk_that_cannot_be_measured_is_unavailable(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=0, f_frsize=4096))
    log, (block,) = open_log(tmp_path), blocks_of(1)
    fail(monkeypatch, os, "statvfs", errno.EIO)
    with pytest.raises(Unavailable):
        append(log, block)
    log.close()


def test_full_disk_that_cannot_be_measured_is_unavailable(tmp_path, monkeypatch):
    log, (first, second) = open_log(tmp_path), blocks_of(2)
    append(log, first)
    fail(monkeypatch, os, "pwritev", errno.ENOSPC)
    fail(monkeypatch, os, "statvfs", errno.EIO)
    with pytest.raises(Unavailable, match="cannot be measured"):
        append(log, second)
    log.close()


def test_quota_that_the_file_system_does_not_tell_is_lived_with(tmp_path, monkeypatch):
    quota, real = 60 * RECORD, os.pwritev

    def within_quota(fd, pieces, offset):
        if sum(path.stat().st_size for path in files_of(tmp_path)) + sum(map(len, map(bytes, pieces))) > quota:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return real(fd, pieces, offset)

    monkeypatch.setattr(os, "pwritev", within_quota)
    saved, kept, _ = kept_after(tmp_path, 400)
    assert sum(saved) >= 395
    assert sum(kept) >= 30
    assert kept[-1]


def test_files_grow_again_after_a_disk_was_full(tmp_path, monkeypatch):
    log, blocks = open_log(tmp_path, segment_bytes=1 << 20), blocks_of(1100)
    assert all(append(log, block) for block in blocks[:50])
    fail(monkeypatch, os, "pwritev", errno.ENOSPC)
    assert not any(append(log, block) for block in blocks[50:100])
    assert len(log) == 0
    monkeypatch.undo()
    assert all(append(log, block) for block in blocks[100:])
    assert len(files_of(tmp_path)) < 60
    assert files_of(tmp_path)[-2].stat().st_size > (1 << 20) - RECORD
    log.close()


@pytest.mark.parametrize("is_used", [False, True])
def test_files_that_cannot_be_deleted_stay_counted_and_keep_their_blocks(tmp_path, monkeypatch, is_used):
    capacity, clock = 40 * RECORD, FakeClock()
    log, blocks = open_log(tmp_path, capacity, now=clock.now), blocks_of(90)
    saved = []
    while not saved or log.used_bytes <= capacity - 4 * RECORD:
        saved.append(blocks[len(saved)])
        assert append(log, saved[-1])
        assert not is_used or read(log, saved[-1])
    stuck = files_of(tmp_path)
    fail(monkeypatch, Path, "unlink", errno.EBUSY, lambda path: path in stuck)  # another file could be deleted
    results = [append(log, block) for block in blocks[-10:]]
    if is_used:  # copies of used blocks are in other files, which may make room
        assert len(log) >= len(saved) - 5
    else:
        assert not any(results)
        assert [read(log, block) for block in saved] == [bytes(block.content) for block in saved]
    assert files_of(tmp_path)[: len(stuck)] == stuck
    assert log.used_bytes == sum(path.stat().st_size for path in files_of(tmp_path)) <= capacity
    monkeypatch.undo()
    clock.advance(_RETRY_S)
    assert all(append(log, block) for block in blocks[len(saved) :])
    assert log.used_bytes == sum(path.stat().st_size for path in files_of(tmp_path)) <= capacity
    log.close()


def test_a_block_costs_few_deletions_that_fail_and_each_is_tried_again_later(tmp_path, monkeypatch):
    clock, tried = FakeClock(), []
    log, blocks = open_log(tmp_path, 40 * RECORD, now=clock.now), blocks_of(100)
    fail(monkeypatch, Path, "unlink", errno.EBUSY, lambda path: tried.append(path) or True)
    saved = [append(log, block) for block in blocks]
    assert saved.count(False) > 50
    files = files_of(tmp_path)
    assert sorted(tried) == files
    clock.advance(_RETRY_S)
    tried.clear()
    assert not append(log, blocks[-1])
    assert tried == files[:_MAX_DELETIONS]
    assert not any(append(log, block) for block in blocks[-5:])
    assert sorted(tried) == files
    log.close()


def test_files_are_deleted_while_no_descriptor_refers_to_them(tmp_path, monkeypatch):
    log, blocks = open_log(tmp_path, 40 * RECORD), blocks_of(100)
    fail(monkeypatch, Path, "unlink", errno.ETXTBSY, is_open)  # as some network file systems
    for block in blocks:
        assert append(log, block)
        assert read(log, block)
    log.close()
    damaged = tmp_path / "segment-000000000999.kv"
    damaged.write_bytes(bytes(RECORD))
    open_log(tmp_path, 40 * RECORD).close()
    assert not damaged.exists()


def test_damaged_file_that_cannot_be_deleted_counts_whole(tmp_path, monkeypatch):
    (tmp_path / "segment-000000000001.kv").write_bytes(bytes(30 * RECORD))
    fail(monkeypatch, Path, "unlink", errno.EPERM)
    log = open_log(tmp_path, 40 * RECORD)
    assert log.used_bytes == 30 * RECORD
    log.close()


def test_files_that_leave_no_room_and_cannot_be_deleted_cost_no_others(tmp_path, monkeypatch):
    capacity, clock = 40 * RECORD, FakeClock()
    log, blocks = open_log(tmp_path), blocks_of(19)
    assert all(append(log, block) for block in blocks[:18])
    log.close()
    damaged = [tmp_path / f"segment-{number:012}.kv" for number in (100, 101)]
    for path in damaged:
        path.write_bytes(bytes(capacity // 2))
    with monkeypatch.context() as failing:
        fail(failing, Path, "unlink", errno.EPERM, lambda path: path in damaged)
        log = open_log(tmp_path, capacity, now=clock.now)
        for _ in range(20):
            assert not append(log, blocks[18])
            clock.advance(_RETRY_S)
        assert knows(log, blocks[:18]) == [True] * 18
    assert append(log, blocks[18])
    assert not any(path.exists() for path in damaged)
    assert knows(log, blocks) == [True] * 19
    log.close()


def test_slow_saves_get_past_files_that_cannot_be_deleted(tmp_path, monkeypatch):
    capacity, clock = 40 * RECORD, FakeClock()
    log, blocks = open_log(tmp_path, capacity, now=clock.now), blocks_of(100)
    while log.used_bytes <= capacity - 4 * RECORD:
        assert append(log, blocks.pop())
    stuck, saved = files_of(tmp_path)[:_MAX_DELETIONS], []
    fail(monkeypatch, Path, "unlink", errno.EPERM, lambda path: path in stuck)
    for block in blocks[:30]:
        clock.advance(_RETRY_S)
        saved.append(append(log, block))
    assert saved.count(False) <= 1  # the first has met four of them
    monkeypatch.undo()
    for block in blocks[30:60]:
        clock.advance(_RETRY_S)
        assert append(log, block)
    assert not any(path.exists() for path in stuck)
    log.close()


def test_one_file_that_cannot_be_deleted_takes_its_own_room_only(tmp_path, caplog):
    (tmp_path / "segment-000000000001.kv").mkdir()  # it can be neither read nor deleted
    capacity = 40 * RECORD
    log, blocks = open_log(tmp_path, capacity), blocks_of(300)
    assert all(append(log, block) for block in blocks)
    assert all(knows(log, blocks[-20:]))
    assert log.used_bytes <= capacity
    lines = [record.getMessage() for record in caplog.records if "kvstore_segment_not_deleted" in record.getMessage()]
    assert len(lines) == 1
    log.close()


def test_files_that_cannot_be_deleted_do_not_grow_the_log(tmp_path, monkeypatch):
    capacity = 40 * RECORD
    log, blocks = open_log(tmp_path, capacity), blocks_of(300)
    for block in blocks[:30]:
        assert append(log, block)
        assert read(log, block)  # each is worth a second chance
    stuck, sizes = files_of(tmp_path)[:6], []

    def is_stuck(path):
        sizes.append(sum(path.stat().st_size for path in files_of(tmp_path)))
        return path in stuck

    fail(monkeypatch, Path, "unlink", errno.EPERM, is_stuck)
    assert [append(log, block) for block in blocks[30:]].count(False) <= 1  # the first has met four of them
    assert max(sizes) <= capacity
    assert set(stuck) < set(files_of(tmp_path))
    assert log.used_bytes == sum(path.stat().st_size for path in files_of(tmp_path))
    assert knows(log, blocks[-10:]) == [True] * 10
    log.close()
