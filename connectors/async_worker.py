"""The worker side of a connector whose own threads do the work.

Owns the queue of reports from the connector's threads to the engine thread, the wakeup of the engine and the error that ended
the connector.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from connectors.reports import ALL_BLOCKS, LoadEnded, SendingEnded
from core.connector import KVConnectorWorker
from core.errors import EngineDead
from core.kv.pool_region import KVPoolRegion
from core.request import KVConnectorOutput

ReportT = TypeVar("ReportT")


class ReportingWorker(KVConnectorWorker, Generic[ReportT]):
    """A worker side that never blocks: ``report``, ``wake`` and ``fail`` are callable from any thread.

    ``name`` names the connector in errors.
    """

    def __init__(self, name: str) -> None:
        self.pool: KVPoolRegion | None = None
        self._name = name
        self._reports: deque[ReportT] = deque()
        self._wakeup: Callable[[], None] = _no_wakeup
        self._death: BaseException | None = None

    def register_kv_caches(self, pool: KVPoolRegion) -> None:
        """Keep the pool for the connector's threads."""
        self.pool = pool

    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        """Keep the callback that wakes an idle engine."""
        self._wakeup = wakeup

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorOutput:
        """Drain the reports.

        Raises:
            EngineDead: a thread or the event loop of the connector has failed, so that loads may never end.
        """
        if self._death is not None:
            raise EngineDead(f"{self._name} has died: {self._death!r}") from self._death
        output = KVConnectorOutput()
        while self._reports:
            self.add_report(self._reports.popleft(), output)
        return output

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Return the two sets of ``get_transfer_results``."""
        output = self.get_transfer_results(finished_req_ids)
        return output.finished_sending, output.finished_recving

    def report(self, report: ReportT) -> None:
        """Queue a report and wake the engine."""
        self._reports.append(report)
        self._wakeup()

    def wake(self) -> None:
        """Wake the engine, because the scheduler side can continue."""
        self._wakeup()

    def fail(self, error: BaseException) -> None:
        """Make the next step raise."""
        self._death = error
        self._wakeup()

    def add_report(self, report: ReportT, output: KVConnectorOutput) -> None:
        """Put a report into the step's output. Override it for reports of other types than these two."""
        if isinstance(report, SendingEnded):
            output.finished_sending.add(report.request_id)
        elif isinstance(report, LoadEnded):
            add_load_ended(report, output)


def _no_wakeup() -> None:
    """Stand in until ``set_wakeup``."""


def add_load_ended(ended: LoadEnded, output: KVConnectorOutput) -> None:
    """Add the end of a load to a step's output."""
    output.finished_recving.add(ended.request_id)
    output.quarantined_block_ids.update(ended.quarantined_block_ids)
    if ended.usage is not None:
        output.transfer_usage[ended.request_id] = ended.usage
    if ended.error is None:
        return
    if ended.invalid_block_ids is ALL_BLOCKS:
        output.failed_recving[ended.request_id] = ended.error
    else:
        output.invalid_block_ids.update(ended.invalid_block_ids)
        output.load_errors[ended.request_id] = ended.error
