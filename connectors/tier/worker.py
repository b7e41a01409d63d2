"""The worker side of a tier connector: the engine thread's end of the queues to and from the transfer thread.

It never blocks and makes no decisions. References and request states protect blocks that are being copied, so preemption and
the end of a step need no handling here.
"""

from __future__ import annotations

from collections.abc import Callable

from connectors.async_worker import ReportingWorker
from connectors.reports import LoadEnded
from connectors.tier.messages import Report, SaveEnded, SavesAreSlow, TierConnectorMetadata, TierConnectorWorkerMetadata
from core.request import KVConnectorMetadata, KVConnectorOutput


class TierConnectorWorker(ReportingWorker[Report]):
    """Passes step messages to ``submit``, on the engine thread, and collects reports."""

    def __init__(self, name: str, submit: Callable[[TierConnectorMetadata], None]) -> None:
        super().__init__(f"connector {name}")
        self._submit = submit

    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        """Pass the message of the step to the transfer thread."""
        assert isinstance(metadata, TierConnectorMetadata)
        if not metadata.is_empty():
            self._submit(metadata)

    def add_report(self, report: Report, output: KVConnectorOutput) -> None:
        """Put a report into the step's output; a save that ends after saves were slow ends the slowness."""
        if isinstance(report, LoadEnded):
            super().add_report(report, output)
            return
        meta = output.worker_meta
        saved = meta.saved_block_ids if isinstance(meta, TierConnectorWorkerMetadata) else ()
        if isinstance(report, SaveEnded):
            saved += report.block_ids
        output.worker_meta = TierConnectorWorkerMetadata(saved, is_slow=isinstance(report, SavesAreSlow))
