"""The thread of a tier: runs its jobs one after another, verifies loaded blocks, and counts failures.

It owns the queue of one tier. Lookups, which are short, run before loads, and loads before saves, for which no request waits.
No kind starves: lookups, also those of saves, may come faster than a slow tier answers. A job that no query needs any more is
skipped. If the tier raises, the job finds nothing. A block whose bytes or seal do not match its key is removed from
the tier and counts as missing. ``submit`` may be called from any thread; ``on_done`` is called on the thread of the tier.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from core.errors import CorruptBlock, StaleBlock, StoreError
from core.log import event
from core.rate_limit import LimitedLog
from kvstore.key import StoreKey
from kvstore.seal_check import BlockVerifier
from kvstore.tiers.base import LoadJob, LocateJob, SaveJob, Tier, TierJob, TierStatistics

# How many jobs of other kinds may run while one of a kind waits: then it is its turn.
MAX_PASSED: Mapping[type[TierJob], int] = MappingProxyType({LoadJob: 1, SaveJob: 16})

_log = logging.getLogger(__name__)


class TierExecutor:
    """Runs the jobs of one tier on a thread of its own."""

    def __init__(self, tier: Tier, on_done: Callable[[TierJob], None]) -> None:
        self.tier = tier
        self._on_done = on_done
        self._runner = TierRunner(tier)
        self._jobs: dict[type[TierJob], deque[TierJob]] = {
            kind: deque() for kind in (LocateJob, LoadJob, SaveJob)
        }  # by urgency
        self._num_passed = dict.fromkeys(MAX_PASSED, 0)  # since the last of the kind ran, while one waits
        self._wake = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=f"kvstore-{tier.name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, job: TierJob) -> None:
        """Queue a job; ``on_done`` is called when it has ended."""
        with self._wake:
            self._jobs[type(job)].append(job)
            self._wake.notify()

    def statistics(self) -> TierStatistics:
        """Return the counts."""
        return self._runner.statistics()

    def stop(self, timeout_s: float | None = None) -> bool:
        """End the thread after its current job and close the tier; False if the job takes too long, which closes nothing.

        Queued jobs are dropped.
        """
        self.close()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return False
        self.tier.close()
        return True

    def close(self) -> None:
        """Have the thread end after its current job. Idempotent."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()

    def _run(self) -> None:
        self.tier.check()
        while (job := self._next_job()) is not None:
            self._runner.run(job)
            self._on_done(job)

    def _next_job(self) -> TierJob | None:
        with self._wake:
            self._wake.wait_for(lambda: self._is_closing or any(self._jobs.values()))
            if self._is_closing:
                return None
            waiting = [kind for kind, jobs in self._jobs.items() if jobs]
            chosen = next((kind for kind in waiting if self._is_its_turn(kind)), waiting[0])
            for kind in MAX_PASSED.keys() & waiting:
                self._num_passed[kind] = 0 if kind is chosen else self._num_passed[kind] + 1
            return self._jobs[chosen].popleft()

    def _is_its_turn(self, kind: type[TierJob]) -> bool:
        return kind in MAX_PASSED and self._num_passed[kind] >= MAX_PASSED[kind]


def stop_all(workers: Iterable[TierExecutor], timeout_s: float) -> None:
    """Stop workers, all within this time, and name the tiers whose job does not end in it."""
    workers, ends_at = list(workers), time.monotonic() + timeout_s
    for worker in workers:
        worker.close()
    for worker in workers:
        if not worker.stop(max(0.0, ends_at - time.monotonic())):
            _log.warning(event("kvstore_tier_hangs", tier=worker.tier.name))


class TierRunner:
    """Runs single jobs of a tier on the thread of the caller."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._verifier = BlockVerifier()
        self._counts = TierStatistics()
        self._limited_log = LimitedLog(_log, time.monotonic)  # a bad disk can fail every block

    def run(self, job: TierJob) -> None:
        """Run a job and store the result in it, or skip it if it is not wanted any more. Never raises."""
        job.is_skipped = not job.is_wanted
        if job.is_skipped:
            return
        try:
            self._do(job)
        except StoreError as error:
            self._counts.errors += 1
            self._limited_log.warning("kvstore_tier_failed", tier=self._tier.name, error=error.message)
        except Exception:  # a transfer boundary: a broken tier has no blocks
            self._counts.errors += 1
            self._limited_log.exception("kvstore_tier_broke", tier=self._tier.name)

    def statistics(self) -> TierStatistics:
        """Return the counts and what the tier holds."""
        self._counts.num_blocks, self._counts.used_bytes = self._tier.occupancy()
        self._counts.lost_blocks = self._tier.num_lost_blocks()
        return self._counts

    def _do(self, job: TierJob) -> None:
        match job:
            case LocateJob():
                job.found = self._tier.locate(job.keys)
            case LoadJob():
                self._load(job)
            case SaveJob():
                job.is_saved = self._tier.save(job.key, job.seal, job.block)
                self._counts.saved_blocks += job.is_saved
                self._counts.failed_saves += not job.is_saved

    def _load(self, job: LoadJob) -> None:
        try:
            loaded = self._tier.load(job.key, job.target)
            if loaded is not None:
                self._verifier.check(StoreKey.unpack(job.key), loaded.seal, job.target[: loaded.num_bytes])
        except (CorruptBlock, StaleBlock) as error:
            self._counts.corrupt_blocks += 1
            key = job.key.hex()
            self._limited_log.warning("kvstore_corrupt_block", block_key=key, tier=self._tier.name, error=error.message)
            self._tier.remove(job.key)
            return
        self._counts.loaded_blocks += loaded is not None
        self._counts.missing_blocks += loaded is None
        job.loaded = loaded
