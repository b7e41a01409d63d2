"""Several threads for one call of a compiled kernel.

Owns the threads and the wait for all of them. Does not know what a kernel computes, nor how its work is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch


class KernelThreads:
    """Runs the parts of one call side by side, on at most as many threads as torch has. ``name`` is the threads' prefix."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._threads: ThreadPoolExecutor | None = None

    def run(self, function: Callable[..., None], calls: Sequence[tuple[object, ...]]) -> None:
        """Call ``function`` with each tuple of arguments, the first on this thread; return when all have ended."""
        if len(calls) == 1:
            function(*calls[0])
            return
        others = self._submit(function, calls[1:])
        try:
            function(*calls[0])
        finally:
            wait(others)  # they read and write memory of the caller
        for other in others:
            other.result()

    def _submit(self, function: Callable[..., None], calls: Sequence[tuple[object, ...]]) -> list[Future[None]]:
        pool = self._pool()
        try:
            return [pool.submit(function, *call) for call in calls]
        except RuntimeError:  # no thread could be started, but the call was queued: it must not run on memory that is gone
            self._threads = None
            pool.shutdown(wait=True, cancel_futures=True)
            raise

    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix=self._name)
        return self._threads
