"""Copies of blocks beside the model, without a GPU: copies that are done at a wait, as on a stream."""

from __future__ import annotations

import pytest
import torch

from connectors.pool_access import DevicePoolAccess
from core.block_copier import TensorBlockCopier, cuda_block_copier

NUM_BLOCKS, BLOCK_BYTES = 10, 64


class LateQueue:
    """Does copies in order, when one of them is waited for."""

    def __init__(self):
        self.copies = []

    def submit(self, copy):
        self.copies.append(copy)
        return Done(self, copy)


class Done:
    def __init__(self, queue, copy):
        self.queue, self.copy = queue, copy

    def synchronize(self):
        while self.copy in self.queue.copies:
            self.queue.copies.pop(0)()


@pytest.fixture
def rows():
    return torch.arange(NUM_BLOCKS, dtype=torch.uint8)[:, None].repeat(1, BLOCK_BYTES)


@pytest.fixture
def queue():
    return LateQueue()


@pytest.fixture
def copier(rows, queue):
    return TensorBlockCopier(rows, queue, num_slots=3)


def test_nothing_is_copied_before_its_turn_on_the_stream(copier, rows, queue):
    copier.slot(0)[:] = b"\x77" * BLOCK_BYTES
    copier.start_write(0, 4)
    assert rows[4].tolist() == [4] * BLOCK_BYTES
    copier.wait(0)
    assert rows[4].tolist() == [0x77] * BLOCK_BYTES
    assert not queue.copies


def test_a_slot_belongs_to_its_copy_until_it_was_waited_for(copier):
    copier.start_read(1, 5)
    with pytest.raises(AssertionError):
        copier.slot(1)
    with pytest.raises(AssertionError):
        copier.start_write(1, 6)
    copier.wait(1)
    assert bytes(copier.slot(1)) == bytes([5]) * BLOCK_BYTES
    copier.wait(1)  # there is none any more


def test_writes_and_reads_of_a_tier_go_through_slots_in_turn(copier, rows):
    access = DevicePoolAccess(copier)
    for block_id in range(8):
        access.write(
            block_id, lambda target, block_id=block_id: target.__setitem__(slice(None), bytes([90 + block_id]) * BLOCK_BYTES)
        )
    access.finish_writes()
    assert rows[:, 0].tolist() == [*range(90, 98), 8, 9]
    assert [bytes(access.read([block_id])[0])[0] for block_id in (9, 0, 3)] == [9, 90, 93]


@pytest.mark.gpu
def test_copies_on_a_gpu(rows):
    on_device = rows.cuda()
    access = DevicePoolAccess(cuda_block_copier(on_device))
    access.write(3, lambda target: target.__setitem__(slice(None), b"\x55" * BLOCK_BYTES))
    access.finish_writes()
    assert on_device[3].tolist() == [0x55] * BLOCK_BYTES
    assert [bytes(view)[0] for view in access.read([3, 7])] == [0x55, 7]
