"""The common part of both EC connectors under virtual time, and a simulated worker's interface to its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import numpy as np

from connectors.ec.scheduler import FetchingScheduler
from connectors.ec.worker import FetchingWorker
from core.ec_connector import EmbeddingsLayout
from core.testing.hash_encoder import HASH_EMBEDDINGS, ROW_BYTES
from core.wire.media import ECSource
from kvferry.sim.loop import Process, Timer


class Embeddings(Protocol):
    """An EC connector of a simulated worker."""

    scheduler: FetchingScheduler
    worker: FetchingWorker

    def start(self, complain: Callable[[str], None], max_rows_per_read: int) -> None:
        """Answer readers and start to read."""

    def corrupt(self) -> None:
        """Change a bit of the embeddings that are promised to a reader next."""

    def release_sources(self, sources: Sequence[ECSource]) -> None:
        """Release embeddings that will not be read."""

    def num_leased_blocks(self) -> int:
        """Return how many chunks are held for readers."""

    def longest_lease_s(self) -> float:
        """Return how long readers may still need this worker."""

    def leftovers(self) -> dict[str, int]:
        """Count resources that must be free once every request has ended."""

    def count_what_happened(self) -> Counter[str]:
        """Count events that not every run has."""


class SimWakeupTimer:
    """``connectors.ec.wakeup_timer`` as an event: calls ``ring`` at the time that was set last, by the process's own clock."""

    def __init__(self, process: Process, ring: Callable[[], None]) -> None:
        self._process = process
        self._ring = ring
        self._timer: Timer | None = None

    def set(self, at: float) -> None:
        """Set the time, replacing the previous one."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._process.call_at(at, self._ring)


def leftovers_of_reader(scheduler: FetchingScheduler, worker: FetchingWorker) -> dict[str, int]:
    """Count resources that neither side may hold once every request has ended."""
    return {
        "embeddings on their way": scheduler.num_fetching_items,
        "chunks that requests want": scheduler.num_wanted_chunks,
        "quarantined chunks": scheduler.num_quarantined_chunks,
        "requests that the EC connector knows": len(scheduler._wishes),
        "requests that the EC connector has given up": len(scheduler._unavailable),
        "fetches that the worker side expects": len(worker._fetches),
        "reports of the EC connector": len(worker._reports),
    }


def why_not_written(scheduler: FetchingScheduler, chunk: int, *fetched: bytes) -> str:
    """Return why a chunk of a reader's memory may not be written: it is not being filled. Empty if it may.

    ``fetched`` are the items that are, or may be, written there: only the chunk's own one, if it is known.
    """
    items = [item for item in scheduler._chunk_cache._items.values() if chunk in item.chunks]
    if not items or items[0].is_here:
        return f"chunk {chunk} was written, which no fetch fills: {items}"
    if fetched and fetched != (items[0].identifier,):
        return f"chunk {chunk} of {items[0]} was written for {', '.join(identifier.hex() for identifier in fetched)}"
    return ""


def check_layout(layout: EmbeddingsLayout) -> None:
    """Check that the layout is that of a ``HashModel``'s embeddings."""
    assert layout == HASH_EMBEDDINGS


def to_bytes(rows: object) -> memoryview:
    """Return the bytes of rows in a ``HashModel``'s format."""
    return memoryview(cast(Any, rows).reshape(-1))


def to_rows(content: memoryview, layout: EmbeddingsLayout) -> Any:  # noqa: ANN401  stands for a tensor
    """Return a copy of bytes as rows."""
    return np.frombuffer(content, dtype=np.uint8).copy().reshape(-1, ROW_BYTES)
