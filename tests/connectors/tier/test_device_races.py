"""Saves, loads, preemptions and aborts with a pool on a device, whose copies are done whenever the device likes.

The model's tokens change with any wrong byte. On a machine without a GPU the device is
``connectors.testing.delayed_device``; the same histories run on a real one.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch

from connectors.pool_access import DevicePoolAccess
from connectors.testing.delayed_device import DelayedDevice
from core.block_copier import CudaCopyQueue, TensorBlockCopier, on_side_stream
from core.digest import BlockDigester, TensorDigester
from core.engine.cuda.pinned_memory import pin_for_cuda
from core.kv.seals import each_by_itself
from core.testing.hash_model import SLOT_BYTES, HashAttention, HashModel
from kvferry.sim.late_hash_model import LateHashModel

HYBRID = (HashAttention(window=20), HashAttention())
BLOCK_BYTES = 16 * SLOT_BYTES
NUM_SLOTS = 5
NUM_REQUESTS = 24
LATE = {"make_model": LateHashModel, "async_scheduling": True}


class CudaHashModel(HashModel):
    """Its pool is on a GPU: a step begins with a copy of it to the host, and ends with copies of the blocks it wrote."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.on_device = torch.from_numpy(self.rows).cuda()
        self.written: set[int] = set()

    def execute_model(self, scheduler_output):
        self.rows[:] = self.on_device.cpu().numpy()
        self.written.clear()
        output = super().execute_model(scheduler_output)
        for block_id in self.written:
            self.on_device[block_id].copy_(torch.from_numpy(self.rows[block_id]))
        torch.cuda.synchronize()
        return output

    def _write(self, table, position, entry):
        super()._write(table, position, entry)
        self.written.add(table[position // self.block_size])


class SlotStore:
    """Makes a store whose blocks lie in slots of one piece of memory while they are pinned, and are garbage afterwards."""

    def __init__(self, store, num_slots=64):
        self.memory = memoryview(bytearray(num_slots * BLOCK_BYTES))
        self.free = list(range(num_slots))
        self.num_pinned = 0
        stored, release = store._stored, store.release

        def pin(key):
            block = stored(key)
            if block is None:
                return None
            start = self.free.pop() * BLOCK_BYTES
            self.num_pinned += 1
            self.memory[start : start + BLOCK_BYTES] = block.content
            return dataclasses.replace(block, content=self.memory[start : start + BLOCK_BYTES].toreadonly())

        def unpin(ticket):
            release(ticket)
            for block in ticket.blocks:
                if block is not None:
                    start = address_of(block.content) - address_of(self.memory)
                    self.memory[start : start + BLOCK_BYTES] = b"\xdd" * BLOCK_BYTES
                    self.free.append(start // BLOCK_BYTES)

        store._stored, store.release = pin, unpin


def address_of(memory):
    return np.frombuffer(memory, dtype=np.uint8).ctypes.data


class History:
    """A history drawn from a seed: prompts with common beginnings, some aborted at any time, in a pool that is too small."""

    def __init__(self, make_engine, store, seed, **settings):
        self.rng = random.Random(seed)
        store.answers_at_once = False
        self.store = store
        self.engine = make_engine(num_blocks=36, max_tokens=48, is_lazy=self.rng.random() < 0.3, **settings)
        self.num_added = 0
        self.happened = Counter()

    def run(self, go_on):
        """Let it all happen; ``go_on`` gives the device a chance."""
        for _ in range(4000):
            self.happen()
            go_on()
            if self.num_added == NUM_REQUESTS and not self.engine.core.has_requests():
                break
        self.engine.run()
        self.engine.assert_is_right()
        self.engine.assert_is_empty()
        self.happened["preemptions"] += self.engine.core.stats.num_preemptions
        self.happened += self.engine.mover.counts
        return self.happened

    def happen(self):
        rng, engine = self.rng, self.engine
        if self.num_added < NUM_REQUESTS and rng.random() < 0.3:
            family, length = rng.randrange(4), rng.randrange(20, 190)
            engine.add(f"r{self.num_added}", [1000 * family + position for position in range(length)], rng.randrange(2, 40))
            self.num_added += 1
        if rng.random() < 0.06 and engine.core.scheduler.requests:
            leaving = rng.choice(sorted(engine.core.scheduler.requests))
            self.happened["aborts"] += len(engine.core.abort_requests([leaving]))
        if rng.random() < 0.5:
            self.store.answer(rng.randrange(3))
        if rng.random() < 0.7:
            engine.move(rng.randrange(1, 4))
        if rng.random() < 0.6:
            engine.step()


def way_to(device, slots=None):
    """Return what opens a model's pool as memory of the device, with the memory of ``slots`` pinned."""

    def open_pool(model):
        copier = device.new_copier(torch.from_numpy(model.rows), NUM_SLOTS)
        if slots is None:
            return DevicePoolAccess(copier)
        digester = BlockDigester(BLOCK_BYTES)
        digest_blocks = each_by_itself(lambda block_id: digester.digest(model.rows[block_id]))
        return DevicePoolAccess(copier, digest_blocks, slots.memory)

    return open_pool


def run_on_delayed_device(tier_engine, store, seed, attentions, is_pinned=False, **settings):
    device = DelayedDevice(seed, share=(0.02, 0.1, 0.4)[seed % 3])  # slow ones and fast ones
    slots = SlotStore(store) if is_pinned else None
    open_pool = way_to(device, slots)
    history = History(partial(tier_engine, store=store), store, seed, attentions=attentions, open_pool=open_pool, **settings)
    happened = history.run(device.go_on)
    happened["late copies"] += device.num_late
    happened["pinned blocks"] += 0 if slots is None else slots.num_pinned
    return happened


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attentions", "is_pinned"),
    [
        pytest.param(HYBRID, False, id="sliding, slots"),
        pytest.param((HashAttention(),), True, id="full, pinned"),
        pytest.param(HYBRID, True, id="sliding, pinned", marks=pytest.mark.full),
        pytest.param((HashAttention(),), False, id="full, slots", marks=pytest.mark.full),
    ],
)
def test_no_copy_is_ever_early_or_late(tier_engine, scripted_store, attentions, is_pinned):
    happened = Counter()
    for seed in range(8):
        happened += run_on_delayed_device(tier_engine, scripted_store(), seed, attentions, is_pinned)
    assert (happened["pinned blocks"] > 0) == is_pinned
    assert not happened["blocks_copied_again"], "what landed was not what was stored"
    assert not happened["failed_blocks"], "what came back was not what was saved"
    for what in ("saved_blocks", "loaded_blocks", "aborted_loads", "preemptions", "aborts", "late copies"):
        assert happened[what] > 0, f"no {what}: the histories show nothing"


@pytest.mark.slow
@pytest.mark.parametrize("is_pinned", [False, True], ids=["slots", "pinned"])
def test_no_copy_is_ever_early_or_late_with_async_scheduling(tier_engine, scripted_store, is_pinned):
    happened = Counter()
    for seed in range(8):
        happened += run_on_delayed_device(tier_engine, scripted_store(), seed, HYBRID, is_pinned, **LATE)
    assert not happened["failed_blocks"] + happened["blocks_copied_again"], "what came back was not what was saved"
    for what in ("saved_blocks", "loaded_blocks", "aborted_loads", "preemptions", "aborts", "late copies"):
        assert happened[what] > 0, f"no {what}: the histories show nothing"


@pytest.mark.full
@pytest.mark.parametrize("seed", range(100, 300))
def test_no_copy_is_ever_early_or_late_in_many_histories(tier_engine, store, seed):
    attentions, late = HYBRID if seed % 2 else (HashAttention(),), LATE if seed % 3 else {}
    run_on_delayed_device(tier_engine, store, seed, attentions, is_pinned=seed % 4 < 2, **late)


def nobody_waits_for_writes(access):
    """The mutant reports a load while its last copies are under way."""


def nobody_waits_for_reads(copier, slot, wait=TensorBlockCopier.wait):
    """The mutant uses a slot while its copy is under way."""
    copier._copies.pop(slot, None)


@pytest.mark.parametrize(
    ("mutant", "is_pinned"),
    [
        ((DevicePoolAccess, "finish_writes", nobody_waits_for_writes), False),
        ((DevicePoolAccess, "finish_writes", nobody_waits_for_writes), True),
        ((TensorBlockCopier, "wait", nobody_waits_for_reads), False),
    ],
    ids=["writes", "pinned writes", "slots"],
)
def test_histories_find_a_missing_wait(tier_engine, scripted_store, monkeypatch, mutant, is_pinned):
    monkeypatch.setattr(*mutant)

    def run_all():
        for seed in range(8):
            happened = run_on_delayed_device(tier_engine, scripted_store(), seed, (HashAttention(),), is_pinned)
            assert not happened["failed_blocks"] + happened["blocks_copied_again"], "what came back was not what was saved"

    with pytest.raises(AssertionError):
        run_all()


def test_damaged_block_is_found_where_it_has_landed(tier_engine, store, rng):
    slots = SlotStore(store)
    engine = tier_engine(open_pool=way_to(DelayedDevice(1), slots))
    engine.add("a", range(100))
    engine.run()
    engine.forget()
    store.corrupt(rng)
    engine.add("b", range(100))
    engine.run()
    assert engine.mover.counts["blocks_copied_again"] == engine.mover.counts["failed_blocks"] == 1
    assert store.rejected == {"digest": 1}, "the store is told"
    engine.assert_is_right()
    engine.assert_is_empty()


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(12))
def test_no_copy_is_ever_early_or_late_on_a_gpu(tier_engine, store, seed):
    slots = SlotStore(store) if seed % 4 < 2 else None
    unpin = pin_for_cuda(slots.memory) if slots is not None else None

    def open_pool(model):
        rows = model.on_device
        copier = TensorBlockCopier(rows, CudaCopyQueue(rows.device), NUM_SLOTS)
        if slots is None:
            return DevicePoolAccess(copier)
        digester = TensorDigester(rows.view(torch.int64))
        return DevicePoolAccess(copier, on_side_stream(rows.device, digester.digests), slots.memory)

    settings = {"attentions": HYBRID if seed % 2 else (HashAttention(),), "make_model": CudaHashModel, "open_pool": open_pool}
    try:
        happened = History(partial(tier_engine, store=store), store, seed, **settings).run(lambda: None)
    finally:
        if unpin is not None:
            unpin()
    assert happened["loaded_blocks"] + happened["saved_blocks"] > 0
    assert not happened["failed_blocks"] + happened["blocks_copied_again"]
