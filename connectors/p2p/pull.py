"""The consumer's state machine: from "load these blocks" to "they are verified" or "these are not".

Owns the loads in progress and puts together what they need: peers (``peers``), leases kept alive (``held_leases``), reads and
the blocks that late bytes may hit (``open_reads``), and the check of what has arrived (``verification``). Does no I/O and reads
no clock: every entry point takes the time and returns actions. Called by ``connectors.p2p.node``.

    load:  CONNECTING ──handshake──▶ READING ──every read terminal──▶ SEALING ──seals read──▶ reported
               │                        ▲  │                             │ │
               │                        └──│────wrong digest, once───────┘ │
               └──failure, abort, deadline─┴───────────────────────────────┴──────▶ reported, what is open quarantined

A load of a peer that cannot be opened by the chosen transport goes back to CONNECTING while there is another.
A load is reported once and at once. What its open reads may still write is quarantined until they are terminal; a read that
does not become terminal is ended by fencing its peer. A block is accepted only by a seal that was looked at when every byte had
arrived; no lease and no timer takes part in that. Seals are ordered with the last of the blocks, and the transfer thread sees
to it that they come behind (``PostSealRead.after``), so that the load does not wait for two changes of thread in between.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from connectors.p2p.actions import (
    Action,
    CloseControl,
    HandoffRef,
    PeerFailed,
    PeerFenced,
    PostRead,
    PostSealRead,
    PullRequest,
    ReadEnded,
    TransferEvent,
)
from connectors.p2p.handshake import WorkerIdentity, peer_error
from connectors.p2p.held_leases import HeldLeases
from connectors.p2p.load import Load, LoadPhase, RowSlice
from connectors.p2p.open_reads import OpenReads, QuarantineBounds
from connectors.p2p.peers import Peer, Peers, ReaderTerms
from connectors.p2p.settings import PullSettings
from connectors.reporting import LoadEnded
from core.errors import KVFerryError, LayoutMismatch, LeaseExpired, PeerUnreachable, ProtocolError, StaleBlock, TransferTimeout
from core.transport import PeerId
from core.wire.kv import ControlError, ControlMessage, HandshakeRefused, HandshakeReply, KVLayoutInfo, LeaseState
from core.wire.messages import ErrorInfo


@dataclass(slots=True)
class PullCounts:
    """What has happened since the start."""

    handshakes: int = 0
    failed_handshakes: int = 0
    unexpected_messages: int = 0
    fenced_peers: int = 0
    blocks_read_again: int = 0
    quarantined_blocks: int = 0


class PullProtocol:
    """Loads blocks from any number of peers. ``transports`` are those this worker can read by, in order of preference."""

    def __init__(self, identity: WorkerIdentity, transports: Iterable[str], settings: PullSettings) -> None:
        self._settings = settings
        self._layout = identity.layout
        self._actions: list[Action] = []
        terms = ReaderTerms(tuple(transports), settings.kv_verify, settings.handshake_timeout_s)
        self._peers = Peers(identity, terms, self._emit)
        self.leases = HeldLeases(settings.lease_renew_interval_s, settings.lease_margin_s, self._emit)
        bounds = QuarantineBounds(
            settings.max_quarantined_blocks, settings.max_quarantined_blocks_in_total, settings.fence_grace_s
        )
        self._reads = OpenReads(bounds, self._emit)
        self._quarantine = self._reads.quarantine
        self._loads: dict[str, Load] = {}
        self._counts = PullCounts()

    @property
    def counts(self) -> PullCounts:
        """What has happened since the start."""
        self._counts.quarantined_blocks = self._reads.num_quarantined
        return self._counts

    @property
    def num_loading_blocks(self) -> int:
        """Blocks of loads that have not been reported."""
        return sum(load.num_rows for load in self._loads.values())

    @property
    def num_quarantined_blocks(self) -> int:
        """Blocks of reported loads that a read may still write."""
        return self._quarantine.num_blocks

    def transports_in_use(self) -> set[str]:
        """Return the transports by which peers are open."""
        return self._peers.transports_in_use()

    # ---- what the engine wants -------------------------------------------------------------------------------------

    def expect(self, handoff: HandoffRef, now: float) -> list[Action]:
        """Ask for a lease that may be held soon."""
        self.leases.expect(handoff, now)
        return self._take_actions()

    def hold(self, handoff: HandoffRef, now: float) -> list[Action]:
        """Keep a lease alive from now on. Idempotent."""
        self.leases.hold(handoff, now)
        return self._take_actions()

    def release(self, handoff: HandoffRef) -> list[Action]:
        """Tell the owner that nobody here needs the hand-over any more."""
        self.leases.release(handoff)
        return self._take_actions()

    def start(self, request: PullRequest, now: float) -> list[Action]:
        """Begin a load. Its lease is held until ``release``."""
        assert request.request_id not in self._loads, f"{request.request_id} is loading already"
        self.leases.hold(request.handoff, now)
        deadline = now + self._settings.transfer_deadline_s
        if request.deadline is not None:
            deadline = min(deadline, request.deadline)
        self._loads[request.request_id] = load = Load(request, now, deadline)
        if deadline <= now:
            self._on_deadline(load, now)
        elif self._reads.is_full(load.owner):
            self._end(load, self._reads.why_full(load.owner), now)
        else:
            self._connect(load, now)
        return self._take_actions()

    def abort(self, request_id: str, now: float) -> list[Action]:
        """Give up a load. An unknown or reported one is ignored."""
        load = self._loads.get(request_id)
        if load is not None:
            quarantined = load.open_rows()
            self._forget(load, fence_at=max(now, load.deadline))
            self._emit(LoadEnded(request_id, usage=None, quarantined_block_ids=quarantined))
            self._reads.hurry_if_full(self._served_by(), now)
        return self._take_actions()

    # ---- what the world says ---------------------------------------------------------------------------------------

    def on_control(self, address: str, message: ControlMessage, now: float) -> list[Action]:
        """Take a control message from the peer that we reached at ``address``."""
        match message:
            case HandshakeReply() if self._peers.is_shaking_hands(address):
                self._on_handshake_reply(address, message, now)
            case HandshakeRefused() if self._peers.is_shaking_hands(address):
                self._note_incarnation(address, message.incarnation, now)
                self._fail_handshake(address, peer_error(message.code, message.message), now)
            case LeaseState():
                self._on_lease_state(address, message, now)
            case ControlError() if self._peers.is_shaking_hands(address):
                self._fail_handshake(address, peer_error(message.code, message.message), now)
            case _:
                self._counts.unexpected_messages += 1
        return self._take_actions()

    def on_disconnected(self, address: str, now: float) -> list[Action]:
        """The control connection is lost or was refused: the process behind it is gone, or cannot be reached.

        Who waits for another life of it than the one that is lost gets a new handshake, once.
        """
        if self._peers.end_handshake(address):
            self._counts.failed_handshakes += 1
        self.leases.on_disconnected(address)
        self._emit(CloseControl(address))
        error = PeerUnreachable(f"the control connection to {address} was lost")
        lost = self._peers.at(address)
        for peer_id in lost:
            self._lose(peer_id, error, now)
        for load in self._loads_at(address):
            if lost:
                self._connect(load, now)
            else:
                self._end(load, error, now)
        return self._take_actions()

    def on_transfer(self, event: TransferEvent, now: float, at: float | None = None) -> list[Action]:
        """Take a report of the transfer thread. ``at``: when it happened, on the same clock; None = now."""
        match event:
            case PeerFailed():
                self._on_peer_failed(event, now)
            case ReadEnded():
                if not event.has_no_room:
                    self._offer_room(now)
                self._on_read_ended(event, now, now if at is None else at)
        return self._take_actions()

    def on_timer(self, now: float) -> list[Action]:
        """Do what is due: handshake timeouts, deadlines, fences, renewals."""
        for address in self._peers.unanswered(now):
            timeout_s = self._settings.handshake_timeout_s
            error = PeerUnreachable(f"no answer to the handshake from {address} in {timeout_s:g} s")
            self._fail_handshake(address, ErrorInfo.of(error), now)
            if not self._peers.at(address):
                self._emit(CloseControl(address))
        for load in [load for load in self._loads.values() if load.deadline <= now]:
            if load.request.request_id in self._loads:
                self._on_deadline(load, now)
        for peer_id in self._quarantine.overdue(now):
            self._fence(peer_id, now)
        self.leases.on_timer(now)
        return self._take_actions()

    def next_timer(self) -> float | None:
        """Return when ``on_timer`` has something to do, or None."""
        earliest = min(
            self._peers.next_timeout(),
            min((load.deadline for load in self._loads.values()), default=math.inf),
            self._quarantine.next_fence(),
            self.leases.next_timer(),
        )
        return None if earliest == math.inf else earliest

    # ---- peers -----------------------------------------------------------------------------------------------------

    def _connect(self, load: Load, now: float) -> None:
        """Go on to the blocks if the peer is open, else find out who it is."""
        peer = self._peers.get(load.owner)
        if peer is not None:
            self._begin_reading(load, peer, now)
        elif self._peers.shake_hands(load.owner, now):
            self._counts.handshakes += 1

    def _on_handshake_reply(self, address: str, reply: HandshakeReply, now: float) -> None:
        self._note_incarnation(address, reply.incarnation, now)
        try:
            peer = self._peers.open(address, reply, now)
        except KVFerryError as error:
            self._fail_handshake(address, ErrorInfo.of(error), now)
            return
        for load in self._connecting_to(address):
            if not load.is_reading:  # else its reads, posted in vain, are about to end
                self._begin_reading(load, peer, now)

    def _on_peer_failed(self, failed: PeerFailed, now: float) -> None:
        """Let the loads that wait go over to the next transport; without one they fail."""
        waiting = [load for load in self._loads_at(failed.peer.address) if load.owner == failed.peer and load.is_untouched]
        is_left = self._peers.avoid(failed.peer, failed.transport, failed.error.message)
        if is_left and self._peers.get(failed.peer) is not None:
            for load in waiting:
                load.start_over()
        self._lose(failed.peer, failed.error, now)
        for load in waiting:
            if load.request.request_id in self._loads:
                self._connect(load, now)

    def _fail_handshake(self, address: str, error: ErrorInfo, now: float) -> None:
        """Fail all loads that wait for this handshake."""
        self._peers.end_handshake(address)
        self._counts.failed_handshakes += 1
        for load in self._connecting_to(address):
            self._end(load, error, now)

    def _note_incarnation(self, address: str, incarnation: int, now: float) -> None:
        """Whoever lived at this address before is dead: its blocks, leases and memory are worth nothing."""
        self.leases.forget_others(address, incarnation)
        others = [peer_id for peer_id in self._peers.at(address) if peer_id.incarnation != incarnation]
        for peer_id in others:
            self._lose(peer_id, _other_life(peer_id, incarnation), now)
        for load in self._loads_at(address):
            if load.owner.incarnation != incarnation:
                self._end(load, _other_life(load.owner, incarnation), now)

    def _lose(self, peer_id: PeerId, error: KVFerryError, now: float) -> None:
        """Fence a peer and fail its loads; its open reads become terminal by that."""
        if not self._peers.close(peer_id):
            return
        self._fence_late_reads(peer_id)
        for load in self._loads_at(peer_id.address):
            if load.owner == peer_id and load.phase is not LoadPhase.CONNECTING:
                self._end(load, error, now)

    def _fence(self, peer_id: PeerId, now: float) -> None:
        self._counts.fenced_peers += 1
        self._fence_late_reads(peer_id)
        self._lose(peer_id, PeerUnreachable(f"{peer_id.address} was fenced because reads of it do not end"), now)

    def _fence_late_reads(self, peer_id: PeerId) -> None:
        """Note that late reads of a peer are about to become terminal, and say so if there are any."""
        num_late_blocks = self._quarantine.num_blocks_of(peer_id)
        if num_late_blocks:
            self._emit(PeerFenced(peer_id, num_late_blocks))
        self._quarantine.fence(peer_id)

    # ---- reads -------------------------------------------------------------------------------------------------------

    def _begin_reading(self, load: Load, peer: Peer, now: float) -> None:
        last = max(load.request.remote_rows, default=0)
        if last >= peer.num_blocks:
            self._end(load, ProtocolError(f"the hand-over names block {last} of {peer.num_blocks}"), now)
            return
        if peer.layout != self._layout_of(load.request):
            self._end(load, LayoutMismatch(f"the hand-over is of {load.request.layout}, its owner has {peer.layout}"), now)
            return
        larger = {} if load.is_converted else self._settings.max_read_bytes_by  # converted blocks land in the staging area
        read_bytes = larger.get(peer.transport, self._settings.max_read_bytes)
        load.begin_reading(now, read_bytes // peer.layout.block_bytes)
        self._go_on_reading(load, now)

    def _go_on_reading(self, load: Load, now: float, max_reads: int | None = None) -> None:
        """Post what may be in flight; with the last of it, order the seals."""
        transfer_id = load.request.handoff.transfer_id
        while load.is_waiting and len(load.open_reads) < (max_reads or self._settings.max_reads_in_flight):
            if transfer_id not in self.leases:
                error = LeaseExpired(f"{load.owner.address} no longer holds the hand-over {transfer_id}")
                load.spoil_waiting(ErrorInfo.of(error))
            elif not load.wants_room and self.leases.may_start_read(transfer_id, now):
                rows = load.next_slice()
                self._emit(self._post_read(self._reads.open_blocks(load, rows), load.owner, rows))
            else:
                return
        if not load.is_waiting:
            self._read_seals(load, now)

    def _offer_room(self, now: float) -> None:
        """A read has ended: let the loads that had no room try again, the eldest first, with one read each."""
        for load in [load for load in self._loads.values() if load.wants_room]:
            load.offer_room(now)
            self._go_on_reading(load, now, len(load.open_reads) + 1)

    def _post_read(self, read_id: int, owner: PeerId, rows: RowSlice) -> PostRead:
        peer = self._peers.get(owner)
        wants_digests = bool(rows.copies) and peer is not None and peer.verifies_digests
        return PostRead(read_id, owner, rows.remote_rows, rows.local_rows, rows.copies, wants_digests)

    def _read_seals(self, load: Load, now: float) -> None:
        """Order the seals of all that has arrived or is about to; without anything, the load is over.

        Blocks that are converted may be read in vain, for want of room: their seals are ordered when they are here.
        """
        if load.seal_read is not None or (load.open_reads and load.is_converted):
            return
        rows = load.to_seal()
        if not rows.indices:
            self._end(load, None, now)
            return
        peer = self._peers.get(load.owner)
        assert peer is not None, "a lost peer ends its loads"
        after = tuple(load.open_reads)
        read_id = self._reads.open_seals(load, rows)
        wants_digests = peer.verifies_digests and not rows.copies  # what was converted has been digested before
        self._emit(PostSealRead(read_id, load.owner, rows.remote_rows, rows.local_rows, wants_digests, after))
        if not after:
            load.begin_sealing()

    def _on_read_ended(self, read: ReadEnded, now: float, ended_at: float) -> None:
        load = self._reads.end(read.read_id)
        if load is None:
            return
        if load.phase is LoadPhase.CONNECTING:  # posted in vain, to a peer that could not be opened
            self._on_read_in_vain(load, read, now)
            return
        peer = self._peers.get(load.owner)
        assert peer is not None, "a lost peer ends its loads"
        if read.error is None and not read.has_no_room:
            peer.last_progress_at = now
        if read.read_id == load.seal_read:
            load.seals_ended_at = ended_at
            self._on_seals_read(load, peer, read, now)
        else:
            load.last_ended_at = ended_at
            self._on_blocks_read(load, peer, read, now)

    def _on_read_in_vain(self, load: Load, read: ReadEnded, now: float) -> None:
        """Ask for the blocks again, by another transport; for their seals when it comes to that."""
        if read.read_id == load.seal_read:
            load.end_sealing()
        else:
            load.want_again(load.open_reads.pop(read.read_id))
        if not load.is_reading:
            self._connect(load, now)

    def _on_blocks_read(self, load: Load, peer: Peer, read: ReadEnded, now: float) -> None:
        rows = load.open_reads.pop(read.read_id)
        if read.has_no_room:
            load.want_again(rows)
            load.wants_room = True
            return
        if read.error is None:
            load.arrive(rows)
            load.digests.update(zip(rows.remote_rows, read.digests, strict=False))
        else:
            load.spoil(rows.indices, ErrorInfo.of(read.error))
        if isinstance(read.error, PeerUnreachable):
            self._lose(load.owner, read.error, now)
        elif load.seal_read is None:
            self._go_on_reading(load, now)
        elif load.open_reads:
            load.seal_check(peer.seal_terms)  # while more is on the way
        else:
            self._on_bytes_here(load, now)

    def _on_bytes_here(self, load: Load, now: float) -> None:
        """The seals are being read by now. If no block has come there is nothing to prove."""
        if load.has_arrived:
            load.begin_sealing()
        else:
            self._end(load, None, now)

    def _on_seals_read(self, load: Load, peer: Peer, read: ReadEnded, now: float) -> None:
        """Decide about the rows; bytes that do not fit their seal are read once more."""
        check = load.seal_check(peer.seal_terms)
        rows = load.end_sealing()
        if read.error is not None:
            load.spoil(load.arrived_of(rows.indices), ErrorInfo.of(read.error))
            if isinstance(read.error, PeerUnreachable):
                self._lose(load.owner, read.error, now)
            self._end(load, read.error, now)
            return
        assert not load.open_reads, "seals are read when the blocks have been"
        load.digests.update(zip(rows.remote_rows, read.digests, strict=False))
        verdict = check.verdict(read.seals, load.digests)
        load.verify(load.arrived_of(verdict.good))
        for index in load.arrived_of(verdict.stale):
            load.spoil([index], verdict.stale[index])
        corrupt = load.arrived_of(verdict.corrupt)
        if corrupt and not load.has_read_again:
            self._counts.blocks_read_again += len(corrupt)
            load.read_again(corrupt)
            load.phase = LoadPhase.READING
            self._go_on_reading(load, now)
            return
        for index in corrupt:
            load.spoil([index], verdict.corrupt[index])
        self._end(load, None, now)

    def _on_lease_state(self, address: str, state: LeaseState, now: float) -> None:
        self._note_incarnation(address, state.incarnation, now)
        going_on, ending = self.leases.on_state(address, state)
        news = {*going_on, *ending}
        for load in self._loads_at(address):
            if load.phase is LoadPhase.READING and load.request.handoff.transfer_id in news:
                self._go_on_reading(load, now)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _on_deadline(self, load: Load, now: float) -> None:
        """Report the failure now. A peer from which nothing came meanwhile is frozen and fenced; a slow one gets more time."""
        peer = self._peers.get(load.owner)
        is_frozen = peer is not None and peer.last_progress_at <= load.reading_since
        patience_s = self._settings.transfer_deadline_s
        fence_at = max(now, load.asked_since + patience_s) if is_frozen else now + patience_s
        budget = f"{load.deadline - load.started_at:g} s"
        error = TransferTimeout(f"the load from {load.owner.address} did not end in {budget}: {load.phase.value}")
        self._end(load, error, now, fence_at)

    def _end(self, load: Load, error: KVFerryError | ErrorInfo | None, now: float, fence_at: float | None = None) -> None:
        """Report a load: what is verified of it may be used. ``error`` is why the rest may not, as far as that is not known."""
        if load.request.request_id not in self._loads:
            return
        info = ErrorInfo.of(error) if isinstance(error, KVFerryError) else error
        peer = self._peers.get(load.owner)
        report = load.report(info, peer.transport if peer else "", self._layout_of(load.request).block_bytes, now)
        self._forget(load, max(now, load.deadline) if fence_at is None else fence_at)
        self._emit(report)
        self._reads.hurry_if_full(self._served_by(), now)

    def _forget(self, load: Load, fence_at: float) -> None:
        """Let go of a load, and of its reads."""
        del self._loads[load.request.request_id]
        is_open = self._peers.get(load.owner) is not None
        self._reads.abandon(load, fence_at if is_open else math.inf)

    # ---- small change --------------------------------------------------------------------------------------------------

    def _layout_of(self, request: PullRequest) -> KVLayoutInfo:
        return self._layout if request.layout is None else request.layout

    def _served_by(self) -> set[PeerId]:
        return {load.owner for load in self._loads.values()}

    def _loads_at(self, address: str) -> list[Load]:
        return [load for load in self._loads.values() if load.owner.address == address]

    def _connecting_to(self, address: str) -> list[Load]:
        return [load for load in self._loads_at(address) if load.phase is LoadPhase.CONNECTING]

    def _emit(self, action: Action) -> None:
        self._actions.append(action)

    def _take_actions(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions


def _other_life(expected: PeerId, incarnation: int) -> StaleBlock:
    return StaleBlock(
        f"the worker at {expected.address} has restarted since it made the hand-over: "
        f"incarnation {incarnation:016x} instead of {expected.incarnation:016x}"
    )
