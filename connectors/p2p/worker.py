"""The worker side of the p2p connector: the engine thread's end of the queues to and from the event loop.

Never blocks and decides nothing: loads are run by ``P2PAgent`` in the event loop and by the transfer thread.
"""

from __future__ import annotations

from collections.abc import Callable

from connectors.async_worker import ReportingWorker
from connectors.p2p.actions import QuarantineEnded, Report
from connectors.p2p.metadata import P2PConnectorMetadata, P2PConnectorWorkerMetadata
from connectors.p2p.prefixes.messages import PrefixReport
from core.request import KVConnectorMetadata, KVConnectorOutput

P2PReport = Report | PrefixReport


class P2PConnectorWorker(ReportingWorker[P2PReport]):
    """Passes step messages to ``submit``, which must be callable from the engine thread, and collects reports."""

    def __init__(self, submit: Callable[[P2PConnectorMetadata], None]) -> None:
        super().__init__("the KV transfer")
        self._submit = submit

    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        """Pass the step's message on."""
        assert isinstance(metadata, P2PConnectorMetadata)
        if not metadata.is_empty():
            self._submit(metadata)

    def add_report(self, report: P2PReport, output: KVConnectorOutput) -> None:
        """Put a report into the step's output."""
        if isinstance(report, QuarantineEnded):
            _end_quarantine(report, output)
        elif isinstance(report, PrefixReport):
            output.worker_meta = output.worker_meta or P2PConnectorWorkerMetadata()
            assert isinstance(output.worker_meta, P2PConnectorWorkerMetadata)
            output.worker_meta.reports.append(report)
        else:
            super().add_report(report, output)


def _end_quarantine(ended: QuarantineEnded, output: KVConnectorOutput) -> None:
    # The engine does not know some of them as quarantined yet: for the engine they never were.
    told = set(ended.block_ids) - output.quarantined_block_ids
    output.quarantined_block_ids.difference_update(ended.block_ids)
    output.unquarantined_block_ids |= told
