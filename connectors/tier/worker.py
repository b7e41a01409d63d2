"""The worker side of a tier connector: the engine thread's end of the queues to and from the transfer thread.

It never blocks and makes no decisions. References and request states protect blocks that are being copied, so preemption and
the end of a step need no handling here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from connectors.async_worker import ReportingWorker, add_load_ended
from connectors.load_ended import LoadEnded
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

    def _tell(self, reports: Iterator[Report], output: KVConnectorOutput) -> None:
        saved: list[int] = []
        is_slow = False
        for report in reports:
            match report:
                case SaveEnded():
                    saved += report.block_ids
                    is_slow = False
                case SavesAreSlow():
                    is_slow = True
                case LoadEnded():
                    add_load_ended(report, output)
        if saved or is_slow:
            output.worker_meta = TierConnectorWorkerMetadata(tuple(saved), is_slow)
