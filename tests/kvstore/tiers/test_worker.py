"""The thread of a tier: the order of its jobs."""

import threading

from kvstore.testing.blocks import BLOCK_BYTES, make_block
from kvstore.testing.in_memory import DictTier
from kvstore.tiers.base import LoadJob, LocateJob, SaveJob
from kvstore.tiers.worker import TierWorker

DEADLINE_S = 30.0


def test_lookups_go_before_loads_and_loads_before_saves():
    done, is_over = [], threading.Event()

    def on_done(job):
        done.append(job)
        if len(done) == len(jobs):
            is_over.set()

    blocks = [make_block(number) for number in range(2)]
    jobs = [
        *(SaveJob(0, block.key.pack(), block.seal, block.content) for block in blocks),
        *(LoadJob(0, block.key.pack(), memoryview(bytearray(BLOCK_BYTES))) for block in blocks),
        *(LocateJob(0, [block.key.pack()]) for block in blocks),
    ]
    worker = TierWorker(DictTier(), on_done)
    for job in jobs:
        worker.submit(job)
    worker.start()
    assert is_over.wait(DEADLINE_S)
    assert worker.stop(DEADLINE_S)
    assert done == [*jobs[4:], *jobs[2:4], *jobs[:2]]
