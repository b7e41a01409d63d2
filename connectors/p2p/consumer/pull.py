"""The consumer's state machine: from "load these blocks" to "they are verified" or "these are not".

Owns the loads in progress and coordinates what they need: peers and the health of transports to them (``peers``), handshakes
that open peers (``handshakes``), leases kept alive (``held_leases``), open reads and the quarantined blocks that they may still
write (``inflight_reads``), the steps of reading (``load_reading``) and the search for stalled peers (``stalls``). Does no I/O
and reads no clock: every entry point takes the time and returns actions.

    load:  CONNECTING ──handshake──▶ READING ──every read terminal──▶ SEALING ──seals read──▶ reported
               │                        ▲  │                             │ │
               │                        └──│────wrong digest, once───────┘ │
               └──failure, abort, deadline─┴───────────────────────────────┴──────▶ reported, what is open quarantined

If the chosen transport cannot open the peer, or no bytes arrive by it, the load goes back to CONNECTING and tries the next
transport; without one it fails at once. When a preferred transport works again, new loads wait in CONNECTING until the loads by
the other one are over: a peer is open by one transport at a time.
A load is reported once and without delay. The blocks that its open reads may still write are quarantined until these reads are
terminal; a read that does not become terminal is ended by fencing its peer. A block is accepted only by a seal that was read
after every byte of the block had arrived, never by a lease or a timer. Seals are ordered together with the last blocks; the
transfer thread reads them after the blocks (``PostSealRead.after``).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from connectors.p2p.actions import (
    Action,
    AskProgress,
    ConsumerStep,
    ControlLost,
    ControlReceived,
    ExpectHandoff,
    HandshakeUnsent,
    MeetPeer,
    PeerFailed,
    PeerFenced,
    PeerLost,
    PeerProgress,
    ProbeEnded,
    PullRequest,
    ReadEnded,
    TransferReport,
)
from connectors.p2p.consumer.counts import PullCounts
from connectors.p2p.consumer.handshakes import Handshakes
from connectors.p2p.consumer.held_leases import HeldLeases
from connectors.p2p.consumer.inflight_reads import InflightReads, QuarantineBounds
from connectors.p2p.consumer.load import Load, LoadPhase, refused_load, restart_error
from connectors.p2p.consumer.load_reading import LoadExits, LoadReader
from connectors.p2p.consumer.loads import Loads
from connectors.p2p.consumer.peers import ConsumerTerms, Peer, Peers
from connectors.p2p.consumer.stalls import StallWatch
from connectors.p2p.producer.handshake import WorkerIdentity
from connectors.p2p.settings import PullSettings
from connectors.p2p.transport.interface import PeerId
from connectors.reports import LoadEnded
from core.errors import KVFerryError, PeerUnreachable, TransferTimeout, VersionMismatch
from core.machine_driver import ByType, EventHandler, TimerDue
from core.wire.kv import ControlError, HandshakeRefused, HandshakeReply, LeaseRenew, LeaseState, kind_of
from core.wire.messages import ErrorInfo


class PullProtocol:
    """Loads blocks from any number of peers. ``transports`` are this worker's, in order of preference."""

    def __init__(self, identity: WorkerIdentity, transports: Iterable[str], settings: PullSettings) -> None:
        self._settings = settings
        self._layout = identity.layout
        self._actions: list[Action] = []
        terms = ConsumerTerms(tuple(transports), settings.kv_verify, settings.handshake_timeout_s, settings.breaker)
        self.peers = Peers(identity, terms, self._emit)
        self.leases = HeldLeases(settings.lease_renew_interval_s, settings.lease_margin_s, self._emit)
        most, most_in_total = settings.max_quarantined_blocks, settings.max_quarantined_blocks_in_total
        self._reads = InflightReads(QuarantineBounds(most, most_in_total, settings.fence_grace_s), self._emit)
        self._quarantine = self._reads.quarantine
        self.loads = Loads()
        self._stalls = StallWatch(settings.transfer_stall_s)
        exits = LoadExits(self._end, self._on_read_failed, self._connect)
        self._reader = LoadReader(settings, identity.layout, self.peers, self.leases, self._reads, exits)
        self._handshakes = Handshakes(identity, terms, self.peers, self.leases, self.loads, self._end)
        self._counts = PullCounts()
        self.handlers: ByType[EventHandler] = ByType(
            {
                ConsumerStep: self.on_step,
                ExpectHandoff: self.expect,
                MeetPeer: self.meet,
                ControlReceived: self.on_control,
                ControlLost: self.on_disconnected,
                HandshakeUnsent: self.on_unsent,
                TransferReport: self.on_transfer,
                TimerDue: self.on_timer,
            }
        )

    @property
    def counts(self) -> PullCounts:
        """What has happened since the start."""
        self._counts.handshakes, self._counts.failed_handshakes = self._handshakes.num_sent, self._handshakes.num_failed
        self._counts.quarantined_blocks = self._reads.num_quarantined
        self._counts.blocks_read_again = self._reader.num_blocks_read_again
        return self._counts

    @property
    def num_loading_blocks(self) -> int:
        """Blocks of loads that have not been reported."""
        return self.loads.num_rows

    @property
    def num_quarantined_blocks(self) -> int:
        """Blocks of reported loads that a read may still write."""
        return self._quarantine.num_blocks

    # ---- orders of the engine --------------------------------------------------------------------------------------

    def on_step(self, step: ConsumerStep, now: float) -> list[Action]:
        """Carry out one engine step's orders, in the order of the fields."""
        actions: list[Action] = []
        self.leases.hold(step.holds, now)
        for request in step.pulls:
            actions += self.start(request, now)
        for request_id, refusal in step.refused.items():
            self._emit(refused_load(request_id, refusal))
        for request_id in step.aborts:
            actions += self.abort(request_id, now)
        for handoff in step.releases:
            self.leases.release(handoff)
        return actions + self._take_actions()

    def expect(self, event: ExpectHandoff, now: float) -> list[Action]:
        """Ask for a lease that may be held soon."""
        self.leases.expect(event.handoff, now)
        return self._take_actions()

    def meet(self, event: MeetPeer, now: float) -> list[Action]:
        """Shake hands with a producer before its first load. A failure ends no load: the first one tries again."""
        self._handshakes.meet(event.producer, now)
        return self._take_actions()

    def start(self, request: PullRequest, now: float) -> list[Action]:
        """Begin a load. Its lease, if it has one, is held until ``release``."""
        if request.is_leased:
            self.leases.hold((request.handoff,), now)
        deadline = now + self._settings.transfer_deadline_s
        if request.deadline is not None:
            deadline = min(deadline, request.deadline)
        load = Load(request, now, deadline)
        self.loads.add(load)
        if deadline <= now:
            self._on_deadline(load, now)
        elif self._reads.is_full(load.producer, now):
            self._end(load, self._reads.why_full(load.producer), now)
        else:
            self._connect(load, now)
        return self._take_actions(now)

    def abort(self, request_id: str, now: float) -> list[Action]:
        """Give up a load. An unknown or reported one is ignored."""
        load = self.loads.get(request_id)
        if load is not None:
            quarantined = load.open_rows()
            self._forget(load, now)
            self._emit(LoadEnded(request_id, usage=None, quarantined_block_ids=quarantined))
            self._reads.hurry_if_full(self.loads.producers, now)
            self._close_if_retired(load.producer, now)
        return self._take_actions(now)

    # ---- messages and reports --------------------------------------------------------------------------------------

    def on_control(self, event: ControlReceived, now: float) -> list[Action]:
        """Handle a control message from the producer connected at ``event.address``."""
        address, message = event.address, event.message
        self.peers.note_message(address, now)
        if isinstance(message, HandshakeReply | HandshakeRefused | LeaseState):
            left_waiting = self._handshakes.leave_replaced(address, message.incarnation, now)
            for load in left_waiting:
                self._connect(load, now)
            if left_waiting:
                return self._take_actions(now)
        match message:
            case HandshakeReply() if self._handshakes.awaits(address, message):
                self._note_incarnation(address, message.incarnation, now)
                for load in self._handshakes.on_reply(address, message, now):
                    self._connect(load, now)
            case HandshakeRefused() if self._handshakes.awaits(address, message):
                self._note_incarnation(address, message.incarnation, now)
                self._handshakes.on_refused(address, message, now)
            case LeaseState():
                self._on_lease_state(address, message, now)
            case ControlError() if self._handshakes.awaits(address, message):
                self._handshakes.on_refused(address, message, now)
            case ControlError(code=VersionMismatch.code) if not self.peers.at(address):
                self._handshakes.note_other_version(address)
            case ControlError() if message.kind == kind_of(LeaseRenew):
                self._counts.unexpected_messages += 1
                self._go_on(address, self.leases.on_refused(address, message.number, now), now)
            case _:
                self._counts.unexpected_messages += 1
        return self._take_actions(now)

    def on_disconnected(self, event: ControlLost, now: float) -> list[Action]:
        """The control connection is lost or was refused: its process is gone, or cannot be reached.

        Loads that wait for another incarnation than the one that has answered get a new handshake, once.
        """
        address = event.address
        self.peers.health.forget_at(address)
        answering = self._handshakes.on_disconnected(address)
        error = PeerUnreachable(f"the control connection to {address} was lost")
        lost = self.peers.at(address)
        for peer_id in lost:
            self._lose(peer_id, error, now)
        for load in self.loads.at(address):
            if lost or answering not in {None, load.producer.incarnation}:
                self._connect(load, now)
            else:
                self._end(load, error, now)
        return self._take_actions(now)

    def on_unsent(self, event: HandshakeUnsent, now: float) -> list[Action]:
        """A handshake was not sent, as for want of a descriptor: loads do not wait for an answer."""
        self._handshakes.on_unsent(event, now)
        return self._take_actions(now)

    def on_transfer(self, report: TransferReport, now: float) -> list[Action]:
        """Handle a report of the transfer thread."""
        match event := report.event:
            case PeerFailed():
                self._on_peer_failed(event, now)
            case PeerLost():
                self._on_peer_lost(event, now)
            case ReadEnded():
                if not event.has_no_room:
                    self._reader.offer_room(self.loads, now)
                self._on_read_ended(event, now, report.at)
            case PeerProgress():
                self._on_progress(event, now)
            case ProbeEnded():
                self._on_probe_ended(event, now)
        return self._take_actions(now)

    def on_timer(self, event: TimerDue, now: float) -> list[Action]:
        """Do what is due: handshake timeouts, deadlines, fences, renewals."""
        self._handshakes.on_timer(now)
        for load in self.loads.overdue(now):
            if load in self.loads:
                self._on_deadline(load, now)
        for load in self.loads.looking_again(now):
            self._reader.look_again(load, now)
        for peer_id in self._quarantine.overdue(now):
            self._fence(peer_id, now)
        for peer_id in self._stalls.due(now):
            self._emit(AskProgress(peer_id))
            self.leases.ask_producer(peer_id, now)
        self.peers.health.on_timer(now)
        self.leases.on_timer(now)
        return self._take_actions(now)

    def next_timer(self) -> float | None:
        """Return when ``on_timer`` has something to do, or None."""
        earliest = min(
            self._handshakes.next_timer(),
            self.loads.next_timer(),
            self._quarantine.next_fence(),
            self._stalls.next_timer(),
            self.peers.health.next_timer(),
            self.leases.next_timer(),
        )
        return None if earliest == math.inf else earliest

    # ---- peers -----------------------------------------------------------------------------------------------------

    def _connect(self, load: Load, now: float) -> None:
        """Go on to the blocks if the peer is open, else shake hands with it."""
        peer = self.peers.get(load.producer)
        if peer is not None and peer.is_retiring:
            return  # the load continues when the loads by the old transport are over
        if peer is not None:
            if not load.is_reading:  # else its reads, posted in vain, are about to end
                self._reader.begin(load, peer, now)
            return
        if (refusal := self._handshakes.why_not_asked(load.producer, now)) is not None:
            self._end(load, refusal, now)
            return
        if (unreadable := self.peers.why_unreadable(load.producer)) is not None:
            self._counts.loads_without_transport += 1
            self._end(load, unreadable, now)
        else:
            self._handshakes.ask(load.producer, now)

    def _on_peer_failed(self, failed: PeerFailed, now: float) -> None:
        """Let the loads that wait try the next transport; without one they fail."""
        peer = self.peers.opened_by(failed.how_to_open)
        if peer is not None:
            is_left = self.peers.avoid(peer.peer_id, peer.transport, failed.error.message)
            self._leave(peer.peer_id, failed.error, now, is_left=is_left)

    def _on_peer_lost(self, lost: PeerLost, now: float) -> None:
        """Close a peer whose connection broke while no read was open. The loads that wait connect again."""
        peer = self.peers.opened_by(lost.how_to_open)
        if peer is not None:
            self.peers.health.count_failure(peer.how_to_open, lost.error, now)
            self._leave(peer.peer_id, lost.error, now, is_left=self.peers.why_unreadable(peer.peer_id) is None)

    def _on_progress(self, progress: PeerProgress, now: float) -> None:
        """Drop a transport by which no bytes come from a peer that answers, before the deadlines of its loads."""
        peer = self.peers.get(progress.peer)
        if peer is not None and self._stalls.on_progress(progress, peer.heard_at, now):
            where = f"{progress.peer.address} by {peer.transport}"
            self._break_transport(peer, TransferTimeout(f"no byte came from {where} in {self._stalls.stall_s:g} s"), now)

    def _on_probe_ended(self, ended: ProbeEnded, now: float) -> None:
        """Use a transport again after a successful probe, once the loads by a less preferred one are over."""
        restored = self.peers.health.on_probe_ended(ended, now)
        if restored is not None and self.peers.retire_if_worse(restored):
            self._close_if_retired(restored.peer, now)

    def _close_if_retired(self, peer_id: PeerId, now: float) -> None:
        peer = self.peers.get(peer_id)
        is_needed = any(load.phase is not LoadPhase.CONNECTING for load in self.loads.of(peer_id))
        if peer is not None and peer.is_retiring and not is_needed:
            self._lose(peer_id, PeerUnreachable(f"{peer_id.address} is read by another transport from now on"), now)

    def _on_read_failed(self, peer_id: PeerId, error: PeerUnreachable, now: float) -> None:
        peer = self.peers.get(peer_id)
        if peer is not None:
            self.peers.health.count_failure(peer.how_to_open, error, now)
            self._lose(peer_id, error, now)

    def _break_transport(self, peer: Peer, error: KVFerryError, now: float) -> None:
        """Stop using a transport to the peer until a probe succeeds. Fences the peer."""
        self._counts.fenced_peers += 1
        self.peers.health.open_breaker(peer.how_to_open, error, now)
        self._leave(peer.peer_id, error, now, is_left=self.peers.why_unreadable(peer.peer_id) is None)

    def _leave(self, peer_id: PeerId, error: KVFerryError, now: float, *, is_left: bool) -> None:
        """Close a peer; loads that have received nothing from it yet try another transport if one ``is_left``."""
        waiting = [load for load in self.loads.of(peer_id) if load.is_untouched]
        if is_left and self.peers.get(peer_id) is not None:
            for load in waiting:
                load.start_over(now)
        self._lose(peer_id, error, now)
        for load in waiting:
            if load in self.loads:
                self._connect(load, now)

    def _note_incarnation(self, address: str, incarnation: int, now: float) -> None:
        """The earlier incarnations at this address are dead: their blocks, leases and memory are void."""
        self.leases.forget_others(address, incarnation)
        self.peers.health.forget_at(address, but_for=incarnation)
        others = [peer_id for peer_id in self.peers.at(address) if peer_id.incarnation != incarnation]
        for peer_id in others:
            self._lose(peer_id, restart_error(peer_id, incarnation), now)
        for load in self.loads.at(address):
            if load.producer.incarnation != incarnation:
                self._end(load, restart_error(load.producer, incarnation), now)

    def _lose(self, peer_id: PeerId, error: KVFerryError, now: float) -> None:
        """Fence a peer, which ends its open reads, and fail its loads."""
        peer = self.peers.close(peer_id)
        if peer is None:
            return
        self._stalls.forget(peer_id)
        self._fence_late_reads(peer_id)
        waiting = []
        for load in self.loads.of(peer_id):
            if load.phase is not LoadPhase.CONNECTING:
                self._end(load, error, now)
            elif peer.is_retiring:
                waiting.append(load)
        for load in waiting:
            load.asked_since = now  # until now it has waited for the end of the other transport
            self._connect(load, now)

    def _fence(self, peer_id: PeerId, now: float) -> None:
        """End the late reads of a peer that are overdue. What has brought nothing for a whole deadline is broken."""
        peer, patience_s = self.peers.get(peer_id), self._settings.transfer_deadline_s
        for reading_since in self._quarantine.overdue_since(peer_id, now):
            if peer is not None and peer.last_progress_at <= reading_since and reading_since + patience_s <= now:
                where = f"{peer_id.address} by {peer.transport}"
                self._break_transport(peer, TransferTimeout(f"no read of {where} ended in {patience_s:g} s"), now)
                return
        self._counts.fenced_peers += 1
        self._fence_late_reads(peer_id)
        self._lose(peer_id, PeerUnreachable(f"{peer_id.address} was fenced because reads of it do not end"), now)

    def _fence_late_reads(self, peer_id: PeerId) -> None:
        """Stop counting the late reads of a peer, which are about to become terminal, and log it if there are any."""
        num_late_blocks = self._quarantine.num_blocks_of(peer_id)
        if num_late_blocks:
            self._emit(PeerFenced(peer_id, num_late_blocks))
        self._quarantine.fence(peer_id)

    # ---- reads and leases --------------------------------------------------------------------------------------------

    def _on_read_ended(self, read: ReadEnded, now: float, ended_at: float) -> None:
        late_from = self._quarantine.open_peer_of(read.read_id)
        load = self._reads.end(read.read_id)
        if load is not None:
            self._stalls.begin_again(load.producer, now)
            self._reader.on_read_ended(load, read, now, ended_at)
        elif late_from is not None and isinstance(read.error, PeerUnreachable):
            self._on_read_failed(late_from, read.error, now)  # else only the next load would find out
        elif late_from is not None and read.error is None and not read.has_no_room:
            self.peers.note_progress(late_from, now)

    def _on_lease_state(self, address: str, state: LeaseState, now: float) -> None:
        self._note_incarnation(address, state.incarnation, now)
        self._handshakes.repeat_if_lost(address, state.number, now)
        going_on, ending = self.leases.on_state(address, state)
        self._go_on(address, {*going_on, *ending}, now)

    def _go_on(self, address: str, transfer_ids: Collection[str], now: float) -> None:
        """Continue the loads of handoffs of which there is news."""
        for load in self.loads.at(address):
            if load.phase is LoadPhase.READING and load.request.handoff.transfer_id in transfer_ids:
                self._reader.post_reads(load, now)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _on_deadline(self, load: Load, now: float) -> None:
        """Report the failure now. A peer that sent no bytes meanwhile is frozen and is fenced; a slow one gets more time.

        It is judged only if the load has waited for this transport for a whole ``transfer_deadline_s``: one with a shorter
        deadline of its own breaks nothing.
        """
        peer = self._peer_read_by(load)
        patience_s = self._settings.transfer_deadline_s
        is_slow = peer is not None and peer.last_progress_at > load.reading_since
        budget = f"{load.deadline - load.started_at:g} s"
        error = TransferTimeout(f"the load from {load.producer.address} did not end in {budget}: {load.phase.value}")
        self._end(load, error, now)
        is_dead = not is_slow and load.asked_since + patience_s <= now
        if peer is not None and is_dead and self.peers.get(load.producer) is peer:
            self._break_transport(peer, error, now)

    def _end(self, load: Load, error: KVFerryError | ErrorInfo | None, now: float) -> None:
        """Report a load; its verified blocks may be used. ``error`` applies to the others, unless they have their own."""
        if load not in self.loads:
            return
        info = ErrorInfo.of(error) if isinstance(error, KVFerryError) else error
        peer = self.peers.get(load.producer)
        if peer is not None and load.is_loaded:
            self.peers.health.count_success(peer.peer_id, peer.transport)
        layout = load.request.layout or self._layout
        report = load.report(info, peer.transport if peer else "", layout.block_bytes, now)
        self._forget(load, now)
        self._emit(report)
        self._reads.hurry_if_full(self.loads.producers, now)
        self._close_if_retired(load.producer, now)

    def _forget(self, load: Load, now: float) -> None:
        """Remove a load and its reads. Their peer is fenced when they have had a whole deadline, a slow one gets another."""
        self.loads.remove(load)
        peer, patience_s = self._peer_read_by(load), self._settings.transfer_deadline_s
        if peer is None:
            fence_at = math.inf
        elif peer.last_progress_at > load.reading_since:
            fence_at = now + patience_s
        else:
            fence_at = max(now, load.reading_since + patience_s)
        self._reads.abandon(load, fence_at, now)

    def _peer_read_by(self, load: Load) -> Peer | None:
        """Return the peer that a load has open reads of. None without any, and if that is closed: they are about to end."""
        is_reading = load.is_reading and load.phase is not LoadPhase.CONNECTING
        return self.peers.get(load.producer) if is_reading else None

    def _emit(self, action: Action) -> None:
        self._actions.append(action)

    def _take_actions(self, now: float | None = None) -> list[Action]:
        """Return the collected actions. ``now`` is given where reads may have been posted or ended."""
        if now is not None:
            readable = [peer for peer in self._reads.awaited_peers() if self.peers.get(peer) is not None]
            self._stalls.watch(readable, now)
        actions, self._actions = self._actions, []
        return actions
