"""The worker side of the p2p connector: the engine thread's end of the queues to and from the event loop.

Never blocks and decides nothing: loads are run by ``P2PNode`` in the event loop and by the transfer thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from connectors.p2p.actions import LoadEnded, P2PConnectorMetadata, QuarantineEnded, Report, SendingEnded
from core.connector import KVConnectorMetadata, KVConnectorWorker, KVPoolRegion
from core.errors import EngineDead
from core.request import KVConnectorOutput


class P2PConnectorWorker(KVConnectorWorker):
    """Hands step messages to ``submit`` and collects reports.

    ``submit`` must be callable from the engine thread; ``report`` and ``fail`` are callable from any thread.
    """

    def __init__(self, submit: Callable[[P2PConnectorMetadata], None]) -> None:
        self.pool: KVPoolRegion | None = None
        self._submit = submit
        self._reports: deque[Report] = deque()
        self._wakeup: Callable[[], None] = _no_wakeup
        self._death: BaseException | None = None

    def register_kv_caches(self, pool: KVPoolRegion) -> None:
        """Keep the pool for the transports."""
        self.pool = pool

    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        """Receive what wakes an idle engine."""
        self._wakeup = wakeup

    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        """Pass the step's message on."""
        assert isinstance(metadata, P2PConnectorMetadata)
        if not metadata.is_empty():
            self._submit(metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorOutput:
        """Drain the reports.

        Raises:
            EngineDead: the transfer thread or the control plane has ended; nothing can be loaded or served any more.
        """
        if self._death is not None:
            raise EngineDead(f"the KV transfer has died: {self._death!r}")
        output = KVConnectorOutput()
        while self._reports:
            _add(output, self._reports.popleft())
        return output

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Return the two sets of ``get_transfer_results``."""
        output = self.get_transfer_results(finished_req_ids)
        return output.finished_sending, output.finished_recving

    def report(self, report: Report) -> None:
        """Queue news and wake the engine."""
        self._reports.append(report)
        self._wakeup()

    def fail(self, error: BaseException) -> None:
        """Make the next step raise."""
        self._death = error
        self._wakeup()


def _add(output: KVConnectorOutput, report: Report) -> None:
    match report:
        case SendingEnded():
            output.finished_sending.add(report.request_id)
        case QuarantineEnded():
            # The engine has not heard of some of them yet: for it they were never in quarantine.
            told = set(report.block_ids) - output.quarantined_block_ids
            output.quarantined_block_ids.difference_update(report.block_ids)
            output.unquarantined_block_ids |= told
        case LoadEnded():
            _add_load(output, report)


def _add_load(output: KVConnectorOutput, ended: LoadEnded) -> None:
    output.finished_recving.add(ended.request_id)
    output.quarantined_block_ids.update(ended.quarantined_block_ids)
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
