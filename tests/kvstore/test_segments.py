"""Segment files: what was committed survives a kill or a cut at any byte, what was torn is refused, and room is made."""

import errno
import fcntl
import itertools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import ConfigError, CorruptBlock, Unavailable
from core.ids import SeededIds
from kvstore.seal_check import BlockVerifier
from kvstore.segment_file import PAGE_BYTES, record_bytes
from kvstore.segments import SegmentLog
from kvstore.testing.blocks import make_block

CAPACITY = 64 << 20
SEGMENT_BYTES = 20_000  # a few records
SIZES = (8, 3000, 3840, 3848, 9000)  # one of them fills a page exactly


def blocks_of(count):
    return [make_block(number, size) for number, size in zip(range(count), itertools.cycle(SIZES), strict=False)]


def open_log(folder, capacity=CAPACITY, segment_bytes=SEGMENT_BYTES, seed=1):
    return SegmentLog(folder, capacity, segment_bytes, SeededIds(seed))


def append(log, block):
    return log.append(block.key.pack(), block.seal, block.content)


def served(log, block):
    """Whether the log has the block, complete; anything else than a miss or the truth fails."""
    target = memoryview(bytearray(block.content.nbytes))
    record = log.read(block.key.pack(), target)
    if record is None:
        assert block.key.pack() not in log
        return False
    BlockVerifier().check(block.key, record.seal, target[: record.num_bytes])
    assert target == block.content
    return True


def files_of(folder):
    return sorted(folder.glob("segment-*.kv"))


def test_what_was_appended_is_read(tmp_path):
    log, blocks = open_log(tmp_path), blocks_of(10)
    assert all(append(log, block) for block in blocks)
    assert len(files_of(tmp_path)) > 1
    assert all(served(log, block) for block in blocks)
    assert (len(log), log.used_bytes) == (10, sum(path.stat().st_size for path in files_of(tmp_path)))
    log.close()


def test_appending_again_writes_nothing(tmp_path):
    log, block = open_log(tmp_path), make_block(1)
    append(log, block)
    before = log.used_bytes
    assert append(log, block)
    assert log.used_bytes == before
    log.close()


def test_a_restart_finds_everything(tmp_path):
    log, blocks = open_log(tmp_path), blocks_of(12)
    for block in blocks[:6]:
        append(log, block)
    log.close()
    log = open_log(tmp_path, seed=2)
    for block in blocks[6:]:
        append(log, block)
    log.close()
    log = open_log(tmp_path, seed=3)
    assert all(served(log, block) for block in blocks)
    assert log.num_torn_bytes == 0
    log.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Files with 12 blocks, and where each record ends: (file, end of its block, block)."""
    folder = tmp_path_factory.mktemp("written")
    log, ends = open_log(folder), []
    for block in blocks_of(12):
        append(log, block)
        path = files_of(folder)[-1]
        size = path.stat().st_size
        ends.append((path.name, size - record_bytes(block.content.nbytes) + 256 + block.content.nbytes, block))
    log.close()
    return folder, ends


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(choice=st.data())
def test_a_cut_at_any_byte_costs_only_what_was_cut(written, tmp_path_factory, choice):
    source, ends = written
    folder = tmp_path_factory.mktemp("cut")
    shutil.copytree(source, folder, dirs_exist_ok=True)
    path = choice.draw(st.sampled_from(files_of(folder)))
    cut = choice.draw(st.integers(0, path.stat().st_size))
    os.truncate(path, cut)
    log = open_log(folder, seed=5)
    for name, end, block in ends:
        assert served(log, block) == (name != path.name or end <= cut)
    late = make_block(99)
    assert append(log, late)
    log.close()
    log = open_log(folder, seed=6)
    assert served(log, late)
    for name, end, block in ends:
        assert served(log, block) == (name != path.name or end <= cut)
    log.close()
    shutil.rmtree(folder)


@settings(max_examples=40, deadline=None)
@given(choice=st.data())
def test_a_changed_byte_is_never_served_and_costs_at_most_its_own_block(written, tmp_path_factory, choice):
    source, ends = written
    folder = tmp_path_factory.mktemp("changed")
    shutil.copytree(source, folder, dirs_exist_ok=True)
    path = choice.draw(st.sampled_from(files_of(folder)))
    offset = choice.draw(st.integers(PAGE_BYTES, path.stat().st_size - 1))
    with path.open("r+b") as file:
        file.seek(offset)
        old = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([old ^ choice.draw(st.integers(1, 255))]))
    log = open_log(folder, seed=5)
    lost = 0
    for _, _, block in ends:
        try:
            lost += not served(log, block)
        except CorruptBlock:
            lost += 1
    assert lost <= 1
    log.close()
    shutil.rmtree(folder)


def test_a_file_without_a_whole_first_page_is_deleted(tmp_path):
    (tmp_path / "segment-000000000007.kv").write_bytes(b"torn")
    log = open_log(tmp_path)
    assert (len(log), log.num_torn_bytes) == (0, 0)
    assert not files_of(tmp_path)
    append(log, make_block(1))
    assert files_of(tmp_path)[0].name == "segment-000000000008.kv"
    log.close()


def test_a_record_that_moved_to_another_file_is_refused(tmp_path):
    log = open_log(tmp_path, segment_bytes=PAGE_BYTES)
    for block in blocks_of(3):
        append(log, block)
    log.close()
    first, second, _ = files_of(tmp_path)
    with first.open("rb") as source, second.open("r+b") as target:
        source.seek(PAGE_BYTES)
        target.seek(PAGE_BYTES)
        target.write(source.read())
    log = open_log(tmp_path)
    assert [served(log, block) for block in blocks_of(3)] == [True, False, True]
    log.close()


KILLED = """
import sys
from pathlib import Path
from core.ids import RandomIds
from kvstore.segments import SegmentLog
from kvstore.testing.blocks import make_block
log = SegmentLog(Path(sys.argv[1]), 1 << 30, 300_000, RandomIds())
print("open", flush=True)
for number in range(int(sys.argv[2]), 10**9):
    block = make_block(number, 65536)
    assert log.append(block.key.pack(), block.seal, block.content)
    print(number, flush=True)
