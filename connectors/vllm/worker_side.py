"""The worker side: one rank's agent, its seals, and what the rank reports to vLLM after each step.

The engine's thread calls it; the agent's thread reports ends of loads and leases. Knows no tensors: the pool comes as memory.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from connectors.p2p.actions import (
    ConsumerStep,
    HandoffRef,
    LeaseGrant,
    PullRequest,
    QuarantineEnded,
    ReleaseHandoffs,
    Report,
)
from connectors.p2p.driver import AgentHost, P2PDriver
from connectors.p2p.metrics import P2PMetrics
from connectors.p2p.producer.handshake import WorkerIdentity
from connectors.p2p.settings import DriverSettings
from connectors.p2p.transport.factory import TransportFactory, create_transport
from connectors.reports import ALL_BLOCKS, LoadEnded, SendingEnded
from connectors.vllm.agent_thread import AgentThread
from connectors.vllm.counts import RankCounts
from connectors.vllm.head_ranges import head_sources, leased_peers
from connectors.vllm.identity import ModelIdentity
from connectors.vllm.load_parts import LoadParts
from connectors.vllm.orders import LoadOrder, QuarantineNews, RankAddress, RankOrders, RankReports, RemoteHandoff
from connectors.vllm.sealing import KVWritten, Sealer, SealingThread
from core.errors import ConfigError
from core.kv.pool_region import KVPoolRegion


@dataclass(frozen=True, slots=True)
class QuarantineBegan:
    """Late reads of a load that has ended, or of a part of one, may still write these blocks."""

    block_ids: tuple[int, ...]


@dataclass(slots=True)
class StepReport:
    """What a rank reports after a step: request ids, and blocks that must be computed again."""

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)
    invalid_block_ids: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRole:
    """What a rank does. ``num_kv_heads`` are those of the model, on all ``num_ranks`` ranks together.

    ``can_name_blocks``: vLLM accepts single invalid blocks. One is named only if no read can write it any more, because vLLM
    computes it again in place.
    """

    rank: int = 0
    num_ranks: int = 1
    num_kv_heads: int = 1
    is_producer: bool
    can_name_blocks: bool


class WorkerSide:
    """One rank: its agent, its seals, and its reports. ``pool`` is the engine's memory, and the seals."""

    def __init__(
        self,
        role: RankRole,
        identity: WorkerIdentity,
        settings: DriverSettings,
        pool: KVPoolRegion,
        create: TransportFactory = create_transport,
    ) -> None:
        assert pool.seals is not None, "the pool of an engine has seals"
        self.totals = RankCounts()  # since the start
        self._counts = RankCounts()
        self._role = role
        self._identity = identity
        self._settings = settings
        self.pool = pool
        self._sealer = Sealer(pool.seals)
        self._lock = threading.Lock()  # guards what both threads use, below
        self._reports: list[Report | QuarantineBegan] = []
        self._failure: BaseException | None = None
        self._sending: dict[str, str] = {}  # transfer id → request id of granted leases
        self._published: set[str] = set()
        self._ended: set[str] = set()  # transfers whose lease has ended before vLLM has published them
        self._news: list[QuarantineNews] = []
        self._parts = LoadParts()
        host = AgentHost(
            identity=identity,
            is_producer=role.is_producer,
            also_reads=True,
            report=self._on_report,
            fail=self._on_failure,
            metrics=P2PMetrics(CollectorRegistry()),
            name_load=lambda request_id: {"request_id": request_id},
        )
        self._agent = AgentThread(P2PDriver(settings, host, create))
        bind = pool.bind_thread
        self._sealing = None if bind is None else SealingThread(self._sealer, bind, self._on_failure)  # of a pool on a device

    # ---- start and stop ----------------------------------------------------------------------------------------------

    def start(self, model: ModelIdentity) -> RankAddress:
        """Start the agent; return where peers reach this rank, which holds KV of this model.

        Raises:
            ConfigError: an address cannot be bound, or is none that peers can connect to.
            ConnectorUnavailable: no transport works here.
        """
        try:
            self._agent.start(self.pool)
        except ConfigError as error:
            if error.param != "address":
                raise
            raise ConfigError(f"kvferry.host, kvferry.port: {error.message}", param="kvferry.port") from error
        if self._sealing is not None:
            self._sealing.start()
        driver = self._agent.driver
        identity = self._identity
        return RankAddress(driver.control_address, identity.incarnation, model, identity.layout, driver.transports)

    def stop(self) -> None:
        """End the agent: peers lose this rank, reads in progress end. Idempotent."""
        if self._sealing is not None:
            self._sealing.stop()
        self._agent.stop()

    # ---- a step, in this order ---------------------------------------------------------------------------------------

    def begin_step(self, orders: RankOrders) -> None:
        """Break the seals of cancelled handoffs, before the step writes any block.

        Raises: the error that ended the agent: nothing can be verified any more, so the engine must not go on.
        """
        if self._failure is not None:
            raise RuntimeError("the KV transfer of this worker has died") from self._failure
        for transfer_id in orders.cancelled:
            self._sealer.end(transfer_id)
        with self._lock:
            self._published.update(orders.published)
            for transfer_id in orders.cancelled:
                self._sending.pop(transfer_id, None)
                self._ended.discard(transfer_id)
        if orders.cancelled or orders.ended:
            ended = [*orders.cancelled, *orders.ended]
            self._agent.driver.post(ReleaseHandoffs([_lease_name(transfer_id, self._role.rank) for transfer_id in ended]))

    def start_loads(self, orders: RankOrders) -> None:
        """Pass the orders for loads and leases of other engines to the agent."""
        step = ConsumerStep(
            holds=[ref for remote in orders.holds for ref in self._leased(remote)],
            releases=[ref for remote in orders.releases for ref in self._leased(remote)],
        )
        with self._lock:
            step.pulls = [self._parts.begin(load.request_id, self._pulls(load)) for load in orders.loads]
            step.aborts = [name for request_id in orders.aborts if (name := self._parts.abort(request_id)) is not None]
        if not step.is_empty():
            self._agent.driver.post(step)

    def seal(self, orders: RankOrders, written: KVWritten | None = None) -> None:
        """Seal the prompts that the step has completed: now, or on a device as soon as their KV is ``written``."""
        for order in orders.seals:
            self._sealer.begin(order)
            with self._lock:
                self._sending[order.transfer_id] = order.request_id
        if self._sealing is None:
            for order in orders.seals:
                self._sealer.seal(order)
        elif orders.seals:
            assert written is not None, "a step on a device has only been submitted"
            self._sealing.seal(orders.seals, written)
        for order in orders.seals:
            grant = LeaseGrant(_lease_name(order.transfer_id, self._role.rank), order.transfer_id, len(order.blocks))
            self._agent.driver.post(grant)

    def end_step(self) -> StepReport:
        """Return what has ended since the last step. A published transfer is reported after its seals were broken, once."""
        with self._lock:
            reports, self._reports = self._reports, []
            done = self._ended & self._published
            self._ended -= done
            self._published -= done
            found = StepReport(finished_sending={self._sending.pop(transfer_id) for transfer_id in done})
        for report in reports:
            self._add(report, found)
        return found

    def take_news(self) -> RankReports | None:
        """Return what the scheduler side must know of quarantined blocks; None without news."""
        news, self._news = self._news, []
        return RankReports(news) if news else None

    def take_counts(self) -> RankCounts:
        """Return the counts since the last call."""
        counts, self._counts = self._counts, RankCounts()
        return counts

    def num_held_blocks(self) -> int:
        """Return how many blocks this rank holds for readers, or for late reads."""
        agent = self._agent.driver.agent
        return 0 if agent is None else agent.producer.leases.num_blocks + agent.consumer.num_quarantined_blocks

    # ---- reports of the agent ----------------------------------------------------------------------------------------

    def _on_report(self, report: Report) -> None:
        """Keep a report for the next step. Any thread. A lease that ends breaks its seals first."""
        if isinstance(report, SendingEnded):
            self._sealer.end(report.request_id)
            with self._lock:
                if report.request_id in self._sending:  # else it was cancelled
                    self._ended.add(report.request_id)
            return
        with self._lock:
            if isinstance(report, LoadEnded):
                self._end_part(report)
            else:
                self._reports.append(report)

    def _end_part(self, part: LoadEnded) -> None:
        """Begin the next part of a load, or keep its end for the next step."""
        if part.quarantined_block_ids:
            self._reports.append(QuarantineBegan(part.quarantined_block_ids))
        found = self._parts.end(part)
        if isinstance(found, PullRequest):
            self._agent.driver.post(ConsumerStep(pulls=[found]))
        else:
            self._reports.append(found)

    def _on_failure(self, error: BaseException) -> None:
        self._failure = error

    def _add(self, report: Report | QuarantineBegan, found: StepReport) -> None:
        if isinstance(report, QuarantineEnded):
            self._news.append(QuarantineNews(ended=report.block_ids))
            return
        if isinstance(report, QuarantineBegan):
            self._news.append(QuarantineNews(added=report.block_ids))
            return
        assert isinstance(report, LoadEnded)
        found.finished_recving.add(report.request_id)
        self.totals.add(report)
        self._counts.add(report)
        if report.error is None:
            return
        ids = report.invalid_block_ids
        if self._role.can_name_blocks and ids is not ALL_BLOCKS and not report.quarantined_block_ids:
            found.invalid_block_ids.update(ids)
        else:
            found.failed_recving.add(report.request_id)

    # ---- ranks of P --------------------------------------------------------------------------------------------------

    def _leased(self, remote: RemoteHandoff) -> list[HandoffRef]:
        """Return the leases of a handoff that this rank holds and releases."""
        role = self._role
        peers = leased_peers(role.rank, role.num_ranks, len(remote.ranks), role.num_kv_heads)
        return [_ref(remote, peer) for peer in peers]

    def _pulls(self, load: LoadOrder) -> list[PullRequest]:
        """Return the parts of a load: the same blocks from each rank of P that holds heads of this rank."""
        role, remote = self._role, load.handoff
        deadline = self._settings.clock.now() + self._settings.transfer.transfer_deadline_s  # of all parts together
        sources = head_sources(role.rank, role.num_ranks, len(remote.ranks), role.num_kv_heads)
        return [
            PullRequest(
                load.request_id,
                _ref(remote, source.peer_rank),
                load.units,
                load.num_tokens,
                deadline,
                load.layout,
                heads=source.heads,
            )
            for source in sources
        ]


def _ref(remote: RemoteHandoff, peer_rank: int) -> HandoffRef:
    return HandoffRef(_lease_name(remote.transfer_id, peer_rank), remote.ranks[peer_rank])


def _lease_name(transfer_id: str, rank: int) -> str:
    """Return the name of a handoff's lease on one rank of P: a reader may hold those of several ranks."""
    return f"{transfer_id}/{rank}"
