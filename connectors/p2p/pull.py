"""The consumer's state machine: from "load these blocks" to "they are here" or "they will not come".

Owns the loads in progress, the peers that are open, and the leases that are kept alive. Does no I/O and reads no clock: every
entry point takes the time and returns actions. Called by ``connectors.p2p.node``.

    load:   CONNECTING ──handshake──▶ LEASING ──lease is held──▶ READING ──all reads ended──▶ done
                │                        │                          │
                └─────── failure, abort, deadline ──────────────────┴──▶ ENDING ──last read terminal──▶ done

A failed load is reported at once; its end is reported only when no byte can arrive any more: every read is terminal. A read
that does not become terminal is ended by fencing its peer.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum

from connectors.p2p.actions import (
    Action,
    CancelRead,
    CloseControl,
    ClosePeer,
    HandoffRef,
    LoadEnded,
    LoadFailed,
    OpenPeer,
    PeerFailed,
    PostRead,
    PullRequest,
    ReadEnded,
    SendControl,
    TransferEvent,
)
from connectors.p2p.handshake import WorkerIdentity, check_compatible, peer_error
from core.errors import KVFerryError, LeaseExpired, PeerUnreachable, ProtocolError, TransferTimeout
from core.transport import PeerId
from core.wire.kv import (
    ControlError,
    ControlMessage,
    Handshake,
    HandshakeRefused,
    HandshakeReply,
    LeaseRelease,
    LeaseRenew,
    LeaseState,
)
from core.wire.messages import ErrorInfo, TransferUsage


@dataclass(frozen=True, slots=True, kw_only=True)
class PullSettings:
    """Durations and bounds. A read is one handle of a transport; a load is cut into reads of at most ``max_read_bytes``."""

    transfer_deadline_s: float
    handshake_timeout_s: float
    lease_renew_interval_s: float
    max_read_bytes: int = 16 << 20
    max_reads_in_flight: int = 4  # per load


class LoadPhase(Enum):
    """Where a load is; see the module's picture."""

    CONNECTING = "connecting"
    LEASING = "leasing"
    READING = "reading"
    ENDING = "ending"


@dataclass(slots=True)
class _Load:
    request: PullRequest
    started_at: float
    deadline: float
    phase: LoadPhase = LoadPhase.CONNECTING
    waiting_reads: deque[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=deque)
    open_reads: set[int] = field(default_factory=set)
    reading_since: float = 0.0
    fence_at: float = 0.0  # while ENDING: when the peer is fenced if reads are still open
    is_reported: bool = False  # the engine knows that it has failed, or asked for the end itself

    @property
    def owner(self) -> PeerId:
        return self.request.handoff.owner


@dataclass(slots=True)
class _Peer:
    transport: str
    num_blocks: int
    last_progress_at: float


@dataclass(slots=True)
class _Lease:
    """A lease kept alive. ``good_until`` is a lower bound: the owner's answer counted from the sending of our question.

    One connection keeps the order, so answers belong to questions in turn; a lost one makes the bound lower, never higher.
    """

    owner: PeerId
    good_until: float = 0.0
    asked_at: deque[float] = field(default_factory=deque)  # questions without an answer


@dataclass(slots=True)
class PullCounts:
    """What has happened since the start."""

    handshakes: int = 0
    failed_handshakes: int = 0
    unexpected_messages: int = 0
    fenced_peers: int = 0


