"""The p2p connector under virtual time: scheduler side, worker side and agent are the real ones."""

from __future__ import annotations

from collections import Counter

from connectors.p2p.actions import Report
from connectors.p2p.metadata import P2PConnectorMetadata
from connectors.p2p.prefixes.messages import PrefixAnswered, PrefixReport
from connectors.p2p.producer.handshake import WorkerIdentity
from connectors.p2p.scheduler import P2PConnectorScheduler
from connectors.p2p.worker import P2PConnectorWorker
from connectors.reports import LoadEnded
from core.config_workers import ConnectorSection
from core.ids import IdSource
from kvferry.sim.driver import SimDriver, WriteWatch
from kvferry.sim.host import Host
from kvferry.sim.timing_checks import TimingChecks

_PATIENCE_S = (0.25, 1.0, 3.0)  # the least that a reader waits for a source


class SimConnector(SimDriver):
    """Producer on prefill workers, consumer on decode workers; both on all workers if they serve beginnings of prompts."""

    def __init__(
        self, host: Host, identity: WorkerIdentity, config: ConnectorSection, ids: IdSource, control_address: str
    ) -> None:
        super().__init__(host, identity, config, ids, control_address)
        self.scheduler = P2PConnectorScheduler(
            identity,
            lease_ms=int(1000 * config.lease_s),
            ids=ids,
            grant=self._grant,
            now=host.process.clock.now,
            post=self._post if config.peer_prefixes else None,
        )
        self.scheduler.control_address = control_address
        if self.scheduler.pulls is not None:
            self.scheduler.pulls.least_patience_s = _PATIENCE_S[identity.incarnation % len(_PATIENCE_S)]
        self.worker = P2PConnectorWorker(self._submit)
        self._ended_loads: Counter[str] = Counter()  # by outcome

    def start(self, watch: WriteWatch, times: TimingChecks, max_rows_per_read: int) -> None:
        """Answer readers and start to read."""
        self._times = times
        pool = self.worker.pool
        assert pool is not None, "register_kv_caches comes before start"
        self._start(pool, watch, max_rows_per_read)

    def count_what_happened(self) -> dict[str, int]:
        """Count events that not every run has."""
        assert self.agent is not None
        counts = self.agent.counts()
        names = {"expired_leases": "lease_expired", "late_lease_messages": "lease_late"}
        happened = {name: counts[key] for name, key in names.items()}
        happened |= {"converted_blocks": self._staging.num_converted, "waits_for_staging": self._staging.num_refusals}
        return (
            happened
            | {name: counts[name] for name in ("fenced_peers", "blocks_read_again", "leases_known_in_time")}
            | self._ended_loads
        )

    def pinned(self) -> list[int]:
        """Return the blocks that are kept for readers of prefixes, once for each reference."""
        return self.scheduler.pins.pinned if self.scheduler.pins is not None else []

    def _report_prefix(self, report: PrefixReport) -> None:
        if isinstance(report, PrefixAnswered):
            self._ended_loads[f"prefix_{report.refusal or 'held'}"] += 1
            if report.handoff is not None and self._has_asked_after_preemption(report.request_id):
                self._ended_loads["prefix_held_after_preemption"] += 1
        self.worker.report(report)

    def _has_asked_after_preemption(self, request_id: str) -> bool:
        pulls = self.scheduler.pulls
        asked = pulls._rounds.get(request_id) if pulls is not None else None
        return asked is not None and asked.num_preemptions > 0

    def _submit(self, metadata: P2PConnectorMetadata) -> None:
        def on_step() -> None:
            self._times.on_order(metadata)
            self._consumer.handle(metadata)

        self._host.from_engine.put(on_step)

    def _report(self, report: Report) -> None:
        if isinstance(report, LoadEnded) and report.usage is not None:
            outcome = report.error.code if report.error is not None else "ok"
            is_prefix = self.agent is not None and self.agent.asks.end_load(report.request_id)
            self._ended_loads[f"{'prefix_load' if is_prefix else 'load'}_{outcome}"] += 1
            self._times.on_load_ended(report)
        self.worker.report(report)
