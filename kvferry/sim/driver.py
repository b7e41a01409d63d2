"""A p2p agent under virtual time: drives a real ``P2PAgent`` as ``connectors.p2p.driver`` does in a worker.

Agent and transfer executor are the real ones; the event loop, the sockets and the transfer thread are simulated. The queues
between the three threads keep their order, and each takes its time. Subclasses define the content of the blocks and their
users: KV (``kvferry.sim.connector``) or embeddings (``kvferry.sim.embeddings``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Protocol, get_args

from connectors.p2p.actions import (
    Action,
    CloseControl,
    ControlLost,
    ControlReceived,
    ExpectHandoff,
    HandoffRef,
    LeaseGrant,
    MeetPeer,
    PeerFenced,
    PostRead,
    ProbeEnded,
    QuarantineEnded,
    ReadEnded,
    ReleaseHandoffs,
    RenewHandoffs,
    Reply,
    Report,
    SendControl,
    TransferCommand,
    TransferReport,
    TransportBroken,
    TransportRestored,
)
from connectors.p2p.agent import P2PAgent
from connectors.p2p.config import transfer_settings
from connectors.p2p.prefixes.messages import AnswerTo, PrefixAsked, PrefixFound, PrefixReport
from connectors.p2p.producer.handshake import HandshakeResponder, WorkerIdentity
from connectors.p2p.settings import agent_settings
from connectors.p2p.transfer.executor import TransferExecutor
from connectors.p2p.transfer.staging import StagedRows, StagingArea, map_staging_area
from connectors.p2p.transport.factory import TransportSettings, open_transports
from connectors.p2p.transport.interface import regions_of
from connectors.reports import LoadEnded, SendingEnded
from core.config_workers import ConnectorSection
from core.digest import BlockDigester
from core.ids import IdSource
from core.kv.block_form import BlockForm
from core.kv.pool_region import KVPoolRegion
from core.kv.seals import each_by_itself
from core.machine_driver import ActionHandler, ByType, EventHandler, MachineDriver
from core.testing.hash_model import SLOT_BYTES
from core.wire.codec import decode_control_frame, encode_control_message
from core.wire.early import MeetProducer
from core.wire.kv import ControlMessage, KVHandoff, LeaseRelease, LeaseRenew, LeaseState, PrefixQuestion
from kvferry.sim.breaker_checks import BreakerChecks
from kvferry.sim.host import Host
from kvferry.sim.lease_checks import LeaseChecks
from kvferry.sim.loop import ProcessTimers, Queue
from kvferry.sim.network import Link
from kvferry.sim.seal_checks import WrongSeals
from kvferry.sim.transport import TRAITS, LandingWatch, SimTransport

STAGED_TOKENS = 512  # the size of the staging area: one load of the longest prompt, not two


class WriteWatch(LandingWatch, Protocol):
    """Sees every write of a worker's transfers into its memory. ``complain`` receives violations of its agent."""

    complain: Callable[[str], None]

    def on_conversion(self, block_id: int) -> None:
        """A block will be filled from the staging area."""


@dataclass(slots=True)
class _WatchedStaging(StagingArea):
    """Checks that taken rows belong to one read only, and converted blocks to the load."""

    watch: WriteWatch | None = None
    transports: Sequence[SimTransport] = ()
    num_refusals: int = 0  # for lack of room; the read waits
    num_converted: int = 0  # blocks of ours

    def take(self, num_rows: int, row_bytes: int, num_held_bytes: int = 0) -> StagedRows | None:
        staged = StagingArea.take(self, num_rows, row_bytes, num_held_bytes)
        self.num_refusals += staged is None
        if staged is not None:
            start, end = staged.span
            late = [span for transport in self.transports for span in transport.staged_bytes()]
            assert all(end <= span.start or span.stop <= start for span in late), f"{staged} may still be written"
        return staged

    def convert(self, staged: StagedRows, read: PostRead, theirs: BlockForm) -> None:
        assert self.watch is not None
        for block_id in dict.fromkeys(copy.local_row for copy in read.copies):
            self.watch.on_conversion(block_id)
            self.num_converted += 1
        StagingArea.convert(self, staged, read, theirs)


