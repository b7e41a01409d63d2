"""The worker side of the LMCache connector: the engine thread's end of the queues to and from the event loop.

The one thing it does itself is to copy what a step has completed, behind the step, before its blocks can be written again: a
copy of some MiB per chunk. Everything else runs in the event loop and on the copying thread. Never waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from connectors.lmcache.actions import LMCacheMPConnectorMetadata, LoadEnded, Save
from connectors.lmcache.staging import Bytes
from core.connector import KVConnectorMetadata, KVConnectorWorker, KVPoolRegion
from core.errors import EngineDead
from core.request import KVConnectorOutput


class LMCacheMPConnectorWorker(KVConnectorWorker):
    """Hands step messages to ``submit``, what has been copied to ``submit_copied``, and collects the ends of loads.

    Both must be callable from the engine thread and keep order; ``report`` and ``fail`` are callable from any thread.
    """

    def __init__(
        self, submit: Callable[[LMCacheMPConnectorMetadata], None], submit_copied: Callable[[Sequence[Save]], None]
    ) -> None:
        self.pool: KVPoolRegion | None = None
        self.rows: Bytes = np.empty((0, 0), dtype=np.uint8)  # of the pool, [num_blocks, block_bytes]
        self._submit = submit
        self._submit_copied = submit_copied
        self._saves: list[Save] = []
        self._reports: deque[LoadEnded] = deque()
        self._wakeup: Callable[[], None] = _no_wakeup
        self._death: BaseException | None = None

    def register_kv_caches(self, pool: KVPoolRegion) -> None:
        """Keep the pool."""
        self.pool = pool
        if pool.buffer is not None:
            self.rows = np.frombuffer(pool.buffer, dtype=np.uint8).reshape(pool.num_blocks, pool.block_bytes)

    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        """Receive what wakes an idle engine."""
        self._wakeup = wakeup

    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        """Pass the step's message on."""
        assert isinstance(metadata, LMCacheMPConnectorMetadata)
        self._saves = metadata.saves
        if not metadata.is_empty():
            self._submit(metadata)

    def wait_for_save(self) -> None:
        """Copy the blocks of chunks that the step has completed."""
        saves, self._saves = self._saves, []
        for save in saves:
            staging = save.transfer.server.staging
            for move, page in zip(save.transfer.moves, save.pages, strict=True):
                staging.rows[page, : staging.block_bytes] = self.rows[move.block_id]
        if saves:
            self._submit_copied(saves)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorOutput:
        """Drain the reports.

        Raises:
            EngineDead: the copying thread or the event loop's part has failed; nobody knows what still waits.
        """
        if self._death is not None:
            raise EngineDead(f"the LMCache connector has died: {self._death!r}")
        output = KVConnectorOutput()
        while self._reports:
            _add(output, self._reports.popleft())
        return output

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Return the two sets of ``get_transfer_results``."""
        output = self.get_transfer_results(finished_req_ids)
        return output.finished_sending, output.finished_recving

    def report(self, ended: LoadEnded) -> None:
        """Queue the end of a load and wake the engine."""
        self._reports.append(ended)
        self._wakeup()

    def wake(self) -> None:
        """Wake the engine: the scheduler side has an answer."""
        self._wakeup()

    def fail(self, error: BaseException) -> None:
        """Make the next step raise."""
        self._death = error
        self._wakeup()


def _add(output: KVConnectorOutput, ended: LoadEnded) -> None:
    output.finished_recving.add(ended.request_id)
    if ended.usage is not None:
        output.transfer_usage[ended.request_id] = ended.usage
    if ended.error is None:
        return
    if ended.invalid_block_ids:
        output.invalid_block_ids.update(ended.invalid_block_ids)
        output.load_errors[ended.request_id] = ended.error
    else:
        output.failed_recving[ended.request_id] = ended.error


def _no_wakeup() -> None:
    """Stand in until the engine has given its own."""
