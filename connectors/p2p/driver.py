"""``P2PDriver`` runs a ``P2PAgent`` in the event loop of a worker: ZeroMQ sockets, transports, transfer thread and clock.

Decides nothing. Events go to the machine of the agent for their type, and actions to the part that carries them out. Events
of other threads arrive in their order, and before any question that came after them: a reader that was told of a lease finds
it. If a machine raises, the worker ends, because requests may wait for actions that were lost. The driver knows a pool of
blocks with seals and not their content: ``connectors.p2p.connector`` uses it for KV, ``connectors.ec.p2p`` for embeddings.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

from connectors.p2p.actions import (
    CloseControl,
    ControlLost,
    ControlReceived,
    HandshakeUnsent,
    PeerFailed,
    PeerFenced,
    PeerLost,
    PeerOpened,
    QuarantineEnded,
    Reply,
    SendControl,
    TransferReport,
    TransportBroken,
    TransportRestored,
)
from connectors.p2p.agent import P2PAgent
from connectors.p2p.control import ControlClients, ControlServer
from connectors.p2p.metrics import P2PMetrics
from connectors.p2p.prefixes.messages import AnswerTo, PinEnded, PrefixAnswered, PrefixAsked, PrefixExpired
from connectors.p2p.producer.handshake import HandshakeResponder, WorkerIdentity
from connectors.p2p.settings import DriverSettings, agent_settings
from connectors.p2p.transfer.executor import TransferExecutor
from connectors.p2p.transfer.staging import map_staging_area
from connectors.p2p.transfer.thread import TransferThread
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
from core.machine_driver import ActionHandler, ByType, EventHandler, LoopTimers, MachineDriver
from core.rate_limit import LimitedLog
from core.wire.contexts import started_context
from core.wire.kv import ControlMessage, Handshake, HandshakeRefused, HandshakeReply, PrefixQuestion
from core.wire.pairing import verifies_digests
from core.wire.sockets import AsyncContext, advertised_host, join_tcp, split_tcp

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentHost:
    """The worker that an agent serves. A producer serves its pool to consumers; every other worker only reads.

    A producer reads too if ``also_reads``. With ``serves_prefixes`` it is asked for beginnings of prompts as well.

    ``report`` receives the ends of loads, leases and quarantines. ``fail`` receives the error that ended the agent or one of
    its threads. Both are called from any thread and must not block. ``name_load`` returns the log fields that name a load,
    given the request id in its report.
    """

    identity: WorkerIdentity
    is_producer: bool
    report: Callable[[Any], None]
    fail: Callable[[BaseException], None]
    metrics: P2PMetrics
    name_load: Callable[[str], Mapping[str, object]]
    also_reads: bool = False
    serves_prefixes: bool = False

    @property
    def is_consumer(self) -> bool:
        """True if the worker reads other workers' blocks."""
        return self.also_reads or not self.is_producer


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
        self._posted: deque[object] = deque()  # events of other threads
        self._machines: ByType[MachineDriver[ControlMessage]] = ByType()  # by the type of the event; empty before ``start``
        self._zmq: AsyncContext | None = None
        self._server: ControlServer | None = None
        self._clients: ControlClients | None = None
        self._transfers: TransferThread | None = None
        self._chosen_by_readers: set[str] = set()  # transports; a producer does not learn when a reader is gone
        self.control_address = ""  # where consumers connect; empty until a producer has started

    @property
    def agent(self) -> P2PAgent | None:
        """The agent; None before ``start`` and after ``stop``."""
        return self._agent

    def longest_lease_s(self) -> float:
        """Return how long the longest lease lasts unless it is renewed, in seconds."""
        return 0.0 if self._agent is None else self._agent.producer.leases.longest_left_s(self._settings.clock.now())

    @property
    def transports(self) -> tuple[str, ...]:
        """Transports that work here, in order of preference; known after ``start``."""
        return tuple(self._transport_set.transports)

    # ---- start and stop --------------------------------------------------------------------------------------------

    async def start(self, pool: KVPoolRegion) -> None:
        """Open the transports, start the transfer thread, bind or prepare the control sockets.

        Raises:
            ConfigError: the control address is not one that peers can connect to, or an address cannot be bound.
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
        staging = map_staging_area(pool) if self._host.is_consumer else None
        landing = staging.region if staging is not None else None

        def open_all() -> TransportSet:
            if pool.bind_thread is not None:
                pool.bind_thread()
            return open_transports(names, regions_of(pool), self._transport_settings(), is_producer, self._create, landing)

        self._transport_set = await asyncio.to_thread(open_all)  # loading a transport's library can take seconds
        self._transport_set.skipped |= unverifiable
        agent = self._new_agent(pool, self._transport_set)
        executor = TransferExecutor(
            self._transport_set.transports,
            pool.seals,
            pool.new_digester() if pool.new_digester is not None else _no_digest,
            lambda happened, at: self.post(TransferReport(happened, at)),
            self._settings.clock.now,
            staging,
        )
        self._transfers = TransferThread(executor, self._host.fail, pool.bind_thread)
        self._transfers.start()
        self._zmq = started_context(AsyncContext)
        self._clients = ControlClients(
            self._zmq,
            lambda address, message: self.handle(ControlReceived(address, message)),
            lambda address: self.handle(ControlLost(address)),
            self._host.fail,
            self._settings.keys,
        )
        self._drive(agent, self._clients, self._transfers)
        if is_producer:
            self._serve(self._zmq)
        self._publish()

    async def stop(self) -> None:
        """End tasks and threads, close sockets. Reads in progress end with the transports. Idempotent."""
        if self._loop is None:
            return
        self._loop = self._agent = None  # later events find no agent
        for machine in self._machines.values():
            machine.stop()
        if self._server is not None:
            await self._server.stop()
        if self._clients is not None:
            await self._clients.stop()
        if self._transfers is not None:
            await asyncio.to_thread(self._transfers.stop)
        if self._zmq is not None:
            self._zmq.destroy(linger=0)

    # ---- events and actions ----------------------------------------------------------------------------------------

    def post(self, happened: object) -> None:
        """Handle an event in the event loop, in the order of the calls; ignored after ``stop``. Any thread."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            self._posted.append(happened)
            loop.call_soon_threadsafe(self._handle_posted)

    def handle(self, happened: object) -> None:
        """Pass an event to the machine for its type. Event loop only."""
        if self._agent is not None:
            self._machines[type(happened)].handle(happened)

    def _handle_posted(self) -> None:
        while self._posted:
            self.handle(self._posted.popleft())

    def _answer(self, message: ControlMessage) -> ControlMessage | None:
        """Answer a consumer by all that other threads have told: the event loop may have taken its message first."""
        self._handle_posted()
        return self._machines[Handshake].handle(message)

    def _drive(self, agent: P2PAgent, clients: ControlClients, transfers: TransferThread) -> None:
        """Route events to the machines of the agent, and their actions to sockets, transfer thread, engine and log."""
        actions: ByType[ActionHandler[ControlMessage]] = ByType(
            {
                SendControl: partial(self._send_control, clients),
                CloseControl: lambda action: clients.close(action.address),
                Reply: attrgetter("message"),  # ``MachineDriver.handle`` returns it
                PeerFenced: self._note_fence,
                TransportBroken: self._note_broken_transport,
                TransportRestored: self._note_restored_transport,
                LoadEnded: self._report_load,
                QuarantineEnded: self._host.report,
                SendingEnded: self._host.report,
                PinEnded: self._host.report,
                PrefixAsked: self._host.report,
                PrefixAnswered: self._report_answer,
                PrefixExpired: self._host.report,
                AnswerTo: self._answer_to,
                object: transfers.submit,
            }
        )
        timers = LoopTimers(self._settings.clock)
        consumer, producer, asks = (
            MachineDriver[ControlMessage](machine.handlers, actions, machine.next_timer, timers, self._fail)
            for machine in (agent.consumer, agent.producer, agent.asks)
        )
        readers = dict.fromkeys(agent.asks.handlers, asks) | dict.fromkeys(agent.consumer.handlers, consumer)
        self._machines = ByType(readers | {object: producer})
        agent.consumer.handlers[TransferReport] = partial(self._on_transfer, agent.consumer.handlers[TransferReport])
        agent.producer.handlers[Handshake] = self._on_handshake
        self._agent = agent

    def _send_control(self, clients: ControlClients, action: SendControl) -> None:
        """Send a message. The consumer hears of a handshake that was not sent once it has carried out its present actions."""
        error = clients.send(action.address, action.message)
        if error is not None and isinstance(action.message, Handshake):
            self.post(HandshakeUnsent(action.address, action.message, str(error)))

    def _on_transfer(self, handler: EventHandler, report: TransferReport, now: float) -> Iterable[object]:
        actions = handler(report, now)
        match report.event:
            case PeerOpened() as opened:
                self._note_peer(opened)
            case PeerFailed() as failed:
                self._note_failed_peer(failed)
            case PeerLost(how_to_open=how, error=error):
                self._log_transport(lost=how.transport, peer=how.peer.address, error=error.message)
        return actions

    def _on_handshake(self, handshake: Handshake, now: float) -> list[Reply]:
        assert self._agent is not None
        actions = self._agent.producer.on_handshake(handshake, now)
        for reply in actions:
            self._note_consumer(handshake, reply.message)
        return actions

    def _serve(self, zmq: AsyncContext) -> None:
        """Bind the control socket and answer consumers."""
        take = self._take_question if self._host.serves_prefixes else None
        self._server = ControlServer(zmq, self._answer, self._host.fail, self._settings.keys, take)
        host, port = split_tcp(self._server.start(self._settings.control_address))
        self.control_address = join_tcp(advertised_host(host, self._settings.advertise_host), port)

    def _take_question(self, sender: bytes, message: ControlMessage) -> bool:
        """Pass a question about a prefix on; the engine answers it after its present step."""
        if not isinstance(message, PrefixQuestion):
            return False
        self.handle(PrefixAsked(sender, message))
        return True

    def _answer_to(self, answer: AnswerTo) -> None:
        if self._server is not None:
            self._server.send(answer.sender, answer.message)

    def _new_agent(self, pool: KVPoolRegion, opened: TransportSet) -> P2PAgent:
        assert pool.seals is not None
        responder = HandshakeResponder(self._host.identity, pool.num_blocks, opened.offers, pool.seals.has_digests)
        settings = agent_settings(
            self._settings.transfer,
            pool.num_blocks,
            is_on_device=pool.buffer is None,
            unsealed_patience_s=self._settings.unsealed_patience_s,
        )
        return P2PAgent(self._host.identity, self.transports, settings, responder if self._host.is_producer else None)

    def _unverifiable(self, pool: KVPoolRegion) -> dict[str, str]:
        """Return the transports over which this worker cannot verify blocks as ``kv_verify`` demands, and why."""
        if not self._host.is_consumer or pool.new_digester is not None:
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

    def _fail(self, error: Exception) -> None:
        _log.error(event("kv_agent_failed"), exc_info=error)
        self._host.fail(error)

    def _note_peer(self, opened: PeerOpened) -> None:
        incarnation = f"{opened.peer.incarnation:016x}"
        fallback = {"instead_of": opened.instead_of} if opened.instead_of else {}
        self._log_transport(transport=opened.transport, peer=opened.peer.address, incarnation=incarnation, **fallback)

    def _note_failed_peer(self, failed: PeerFailed) -> None:
        """Log that a transport failed; the consumer tries the next one."""
        how = failed.how_to_open
        name = f"{self._metrics.kind}_transport_failed"
        _log.warning(event(name, transport=how.transport, peer=how.peer.address, error=failed.error.message))

    def _note_consumer(self, handshake: Handshake, answer: ControlMessage) -> None:
        if isinstance(answer, HandshakeReply):
            self._chosen_by_readers.add(answer.transport)
            self._log_transport(transport=answer.transport, reader=handshake.engine_id)
        elif isinstance(answer, HandshakeRefused):
            name = f"{self._metrics.kind}_handshake_refused"
            self._limited_log.warning(
                name, key=answer.code, reader=handshake.engine_id, code=answer.code, reason=answer.message
            )

    def _report_answer(self, answer: PrefixAnswered) -> None:
        if answer.refusal is not None:
            self._metrics.count_prefix_refusal(answer.refusal)
        self._host.report(answer)

    def _report_load(self, ended: LoadEnded) -> None:
        self._metrics.count_load(ended)
        if self._agent is not None and self._agent.asks.end_load(ended.request_id):
            self._metrics.count_prefix_load(ended)
        self._note_failed_load(ended)
        self._host.report(ended)

    def _note_failed_load(self, ended: LoadEnded) -> None:
        """Log the peer and request of a failed load, at most one line per peer and reason in an interval.

        A peer that is lost, of another version or of another layout fails every load. Aborted loads write no line.
        """
        if ended.error is None or ended.usage is None:
            return
        if ended.error.code == VersionMismatch.code:
            name = "other_wire_version"
            self._limited_log.warning(name, key=ended.peer, peer=ended.peer, message=ended.error.message)
            return
        reason = fallback_reason(ended.error.code)
        self._limited_log.warning(
            f"{self._metrics.kind}_load_failed",
            key=(ended.peer, reason),
            **self._host.name_load(ended.request_id),
            peer=ended.peer,
            transport=ended.usage.transport or "-",
            reason=reason,
            message=ended.error.message,
            verified_blocks=ended.usage.verified_blocks,
            quarantined_blocks=len(ended.quarantined_block_ids),
        )

    def _note_fence(self, fenced: PeerFenced) -> None:
        name = f"{self._metrics.kind}_peer_fenced"
        _log.warning(event(name, peer=fenced.peer.address, quarantined_blocks=fenced.num_blocks))

    def _note_broken_transport(self, broken: TransportBroken) -> None:
        where = {"transport": broken.transport, "peer": broken.peer.address}
        name = f"{self._metrics.kind}_transport_broken"
        _log.warning(event(name, **where, reason=broken.reason, probe_in_s=broken.retry_s))

    def _note_restored_transport(self, restored: TransportRestored) -> None:
        where = {"transport": restored.transport, "peer": restored.peer.address}
        _log.info(event(f"{self._metrics.kind}_transport_restored", **where, after_s=round(restored.after_s, 3)))

    def _log_transport(self, **fields: object) -> None:
        _log.info(event(f"{self._metrics.kind}_transport", **fields))

    def _publish(self) -> None:
        self._metrics.start_transports(self.transports, self._transports_in_use)
        self._metrics.read_at_scrape(self._num_leased_blocks, self._num_loading_blocks, self._events)
        if self._host.serves_prefixes:
            self._metrics.start_prefixes(self._num_pinned_blocks)
        self._metrics.read_broken_transports(self.transports, self._num_broken_transports)
        usable, skipped = ",".join(self.transports), ",".join(self._transport_set.skipped)
        self._log_transport(usable=usable, skipped=skipped, control_address=self.control_address)

    def _num_leased_blocks(self) -> int:
        return self._agent.producer.leases.num_blocks if self._agent is not None else 0

    def _num_pinned_blocks(self) -> int:
        return self._agent.producer.prefixes.num_pinned_blocks if self._agent is not None else 0

    def _num_loading_blocks(self) -> int:
        return self._agent.consumer.num_loading_blocks if self._agent is not None else 0

    def _transports_in_use(self) -> set[str]:
        if self._agent is None:
            return set()
        return self._chosen_by_readers | self._agent.consumer.peers.transports_in_use()

    def _num_broken_transports(self) -> dict[str, int]:
        return self._agent.consumer.peers.health.num_broken() if self._agent is not None else {}

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
