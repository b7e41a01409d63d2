"""A disk tier goes on when a file cannot be written, and what it leaves of that file is counted."""

import contextlib
import errno
import fcntl
import itertools
import os
import resource
from pathlib import Path

import pytest

from core.errors import Unavailable
from core.testing.clock import FakeClock
from kvstore.segment_file import PAGE_BYTES
from kvstore.segments import _RETRY_S
from kvstore.testing.blocks import make_block
from tests.kvstore.disk_logs import BLOCK, RECORD, SEGMENT, append, blocks_of, fail, files_of, knows, open_log, path_of, read


@pytest.mark.parametrize(
    ("call", "number"), [("fstat", errno.ESTALE), ("pwritev", errno.EIO), ("pwritev", errno.EFBIG), ("fdatasync", errno.EIO)]
)
@pytest.mark.parametrize("cannot_be_cut", [False, True])
def test_one_file_that_cannot_be_written_costs_one_save(tmp_path, monkeypatch, call, number, cannot_be_cut):
    log, blocks = open_log(tmp_path, segment_bytes=1 << 20, sync=True), blocks_of(6)
    assert append(log, blocks[0])
    (bad,) = files_of(tmp_path)
    fail(monkeypatch, os, call, number, lambda fd, *_: path_of(fd) == str(bad))
    if cannot_be_cut:
        fail(monkeypatch, os, "ftruncate", number, lambda fd, *_: path_of(fd) == str(bad))
    with pytest.raises(Unavailable):
        append(log, blocks[1])
    assert all(append(log, block) for block in blocks[1:])
    assert [read(log, block) for block in blocks] == [bytes(block.content) for block in blocks]
    assert len(files_of(tmp_path)) == 2
    assert log.used_bytes >= sum(path.stat().st_size for path in files_of(tmp_path))
    log.close()


def test_a_used_block_that_cannot_be_copied_costs_one_save(tmp_path, monkeypatch):
    """A large one, where the process may only write small files now."""
    log, large, blocks = open_log(tmp_path, 10 * SEGMENT), make_block(1000, 2 * BLOCK), blocks_of(60)
    assert append(log, large)
    assert all(append(log, block) for block in blocks[:15])
    assert log.read(large.key.pack(), memoryview(bytearray(2 * BLOCK)))
    fail(
        monkeypatch,
        os,
        "pwritev",
        errno.EFBIG,
        lambda fd, pieces, *_: 2 * BLOCK in [memoryview(each).nbytes for each in pieces],
    )
    results = []
    for block in blocks[15:]:
        try:
            results.append(append(log, block))
        except Unavailable:
            results.append(False)
    assert results.count(False) == 1
    log.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOMEM])
def test_saves_that_fail_for_a_while_cost_no_used_block(tmp_path, number):
    segment_bytes = 20 * RECORD
    log, blocks = open_log(tmp_path, 8 * segment_bytes, segment_bytes), iter(blocks_of(400))
    used = [next(blocks) for _ in range(8)]
    assert all(append(log, block) and read(log, block) for block in used)
    while log.used_bytes + RECORD + log._reserve_bytes <= log.limit_bytes:
        assert append(log, next(blocks))
    oldest = files_of(tmp_path)[0]
    num_failed = 0
    with pytest.MonkeyPatch.context() as patch:
        fail(patch, os, "pwritev", number)
        for block in itertools.islice(blocks, 40):
            try:
                append(log, block)
            except Unavailable:
                num_failed += 1
    assert num_failed == 40
    while oldest.exists():
        append(log, next(blocks))
    assert all(knows(log, used))
    log.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_files_that_can_be_neither_written_nor_deleted_do_not_pile_up(tmp_path, monkeypatch, number):
    log, blocks = open_log(tmp_path), blocks_of(20)
    fail(monkeypatch, os, "pwritev", number)
    fail(monkeypatch, Path, "unlink", errno.EPERM)
    for block in blocks:
        with contextlib.suppress(Unavailable):
            assert not append(log, block)
    assert [path.stat().st_size for path in files_of(tmp_path)] == [0]
    monkeypatch.undo()
    assert all(append(log, block) for block in blocks)
    assert log.used_bytes == sum(path.stat().st_size for path in files_of(tmp_path))
    log.close()
    log = open_log(tmp_path)
    assert [read(log, block) for block in blocks] == [bytes(block.content) for block in blocks]
    log.close()


def test_a_late_error_at_the_close_of_a_file_ends_nothing(tmp_path, monkeypatch, caplog):
    log, blocks, real = open_log(tmp_path), blocks_of(10), os.close

    def late(fd):
        is_segment = path_of(fd).endswith(".kv")
        is_written = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
        real(fd)
        if is_segment and is_written:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "close", late)
    assert all(append(log, block) for block in blocks)
    assert [read(log, block) for block in blocks] == [bytes(block.content) for block in blocks]
    log.close()
    monkeypatch.undo()
    assert len([record for record in caplog.records if "kvstore_segment_close_failed" in record.getMessage()]) == 1
    log = open_log(tmp_path)  # the folder was released
    assert knows(log, blocks) == [True] * 10
    log.close()