class PullProtocol:
    """Loads blocks from any number of peers.

    ``transports`` are the names this worker can read by, in order of preference; ``block_bytes`` is the size of a row.
    """

    def __init__(self, identity: WorkerIdentity, transports: Iterable[str], settings: PullSettings) -> None:
        self._identity = identity
        self._transports = tuple(transports)
        self._settings = settings
        self._rows_per_read = max(1, settings.max_read_bytes // identity.layout.block_bytes)
        self._loads: dict[str, _Load] = {}
        self._reads: dict[int, _Load] = {}
        self._peers: dict[PeerId, _Peer] = {}
        self._handshakes: dict[str, float] = {}  # address → deadline
        self._leases: dict[str, _Lease] = {}
        self._renew_at: float | None = None
        self._last_read_id = 0
        self._actions: list[Action] = []
        self.counts = PullCounts()

    @property
    def num_loading_blocks(self) -> int:
        """Local blocks that a transfer may still write."""
        return sum(len(load.request.local_rows) for load in self._loads.values())

    @property
    def num_loads(self) -> int:
        """Loads that have not ended."""
        return len(self._loads)

    # ---- what the engine wants -------------------------------------------------------------------------------------

    def hold(self, handoff: HandoffRef, now: float) -> list[Action]:
        """Keep a lease alive from now on. Idempotent."""
        if handoff.transfer_id not in self._leases:
            self._leases[handoff.transfer_id] = _Lease(handoff.owner)
            self._ask_leases([handoff.transfer_id], now)
            if self._renew_at is None:
                self._renew_at = now + self._settings.lease_renew_interval_s
        return self._take_actions()

    def start(self, request: PullRequest, now: float) -> list[Action]:
        """Begin a load. Its lease is held until ``release``."""
        assert request.request_id not in self._loads, f"{request.request_id} is loading already"
        actions = self.hold(request.handoff, now)
        load = _Load(request, started_at=now, deadline=now + self._settings.transfer_deadline_s)
        step = self._rows_per_read
        for first in range(0, len(request.local_rows), step):
            load.waiting_reads.append((request.remote_rows[first : first + step], request.local_rows[first : first + step]))
        self._loads[request.request_id] = load
        self._advance(load, now)
        return actions + self._take_actions()

    def refuse(self, request_id: str, error: KVFerryError) -> list[Action]:
        """Report a load that must not be tried."""
        return [LoadFailed(request_id, error_info(error)), LoadEnded(request_id)]

    def abort(self, request_id: str, now: float) -> list[Action]:
        """Give up a load. Its end is reported as usual; an unknown or ended load is ignored."""
        load = self._loads.get(request_id)
        if load is not None:
            load.is_reported = True
            self._wind_up(load, fence_at=max(now, load.deadline))
        return self._take_actions()

    def release(self, handoff: HandoffRef) -> list[Action]:
        """Tell the owner that nobody here needs the hand-over any more, and stop keeping it alive."""
        self._leases.pop(handoff.transfer_id, None)
        self._send(handoff.owner.address, LeaseRelease(transfer_ids=(handoff.transfer_id,)))
        return self._take_actions()

    # ---- what the world says ---------------------------------------------------------------------------------------

    def on_control(self, address: str, message: ControlMessage, now: float) -> list[Action]:
        """Take a control message from the peer that we reached at ``address``."""
        match message:
            case HandshakeReply():
                self._on_handshake_reply(address, message, now)
            case HandshakeRefused():
                self._note_incarnation(address, message.incarnation, now)
                self._end_handshake(address, peer_error(message.code, message.message), now)
            case LeaseState():
                self._on_lease_state(address, message, now)
            case ControlError() if address in self._handshakes:
                self._end_handshake(address, peer_error(message.code, message.message), now)
            case _:
                self.counts.unexpected_messages += 1
        return self._take_actions()

    def on_disconnected(self, address: str, now: float) -> list[Action]:
        """The control connection is lost or was refused: the process behind it is gone, and its hand-overs with it."""
        error = PeerUnreachable(f"the control connection to {address} was lost")
        if self._handshakes.pop(address, None) is not None:
            self.counts.failed_handshakes += 1
        self._lose_peers([peer for peer in self._peers if peer.address == address], error, now)
        self._fail_loads([load for load in self._loads.values() if load.owner.address == address], error, now)
        for transfer_id in [key for key, lease in self._leases.items() if lease.owner.address == address]:
            del self._leases[transfer_id]
        self._actions.append(CloseControl(address))
        return self._take_actions()

    def on_transfer(self, event: TransferEvent, now: float) -> list[Action]:
        """Take a report of the transfer thread."""
        if isinstance(event, PeerFailed):
            self._lose_peers([event.peer], event.error, now)
        elif isinstance(event, ReadEnded):
            self._on_read_ended(event, now)
        return self._take_actions()

    def on_timer(self, now: float) -> list[Action]:
        """Do what is due: handshake timeouts, deadlines, fences, renewals."""
        for address in [address for address, deadline in self._handshakes.items() if deadline <= now]:
            error = PeerUnreachable(f"no answer to the handshake from {address} in {self._settings.handshake_timeout_s:g} s")
            self._end_handshake(address, error_info(error), now)
            self._close_if_unused(address)
        for load in list(self._loads.values()):
            if load.phase is not LoadPhase.ENDING and load.deadline <= now:
                self._on_deadline(load, now)
        overdue = [load.owner for load in self._loads.values() if load.phase is LoadPhase.ENDING and load.fence_at <= now]
        for peer in dict.fromkeys(overdue):
            self.counts.fenced_peers += 1
            self._lose_peers([peer], PeerUnreachable("the peer was fenced because a read of it did not end"), now)
        if self._renew_at is not None and self._renew_at <= now:
            self._renew(now)
        return self._take_actions()

    def next_timer(self) -> float | None:
        """Return when ``on_timer`` has something to do, or None."""
        times = list(self._handshakes.values())
        for load in self._loads.values():
            times.append(load.fence_at if load.phase is LoadPhase.ENDING else load.deadline)
        if self._renew_at is not None:
            times.append(self._renew_at)
        earliest = min(times, default=math.inf)
        return None if earliest == math.inf else earliest

    # ---- handshake -------------------------------------------------------------------------------------------------

    def _shake_hands(self, address: str, now: float) -> None:
        """One handshake at a time per address, however many loads wait for it."""
        if address in self._handshakes:
            return
        self.counts.handshakes += 1
        self._handshakes[address] = now + self._settings.handshake_timeout_s
        ours = self._identity
        message = Handshake(
            engine_id=ours.engine_id,
            incarnation=ours.incarnation,
            model_fingerprint=ours.model_fingerprint,
            layout=ours.layout,
            transports=self._transports,
            host_id=ours.host_id,
        )
        self._send(address, message)

    def _on_handshake_reply(self, address: str, reply: HandshakeReply, now: float) -> None:
        if address not in self._handshakes:
            self.counts.unexpected_messages += 1
            return
        self._note_incarnation(address, reply.incarnation, now)
        try:
            check_compatible(self._identity, reply.model_fingerprint, reply.layout)
            if reply.transport not in self._transports:
                raise ProtocolError(f"{address} chose transport {reply.transport!r}, which was not offered")
        except KVFerryError as error:
            self._end_handshake(address, error_info(error), now)
            return
        del self._handshakes[address]
        peer_id = PeerId(address, reply.incarnation)
        if peer_id not in self._peers:
            self._peers[peer_id] = _Peer(reply.transport, reply.num_blocks, now)
            self._actions.append(OpenPeer(peer_id, reply.transport, reply.transport_metadata))
        for load in self._loads_in(LoadPhase.CONNECTING, lambda load: load.owner == peer_id):
            self._advance(load, now)

    def _end_handshake(self, address: str, error: ErrorInfo, now: float) -> None:
        """Fail all loads that wait for this handshake."""
        if self._handshakes.pop(address, None) is None:
            return
        self.counts.failed_handshakes += 1
        for load in self._loads_in(LoadPhase.CONNECTING, lambda load: load.owner.address == address):
            self._fail(load, error, now)

    def _note_incarnation(self, address: str, incarnation: int, now: float) -> None:
        """Whoever lived at this address before is dead: its blocks, leases and connections are worth nothing."""
        error = PeerUnreachable(f"the worker at {address} has restarted since it made the hand-over")
        stale = [peer for peer in self._peers if peer.address == address and peer.incarnation != incarnation]
        self._lose_peers(stale, error, now)
        outdated = [
            load for load in self._loads.values() if load.owner.address == address and load.owner.incarnation != incarnation
        ]
        self._fail_loads(outdated, error, now)

    # ---- leases ----------------------------------------------------------------------------------------------------

    def _ask_leases(self, transfer_ids: Iterable[str], now: float) -> None:
        """Renew these leases; the answer says how long they last. One message per owner."""
        by_address: dict[str, list[str]] = {}
        for transfer_id in transfer_ids:
            lease = self._leases[transfer_id]
            by_address.setdefault(lease.owner.address, []).append(transfer_id)
            lease.asked_at.append(now)
        for address, ids in by_address.items():
            self._send(address, LeaseRenew(transfer_ids=tuple(ids)))

    def _renew(self, now: float) -> None:
        self._renew_at = now + self._settings.lease_renew_interval_s if self._leases else None
        self._ask_leases(list(self._leases), now)

    def _on_lease_state(self, address: str, state: LeaseState, now: float) -> None:
        self._note_incarnation(address, state.incarnation, now)
        for transfer_id, left_ms in state.left_ms.items():
            lease = self._leases.get(transfer_id)
            if lease is None or lease.owner.address != address:
                continue
            loads = [load for load in self._loads.values() if load.request.handoff.transfer_id == transfer_id]
            if left_ms <= 0:
                del self._leases[transfer_id]
                self._fail_loads(loads, LeaseExpired(f"{address} no longer holds the hand-over {transfer_id}"), now)
                continue
            if lease.asked_at:
                lease.good_until = max(lease.good_until, lease.asked_at.popleft() + left_ms / 1000)
            for load in loads:
                if load.phase is LoadPhase.LEASING:
                    self._advance(load, now)

    # ---- loads -----------------------------------------------------------------------------------------------------

    def _loads_in(self, phase: LoadPhase, where: Callable[[_Load], bool]) -> list[_Load]:
        return [load for load in self._loads.values() if load.phase is phase and where(load)]

    def _advance(self, load: _Load, now: float) -> None:
        """Take a load as far as it can get now."""
        peer = self._peers.get(load.owner)
        if peer is None:
            load.phase = LoadPhase.CONNECTING
            self._shake_hands(load.owner.address, now)
            return
        load.phase = LoadPhase.LEASING
        transfer_id = load.request.handoff.transfer_id
        lease = self._leases.get(transfer_id)
        if lease is None:
            self._fail(load, error_info(LeaseExpired(f"the hand-over {transfer_id} is not held any more")), now)
            return
        if lease.good_until <= now:
            if not lease.asked_at:
                self._ask_leases([transfer_id], now)
            return
        if load.request.remote_rows and max(load.request.remote_rows) >= peer.num_blocks:
            error = ProtocolError(f"the hand-over names block {max(load.request.remote_rows)} of {peer.num_blocks}")
            self._fail(load, error_info(error), now)
            return
        load.phase = LoadPhase.READING
        load.reading_since = now
        self._post_reads(load)
        if not load.open_reads:
            self._complete(load, now)

    def _post_reads(self, load: _Load) -> None:
        while load.waiting_reads and len(load.open_reads) < self._settings.max_reads_in_flight:
            remote_rows, local_rows = load.waiting_reads.popleft()
            self._last_read_id += 1
            load.open_reads.add(self._last_read_id)
            self._reads[self._last_read_id] = load
            self._actions.append(PostRead(self._last_read_id, load.owner, remote_rows, local_rows))

    def _on_read_ended(self, event: ReadEnded, now: float) -> None:
        load = self._reads.pop(event.read_id, None)
        if load is None:
            return
        load.open_reads.discard(event.read_id)
        peer = self._peers.get(load.owner)
        if peer is not None and event.error is None:
            peer.last_progress_at = now
        if load.phase is LoadPhase.ENDING:
            self._end_if_quiet(load)
            return
        if event.error is not None:
            self._on_read_failed(load, event.error, now)
        elif load.waiting_reads:
            self._post_reads(load)
        elif not load.open_reads:
            self._complete(load, now)

    def _on_read_failed(self, load: _Load, error: KVFerryError, now: float) -> None:
        self._fail(load, error_info(error), now)
        if isinstance(error, PeerUnreachable):
            self._lose_peers([load.owner], error, now)

    def _complete(self, load: _Load, now: float) -> None:
        """All bytes are here; they count if the owner held the blocks until now."""
        request = load.request
        lease = self._leases.get(request.handoff.transfer_id)
        if lease is None or lease.good_until <= now:
            self._fail(load, error_info(LeaseExpired("the lease ended before the read did")), now)
            return
        peer = self._peers.get(load.owner)
        usage = TransferUsage(
            transport=peer.transport if peer else "",
            transferred_tokens=request.num_tokens,
            transferred_bytes=len(request.local_rows) * self._identity.layout.block_bytes,
            transfer_ms=1000 * (now - load.started_at),
        )
        del self._loads[request.request_id]
        self._actions.append(LoadEnded(request.request_id, usage))

    def _on_deadline(self, load: _Load, now: float) -> None:
        """Report the failure now. A peer from which nothing came meanwhile is frozen and fenced; a slow one gets more time."""
        peer = self._peers.get(load.owner)
        is_frozen = peer is not None and peer.last_progress_at <= load.reading_since
        error = TransferTimeout(
            f"the load from {load.owner.address} did not end in {self._settings.transfer_deadline_s:g} s: {load.phase.value}"
        )
        load.fence_at = now if is_frozen else now + self._settings.transfer_deadline_s
        self._fail(load, error_info(error), now)

    def _fail_loads(self, loads: Iterable[_Load], error: KVFerryError, now: float) -> None:
        for load in list(loads):
            self._fail(load, error_info(error), now)

    def _fail(self, load: _Load, error: ErrorInfo, now: float) -> None:
        """Report a failure, once, and wind the load up."""
        if load.phase is LoadPhase.ENDING:
            return
        if not load.is_reported:
            load.is_reported = True
            self._actions.append(LoadFailed(load.request.request_id, error))
        self._wind_up(load, fence_at=load.fence_at or max(now, load.deadline))

    def _wind_up(self, load: _Load, fence_at: float) -> None:
        """Post nothing more and cancel what is open; the load ends with its last open read."""
        if load.phase is not LoadPhase.ENDING:
            load.phase = LoadPhase.ENDING
            load.fence_at = fence_at
            load.waiting_reads.clear()
            self._actions.extend(CancelRead(read_id) for read_id in sorted(load.open_reads))
        self._end_if_quiet(load)

    def _end_if_quiet(self, load: _Load) -> None:
        if not load.open_reads and self._loads.pop(load.request.request_id, None) is not None:
            self._actions.append(LoadEnded(load.request.request_id))

    # ---- peers and messages ----------------------------------------------------------------------------------------

    def _lose_peers(self, peers: Iterable[PeerId], error: KVFerryError, now: float) -> None:
        """Fence peers and fail their loads. Open reads become terminal by the fence."""
        for peer in peers:
            if self._peers.pop(peer, None) is None:
                continue
            self._actions.append(ClosePeer(peer))
            for load in [load for load in self._loads.values() if load.owner == peer]:
                self._fail(load, error_info(error), now)
                load.fence_at = math.inf  # done: the reports of its reads are on their way

    def _close_if_unused(self, address: str) -> None:
        """Close the connection to an address that does not answer."""
        for transfer_id in [key for key, lease in self._leases.items() if lease.owner.address == address]:
            del self._leases[transfer_id]
        if not any(peer.address == address for peer in self._peers):
            self._actions.append(CloseControl(address))

    def _send(self, address: str, message: ControlMessage) -> None:
        self._actions.append(SendControl(address, message))

    def _take_actions(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions


def error_info(error: KVFerryError) -> ErrorInfo:
    """Return an error in the form in which it crosses processes."""
    return ErrorInfo(
        code=error.code, message=error.message, http_status=error.http_status, retryable=error.retryable, param=error.param
    )
