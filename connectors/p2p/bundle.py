"""The p2p connector as a worker sees it: the state machines, their carriers and the transfer thread, wired together.

Runs in the worker's event loop and owns what lives there: the consumer's ``PullProtocol``, the producer's ``LeaseTable`` and
handshake, the control sockets, one timer. The engine thread reaches it through the scheduler and worker sides, the transfer
thread through its events; both cross by ``call_soon_threadsafe``, which keeps order.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Iterable, Sequence

from connectors.p2p.actions import (
    Action,
    CloseControl,
    LeaseGrant,
    LoadEnded,
    LoadFailed,
    OpenPeer,
    P2PConnectorMetadata,
    SendControl,
    TransferEvent,
)
from connectors.p2p.control import ControlClients, ControlServer
from connectors.p2p.handshake import HandshakeResponder, WorkerIdentity
from connectors.p2p.host import host_id
from connectors.p2p.leases import LeaseTable, LeaseTerms
from connectors.p2p.metrics import P2PMetrics
from connectors.p2p.pull import PullProtocol, PullSettings, error_info
from connectors.p2p.scheduler import P2PConnectorScheduler
from connectors.p2p.transfer import TransferExecutor, TransferThread
from connectors.p2p.transports import TransportFactory, TransportSet, TransportSettings, create_transport, open_transports
from connectors.p2p.worker import P2PConnectorWorker
from connectors.registry import Connector, ConnectorContext
from core.errors import ProtocolError
from core.log import event
from core.transport import RowRegion
from core.wire.kv import ControlMessage, Handshake, HandshakeReply, LeaseRelease, LeaseRenew, LeaseState
from core.wire.sockets import AsyncContext, advertised_host, join_tcp, split_tcp

RENEWAL_S = 20.0  # what a renewal adds, at most

_log = logging.getLogger(__name__)


class P2PConnector(Connector):
    """Producer on prefill workers, consumer on decode workers; built by ``connectors.p2p.connector``."""

    scheduler: P2PConnectorScheduler
    worker: P2PConnectorWorker

    def __init__(self, context: ConnectorContext, create: TransportFactory = create_transport) -> None:
        self._context = context
        self._create = create
        config = context.config
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
            is_producer=self._is_producer,
            lease_ms=int(1000 * config.lease_s),
            ids=context.ids,
            grant=lambda grant: self._call_soon(self._on_grant, grant),
        )
        self.worker = P2PConnectorWorker(lambda metadata: self._call_soon(self._on_metadata, metadata))
        terms = LeaseTerms(config.lease_s, min(RENEWAL_S, config.lease_s), config.lease_max_s)
        self._leases = LeaseTable(context.clock, terms)
        self._metrics = P2PMetrics(context.metrics)
        self._transport_set = TransportSet()
        self._pull: PullProtocol | None = None
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
    def control_address(self) -> str:
        """Where readers reach this worker; empty for a consumer."""
        return self.scheduler.control_address

    # ---- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the transports, start the transfer thread, bind or prepare the control sockets.

        Raises:
            ConfigError: peers could not be told where to connect, or an address cannot be bound.
            ConnectorUnavailable: no transport works here.
        """
        pool = self.worker.pool
        assert pool is not None, "register_kv_caches comes before start"
        if self._is_producer:  # before anything is open
            advertised_host(split_tcp(self._context.control_address)[0], self._context.advertise_host)
        self._loop = asyncio.get_running_loop()
        # Loading a transport's library can take seconds.
        self._transport_set = await asyncio.to_thread(
            open_transports,
            self._context.config.transports,
            RowRegion.of_pool(pool),
            self._transport_settings(),
            self._is_producer,
            self._create,
        )
        self._pull = PullProtocol(self._identity, self.transports, self._pull_settings())
        executor = TransferExecutor(
            self._transport_set.transports, lambda happened: self._call_soon(self._on_transfer, happened)
        )
        self._transfers = TransferThread(executor, self.worker.fail)
        self._transfers.start()
        self._zmq = AsyncContext()
        self._clients = ControlClients(self._zmq, self._on_control, self._on_disconnected, self.worker.fail)
        if self._is_producer:
            self._serve(pool.num_blocks)
        self._publish()

    async def stop(self) -> None:
        """End tasks and threads, close sockets. Reads in progress end with the transports."""
        if self._loop is None:
            return
        self._loop = self._pull = None  # from here on nobody reaches the state machines
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
        self.worker.report_sent(self._leases.release(transfer_ids))
        self._arm_timer()

    def renew(self, transfer_ids: Sequence[str]) -> None:
        """Keep these hand-overs for another while."""
        self._leases.renew(transfer_ids)
        self._arm_timer()

    def num_leased_blocks(self) -> int:
        """Return how many blocks are held for readers."""
        return self._leases.num_blocks

    def num_loading_blocks(self) -> int:
        """Return how many blocks a transfer may still write."""
        return self._pull.num_loading_blocks if self._pull is not None else 0

    # ---- what happens, in the event loop ---------------------------------------------------------------------------

    def _call_soon(self, callback: Callable[..., None], argument: object) -> None:
        """Call back in the event loop, in order; nothing after ``stop``. Any thread."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(callback, argument)

    def _on_grant(self, grant: LeaseGrant) -> None:
        self._leases.grant(grant.transfer_id, grant.request_id, grant.num_blocks)
        self._arm_timer()

    def _on_metadata(self, metadata: P2PConnectorMetadata) -> None:
        if self._pull is None:
            return
        now = self._context.clock.now()
        for request_id, error in metadata.refused.items():
            self._apply([LoadFailed(request_id, error_info(error)), LoadEnded(request_id)])
        for handoff in metadata.holds:
            self._apply(self._pull.hold(handoff, now))
        for request in metadata.pulls:
            self._apply(self._pull.start(request, now))
        for request_id in metadata.aborts:
            self._apply(self._pull.abort(request_id, now))
        for handoff in metadata.releases:
            self._apply(self._pull.release(handoff))
        self._arm_timer()

    def _on_control(self, address: str, message: ControlMessage) -> None:
        if self._pull is not None:
            self._apply(self._pull.on_control(address, message, self._context.clock.now()))
            self._arm_timer()

    def _on_disconnected(self, address: str) -> None:
        if self._pull is not None:
            self._apply(self._pull.on_disconnected(address, self._context.clock.now()))
            self._arm_timer()

    def _on_transfer(self, happened: TransferEvent) -> None:
        if self._pull is not None:
            self._apply(self._pull.on_transfer(happened, self._context.clock.now()))
            self._arm_timer()

    def _on_timer(self) -> None:
        self._timer = None
        if self._pull is not None:
            self._apply(self._pull.on_timer(self._context.clock.now()))
        self.worker.report_sent(self._leases.expire())
        self._arm_timer()

    def _arm_timer(self) -> None:
        """Have ``_on_timer`` called when something is due."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        times = [self._leases.next_expiry(), self._pull.next_timer() if self._pull is not None else None]
        due = min((time for time in times if time is not None), default=None)
        if due is not None and self._loop is not None:
            self._timer = self._loop.call_later(max(0.0, due - self._context.clock.now()), self._on_timer)

    # ---- what the state machines want ------------------------------------------------------------------------------

    def _apply(self, actions: Iterable[Action]) -> None:
        for action in actions:
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        assert self._clients is not None
        assert self._transfers is not None
        match action:
            case SendControl():
                self._clients.send(action.address, action.message)
            case CloseControl():
                self._clients.close(action.address)
            case LoadFailed():
                self._metrics.count_failure(action.error.code)
                self.worker.report(action)
            case LoadEnded():
                if action.usage is not None:
                    self._metrics.count_load(action.usage)
                self.worker.report(action)
            case OpenPeer():
                self._metrics.set_transport(action.transport, is_used=True)
                _log.info(
                    event(
                        "kv_transport",
                        transport=action.transport,
                        peer=action.peer.address,
                        incarnation=f"{action.peer.incarnation:016x}",
                    )
                )
                self._transfers.submit(action)
            case _:
                self._transfers.submit(action)

    # ---- producer --------------------------------------------------------------------------------------------------

    def _serve(self, num_blocks: int) -> None:
        assert self._zmq is not None
        self._responder = HandshakeResponder(self._identity, num_blocks, self._transport_set.offers)
        self._server = ControlServer(self._zmq, self._answer, self.worker.fail)
        actual = self._server.start(self._context.control_address)
        host, port = split_tcp(actual)
        self.scheduler.control_address = join_tcp(advertised_host(host, self._context.advertise_host), port)

    def _answer(self, message: ControlMessage) -> ControlMessage | None:
        match message:
            case Handshake():
                return self._shake_hands(message)
            case LeaseRenew():
                left_ms = self._leases.renew(message.transfer_ids)
                self._arm_timer()
                return LeaseState(incarnation=self._identity.incarnation, left_ms=left_ms)
            case LeaseRelease():
                self.release(message.transfer_ids)
                return None
        raise ProtocolError(f"{type(message).__name__} is not for a prefill worker")

    def _shake_hands(self, handshake: Handshake) -> ControlMessage:
        answer = self._responder.answer(handshake)
        if isinstance(answer, HandshakeReply):
            self._metrics.set_transport(answer.transport, is_used=True)
            _log.info(event("kv_transport", transport=answer.transport, reader=handshake.engine_id))
        else:
            _log.warning(event("kv_handshake_refused", reader=handshake.engine_id, code=answer.code, reason=answer.message))
        return answer

    # ---- settings and counts ---------------------------------------------------------------------------------------

    def _transport_settings(self) -> TransportSettings:
        host, _ = split_tcp(self._context.control_address)
        return TransportSettings(
            ids=self._context.ids,
            engine_id=self._context.engine_id,
            bind_address=join_tcp(host, 0),
            advertise_host=self._context.advertise_host,
        )

    def _pull_settings(self) -> PullSettings:
        config = self._context.config
        return PullSettings(
            transfer_deadline_s=config.transfer_deadline_s,
            handshake_timeout_s=config.handshake_timeout_s,
            lease_renew_interval_s=config.lease_renew_interval_s,
        )

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
        counts = {f"lease_{name}": count for name, count in dataclasses.asdict(self._leases.counts).items()}
        if self._pull is not None:
            counts |= dataclasses.asdict(self._pull.counts)
        if self._server is not None:
            counts["bad_control_frames"] = self._server.num_bad_frames
        return counts
