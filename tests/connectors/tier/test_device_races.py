"""Saves, loads, preemptions and aborts beside a pool on a device, whose copies are done whenever the device likes.

The model's tokens change with any wrong byte, whoever has left it. On a machine without a GPU the device is
``core.testing.delayed_device``; the same histories run on a real one.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import partial

import pytest
import torch

from connectors.pool_access import DevicePoolAccess
from core.engine.block_copier import CudaCopyQueue, TensorBlockCopier
from core.testing.delayed_device import DelayedDevice
from core.testing.hash_model import HashAttention, HashModel

HYBRID = (HashAttention(window=20), HashAttention())
NUM_SLOTS = 5
NUM_REQUESTS = 24


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


class History:
    """What happens, drawn from a seed: prompts with common beginnings, some left at any time, in a pool that is too small."""

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
        self.happened["preemptions"] += self.engine.core.gauges.num_preemptions
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


def run_on_delayed_device(tier_engine, store, seed, attentions):
    device = DelayedDevice(seed, share=(0.02, 0.1, 0.4)[seed % 3])  # slow ones and fast ones

    def open_pool(model):
        return DevicePoolAccess(device.new_copier(torch.from_numpy(model.rows), NUM_SLOTS))

    history = History(partial(tier_engine, store=store), store, seed, attentions=attentions, open_pool=open_pool)
    happened = history.run(device.go_on)
    happened["late copies"] += device.num_late
    return happened


@pytest.mark.parametrize("attentions", [(HashAttention(),), HYBRID], ids=["full", "sliding"])
def test_no_copy_is_ever_early_or_late(tier_engine, scripted_store, attentions):
    happened = Counter()
    for seed in range(8):
        happened += run_on_delayed_device(tier_engine, scripted_store(), seed, attentions)
    assert not happened["failed_blocks"], "what came back was not what was saved"
    for what in ("saved_blocks", "loaded_blocks", "aborted_loads", "preemptions", "aborts", "late copies"):
        assert happened[what] > 0, f"no {what}: the histories show nothing"


@pytest.mark.full
@pytest.mark.parametrize("seed", range(100, 300))
def test_no_copy_is_ever_early_or_late_in_many_histories(tier_engine, store, seed):
    run_on_delayed_device(tier_engine, store, seed, HYBRID if seed % 2 else (HashAttention(),))


def nobody_waits_for_writes(access):
    """What is wrong: a load is reported while its last copies are under way."""


def nobody_waits_for_reads(copier, slot, wait=TensorBlockCopier.wait):
    """What is wrong: a slot is used while its copy is under way."""
    copier._copies.pop(slot, None)


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [(DevicePoolAccess, "finish_writes", nobody_waits_for_writes), (TensorBlockCopier, "wait", nobody_waits_for_reads)],
    ids=["writes", "slots"],
)
def test_histories_tell_when_nobody_waits(tier_engine, scripted_store, monkeypatch, owner, name, wrong):
    monkeypatch.setattr(owner, name, wrong)

    def run_all():
        for seed in range(8):
            happened = run_on_delayed_device(tier_engine, scripted_store(), seed, (HashAttention(),))
            assert not happened["failed_blocks"], "what came back was not what was saved"

    with pytest.raises(AssertionError):
        run_all()


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(12))
def test_no_copy_is_ever_early_or_late_on_a_gpu(tier_engine, store, seed):
    def open_pool(model):
        queue = CudaCopyQueue(model.on_device.device)
        return DevicePoolAccess(TensorBlockCopier(model.on_device, queue, NUM_SLOTS))

    attentions = HYBRID if seed % 2 else (HashAttention(),)
    settings = {"attentions": attentions, "make_model": CudaHashModel, "open_pool": open_pool}
    happened = History(partial(tier_engine, store=store), store, seed, **settings).run(lambda: None)
    assert happened["loaded_blocks"] + happened["saved_blocks"] > 0
