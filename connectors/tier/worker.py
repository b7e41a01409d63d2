"""The worker side of a tier connector: the engine thread's end of the queues to and from the mover's thread.

Never blocks and decides nothing. Blocks that are copied are protected by references and by their requests' state, so that
preemption and the end of a step need no care here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from connectors.tier.jobs import (
    LoadEnded,
    Report,
    SaveEnded,
    SavesAreSlow,
    TierConnectorMetadata,
    TierConnectorWorkerMetadata,
)
from core.connector import KVConnectorMetadata, KVConnectorWorker, KVPoolRegion
from core.errors import EngineDead
from core.request import KVConnectorOutput


class TierConnectorWorker(KVConnectorWorker):
    """Hands step messages to ``submit`` and collects reports.

    ``submit`` must be callable from the engine thread; ``report``, ``wake`` and ``fail`` are callable from any thread.
    """

    def __init__(self, name: str, submit: Callable[[TierConnectorMetadata], None]) -> None:
        self.pool: KVPoolRegion | None = None
        self._name = name
        self._submit = submit
        self._reports: deque[Report] = deque()
        self._wakeup: Callable[[], None] = _no_wakeup
        self._death: BaseException | None = None

    def register_kv_caches(self, pool: KVPoolRegion) -> None:
        """Keep the pool for the mover."""
        self.pool = pool

    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        """Receive what wakes an idle engine."""
        self._wakeup = wakeup

    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        """Pass the step's message on."""
        assert isinstance(metadata, TierConnectorMetadata)
        if not metadata.is_empty():
            self._submit(metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorOutput:
        """Drain the reports.

        Raises:
            EngineDead: the mover has ended: what it was copying is never let go.
        """
        if self._death is not None:
            raise EngineDead(f"connector {self._name} has died: {self._death!r}")
        output = KVConnectorOutput()
        saved: list[int] = []
        is_slow = False
        while self._reports:
            report = self._reports.popleft()
            match report:
                case SaveEnded():
                    saved += report.block_ids
                    is_slow = False
                case SavesAreSlow():
                    is_slow = True
                case LoadEnded():
                    _add_load(output, report)
        if saved or is_slow:
            output.worker_meta = TierConnectorWorkerMetadata(tuple(saved), is_slow)
        return output

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Return the two sets of ``get_transfer_results``."""
        output = self.get_transfer_results(finished_req_ids)
        return output.finished_sending, output.finished_recving

    def report(self, report: Report) -> None:
        """Queue news and wake the engine."""
        self._reports.append(report)
        self._wakeup()

    def wake(self) -> None:
        """Wake the engine: there is an answer that its scheduler side waits for."""
        self._wakeup()

    def fail(self, error: BaseException) -> None:
        """Make the next step raise."""
        self._death = error
        self._wakeup()


def _add_load(output: KVConnectorOutput, ended: LoadEnded) -> None:
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
