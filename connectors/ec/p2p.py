"""EC connector "p2p": a reader reads embeddings from the memory of the encode worker that computed them.

Encode workers are producers, all others consumers. The handoff works like that of KV blocks and uses the same parts: control
sockets, handshake, transports, leases, deadlines, quarantine and seals are those of ``connectors.p2p``, run by ``P2PDriver``
for a pool of chunks. Owns that pool and starts and stops the parts. Seals carry digests, and readers verify them over every
transport.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from connectors.ec import p2p_adapter as handoff
from connectors.ec.chunks import ChunkLayout
from connectors.ec.jobs import FetchingMetadata, Source
from connectors.ec.memory import ChunkMemory
from connectors.ec.metrics import publish_fetches
from connectors.ec.produced_embeddings import OfferTerms, ProducedEmbeddings, pass_report
from connectors.ec.scheduler import FetchingScheduler
from connectors.ec.tensors import to_bytes, to_tensor
from connectors.ec.wakeup_timer import WakeupTimer
from connectors.ec.worker import FetchingWorker
from connectors.p2p.actions import ReleaseHandoffs, Report
from connectors.p2p.config import driver_settings, worker_identity
from connectors.p2p.driver import AgentHost, P2PDriver
from connectors.p2p.host_id import host_id
from connectors.p2p.metrics import P2PMetrics
from connectors.p2p.settings import DriverSettings
from connectors.p2p.transport.factory import TransportFactory, create_transport
from core.config_workers import ConnectorSection
from core.ec_connector import ECConnector, ECContext, EmbeddingsLayout
from core.wire.media import ECSource, MMFeature

_RENEWALS_PER_LEASE = 6
_METRICS_KIND = "ec"
_SHOWN_DIGITS = 16  # of an item's identifier in the log: enough to tell items apart


class P2PECConnector(ECConnector):
    """``create`` makes the transports."""

    name = handoff.NAME
    scheduler: FetchingScheduler
    worker: FetchingWorker

    def __init__(self, context: ECContext, create: TransportFactory = create_transport) -> None:
        self._context = context
        self._settings = context.config.ec_connector
        self._is_producer = context.role == "encode"
        self._create = create
        self._layout: ChunkLayout | None = None
        self._memory: ChunkMemory | None = None
        self._offers: ProducedEmbeddings | None = None
        self._driver: P2PDriver | None = None
        self._host_id = host_id()
        self.scheduler = FetchingScheduler(
            self.name,
            context.clock,
            self._settings.transfer_deadline_s,
            self._locate,
            is_consumer=not self._is_producer,
        )
        self.worker = FetchingWorker(to_bytes, to_tensor, self._on_layout)
        self._alarm = WakeupTimer(context.clock, self.worker.wake)

    @property
    def host_id(self) -> str:
        """Equal on two workers that can share memory."""
        return self._host_id

    @property
    def driver(self) -> P2PDriver:
        """The agent's driver; it exists once the shape of the embeddings is known."""
        assert self._driver is not None, "register_caches comes before start"
        return self._driver

    # ---- start and stop --------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the transports, bind or prepare the control sockets.

        Raises:
            ConfigError: the control address is not one that peers can connect to, or an address cannot be bound.
            ConnectorUnavailable: no transport works here.
        """
        assert self._memory is not None, "register_caches comes before start"
        await self.driver.start(self._memory.region)
        self._alarm.start()
        if self._offers is not None:
            self._offers.control_address = self.driver.control_address
        else:
            publish_fetches(self._context.metrics, self.scheduler)

    async def stop(self) -> None:
        """End threads, close sockets and memory files. Reads in progress end with the transports. Idempotent."""
        self._alarm.stop()
        if self._driver is not None:
            await self._driver.stop()
        if self._memory is not None:
            self._memory.close()

    # ---- leases of an encode worker --------------------------------------------------------------------------------

    def release(self, sources: Iterable[ECSource]) -> None:
        """End the leases of these sources, because no consumer will read them. Idempotent. Any thread."""
        own = [
            source for source in sources if source.incarnation == self._context.incarnation and source.connector == self.name
        ]
        transfer_ids = [handoff.decode_held(source.payload).transfer_id for source in own]
        self.driver.post(ReleaseHandoffs(transfer_ids))  # after the grants

    def num_leased_chunks(self) -> int:
        """Return how many chunks are leased to readers."""
        agent = self.driver.agent
        return 0 if agent is None else agent.producer.leases.num_blocks

    def longest_lease_s(self) -> float:
        """Return how long the longest lease lasts unless its reader renews it, in seconds."""
        return self.driver.longest_lease_s()

    # ---- the parts, once the shape of the embeddings is known --------------------------------------------------------

    def _on_layout(self, embeddings: EmbeddingsLayout) -> None:
        context = self._context
        layout = self._layout = ChunkLayout(embeddings, context.model_fingerprint)
        memory = self._memory = ChunkMemory(layout, self._settings.memory_bytes, context.incarnation)
        self.scheduler.bind(layout, memory.num_chunks)
        host = AgentHost(
            identity=worker_identity(context, layout.as_blocks),
            is_producer=self._is_producer,
            report=self._on_report,
            fail=self.worker.fail,
            metrics=P2PMetrics(context.metrics, _METRICS_KIND),
            name_load=lambda identifier: {"item": identifier[:_SHOWN_DIGITS]},
        )
        self._driver = P2PDriver(_driver_settings(context), host, self._create)
        if self._is_producer:
            terms = OfferTerms(
                engine_id=context.engine_id, incarnation=context.incarnation, lease_ms=int(1000 * self._settings.lease_s)
            )
            self._offers = ProducedEmbeddings(memory, terms, context.ids, self._driver.post)
        self.worker.bind(memory.rows, self._submit, self._offers)

    def _locate(self, feature: MMFeature, announced: ECSource | None) -> Source | None:
        assert self._layout is not None, "register_caches comes before the first request"
        return handoff.locate(self._layout, feature, announced)

    # ---- between the engine thread and the agent -----------------------------------------------------------------------

    def _submit(self, metadata: FetchingMetadata) -> None:
        if metadata.has_orders:
            self.driver.post(handoff.as_p2p(metadata))
        if metadata.wake_at is not None:
            self._alarm.set_soon(metadata.wake_at)

    def _on_report(self, report: Report) -> None:
        pass_report(report, self.worker, self._offers)


def _driver_settings(context: ECContext) -> DriverSettings:
    config = context.config.ec_connector
    section = ConnectorSection(
        transports=config.transports,
        kv_verify="digest",
        transfer_deadline_s=config.transfer_deadline_s,
        handshake_timeout_s=config.handshake_timeout_s,
        lease_s=config.lease_s,
        lease_renew_interval_s=config.lease_s / _RENEWALS_PER_LEASE,
        lease_max_s=max(config.lease_s, ConnectorSection().lease_max_s),
    )
    settings = driver_settings(context, section)
    return settings if context.role == "encode" else replace(settings, data_port=0)
