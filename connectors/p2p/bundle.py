"""The p2p connector as a worker sees it: a ``P2PNode`` carried by the event loop, ZeroMQ sockets and the transfer thread.

Decides nothing. Whatever happens is handed to the node, and what the node wants is carried out in order: the engine thread
reaches it through the scheduler and worker sides, the transfer thread through its events; both cross by
``call_soon_threadsafe``, which keeps order. A bug in taking something in ends the worker: nobody knows what still waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from connectors.p2p.actions import (
    Action,
    CloseControl,
    LeaseGrant,
    LoadEnded,
    OpenPeer,
    P2PConnectorMetadata,
    PeerFailed,
    QuarantineEnded,
    Reply,
    SendControl,
    SendingEnded,
    TransferEvent,
)
from connectors.p2p.control import ControlClients, ControlServer
from connectors.p2p.handshake import HandshakeResponder, WorkerIdentity
from connectors.p2p.host import host_id
from connectors.p2p.leases import LeaseTerms
from connectors.p2p.metrics import P2PMetrics
from connectors.p2p.node import NodeSettings, P2PNode
from connectors.p2p.pull import PullSettings
from connectors.p2p.scheduler import P2PConnectorScheduler
from connectors.p2p.staging import map_staging_area
from connectors.p2p.transfer import TransferExecutor, TransferThread
from connectors.p2p.transports import TransportFactory, TransportSet, TransportSettings, create_transport, open_transports
from connectors.p2p.worker import P2PConnectorWorker
from connectors.registry import Connector, ConnectorContext
from core.config import ConnectorSection
from core.connector import KVPoolRegion
from core.errors import ConnectorUnavailable
from core.log import event
from core.transport import regions_of
from core.wire.kv import ControlMessage, Handshake, HandshakeRefused, HandshakeReply
from core.wire.pairing import verifies_digests
from core.wire.sockets import AsyncContext, advertised_host, join_tcp, split_tcp

RENEWAL_S = 20.0  # what a renewal adds, at most
LEASE_MARGIN_S = 1.0  # what must be left of a lease for a read of some MiB to be started, at most

_log = logging.getLogger(__name__)


class P2PConnector(Connector):
    """Producer on prefill workers, consumer on decode workers; built by ``connectors.p2p.connector``."""

    scheduler: P2PConnectorScheduler
    worker: P2PConnectorWorker

    def __init__(self, context: ConnectorContext, create: TransportFactory = create_transport) -> None:
        self._context = context
        self._create = create
        self._is_producer = context.role == "prefill"
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
            grant=lambda grant: self._call_soon(self._on_grant, grant),
        )
        self.worker = P2PConnectorWorker(lambda metadata: self._call_soon(self._on_metadata, metadata))
        self._metrics = P2PMetrics(context.metrics)
        self._transport_set = TransportSet()
        self._node: P2PNode | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._zmq: AsyncContext | None = None
        self._server: ControlServer | None = None
        self._clients: ControlClients | None = None
        self._transfers: TransferThread | None = None

    @property
    def transports(self) -> tuple[str, ...]:
        """Transports that work here, in order of preference; known after ``start``."""
        return tuple(self._transport_set.transports)

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
        if pool.seals is None:
            raise ConnectorUnavailable("connector p2p: the engine makes no seals, and nothing is handed over without")
        if self._is_producer:  # before anything is open
            advertised_host(split_tcp(self._context.control_address)[0], self._context.advertise_host)
        unverifiable = self._unverifiable(pool)
        names = [name for name in self._context.config.transports if name not in unverifiable]
        if not names:
            raise ConnectorUnavailable("; ".join(unverifiable.values()) or "connector.transports is empty")
        self._loop = asyncio.get_running_loop()
        staging = None if self._is_producer else map_staging_area(pool)
        # Loading a transport's library can take seconds.
        self._transport_set = await asyncio.to_thread(
            open_transports,
            names,
            regions_of(pool),
            self._transport_settings(),
            self._is_producer,
            self._create,
            staging.region if staging is not None else None,
        )
        self._transport_set.skipped |= unverifiable
        offers = self._transport_set.offers
        responder = HandshakeResponder(self._identity, pool.num_blocks, offers, pool.seals.has_digests)
        self._node = P2PNode(
            self._identity,
            self._context.clock,
            self.transports,
            node_settings(self._context.config, pool.num_blocks),
            responder if self._is_producer else None,
        )
        executor = TransferExecutor(
            self._transport_set.transports,
            pool.seals,
            pool.new_digester() if pool.new_digester is not None else _no_digest,
            lambda happened: self._call_soon(self._on_transfer, happened),
            staging,
        )
        self._transfers = TransferThread(executor, self.worker.fail)
        self._transfers.start()
        self._zmq = AsyncContext()
        self._clients = ControlClients(self._zmq, self._on_control, self._on_disconnected, self.worker.fail, self._context.keys)
        if self._is_producer:
            self._serve(self._zmq)
        self._publish()

    async def stop(self) -> None:
        """End tasks and threads, close sockets. Reads in progress end with the transports."""
        if self._loop is None:
            return
        self._loop = self._node = None  # from here on nobody reaches the node
        if self._timer is not None:
            self._timer.cancel()
        if self._server is not None:
            await self._server.stop()
        if self._clients is not None:
            await self._clients.stop()
        if self._transfers is not None:
            await asyncio.to_thread(self._transfers.stop)
        if self._zmq is not None:
            self._zmq.destroy(linger=0)

    # ---- leases, as the roles see them -----------------------------------------------------------------------------

    def release(self, transfer_ids: Sequence[str]) -> None:
        """End these hand-overs, because nobody will read them. Idempotent."""
        self._tell(lambda node: node.release(transfer_ids))

    def renew(self, transfer_ids: Sequence[str]) -> None:
        """Keep these hand-overs for another while."""
        self._tell(lambda node: node.renew(transfer_ids))

    def num_leased_blocks(self) -> int:
        """Return how many blocks are held for readers."""
        return self._node.num_leased_blocks if self._node is not None else 0

    def longest_lease_s(self) -> float:
        """Return how long the last of the blocks is held for readers, unless they renew."""
        return self._node.longest_lease_s() if self._node is not None else 0.0

    def num_loading_blocks(self) -> int:
        """Return how many blocks belong to loads that are not over."""
        return self._node.num_loading_blocks if self._node is not None else 0

    def num_quarantined_blocks(self) -> int:
        """Return how many blocks of loads that are over a read may still write."""
        return self._node.num_quarantined_blocks if self._node is not None else 0

    # ---- what happens, in the event loop ---------------------------------------------------------------------------

    def _call_soon(self, callback: Callable[..., None], argument: object) -> None:
        """Call back in the event loop, in order; nothing after ``stop``. Any thread."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(callback, argument)

    def _on_grant(self, grant: LeaseGrant) -> None:
        self._tell(lambda node: node.on_grant(grant))

    def _on_metadata(self, metadata: P2PConnectorMetadata) -> None:
        self._tell(lambda node: node.on_metadata(metadata))

    def _on_control(self, address: str, message: ControlMessage) -> None:
        self._tell(lambda node: node.on_control(address, message))

    def _on_disconnected(self, address: str) -> None:
        self._tell(lambda node: node.on_disconnected(address))

    def _on_transfer(self, happened: TransferEvent) -> None:
        self._tell(lambda node: node.on_transfer(happened))
        if isinstance(happened, PeerFailed):
            self._note_failed_peer(happened)

    def _on_timer(self) -> None:
        self._timer = None
        self._tell(P2PNode.on_timer)

    def _answer(self, message: ControlMessage) -> ControlMessage | None:
        reply = self._tell(lambda node: node.on_question(message))
        if isinstance(message, Handshake):
            self._note_reader(message, reply)
        return reply

    def _tell(self, happened: Callable[[P2PNode], list[Action]]) -> ControlMessage | None:
        """Let the node take something in and carry out what it wants; return its reply, if there is one."""
        node = self._node
        if node is None:
            return None
        try:
            actions = happened(node)
            for action in actions:
                self._carry_out(action)
            self._arm_timer(node)
        except Exception as error:
            _log.exception(event("kv_node_failed"))
            self.worker.fail(error)
            return None
        return next((action.message for action in actions if isinstance(action, Reply)), None)

    def _arm_timer(self, node: P2PNode) -> None:
        """Have ``_on_timer`` called when something is due."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = node.next_timer()
        if due is not None and self._loop is not None:
            self._timer = self._loop.call_later(max(0.0, due - self._context.clock.now()), self._on_timer)

    # ---- what the node wants ---------------------------------------------------------------------------------------

    def _carry_out(self, action: Action) -> None:
        assert self._clients is not None
        assert self._transfers is not None
        match action:
            case SendControl():
                self._clients.send(action.address, action.message)
            case CloseControl():
                self._clients.close(action.address)
            case Reply():
                pass  # ``_tell`` returns it
            case LoadEnded():
                self._metrics.count_load(action)
                self.worker.report(action)
            case QuarantineEnded() | SendingEnded():
                self.worker.report(action)
            case OpenPeer():
                self._note_peer(action)
                self._transfers.submit(action)
            case _:
                self._transfers.submit(action)

    def _serve(self, zmq: AsyncContext) -> None:
        """Begin to answer readers."""
        self._server = ControlServer(zmq, self._answer, self.worker.fail, self._context.keys)
        host, port = split_tcp(self._server.start(self._context.control_address))
        self.scheduler.control_address = join_tcp(advertised_host(host, self._context.advertise_host), port)

    def _unverifiable(self, pool: KVPoolRegion) -> dict[str, str]:
        """Return the transports by which this worker could not verify what it reads as it is told to, and why."""
        if self._is_producer or pool.new_digester is not None:
            return {}
        kv_verify = self._context.config.kv_verify
        reason = f"connector.kv_verify = {kv_verify} verifies digests over {{}}, the engine computes none: set it to identity"
        demanding = [name for name in self._context.config.transports if verifies_digests(kv_verify, name)]
        for name in demanding:
            _log.warning(event("kv_transport_skipped", transport=name, reason=reason.format(name)))
        return {name: reason.format(name) for name in demanding}

    def _transport_settings(self) -> TransportSettings:
        host, _ = split_tcp(self._context.control_address)
        return TransportSettings(
            ids=self._context.ids,
            engine_id=self._context.engine_id,
            bind_address=join_tcp(host, self._context.data_port),
            advertise_host=self._context.advertise_host,
            keys=self._context.keys,
        )

    # ---- what people see -------------------------------------------------------------------------------------------

    def _note_peer(self, opened: OpenPeer) -> None:
        self._metrics.set_transport(opened.transport, is_used=True)
        incarnation = f"{opened.peer.incarnation:016x}"
        _log.info(event("kv_transport", transport=opened.transport, peer=opened.peer.address, incarnation=incarnation))

    def _note_failed_peer(self, failed: PeerFailed) -> None:
        """Say that the next transport is going to be tried."""
        in_use = self._node.transports_in_use() if self._node is not None else set()
        self._metrics.set_transport(failed.transport, is_used=failed.transport in in_use)
        _log.warning(
            event("kv_transport_failed", transport=failed.transport, peer=failed.peer.address, error=failed.error.message)
        )

    def _note_reader(self, handshake: Handshake, answer: ControlMessage | None) -> None:
        if isinstance(answer, HandshakeReply):
            self._metrics.set_transport(answer.transport, is_used=True)
            _log.info(event("kv_transport", transport=answer.transport, reader=handshake.engine_id))
        elif isinstance(answer, HandshakeRefused):
            _log.warning(event("kv_handshake_refused", reader=handshake.engine_id, code=answer.code, reason=answer.message))

    def _publish(self) -> None:
        for name in self.transports:
            self._metrics.set_transport(name, is_used=False)
        self._metrics.read_at_scrape(self.num_leased_blocks, self.num_loading_blocks, self._events)
        _log.info(
            event(
                "kv_transport",
                usable=",".join(self.transports),
                skipped=",".join(self._transport_set.skipped),
                control_address=self.control_address,
            )
        )

    def _events(self) -> dict[str, int]:
        counts = self._node.counts() if self._node is not None else {}
        if self._server is not None:
            counts["bad_control_frames"] = self._server.num_bad_frames
        return counts


def _no_digest(block_id: int) -> int:
    raise AssertionError(f"the digest of block {block_id} is verified though none is demanded")


def node_settings(config: ConnectorSection, num_blocks: int) -> NodeSettings:
    """Return what a configuration means for a node whose pool has ``num_blocks`` blocks."""
    max_quarantined_blocks = config.max_quarantined_blocks or max(1, num_blocks // 4)
    return NodeSettings(
        pull=PullSettings(
            transfer_deadline_s=config.transfer_deadline_s,
            handshake_timeout_s=config.handshake_timeout_s,
            lease_renew_interval_s=config.lease_renew_interval_s,
            lease_margin_s=min(LEASE_MARGIN_S, config.lease_renew_interval_s / 2),
            kv_verify=config.kv_verify,
            max_quarantined_blocks=max_quarantined_blocks,
            max_quarantined_blocks_in_total=max(max_quarantined_blocks, num_blocks // 2),
        ),
        leases=LeaseTerms(config.lease_s, min(RENEWAL_S, config.lease_s), config.lease_max_s),
    )
