"""The thread of a tier: the order of its jobs, and what it logs."""

import threading

from core.errors import Unavailable
from kvstore.testing.blocks import BLOCK_BYTES, make_block
from kvstore.testing.in_memory import DictTier
from kvstore.tiers.base import LoadJob, LocateJob, SaveJob
from kvstore.tiers.worker import MAX_PASSED, TierExecutor, TierRunner

DEADLINE_S = 30.0


def order_of(jobs):
    """Return jobs, all queued before the thread starts, in the order in which it runs them."""
    done, is_over = [], threading.Event()

    def on_done(job):
        done.append(job)
        if len(done) == len(jobs):
            is_over.set()

    worker = TierExecutor(DictTier(), on_done)
    for job in jobs:
        worker.submit(job)
    worker.start()
    assert is_over.wait(DEADLINE_S)
    assert worker.stop(DEADLINE_S)
    return done


def saves(count):
    return [SaveJob(0, block.key.pack(), block.seal, block.content) for block in map(make_block, range(count))]


def loads(count):
    return [LoadJob(0, make_block(number).key.pack(), memoryview(bytearray(BLOCK_BYTES))) for number in range(count)]


def lookups(count):
    return [LocateJob(0, [make_block(number).key.pack()]) for number in range(count)]


def test_lookups_go_before_loads_in_turn_and_loads_before_saves():
    two_saves, three_loads, two_lookups = saves(2), loads(3), lookups(2)
    order = order_of([*two_saves, *three_loads, *two_lookups])
    assert order == [two_lookups[0], three_loads[0], two_lookups[1], *three_loads[1:], *two_saves]


def test_no_number_of_lookups_and_loads_keeps_a_save_from_its_turn():
    (save,), patience = saves(1), MAX_PASSED[SaveJob]
    order = order_of([save, *loads(patience), *lookups(patience)])
    assert order.index(save) == patience


def test_a_tier_that_fails_again_and_again_is_one_line(caplog):
    class Forgetful(DictTier):
        """Takes every block, and cannot say which it has."""

        def locate(self, keys):
            raise Unavailable("no")

    runner = TierRunner(Forgetful())
    for save, lookup in zip(saves(20), lookups(20), strict=True):
        runner.run(save)
        runner.run(lookup)
    assert runner.statistics().errors == 20
    assert caplog.text.count("kvstore_tier_failed") == 1