"""


@pytest.mark.slow
def test_a_killed_writer_leaves_everything_it_had_committed(tmp_path):
    committed, start = [], 0
    for num_wanted in (3, 17, 40):
        with subprocess.Popen([sys.executable, "-c", KILLED, tmp_path, str(start)], stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout.readline() == "open\n"
            for _ in range(num_wanted):
                committed.append(int(child.stdout.readline()))
            child.send_signal(signal.SIGKILL)
            committed += [int(line) for line in child.stdout if line.endswith("\n")]
        start = committed[-1] + 1
        log = SegmentLog(tmp_path, 1 << 30, 300_000, SeededIds(1))
        assert all(served(log, make_block(number, 65536)) for number in committed)
        assert len(committed) <= len(log) <= len(committed) + 3  # a kill between the write and its message
        log.close()


def test_capacity_is_kept_and_the_oldest_go(tmp_path):
    capacity = 40 * record_bytes(4000)
    log = open_log(tmp_path, capacity, capacity // 8)
    blocks = [make_block(number, 4000) for number in range(200)]
    for block in blocks:
        assert append(log, block)
        assert log.used_bytes <= capacity
        assert sum(path.stat().st_size for path in files_of(tmp_path)) <= capacity
    kept = [served(log, block) for block in blocks]
    assert kept == sorted(kept)
    assert 20 <= sum(kept) <= 40
    assert log.num_dropped == 200 - sum(kept)
    log.close()


def test_what_is_read_again_and_again_is_handed_on(tmp_path):
    capacity = 40 * record_bytes(4000)
    log = open_log(tmp_path, capacity, capacity // 8)
    favourite = make_block(0, 4000)
    append(log, favourite)
    for number in range(1, 300):
        append(log, make_block(number, 4000))
        assert served(log, favourite)
        assert log.used_bytes <= capacity
    log.close()
    log = open_log(tmp_path, capacity, capacity // 8)
    assert served(log, favourite)
    log.close()


def test_a_used_block_too_large_to_be_handed_on_costs_smaller_ones_nothing(tmp_path):
    page, capacity = PAGE_BYTES, 128 * PAGE_BYTES  # files of 32 pages, of which 16 may be handed on
    log, small, large = open_log(tmp_path, capacity, capacity // 4), make_block(0, 4000), make_block(1, 17 * page)
    for block in (small, large):
        assert append(log, block)
        assert served(log, block)
    (first,) = files_of(tmp_path)
    others = (make_block(number, 4000) for number in itertools.count(2))
    while first.exists():
        assert append(log, next(others))
    assert [served(log, small), served(log, large)] == [True, False]
    log.close()


def test_used_blocks_that_are_damaged_cost_intact_ones_nothing(tmp_path):
    capacity = 80 * PAGE_BYTES  # files of 20 pages, of which 10 may be handed on
    log, blocks = open_log(tmp_path, capacity, capacity // 4), [make_block(number, 8 * PAGE_BYTES) for number in range(2)]
    for block in blocks:
        assert append(log, block)
        assert served(log, block)
    (first,) = files_of(tmp_path)
    with first.open("r+b") as file:
        file.seek(PAGE_BYTES + record_bytes(8 * PAGE_BYTES))
        file.write(bytes(PAGE_BYTES))
    others = (make_block(number, 4000) for number in itertools.count(2))
    while first.exists():
        assert append(log, next(others))
    assert [served(log, block) for block in blocks] == [True, False]
    log.close()


def test_a_block_larger_than_the_capacity_drives_nothing_out(tmp_path):
    log = open_log(tmp_path, 200_000, 50_000)
    append(log, make_block(1, 4000))
    assert not append(log, make_block(2, 190_000))
    assert served(log, make_block(1, 4000))
    log.close()


def test_removed_blocks_are_gone(tmp_path):
    log, blocks = open_log(tmp_path), blocks_of(3)
    for block in blocks:
        append(log, block)
    log.remove(blocks[1].key.pack())
    log.remove(blocks[1].key.pack())
    assert [served(log, block) for block in blocks] == [True, False, True]
    log.close()


def test_block_that_does_not_fit_is_corrupt(tmp_path):
    log, block = open_log(tmp_path), make_block(1, 4000)
    append(log, block)
    with pytest.raises(CorruptBlock, match="4000 bytes, and a slot has 3999"):
        log.read(block.key.pack(), memoryview(bytearray(3999)))
    log.close()


def test_two_logs_cannot_share_a_folder(tmp_path):
    log = open_log(tmp_path)
    with pytest.raises(ConfigError, match="another process"):
        open_log(tmp_path)
    log.close()
    open_log(tmp_path).close()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_lock_that_the_file_system_refuses_is_told_as_that(tmp_path, monkeypatch, number):
    def refuse(fd, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    before = descriptors()
    with pytest.raises(ConfigError, match=os.strerror(number)) as refused:
        open_log(tmp_path)
    assert "another process" not in str(refused.value)
    assert descriptors() == before


def test_a_relative_folder_stays_the_same_in_another_working_directory(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    log, (first, second) = open_log(Path("kv")), blocks_of(2)
    append(log, first)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert served(log, first)
    assert append(log, second)
    assert len(files_of(tmp_path / "kv")) == 1
    log.close()


def test_a_relative_folder_in_a_working_directory_that_is_gone_is_refused(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ConfigError, match="disk_path"):
        open_log(Path("kv"))


def test_a_folder_that_is_a_file_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(ConfigError, match="disk_path"):
        open_log(path)


def test_a_full_disk_loses_only_the_block_that_did_not_fit(tmp_path, monkeypatch):
    log, blocks = open_log(tmp_path), blocks_of(3)
    append(log, blocks[0])
    real, num_free = os.pwritev, 256  # the header of a record

    def short_write(fd, pieces, offset):
        nonlocal num_free
        if not num_free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        num_written = real(fd, [b"".join(pieces)[:num_free]], offset)
        num_free -= num_written
        return num_written

    monkeypatch.setattr(os, "pwritev", short_write)
    assert not append(log, blocks[1])
    monkeypatch.undo()
    assert append(log, blocks[2])
    log.close()
    log = open_log(tmp_path)
    assert [served(log, block) for block in blocks] == [True, False, True]
    log.close()


def descriptors():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("failure", [errno.ENOSPC, errno.EDQUOT, "short"])
def test_a_disk_without_room_for_a_new_file_keeps_no_descriptor_and_no_file(tmp_path, monkeypatch, no_garbage, failure):
    log, blocks = open_log(tmp_path), blocks_of(30)
    before, real = descriptors(), os.pwritev

    def full(fd, pieces, offset):
        if failure == "short" and not offset:
            return real(fd, [bytes(pieces[0])[:100]], offset)
        raise OSError(errno.ENOSPC if failure == "short" else failure, "full")

    monkeypatch.setattr(os, "pwritev", full)
    assert not any(append(log, block) for block in blocks)
    assert (descriptors(), files_of(tmp_path), log.used_bytes) == (before, [], 0)
    monkeypatch.undo()
    assert all(append(log, block) for block in blocks)
    log.close()
    assert descriptors() == before - 1  # the lock


def test_a_disk_that_fails_keeps_no_descriptor_and_no_file(tmp_path, monkeypatch, no_garbage):
    log, before = open_log(tmp_path), descriptors()

    def broken(fd, pieces, offset):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pwritev", broken)
    for block in blocks_of(3):
        with pytest.raises(Unavailable, match="cannot be written"):
            append(log, block)
    assert (descriptors(), files_of(tmp_path)) == (before, [])
    log.close()


MANY_FILES = """
import resource, sys
from pathlib import Path
from core.ids import RandomIds
from kvstore.segments import SegmentLog
from kvstore.testing.blocks import make_block
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
blocks = [make_block(number, 4000) for number in range(200)]
target = memoryview(bytearray(4000))
for life in range(2):
    log = SegmentLog(Path(sys.argv[1]), 1 << 30, 8192, RandomIds())
    assert len(log) == 200 * life
    for block in blocks:
        assert log.append(block.key.pack(), block.seal, block.content)
    for block in blocks:
        assert log.read(block.key.pack(), target) and target == block.content
    log.close()
