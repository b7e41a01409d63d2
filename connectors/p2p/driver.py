"""``P2PDriver`` runs a ``P2PAgent`` in the event loop of a worker: ZeroMQ sockets, transports, transfer thread and clock.

Decides nothing. The driver passes every event to the agent and carries out the returned actions in order. Calls from other
threads arrive by ``call_soon_threadsafe``, which keeps their order. If the agent raises, the worker ends, because requests
may wait for actions that were lost. The driver knows a pool of blocks with seals and not what the blocks hold:
``connectors.p2p.connector`` uses it for KV, ``connectors.ec.p2p`` for embeddings.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from connectors.p2p.actions import (
    Action,
    CloseControl,
    LogEntry,
    PeerFailed,
    PeerFenced,
    PeerOpened,
    QuarantineEnded,
    Reply,
    Report,
    SendControl,
    TransferEvent,
    TransportBroken,
    TransportRestored,
)
from connectors.p2p.agent import P2PAgent
from connectors.p2p.control import ControlClients, ControlServer
from connectors.p2p.metrics import P2PMetrics
from connectors.p2p.producer.handshake import HandshakeResponder, WorkerIdentity
from connectors.p2p.settings import DriverSettings, agent_settings
from connectors.p2p.transfer.staging import map_staging_area
from connectors.p2p.transfer.thread import TransferExecutor, TransferThread
from connectors.p2p.transport.factory import (
    TransportFactory,
    TransportSet,
    TransportSettings,
    create_transport,
    open_transports,
)
from connectors.p2p.transport.interface import regions_of
from connectors.reports import LoadEnded, SendingEnded
from core.errors import ConnectorUnavailable, VersionMismatch, fallback_reason
from core.kv.pool_region import KVPoolRegion
from core.log import event
from core.rate_limit import LimitedLog
from core.wire.kv import ControlMessage, Handshake, HandshakeRefused, HandshakeReply
from core.wire.pairing import verifies_digests
from core.wire.sockets import AsyncContext, advertised_host, join_tcp, split_tcp

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentHost:
    """The worker that an agent serves. A producer serves its pool to consumers; every other worker only reads.

    ``report`` receives the ends of loads, leases and quarantines. ``fail`` receives the error that ended the agent or one of
    its threads. Both are called from any thread and must not block. ``name_load`` returns the log fields that name a load,
    given the request id in its report.
    """

    identity: WorkerIdentity
    is_producer: bool
    report: Callable[[Report], None]
    fail: Callable[[BaseException], None]
    metrics: P2PMetrics
    name_load: Callable[[str], Mapping[str, object]]


class P2PDriver:
    """Sockets, transports and timers of one agent, for one pool."""

    def __init__(self, settings: DriverSettings, host: AgentHost, create: TransportFactory = create_transport) -> None:
        self._settings = settings
        self._host = host
        self._create = create
        self._metrics = host.metrics
        self._limited_log = LimitedLog(_log, settings.clock.now)  # for entries that a peer can cause at any rate
        self._transport_set = TransportSet()
        self._agent: P2PAgent | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._zmq: AsyncContext | None = None
        self._server: ControlServer | None = None
        self._clients: ControlClients | None = None
        self._transfers: TransferThread | None = None
        self.control_address = ""  # where consumers connect; empty until a producer has started

    @property
    def agent(self) -> P2PAgent | None:
        """The agent; None before ``start`` and after ``stop``."""
        return self._agent

    @property
    def transports(self) -> tuple[str, ...]:
        """Transports that work here, in order of preference; known after ``start``."""
        return tuple(self._transport_set.transports)

    # ---- life ------------------------------------------------------------------------------------------------------

    async def start(self, pool: KVPoolRegion) -> None:
        """Open the transports, start the transfer thread, bind or prepare the control sockets.

        Raises:
            ConfigError: peers could not be told where to connect, or an address cannot be bound.
            ConnectorUnavailable: no transport works here, or the pool lacks seals or digests that are needed.
        """
        if pool.seals is None:
            raise ConnectorUnavailable("connector p2p: the engine makes no seals, and nothing is handed over without")
        is_producer = self._host.is_producer
        if is_producer:  # before anything is open
            advertised_host(split_tcp(self._settings.control_address)[0], self._settings.advertise_host)
        unverifiable = self._unverifiable(pool)
        names = [name for name in self._settings.transfer.transports if name not in unverifiable]
        if not names:
            raise ConnectorUnavailable("; ".join(unverifiable.values()) or "connector.transports is empty")
        self._loop = asyncio.get_running_loop()
        staging = None if is_producer else map_staging_area(pool)
        landing = staging.region if staging is not None else None

        def open_all() -> TransportSet:
            if pool.bind_thread is not None:
                pool.bind_thread()
            return open_transports(names, regions_of(pool), self._transport_settings(), is_producer, self._create, landing)

        self._transport_set = await asyncio.to_thread(open_all)  # loading a transport's library can take seconds
        self._transport_set.skipped |= unverifiable
        offers = self._transport_set.offers
        responder = HandshakeResponder(self._host.identity, pool.num_blocks, offers, pool.seals.has_digests)
        self._agent = P2PAgent(
            self._host.identity,
            self._settings.clock,
            self.transports,
            agent_settings(self._settings.transfer, pool.num_blocks, is_on_device=pool.buffer is None),
            responder if is_producer else None,
        )
        executor = TransferExecutor(
            self._transport_set.transports,
            pool.seals,
            pool.new_digester() if pool.new_digester is not None else _no_digest,
            partial(self.call_soon, self._on_transfer),
            self._settings.clock.now,
            staging,
        )
        self._transfers = TransferThread(executor, self._host.fail, pool.bind_thread)
        self._transfers.start()
        self._zmq = AsyncContext()
        self._clients = ControlClients(self._zmq, self._on_control, self._on_disconnected, self._host.fail, self._settings.keys)
        if is_producer:
            self._serve(self._zmq)
        self._publish()

    async def stop(self) -> None:
        """End tasks and threads, close sockets. Reads in progress end with the transports. Idempotent."""
        if self._loop is None:
            return
        self._loop = self._agent = None  # later events find no agent
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

    # ---- events, in the event loop ---------------------------------------------------------------------------

    def call_soon(self, callback: Callable[..., None], *arguments: object) -> None:
        """Call ``callback`` in the event loop; calls keep their order and are dropped after ``stop``. Any thread."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(callback, *arguments)

    def tell(self, happened: Callable[[P2PAgent], list[Action]]) -> ControlMessage | None:
        """Pass an event to the agent, carry out its actions and return its reply, if any. Event loop only."""
        agent = self._agent
        if agent is None:
            return None
        try:
            actions = happened(agent)
            for action in actions:
                self._carry_out(action)
            self._arm_timer(agent)
        except Exception as error:
            _log.exception(event("kv_agent_failed"))
            self._host.fail(error)
            return None
        return next((action.message for action in actions if isinstance(action, Reply)), None)

    def _on_control(self, address: str, message: ControlMessage) -> None:
        self.tell(lambda agent: agent.on_control(address, message))

    def _on_disconnected(self, address: str) -> None:
        self.tell(lambda agent: agent.on_disconnected(address))

    def _on_transfer(self, happened: TransferEvent, at: float) -> None:
        self.tell(lambda agent: agent.on_transfer(happened, at))
        match happened:
            case PeerOpened():
                self._note_peer(happened)
            case PeerFailed():
                self._note_failed_peer(happened)

    def _on_timer(self) -> None:
        self._timer = None
        self.tell(P2PAgent.on_timer)

    def _answer(self, message: ControlMessage) -> ControlMessage | None:
        reply = self.tell(lambda agent: agent.on_question(message))
        if isinstance(message, Handshake):
            self._note_reader(message, reply)
        return reply

    def _arm_timer(self, agent: P2PAgent) -> None:
        """Schedule ``_on_timer`` for the agent's next deadline."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = agent.next_timer()
        if due is not None and self._loop is not None:
            self._timer = self._loop.call_later(max(0.0, due - self._settings.clock.now()), self._on_timer)

    # ---- actions of the agent ---------------------------------------------------------------------------------------

    def _carry_out(self, action: Action) -> None:
        assert self._clients is not None
        assert self._transfers is not None
        match action:
            case SendControl():
                self._clients.send(action.address, action.message)
            case CloseControl():
                self._clients.close(action.address)
            case Reply():
                pass  # ``tell`` returns it
            case PeerFenced() | TransportBroken() | TransportRestored():
                self._note(action)
            case LoadEnded():
                self._metrics.count_load(action)
                self._note_failed_load(action)
                self._host.report(action)
            case QuarantineEnded() | SendingEnded():
                self._host.report(action)
            case _:
                self._transfers.submit(action)

    def _serve(self, zmq: AsyncContext) -> None:
        """Bind the control socket and answer consumers."""
        self._server = ControlServer(zmq, self._answer, self._host.fail, self._settings.keys)
        host, port = split_tcp(self._server.start(self._settings.control_address))
        self.control_address = join_tcp(advertised_host(host, self._settings.advertise_host), port)

    def _unverifiable(self, pool: KVPoolRegion) -> dict[str, str]:
        """Return the transports over which this worker cannot verify blocks as ``kv_verify`` demands, and why."""
        if self._host.is_producer or pool.new_digester is not None:
            return {}
        kv_verify = self._settings.transfer.kv_verify
        reason = f"connector.kv_verify = {kv_verify} verifies digests over {{}}, the engine computes none: set it to identity"
        demanding = [name for name in self._settings.transfer.transports if verifies_digests(kv_verify, name)]
        for name in demanding:
            _log.warning(event("kv_transport_skipped", transport=name, reason=reason.format(name)))
        return {name: reason.format(name) for name in demanding}

    def _transport_settings(self) -> TransportSettings:
        host, _ = split_tcp(self._settings.control_address)
        return TransportSettings(
            ids=self._settings.ids,
            engine_id=self._host.identity.engine_id,
            bind_address=join_tcp(host, self._settings.data_port),
            advertise_host=self._settings.advertise_host,
            keys=self._settings.keys,
        )

    # ---- metrics and log -------------------------------------------------------------------------------------------

    def _note_peer(self, opened: PeerOpened) -> None:
        self._metrics.set_transport(opened.transport, is_used=True)
        incarnation = f"{opened.peer.incarnation:016x}"
        fallback = {"instead_of": opened.instead_of} if opened.instead_of else {}
        self._log_transport(transport=opened.transport, peer=opened.peer.address, incarnation=incarnation, **fallback)

    def _note_failed_peer(self, failed: PeerFailed) -> None:
        """Log that a transport failed; the agent tries the next one."""
        in_use = self._agent.transports_in_use() if self._agent is not None else set()
        self._metrics.set_transport(failed.transport, is_used=failed.transport in in_use)
        name = f"{self._metrics.kind}_transport_failed"
        _log.warning(event(name, transport=failed.transport, peer=failed.peer.address, error=failed.error.message))

    def _note_reader(self, handshake: Handshake, answer: ControlMessage | None) -> None:
        if isinstance(answer, HandshakeReply):
            self._metrics.set_transport(answer.transport, is_used=True)
            self._log_transport(transport=answer.transport, reader=handshake.engine_id)
        elif isinstance(answer, HandshakeRefused):
            name = f"{self._metrics.kind}_handshake_refused"
            self._limited_log.warning(
                name, key=answer.code, reader=handshake.engine_id, code=answer.code, reason=answer.message
            )

    def _note_failed_load(self, ended: LoadEnded) -> None:
        """Log the peer and request of a failed load, one line per load and none for an aborted one.

        A peer of another version fails every load, so its lines are limited to one per interval.
        """
        if ended.error is None or ended.usage is None:
            return
        if ended.error.code == VersionMismatch.code:
            name = "other_wire_version"
            self._limited_log.warning(name, key=ended.peer, peer=ended.peer, message=ended.error.message)
            return
        _log.warning(
            event(
                f"{self._metrics.kind}_load_failed",
                **self._host.name_load(ended.request_id),
                peer=ended.peer,
                transport=ended.usage.transport or "-",
                reason=fallback_reason(ended.error.code),
                message=ended.error.message,
                verified_blocks=ended.usage.verified_blocks,
                quarantined_blocks=len(ended.quarantined_block_ids),
            )
        )

    def _note(self, entry: LogEntry) -> None:
        kind, peer = self._metrics.kind, entry.peer.address
        match entry:
            case PeerFenced():
                _log.warning(event(f"{kind}_peer_fenced", peer=peer, quarantined_blocks=entry.num_blocks))
            case TransportBroken():
                retry = {"reason": entry.reason, "probe_in_s": entry.retry_s}
                _log.warning(event(f"{kind}_transport_broken", transport=entry.transport, peer=peer, **retry))
            case TransportRestored():
                after_s = round(entry.after_s, 3)
                _log.info(event(f"{kind}_transport_restored", transport=entry.transport, peer=peer, after_s=after_s))

    def _log_transport(self, **fields: object) -> None:
        _log.info(event(f"{self._metrics.kind}_transport", **fields))

    def _publish(self) -> None:
        for name in self.transports:
            self._metrics.set_transport(name, is_used=False)
        self._metrics.read_at_scrape(self._num_leased_blocks, self._num_loading_blocks, self._events)
        self._metrics.read_broken_transports(self.transports, self._num_broken_transports)
        usable, skipped = ",".join(self.transports), ",".join(self._transport_set.skipped)
        self._log_transport(usable=usable, skipped=skipped, control_address=self.control_address)

    def _num_leased_blocks(self) -> int:
        return self._agent.num_leased_blocks if self._agent is not None else 0

    def _num_loading_blocks(self) -> int:
        return self._agent.num_loading_blocks if self._agent is not None else 0

    def _num_broken_transports(self) -> dict[str, int]:
        return self._agent.num_broken_transports() if self._agent is not None else {}

    def _events(self) -> dict[str, int]:
        counts = Counter(self._agent.counts() if self._agent is not None else {})
        for end in (self._server, self._clients):
            if end is not None:
                counts["bad_control_frames"] += end.num_bad_frames
                counts["dropped_control_messages"] += end.num_dropped
        for transport in self._transport_set.transports.values():
            counts.update(transport.counts())
        return counts


def _no_digest(block_ids: Sequence[int]) -> Sequence[int]:
    raise AssertionError(f"digests of the blocks {block_ids} are verified though none is demanded")
