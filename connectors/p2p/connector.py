"""The p2p connector as a worker sees it: both sides, and the node between them that the event loop carries.

Decides nothing. The engine thread reaches the node (``connectors.p2p.driver``) through the scheduler and worker sides.
"""

from __future__ import annotations

from collections.abc import Sequence

from connectors.p2p.actions import HandoffRef, LeaseGrant
from connectors.p2p.config import driver_settings
from connectors.p2p.driver import CarrierOwner, NodeCarrier
from connectors.p2p.host_id import host_id
from connectors.p2p.metadata import P2PConnectorMetadata
from connectors.p2p.metrics import P2PMetrics
from connectors.p2p.producer.handshake import WorkerIdentity
from connectors.p2p.scheduler import P2PConnectorScheduler
from connectors.p2p.transport.factory import TransportFactory, create_transport
from connectors.p2p.worker import P2PConnectorWorker
from connectors.registry import Connector, ConnectorContext
from core.ids import router_id
from core.wire.kv import KVHandoff


class P2PConnector(Connector):
    """Producer on prefill workers, consumer on decode workers; built by ``connectors.p2p.connector``."""

    scheduler: P2PConnectorScheduler
    worker: P2PConnectorWorker

    def __init__(self, context: ConnectorContext, create: TransportFactory = create_transport) -> None:
        self._identity = WorkerIdentity(
            engine_id=context.engine_id,
            incarnation=context.incarnation,
            model_fingerprint=context.model_fingerprint,
            layout=context.layout,
            host_id=host_id(),
        )
        self.scheduler = P2PConnectorScheduler(
            self._identity,
            lease_ms=int(1000 * context.config.lease_s),
            ids=context.ids,
            grant=lambda grant: self.carrier.call_soon(self._on_grant, grant),
        )
        self.worker = P2PConnectorWorker(lambda metadata: self.carrier.call_soon(self._on_metadata, metadata))
        owner = CarrierOwner(
            identity=self._identity,
            is_producer=context.role == "prefill",
            report=self.worker.report,
            fail=self.worker.fail,
            metrics=P2PMetrics(context.metrics),
            name_load=lambda request_id: {"request_id": router_id(request_id)},
        )
        self.carrier = NodeCarrier(driver_settings(context), owner, create)

    @property
    def transports(self) -> tuple[str, ...]:
        """Transports that work here, in order of preference; known after ``start``."""
        return self.carrier.transports

    @property
    def host_id(self) -> str:
        """Equal on two workers between which shared memory works."""
        return self._identity.host_id

    @property
    def has_digests(self) -> bool:
        """True if the seals made here hold digests."""
        pool = self.worker.pool
        return pool is not None and pool.seals is not None and pool.seals.has_digests

    @property
    def control_address(self) -> str:
        """Where readers reach this worker; empty for a consumer."""
        return self.scheduler.control_address

    # ---- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the transports, start the transfer thread, bind or prepare the control sockets.

        Raises:
            ConfigError: peers could not be told where to connect, or an address cannot be bound.
            ConnectorUnavailable: no transport works here, or the engine lacks seals or digests that are needed.
        """
        pool = self.worker.pool
        assert pool is not None, "register_kv_caches comes before start"
        await self.carrier.start(pool)
        self.scheduler.control_address = self.carrier.control_address

    async def stop(self) -> None:
        """End tasks and threads, close sockets. Reads in progress end with the transports."""
        await self.carrier.stop()

    # ---- leases, as the roles see them -----------------------------------------------------------------------------

    def expect(self, handoff: KVHandoff) -> None:
        """Ask how long a lease is good for, while the request that may load it is on its way to the engine."""
        self.carrier.tell(lambda node: node.expect(HandoffRef.of(handoff)))

    def release(self, transfer_ids: Sequence[str]) -> None:
        """End these handoffs, because nobody will read them. Idempotent."""
        self.carrier.tell(lambda node: node.release(transfer_ids))

    def renew(self, transfer_ids: Sequence[str]) -> None:
        """Keep these handoffs for another while."""
        self.carrier.tell(lambda node: node.renew(transfer_ids))

    def num_leased_blocks(self) -> int:
        """Return how many blocks are held for readers."""
        node = self.carrier.node
        return 0 if node is None else node.num_leased_blocks

    def longest_lease_s(self) -> float:
        """Return how long the last of the blocks is held for readers, unless they renew."""
        node = self.carrier.node
        return 0.0 if node is None else node.longest_lease_s()

    def num_loading_blocks(self) -> int:
        """Return how many blocks belong to loads that are not over."""
        node = self.carrier.node
        return 0 if node is None else node.num_loading_blocks

    def num_quarantined_blocks(self) -> int:
        """Return how many blocks of loads that are over a read may still write."""
        node = self.carrier.node
        return 0 if node is None else node.num_quarantined_blocks

    # ---- what the engine thread says, in the event loop --------------------------------------------------------------

    def _on_grant(self, grant: LeaseGrant) -> None:
        self.carrier.tell(lambda node: node.on_grant(grant))

    def _on_metadata(self, metadata: P2PConnectorMetadata) -> None:
        self.carrier.tell(lambda node: node.on_metadata(metadata))