"""


def test_more_files_than_descriptors_are_written_read_and_found_again(tmp_path):
    subprocess.run([sys.executable, "-c", MANY_FILES, tmp_path], check=True, timeout=60)
    assert len(files_of(tmp_path)) > 64


KILLED_AT_EACH_STEP = """
import os, signal, sys
from pathlib import Path
from core.ids import RandomIds
from kvstore.segments import SegmentLog
from kvstore.testing.blocks import make_block

def life(folder, step):
    steps = iter(range(10**6))
    def stepping(real, is_counted=lambda *_: True):
        def call(*arguments):
            if is_counted(*arguments) and next(steps) == step:
                if real is os_pwritev:  # half of it has reached the file
                    fd, pieces, offset = arguments
                    whole = b"".join(pieces)
                    os.pwrite(fd, whole[: len(whole) // 2], offset)
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments)
        return call
    os_pwritev = os.pwritev
    log = SegmentLog(folder / "log", CAPACITY, CAPACITY // 4, RandomIds())
    os.pwritev, os.unlink = stepping(os.pwritev), stepping(os.unlink)
    os.open = stepping(os.open, lambda path, flags, *_: flags & os.O_CREAT)
    target = memoryview(bytearray(4000))
    with (folder / "committed").open("w", buffering=1) as committed:
        for number in range(30):
            block = make_block(number, 4000)
            assert log.append(block.key.pack(), block.seal, block.content)
            committed.write(f"{number}\\n")
            assert log.read(make_block(0, 4000).key.pack(), target) and log.num_dropped <= number
    os._exit(0 if log.num_dropped else 1)

CAPACITY = int(sys.argv[2])
for step in range(1000):
    folder = Path(sys.argv[1]) / str(step)
    folder.mkdir()
    pid = os.fork()
    if not pid:
        life(folder, step)
    _, status = os.waitpid(pid, 0)
    if os.WIFEXITED(status):
        sys.exit(os.WEXITSTATUS(status))
    assert os.WTERMSIG(status) == signal.SIGKILL
"""


@pytest.mark.slow
def test_kill_before_any_step_on_segment_files_loses_no_kept_block(tmp_path):
    capacity = 16 * record_bytes(4000)
    subprocess.run([sys.executable, "-c", KILLED_AT_EACH_STEP, tmp_path, str(capacity)], check=True, timeout=60)
    lives = sorted(tmp_path.iterdir(), key=lambda folder: int(folder.name))
    assert len(lives) > 50
    for folder in lives:
        committed = [int(line) for line in (folder / "committed").read_text().split()]
        log = open_log(folder / "log", capacity, capacity // 4, seed=9)
        kept = [make_block(number, 4000) for number in {*committed[:1], *committed[-5:]}]  # the first is read all the time
        assert all(served(log, block) for block in kept)
        late = [make_block(number, 4000) for number in range(100, 130)]
        assert all(append(log, block) for block in late)
        assert served(log, late[-1])
        assert sum(path.stat().st_size for path in files_of(folder / "log")) <= capacity
        log.close()
