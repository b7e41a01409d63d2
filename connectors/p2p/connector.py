"""The p2p connector of a worker: scheduler side, worker side and the driver of the agent between them.

Decides nothing. Messages of the engine thread reach the agent in the event loop by ``P2PDriver.post``.
"""

from __future__ import annotations

from collections.abc import Sequence

from connectors.p2p.actions import ExpectHandoff, HandoffRef, MeetPeer, ReleaseHandoffs, RenewHandoffs
from connectors.p2p.config import driver_settings, worker_identity
from connectors.p2p.driver import AgentHost, P2PDriver
from connectors.p2p.metrics import P2PMetrics
from connectors.p2p.scheduler import P2PConnectorScheduler
from connectors.p2p.transport.factory import TransportFactory, create_transport
from connectors.p2p.worker import P2PConnectorWorker
from core.connector import Connector, ConnectorContext
from core.ids import router_id
from core.wire.early import MeetProducer
from core.wire.kv import KVHandoff


class P2PConnector(Connector):
    """Producer on prefill workers, consumer on decode workers; both on workers that can switch or share prefixes."""

    scheduler: P2PConnectorScheduler
    worker: P2PConnectorWorker

    def __init__(self, context: ConnectorContext, create: TransportFactory = create_transport) -> None:
        self._identity = worker_identity(context, context.layout)
        has_prefixes = context.config.connector.peer_prefixes
        self.worker = P2PConnectorWorker(lambda metadata: self.driver.post(metadata))  # noqa: PLW0108, the driver is made below
        host = AgentHost(
            identity=self._identity,
            is_producer=context.has_readers,
            also_reads=context.can_switch_role or has_prefixes,
            serves_prefixes=has_prefixes,
            report=self.worker.report,
            fail=self.worker.fail,
            metrics=P2PMetrics(context.metrics),
            name_load=lambda request_id: {"request_id": router_id(request_id)},
        )
        self.driver = P2PDriver(driver_settings(context, context.config.connector), host, create)
        self.scheduler = P2PConnectorScheduler(
            self._identity,
            lease_ms=int(1000 * context.config.connector.lease_s),
            ids=context.ids,
            grant=self.driver.post,
            now=context.clock.now,
            post=self.driver.post if has_prefixes else None,
        )

    @property
    def transports(self) -> tuple[str, ...]:
        """Transports that work here, in order of preference; known after ``start``."""
        return self.driver.transports

    @property
    def meets_producers(self) -> bool:
        """True: it shakes hands before there is anything to read."""
        return True

    @property
    def host_id(self) -> str:
        """Equal on two workers that can share memory."""
        return self._identity.host_id

    @property
    def has_digests(self) -> bool:
        """True if the seals made here hold digests."""
        pool = self.worker.pool
        return pool is not None and pool.seals is not None and pool.seals.has_digests

    @property
    def prefix_address(self) -> str:
        """Where workers ask this one for beginnings of prompts; empty if it serves none."""
        return self.driver.control_address if self.scheduler.pins is not None else ""

    @property
    def control_address(self) -> str:
        """Where readers connect to this worker; empty if it has none."""
        return self.scheduler.control_address

    # ---- start and stop --------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the transports, start the transfer thread, bind or prepare the control sockets.

        Raises:
            ConfigError: the control address is not one that peers can connect to, or an address cannot be bound.
            ConnectorUnavailable: no transport works here, or the engine lacks seals or digests that are needed.
        """
        pool = self.worker.pool
        assert pool is not None, "register_kv_caches comes before start"
        await self.driver.start(pool)
        self.scheduler.control_address = self.driver.control_address

    async def stop(self) -> None:
        """End tasks and threads, close sockets. Reads in progress end with the transports."""
        await self.driver.stop()

    # ---- leases -----------------------------------------------------------------------------

    def meet(self, producer: MeetProducer) -> None:
        """Shake hands with a prefill worker while it computes, so that the first load from it finds its memory open."""
        self.driver.handle(MeetPeer.of(producer))

    def expect(self, handoff: KVHandoff) -> None:
        """Ask for the remaining time of the lease while the request is still on its way to the engine."""
        self.driver.handle(ExpectHandoff(HandoffRef.of(handoff)))

    def release(self, transfer_ids: Sequence[str]) -> None:
        """End these handoffs: no consumer will read them. Idempotent."""
        self.driver.handle(ReleaseHandoffs(transfer_ids))

    def renew(self, transfer_ids: Sequence[str]) -> None:
        """Extend the leases of these handoffs."""
        self.driver.handle(RenewHandoffs(transfer_ids))

    def num_leased_blocks(self) -> int:
        """Return how many blocks are leased to consumers."""
        agent, pins = self.driver.agent, self.scheduler.pins
        num_pinned = pins.num_blocks if pins is not None else 0  # the engine frees them a moment after their leases
        return num_pinned if agent is None else max(num_pinned, agent.producer.leases.num_blocks)

    def longest_lease_s(self) -> float:
        """Return how long the longest lease lasts unless its consumer renews it, in seconds."""
        return self.driver.longest_lease_s()

    def num_loading_blocks(self) -> int:
        """Return how many blocks belong to loads in progress."""
        agent = self.driver.agent
        return 0 if agent is None else agent.consumer.num_loading_blocks

    def num_quarantined_blocks(self) -> int:
        """Return how many blocks of ended loads a late read may still write."""
        agent = self.driver.agent
        return 0 if agent is None else agent.consumer.num_quarantined_blocks
