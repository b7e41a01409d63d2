"""Blocks of a pool as memory: in the host, and through a copier as on a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from connectors.pool_access import DevicePoolAccess, HostPoolAccess, open_pool
from core.errors import ConnectorUnavailable, CorruptBlock
from core.kv.pool_region import KVPoolRegion
from core.testing.hash_model import hash_model_layout

BLOCK_BYTES = 8


class LazyCopier:
    """Copies only at a wait, as a stream may; checks that no slot is touched before."""

    num_slots = 6

    def __init__(self, rows):
        self.rows = rows
        self.memory = [np.zeros(BLOCK_BYTES, dtype=np.uint8) for _ in range(self.num_slots)]
        self.copies = {}

    def slot(self, slot):
        assert slot not in self.copies, "a copy still uses the slot"
        return self.memory[slot].data

    def start_read(self, slot, block_id):
        self.start(slot, lambda: self.memory[slot].__setitem__(slice(None), self.rows[block_id]))

    def start_write(self, slot, block_id):
        self.start(slot, lambda: self.rows[block_id].__setitem__(slice(None), self.memory[slot]))

    def start_write_from(self, slot, block_id, memory):
        self.start(slot, lambda: self.rows[block_id].__setitem__(slice(None), np.frombuffer(memory, dtype=np.uint8)))

    def start(self, slot, copy):
        assert slot not in self.copies, "two copies use one slot"
        self.copies[slot] = copy

    def wait(self, slot):
        if slot in self.copies:
            self.copies.pop(slot)()


@pytest.fixture
def rows():
    return np.arange(10 * BLOCK_BYTES, dtype=np.uint8).reshape(10, BLOCK_BYTES).copy()


@pytest.fixture(params=["host", "device"])
def access(request, rows):
    return HostPoolAccess(rows.reshape(-1).data, BLOCK_BYTES) if request.param == "host" else DevicePoolAccess(LazyCopier(rows))


def test_reads_blocks_as_they_are(access, rows):
    assert [bytes(view) for view in access.read([7, 2, 5][: access.max_reads])] == [bytes(rows[i]) for i in (7, 2, 5)]


def test_writes_are_there_when_they_are_finished(access, rows):
    for block_id in range(8):
        access.write(block_id, lambda target, block_id=block_id: target.__setitem__(slice(None), bytes([100 + block_id]) * 8))
    access.finish_writes()
    assert rows[:8, 0].tolist() == [100 + block_id for block_id in range(8)]
    assert rows[8:].tolist() == np.arange(64, 80).reshape(2, 8).tolist()


def test_reads_and_writes_in_turn_do_not_mix(access, rows):
    access.write(0, lambda target: target.__setitem__(slice(None), b"aaaaaaaa"))
    assert [bytes(view) for view in access.read([3, 4])] == [bytes(rows[3]), bytes(rows[4])]
    access.write(1, lambda target: target.__setitem__(slice(None), b"bbbbbbbb"))
    access.finish_writes()
    assert bytes(rows[0]) == b"aaaaaaaa"
    assert bytes(rows[1]) == b"bbbbbbbb"


def test_what_was_read_stays_while_others_are_written(access, rows):
    """A store takes in what it was given while the next load is under way."""
    views = access.read([3, 4])
    for block_id in range(8, 10):
        access.write(block_id, lambda target: target.__setitem__(slice(None), b"whatever"))
    access.finish_writes()
    assert [bytes(view) for view in views] == [bytes(rows[3]), bytes(rows[4])]


def test_what_does_not_pass_its_check_does_not_reach_a_device(rows):
    access = DevicePoolAccess(LazyCopier(rows))
    before = rows.copy()

    def fill(target):
        target[:] = b"rubbish!"
        raise CorruptBlock("no")

    with pytest.raises(CorruptBlock):
        access.write(4, fill)
    access.finish_writes()
    assert (rows == before).all()


def digest_blocks(block_ids):
    return [7 * block_id for block_id in block_ids]


def test_pinned_memory_goes_into_blocks_as_it_lies(rows):
    memory = memoryview(bytearray(b"abcdefgh" * 20))
    access = DevicePoolAccess(LazyCopier(rows), digest_blocks, memory[:80])
    for block_id in range(9):
        start = 8 * block_id
        assert access.write_from(block_id, memory[start : start + 8].toreadonly())
    access.finish_writes()
    assert {bytes(rows[block_id]) for block_id in range(9)} == {b"abcdefgh"}
    assert access.digests([3, 4]) == [21, 28]


@pytest.mark.parametrize("start", [73, 80, 120])
def test_memory_that_is_not_pinned_is_not_copied_from(rows, start):
    memory = memoryview(bytearray(160))
    access = DevicePoolAccess(LazyCopier(rows), digest_blocks, memory[:80])
    assert not access.write_from(3, memory[start : start + 8])
    assert not access.write_from(3, memoryview(bytearray(8)))


def test_nothing_lands_unchecked_where_nothing_can_digest_it(rows):
    memory = memoryview(bytearray(80))
    assert not DevicePoolAccess(LazyCopier(rows), None, memory).write_from(3, memory[:8])
    assert not DevicePoolAccess(LazyCopier(rows), digest_blocks).write_from(3, memory[:8])
    assert not HostPoolAccess(rows.reshape(-1).data, BLOCK_BYTES).write_from(3, memory[:8])


def test_device_pool_without_copier_is_refused():
    region = KVPoolRegion(base_address=1, num_blocks=2, block_bytes=8, layout=hash_model_layout(16), device="cuda:0")
    with pytest.raises(ConnectorUnavailable, match="cuda:0"):
        open_pool(region)
