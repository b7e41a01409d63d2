"""The resources of the processes during the run: private memory, file descriptors, threads."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import psutil

_INTERVAL_S = 1.0
MIN_LIFE_S = 45.0  # of a process whose growth means something


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at a process; bytes and counts. ``at`` is of the monotonic clock."""

    at: float
    private_bytes: int
    num_fds: int
    num_threads: int


@dataclass(frozen=True, slots=True)
class Growth:
    """The growth of a process in the last quarter of its life compared with the second one, by medians."""

    name: str
    pid: int
    life_s: float
    private_bytes: float  # of the second quarter
    more_private_bytes: float
    more_fds: float
    more_threads: float


class Watch:
    """Samples every process of a cluster; one that is restarted is another process."""

    def __init__(self, pids: Callable[[], Mapping[str, int]]) -> None:
        self._pids = pids
        self._samples: dict[tuple[str, int], list[Sample]] = defaultdict(list)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch")

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._stop.set()
        self._thread.join()

    def growths(self) -> list[Growth]:
        """Return the growth of every process that lived long enough."""
        found = []
        for (name, pid), samples in self._samples.items():
            life_s = samples[-1].at - samples[0].at
            if life_s < MIN_LIFE_S:
                continue
            quarter = len(samples) // 4
            early, late = samples[quarter : 2 * quarter], samples[-quarter:]

            def more(field: str, early: list[Sample] = early, late: list[Sample] = late) -> float:
                return median(getattr(each, field) for each in late) - median(getattr(each, field) for each in early)

            rss = median(each.private_bytes for each in early)
            found.append(Growth(name, pid, life_s, rss, more("private_bytes"), more("num_fds"), more("num_threads")))
        return found

    def _run(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            for name, pid in self._pids().items():
                try:
                    process = psutil.Process(pid)
                    memory = process.memory_info()
                    private_bytes = memory.rss - memory.shared  # a KV pool is shared, has a fixed size, and fills as it is used
                    sample = Sample(time.monotonic(), private_bytes, process.num_fds(), process.num_threads())
                except psutil.Error:
                    continue  # it has just ended
                self._samples[name, pid].append(sample)