def _watched_staging(pool: KVPoolRegion, watch: WriteWatch, transports: Sequence[SimTransport]) -> _WatchedStaging:
    """Return a staging area in which reads have to wait for each other."""
    area = map_staging_area(pool, STAGED_TOKENS * SLOT_BYTES)
    assert area is not None
    return _WatchedStaging(pool, area.region, watch=watch, transports=transports)


class SimDriver:
    """An agent of one worker. ``control_address`` is where readers reach it; "" if it has none."""

    def __init__(
        self, host: Host, identity: WorkerIdentity, config: ConnectorSection, ids: IdSource, control_address: str
    ) -> None:
        self.agent: P2PAgent | None = None
        self._host = host
        self._identity = identity
        self._config = config
        self._ids = ids
        self._control_address = control_address
        self._serves_prefixes = config.peer_prefixes
        self._links: dict[str, Link] = {}
        self._to_transfers = Queue(host.process, host.loop, host.thread_delay_s)
        self._from_transfers = Queue(host.process, host.loop, host.thread_delay_s)

    @property
    def transports(self) -> tuple[str, ...]:
        """Transports that work here."""
        return tuple(self._config.transports)

    def _report(self, report: Report) -> None:
        """Report to the worker side."""
        raise NotImplementedError

    def _report_prefix(self, report: PrefixReport) -> None:
        """Report what concerns a prefix to the worker side."""
        raise NotImplementedError

    def _start(self, pool: KVPoolRegion, watch: WriteWatch, max_rows_per_read: int) -> None:
        """Open the transports for a pool, answer readers, start to read."""
        host = self._host
        self._pool = pool
        self._transports: list[SimTransport] = []

        def create(name: str, settings: TransportSettings) -> SimTransport:
            transport = SimTransport(host.fabric, host.process, TRAITS[name], self._wake_transfers, watch)
            self._transports.append(transport)
            return transport

        settings = TransportSettings(ids=self._ids, engine_id=self._identity.engine_id, bind_address="")
        self._staging = _watched_staging(pool, watch, self._transports)
        opened = open_transports(
            self.transports, regions_of(pool), settings, bool(self._control_address), create, self._staging.region
        )
        assert pool.seals is not None
        self._digester = BlockDigester(pool.block_bytes)
        self._executor = TransferExecutor(
            opened.transports,
            pool.seals,
            each_by_itself(self._digest_block),
            lambda happened, at: self._from_transfers.put(partial(self._consumer.handle, TransferReport(happened, at))),
            host.process.clock.now,
            self._staging,
        )
        limits = agent_settings(transfer_settings(self._config), pool.num_blocks)
        pull = dataclasses.replace(limits.pull, max_read_bytes=max_rows_per_read * pool.block_bytes, max_reads_in_flight=2)
        responder = HandshakeResponder(self._identity, pool.num_blocks, opened.offers, pool.seals.has_digests)
        limits = dataclasses.replace(limits, pull=pull)
        name, clock = self._identity.engine_id, host.process.clock
        self._leases = LeaseChecks(name, limits, clock, watch.complain)
        self._breakers = BreakerChecks(name, pull.transfer_deadline_s, clock.now, watch.complain)
        self.agent = P2PAgent(
            self._identity,
            self.transports,
            limits,
            responder if self._control_address else None,
        )
        self._drive(self.agent)
        if self._control_address:
            self._server = host.network.listen(host.process, self._control_address, self._on_question)

    # ---- leases, as the roles see them -----------------------------------------------------------------------------

    def meet(self, producer: MeetProducer) -> None:
        """Get to know a worker whose handoff is about to come."""
        self._consumer.handle(MeetPeer.of(producer))

    def expect(self, handoff: KVHandoff) -> None:
        """Prepare for a request that may load this handoff."""
        self._consumer.handle(ExpectHandoff(HandoffRef.of(handoff)))

    def release(self, transfer_ids: Sequence[str]) -> None:
        """End these handoffs: they will not be read."""
        self._leases.on_release(transfer_ids)
        self._producer.handle(ReleaseHandoffs(transfer_ids))

    def renew(self, transfer_ids: Sequence[str]) -> None:
        """Extend the leases of these handoffs."""
        self._leases.on_renewal(transfer_ids)
        self._producer.handle(RenewHandoffs(transfer_ids))

    def num_leased_blocks(self) -> int:
        """Return how many blocks are held for readers."""
        return self.agent.producer.leases.num_blocks if self.agent is not None else 0

    def longest_lease_s(self) -> float:
        """Return how long readers may still need this worker."""
        now = self._host.process.clock.now()
        return self.agent.producer.leases.longest_left_s(now) if self.agent is not None else 0.0

    def leftovers(self) -> dict[str, int]:
        """Count resources that must be free once every request has ended."""
        assert self.agent is not None
        opened = self.agent.consumer.peers._peers
        return {
            "peers that were closed, and can be read,": len(set(self._executor._peers) - set(opened)),
            "second lives of peers": len(opened) - len({peer.address for peer in opened}),
            "blocks under lease": self.agent.producer.leases.num_blocks,
            "blocks being loaded": self.agent.consumer.num_loading_blocks,
            "quarantined blocks": self.agent.consumer.num_quarantined_blocks,
            "bytes of the staging area": self._staging.num_taken_bytes,
            "leases asked for": len(self.agent.consumer.leases),
            "open questions": len(self.agent.asks),
            "pinned blocks": self.agent.producer.prefixes.num_pinned_blocks,
            "open reads": sum(transport.num_open_reads for transport in self._transports),
        }

    # ---- events ------------------------------------------------------------------------------------------------------

    def _grant(self, grant: LeaseGrant) -> None:
        def on_grant() -> None:
            self._leases.on_grant(grant.transfer_id)
            self._producer.handle(grant)

        self._host.from_engine.put(on_grant)

    def _post(self, event: object) -> None:
        """Pass a message of the scheduler side about prefixes on to the machine that it is for."""

        def on_event() -> None:
            assert self.agent is not None
            if isinstance(event, PrefixFound):
                self._leases.on_grant(event.handoff.transfer_id)
            machine = self._asks if type(event) in self.agent.asks.handlers else self._producer
            machine.handle(event)

        self._host.from_engine.put(on_event)

    def _on_transfer(self, handler: EventHandler, report: TransferReport, now: float) -> Iterable[object]:
        assert self.agent is not None
        consumer, happened = self.agent.consumer, report.event
        self._breakers.on_transfer(happened)
        verdict = WrongSeals(consumer._reads, happened) if isinstance(happened, ReadEnded) else None
        actions = handler(report, now)
        if verdict is not None and verdict.are_accepted():
            self._leases.complain(f"{self._identity.engine_id}: accepts a block by another seal than that of its handoff")
        if isinstance(happened, ProbeEnded) and happened.error is None:
            self._check_restored(self.agent, happened.probe_id)
        return actions

    def _on_question(self, peer: bytes, frame: bytes) -> None:
        question = decode_control_frame(frame)
        if isinstance(question, PrefixQuestion) and self._serves_prefixes:
            self._producer.handle(PrefixAsked(peer, question))
            return
        if isinstance(question, LeaseRenew):
            self._leases.on_renewal(question.transfer_ids)
        elif isinstance(question, LeaseRelease):
            self._leases.on_release(question.transfer_ids)
        reply = self._producer.handle(question)
        if isinstance(reply, LeaseState):
            self._leases.on_answer(reply)
        if reply is not None:
            self._host.log("answers", reply)
            self._server.send(peer, encode_control_message(reply))

    def _on_lost(self, address: str, link: Link) -> None:
        if self._links.get(address) is link:
            del self._links[address]
            self._host.log(f"loses {address}")
            self._consumer.handle(ControlLost(address))

    # ---- actions of the agent ---------------------------------------------------------------------------------------

    def _drive(self, agent: P2PAgent) -> None:
        """Route events to the machines of the agent, and carry out their actions with checks."""
        agent.consumer.handlers[TransferReport] = partial(self._on_transfer, agent.consumer.handlers[TransferReport])
        handlers: ByType[ActionHandler[ControlMessage]] = ByType(
            {
                SendControl: self._send,
                CloseControl: self._close,
                Reply: attrgetter("message"),
                PeerFenced: partial(self._host.log, "fences"),
                TransportBroken: partial(self._host.log, "switches"),
                TransportRestored: partial(self._host.log, "switches"),
                PostRead: self._post_read,
                object: lambda command: self._to_transfers.put(partial(self._execute, command)),
            }
        )
        handlers.update(dict.fromkeys((LoadEnded, QuarantineEnded, SendingEnded), self._report_and_log))
        handlers.update(dict.fromkeys(get_args(PrefixReport), self._report_prefix_and_log))
        handlers[AnswerTo] = self._answer_to
        actions: dict[type, ActionHandler[ControlMessage]] = ByType({object: partial(self._carry_out, handlers)})
        timers = ProcessTimers(self._host.process)
        self._consumer, self._producer, self._asks = (
            MachineDriver[ControlMessage](machine.handlers, actions, machine.next_timer, timers)
            for machine in (agent.consumer, agent.producer, agent.asks)
        )

    def _carry_out(self, handlers: ByType[ActionHandler[ControlMessage]], action: Action) -> ControlMessage | None:
        self._breakers.on_action(action)
        return handlers[type(action)](action)

    def _send(self, action: SendControl) -> None:
        self._host.log(f"asks {action.address}", action.message)
        if isinstance(action.message, LeaseRenew):
            self._leases.on_question(action.address, action.message.number)
        link = self._links.get(action.address) or self._open(action.address)
        link.send(encode_control_message(action.message))

    def _close(self, action: CloseControl) -> None:
        if action.address in self._links:
            self._links.pop(action.address).close()

    def _report_and_log(self, report: Report) -> None:
        self._host.log("reports", report)
        self._report(report)

    def _report_prefix_and_log(self, report: PrefixReport) -> None:
        self._host.log("reports", report)
        self._report_prefix(report)

    def _answer_to(self, answer: AnswerTo) -> None:
        self._host.log("answers", answer.message)
        self._server.send(answer.sender, encode_control_message(answer.message))

    def _post_read(self, read: PostRead) -> None:
        self._check_lease(read.read_id)
        self._to_transfers.put(partial(self._execute, read))

    def _check_lease(self, read_id: int) -> None:
        assert self.agent is not None
        load = self.agent.consumer._reads._loads.get(read_id)
        if load is not None:  # the load continues
            if load.request.is_leased:
                self._leases.on_read(load.request.handoff.transfer_id)
            self._breakers.on_read(load)

    def _check_restored(self, agent: P2PAgent, probe_id: int) -> None:
        restored = self._breakers.take_probe(probe_id)
        if restored is not None:
            broken = agent.consumer.peers.health.reasons(restored.peer).get(restored.transport)
            self._breakers.check_restored(restored, broken)

    def _check_fence(self, address: str, incarnation: int) -> None:
        """Nothing may be read from another incarnation than the one that has answered."""
        assert self.agent is not None
        if any(peer.address == address and peer.incarnation != incarnation for peer in self.agent.consumer.peers._peers):
            self._leases.complain(f"{self._identity.engine_id}: {address} has answered, and another life of it can be read")

    def _open(self, address: str) -> Link:
        def on_frame(frame: bytes) -> None:
            message = decode_control_frame(frame)
            if isinstance(message, LeaseState):
                self._leases.on_lease_state(address, message)
                self._breakers.forget_at(address, but_for=message.incarnation)
            self._consumer.handle(ControlReceived(address, message))
            if isinstance(message, LeaseState):
                self._check_fence(address, message.incarnation)

        link = Link(self._host.network, self._host.process, address, on_frame, lambda: self._on_lost(address, link))
        self._links[address] = link
        return link

    def _execute(self, command: TransferCommand) -> None:
        self._host.log("transfers", command)
        self._executor.execute(command)
        self._executor.poll()

    def _digest_block(self, block_id: int) -> int:
        pool = self._pool
        assert pool.buffer is not None
        return self._digester.digest(pool.buffer[block_id * pool.block_bytes : (block_id + 1) * pool.block_bytes])

    def _wake_transfers(self) -> None:
        self._to_transfers.put(self._poll)

    def _poll(self) -> None:
        self._executor.poll()
