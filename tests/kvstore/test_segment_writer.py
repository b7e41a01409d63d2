"""A disk tier goes on when a file cannot be written, and what it leaves of that file is counted."""

import contextlib
import errno
import fcntl
import os
from pathlib import Path

import pytest

from core.errors import Unavailable
from tests.kvstore.disk_logs import append, blocks_of, fail, files_of, knows, open_log, path_of, read


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