@contextlib.contextmanager
def limited_files(num_bytes):
    """A limit of the kernel for each file of this process. A write across it is a short one, and the next fails with EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_record_across_the_limit_of_a_file_costs_one_save_and_no_block(tmp_path):
    log, blocks = open_log(tmp_path), blocks_of(12)
    assert all(append(log, block) for block in blocks[:8])  # three, three and two
    with limited_files(PAGE_BYTES + 2 * RECORD + RECORD // 2):
        with pytest.raises(Unavailable, match=os.strerror(errno.EFBIG)):
            append(log, blocks[8])
        assert len(log) == 8
        assert all(append(log, block) for block in blocks[8:10])
    assert all(append(log, block) for block in blocks[10:])
    assert [read(log, block) for block in blocks] == [bytes(block.content) for block in blocks]
    log.close()


def test_a_write_that_takes_a_part_at_a_time_goes_on(tmp_path, monkeypatch):
    log, blocks, real = open_log(tmp_path), blocks_of(7), os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, pieces, offset: real(fd, [b"".join(pieces)[:1000]], offset))
    assert all(append(log, block) for block in blocks)
    assert [read(log, block) for block in blocks] == [bytes(block.content) for block in blocks]
    monkeypatch.undo()
    log.close()
    log = open_log(tmp_path)
    assert [read(log, block) for block in blocks] == [bytes(block.content) for block in blocks]
    log.close()


def test_a_device_that_takes_nothing_is_full(tmp_path, monkeypatch):
    log, blocks = open_log(tmp_path), blocks_of(2)
    assert append(log, blocks[0])
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    assert not append(log, blocks[1])
    monkeypatch.undo()
    assert append(log, blocks[1])
    log.close()


def leave_one_behind(log, block, monkeypatch, number=errno.EIO):
    """Let the first write to a new file fail, and the deletion of the file as well."""
    with monkeypatch.context() as failing:
        fail(failing, os, "pwritev", number)
        fail(failing, Path, "unlink", errno.EIO)
        with contextlib.suppress(Unavailable):
            assert not append(log, block)


def test_an_empty_file_that_is_filled_later_is_not_the_first_to_go(tmp_path, monkeypatch):
    clock = FakeClock()
    log, blocks = open_log(tmp_path, 64 * RECORD, now=clock.now), blocks_of(60)
    assert all(append(log, block) for block in blocks[:9])
    leave_one_behind(log, blocks[9], monkeypatch)
    files = files_of(tmp_path)
    assert len(files) == 4
    clock.advance(_RETRY_S)
    for block in blocks[9:]:
        assert append(log, block)
        if not files[0].exists():
            break
    assert [path.exists() for path in files] == [False, True, True, True]
    assert knows(log, blocks[:12]) == [False] * 3 + [True] * 9
    log.close()


def test_a_moment_without_descriptors_forgets_no_file_that_was_left_behind(tmp_path, monkeypatch):
    log, blocks = open_log(tmp_path), blocks_of(20)
    for block in blocks[:10]:
        leave_one_behind(log, block, monkeypatch, errno.ENOSPC)
        with monkeypatch.context() as failing:
            fail(failing, os, "open", errno.EMFILE)
            with pytest.raises(Unavailable):
                append(log, block)
    assert len(files_of(tmp_path)) == 1
    assert all(append(log, block) for block in blocks)
    assert log.used_bytes == sum(path.stat().st_size for path in files_of(tmp_path))
    log.close()


def test_an_empty_file_that_cannot_be_opened_again_does_not_end_the_saves(tmp_path, monkeypatch):
    log, blocks = open_log(tmp_path), blocks_of(6)
    leave_one_behind(log, blocks[0], monkeypatch)
    (empty,) = files_of(tmp_path)
    fail(monkeypatch, os, "open", errno.EPERM, lambda path, *_: path == empty)
    assert all(append(log, block) for block in blocks)
    assert files_of(tmp_path)[0] == empty
    log.close()


def test_torn_files_that_can_be_neither_cut_nor_deleted_nor_opened_are_counted(tmp_path, monkeypatch):
    clock, capacity = FakeClock(), 40 * RECORD
    log, blocks, real = open_log(tmp_path, capacity, now=clock.now), blocks_of(100), os.pwritev

    def write_half(fd, pieces, offset):
        whole = b"".join(pieces)
        real(fd, [whole[: len(whole) // 2]], offset)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pwritev", write_half)
    fail(monkeypatch, os, "ftruncate", errno.EIO)
    fail(monkeypatch, Path, "unlink", errno.EIO)
    fail(monkeypatch, os, "open", errno.EIO, lambda path, *_: path in files_of(tmp_path))
    for block in blocks:
        with contextlib.suppress(Unavailable):
            assert not append(log, block)
        assert sum(path.stat().st_size for path in files_of(tmp_path)) <= log.used_bytes <= capacity
    monkeypatch.undo()
    clock.advance(_RETRY_S)
    assert [append(log, block) for block in blocks].count(False) == 0
    assert sum(path.stat().st_size for path in files_of(tmp_path)) == log.used_bytes <= capacity
    log.close()
