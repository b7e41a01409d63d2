"""Logs of equal blocks on disk, and calls to the system that fail, for tests of the disk tier."""

import os

from core.ids import SeededIds
from kvstore.segment_file import record_bytes
from kvstore.segments import SegmentLog
from kvstore.testing.blocks import make_block

BLOCK = 4000
RECORD = record_bytes(BLOCK)
SEGMENT = 4 * RECORD  # three blocks after the first page


def blocks_of(count, first=0):
    return [make_block(number, BLOCK) for number in range(first, first + count)]


def open_log(folder, capacity=64 << 20, segment_bytes=SEGMENT, **options):
    return SegmentLog(folder, capacity, segment_bytes, SeededIds(1), **options)


def append(log, block):
    return log.append(block.key.pack(), block.seal, block.content)


def read(log, block):
    target = memoryview(bytearray(BLOCK))
    record = log.read(block.key.pack(), target)
    return None if record is None else bytes(target)


def knows(log, blocks):
    return [block.key.pack() in log for block in blocks]


def files_of(folder):
    return sorted(folder.glob("segment-*.kv"))


def fail(monkeypatch, owner, name, number, condition=lambda *_: True):
    """Let a call to the system fail where the condition holds."""
    real = getattr(owner, name)

    def failing(*arguments, **options):
        if condition(*arguments):
            raise OSError(number, os.strerror(number))
        return real(*arguments, **options)

    monkeypatch.setattr(owner, name, failing)


def path_of(fd):
    return os.readlink(f"/proc/self/fd/{fd}")


def is_open(path):
    """Whether this process has a descriptor of the file."""
    return str(path) in [path_of(fd) for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]
