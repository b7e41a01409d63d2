"""The worker side of the LMCache connector: the engine thread's end of the queues to and from the event loop.

After a step it copies the blocks of completed chunks, before they can be written again: some MiB per chunk. Everything else
runs in the event loop and on the copying thread. Never blocks on either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from connectors.async_worker import ReportingWorker
from connectors.lmcache.messages import LMCacheMPConnectorMetadata, SavePages
from connectors.lmcache.staging import Bytes
from connectors.reports import LoadEnded
from core.kv.pool_region import KVPoolRegion
from core.request import KVConnectorMetadata


class LMCacheMPConnectorWorker(ReportingWorker[LoadEnded]):
    """Passes step messages to ``submit`` and copied saves to ``submit_copied``, and collects the ends of loads.

    Both must be callable from the engine thread and keep order.
    """

    def __init__(
        self, submit: Callable[[LMCacheMPConnectorMetadata], None], submit_copied: Callable[[Sequence[SavePages]], None]
    ) -> None:
        super().__init__("the LMCache connector")
        self.rows: Bytes = np.empty((0, 0), dtype=np.uint8)  # of the pool, [num_blocks, block_bytes]
        self._submit = submit
        self._submit_copied = submit_copied
        self._saves: list[SavePages] = []

    def register_kv_caches(self, pool: KVPoolRegion) -> None:
        """Keep the pool and map its rows."""
        super().register_kv_caches(pool)
        if pool.buffer is not None:
            self.rows = np.frombuffer(pool.buffer, dtype=np.uint8).reshape(pool.num_blocks, pool.block_bytes)

    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        """Pass the step's message to the event loop."""
        assert isinstance(metadata, LMCacheMPConnectorMetadata)
        self._saves = metadata.saves
        if not metadata.is_empty():
            self._submit(metadata)

    def wait_for_save(self) -> None:
        """Copy the blocks of the chunks that the step completed."""
        saves, self._saves = self._saves, []
        for save in saves:
            staging = save.transfer.server.staging
            for move, page in zip(save.transfer.moves, save.pages, strict=True):
                staging.rows[page, : staging.block_bytes] = self.rows[move.block_id]
        if saves:
            self._submit_copied(saves)
