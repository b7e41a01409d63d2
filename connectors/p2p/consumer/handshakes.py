"""The handshakes that loads wait for: one per address however many loads wait, asked again if lost, given up in time.

Owns the handshakes in progress, what is known of the process behind each control connection, and the back-off from workers of
another wire version. It closes a connection whose process does not answer or has been replaced. Posts and ends no reads: loads
leave it when their peer is open or cannot be opened, and ``connectors.p2p.consumer.pull`` decides which ones need a handshake.
Does no I/O and reads no clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from connectors.p2p.actions import Action, CloseControl, HandshakeUnsent, SendControl
from connectors.p2p.consumer.held_leases import HeldLeases
from connectors.p2p.consumer.load import Load
from connectors.p2p.consumer.loads import Loads
from connectors.p2p.consumer.peers import ConsumerTerms, Peers
from connectors.p2p.producer.handshake import WorkerIdentity, peer_error
from connectors.p2p.transport.interface import PeerId
from core.errors import ConnectorUnavailable, KVFerryError, PeerUnreachable, VersionMismatch
from core.wire.kv import ControlError, Handshake, HandshakeRefused, HandshakeReply
from core.wire.messages import ErrorInfo
from core.wire.version import RetryBackoff

MAX_OTHER_VERSIONS = 256  # incarnations of workers that are remembered to speak one


@dataclass(frozen=True, slots=True)
class _OpenHandshake:
    """A handshake without an answer yet: its deadline, and the transports offered to which peer.

    ``after_lease_question`` is the number of the last lease question, of any producer, that was sent before it.
    """

    peer_id: PeerId
    deadline: float
    transports: tuple[str, ...]
    after_lease_question: int
    asked_at: float  # the first time
    message: Handshake | None = None  # the last one; None before it is sent


@dataclass(slots=True)
class _OtherVersion:
    """An incarnation of a worker that speaks another wire version; no handshake with it before ``retry_at``."""

    error: ErrorInfo
    backoff: RetryBackoff
    retry_at: float


class Handshakes:
    """Handshakes by address. ``num_sent`` counts the messages, ``num_failed`` the handshakes that ended and opened no peer.

    ``end`` ends a load whose peer cannot be opened.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        terms: ConsumerTerms,
        peers: Peers,
        leases: HeldLeases,
        loads: Loads,
        end: Callable[[Load, ErrorInfo, float], None],
    ) -> None:
        self._identity = identity
        self._terms = terms
        self._peers = peers
        self._leases = leases
        self._loads = loads
        self._end = end
        self._emit: Callable[[Action], None] = peers.emit
        self._open: dict[str, _OpenHandshake] = {}  # by address
        self._other_versions: dict[PeerId, _OtherVersion] = {}  # in the order of their first refusal
        self._answering: dict[str, int] = {}  # by address, the incarnation that has answered on the present control connection
        self._asked: dict[str, set[str]] = {}  # by address, the transports that were offered on the present control connection
        self._refusing: set[str] = set()  # addresses whose process on the present control connection refuses our wire version
        self.num_sent = 0
        self.num_failed = 0

    # ---- questions ---------------------------------------------------------------------------------------------------

    def meet(self, producer: PeerId, now: float) -> None:
        """Shake hands before the first load, if that would help: the peer is not open, and nothing is known against it."""
        is_open = self._peers.get(producer) is not None
        if not is_open and self.why_not_asked(producer, now) is None and self._peers.why_unreadable(producer) is None:
            self.ask(producer, now)

    def why_not_asked(self, peer_id: PeerId, now: float) -> ErrorInfo | None:
        """Return why no handshake with this incarnation is tried now; None if one may be."""
        other = self._other_versions.get(peer_id)
        return other.error if other is not None and now < other.retry_at else None

    def ask(self, producer: PeerId, now: float) -> None:
        """Start a handshake with the process at a peer's address unless one is open.

        The process on a connection need not refuse another version a second time; that on a new one does, or is another.
        """
        address = producer.address
        if address in self._refusing:
            self._close_control(address)
        if address not in self._open:
            deadline = now + self._terms.handshake_timeout_s
            offered = self._peers.offered_to(producer)
            self._send(_OpenHandshake(producer, deadline, offered, self._leases.last_question, now))

    def repeat_if_lost(self, address: str, answered_lease_question: int, now: float) -> None:
        """Send the handshake again if a lease question that was sent after it was answered.

        A connection keeps the order of messages, so the answer to the handshake is lost. The peer lives, and the repetition
        gets the whole timeout: a load that came later must not pay for the lost answer.
        """
        handshake = self._open.get(address)
        if handshake is not None and answered_lease_question > handshake.after_lease_question:
            deadline = now + self._terms.handshake_timeout_s
            self._send(replace(handshake, deadline=deadline, after_lease_question=self._leases.last_question))

    def _send(self, handshake: _OpenHandshake) -> None:
        self._asked.setdefault(handshake.peer_id.address, set()).update(handshake.transports)
        ours = self._identity
        message = Handshake(
            engine_id=ours.engine_id,
            incarnation=ours.incarnation,
            model_fingerprint=ours.model_fingerprint,
            layout=ours.layout,
            transports=handshake.transports,
            host_id=ours.host_id,
            kv_verify=self._terms.kv_verify,
        )
        self._open[handshake.peer_id.address] = replace(handshake, message=message)
        self._emit(SendControl(handshake.peer_id.address, message))
        self.num_sent += 1

    # ---- answers -----------------------------------------------------------------------------------------------------

    def awaits(self, address: str, answer: HandshakeReply | HandshakeRefused | ControlError) -> bool:
        """True if this may answer the handshake in progress with the address.

        A handshake that was sent twice is answered twice. A second answer is recognised by a transport that was offered earlier
        on this connection and is not offered now.
        """
        handshake = self._open.get(address)
        if handshake is None:
            return False
        match answer:
            case HandshakeReply():
                return answer.transport in handshake.transports or answer.transport not in self._asked[address]
            case HandshakeRefused():
                return True
            case ControlError():
                return answer.may_answer(Handshake)

    def on_reply(self, address: str, reply: HandshakeReply, now: float) -> list[Load]:
        """Open the peer with the awaited answer; the loads that wait for it fail if it does not fit.

        Else they are returned, to go on. They need another handshake if the peer is not open now: this one was meant for
        another incarnation than the one that has answered, and has offered a transport by which that must not be read.
        """
        waiting = self._waiting_at(address)
        try:
            peer = self._peers.open(address, reply, self._open[address].transports, now)
        except KVFerryError as error:
            self._fail(address, ErrorInfo.of(error), now)
            return []
        del self._open[address]
        if peer is None:
            self.num_failed += 1
        else:
            self._other_versions.pop(peer.peer_id, None)
        return waiting

    def on_refused(self, address: str, answer: HandshakeRefused | ControlError, now: float) -> None:
        """Fail the loads that wait for the awaited answer. A worker of another wire version is asked less and less often."""
        handshake = self._open[address]
        error = peer_error(answer.code, answer.message)
        if error.code == ConnectorUnavailable.code:
            error = self._peers.note_uncommon(handshake.peer_id, handshake.transports, error)
        elif error.code == VersionMismatch.code:
            self.note_other_version(address)
            self._back_off(handshake.peer_id, error, now)
        self._fail(address, error, now)

    def on_unsent(self, unsent: HandshakeUnsent, now: float) -> None:
        """Fail the loads that wait for this handshake, unless it was sent again meanwhile."""
        handshake = self._open.get(unsent.address)
        if handshake is not None and handshake.message is unsent.message:
            error = PeerUnreachable(f"the handshake with {unsent.address} could not be sent: {unsent.reason}")
            self._give_up(unsent.address, ErrorInfo.of(error), now)

    def note_other_version(self, address: str) -> None:
        """Record that the process on the present control connection refuses our wire version."""
        self._refusing.add(address)

    def _back_off(self, peer_id: PeerId, error: ErrorInfo, now: float) -> None:
        other = self._other_versions.setdefault(peer_id, _OtherVersion(error, RetryBackoff(), now))
        other.retry_at = now + other.backoff.next_delay_s()
        while len(self._other_versions) > MAX_OTHER_VERSIONS:
            del self._other_versions[next(iter(self._other_versions))]

    def _fail(self, address: str, error: ErrorInfo, now: float) -> None:
        """Fail all loads that wait for this handshake."""
        self._open.pop(address, None)
        self.num_failed += 1
        for load in self._waiting_at(address):
            self._end(load, error, now)

    def _waiting_at(self, address: str) -> list[Load]:
        """Return the loads that wait for a handshake. The peer of the others is open: they wait until it is retired."""
        return [load for load in self._loads.connecting_to(address) if self._peers.get(load.producer) is None]

    # ---- control connections -----------------------------------------------------------------------------------------

    def leave_replaced(self, address: str, incarnation: int, now: float) -> list[Load]:
        """Note which incarnation answers; close the connection if it has answered here before and loads wait for another one.

        A process that was replaced may live on and keep its connections, while another one listens at its address. The first
        answer over the new connection decides. Returns the loads that need another handshake; none if the connection stays.
        """
        waiting = [load for load in self._loads.connecting_to(address) if load.producer.incarnation != incarnation]
        if not waiting or self._answering.get(address) != incarnation:
            self._answering[address] = incarnation
            return []
        self._drop(address)
        for producer in dict.fromkeys(load.producer for load in waiting):
            self._leases.ask_producer(producer, now)
        return self._loads.connecting_to(address)

    def on_disconnected(self, address: str) -> int | None:
        """The control connection is lost, and the answer to a handshake; return the incarnation that has answered on it."""
        answering = self._answering.get(address)
        self._drop(address)
        return answering

    def _drop(self, address: str) -> None:
        """Close the control connection and give up the handshake on it."""
        if self._open.pop(address, None) is not None:
            self.num_failed += 1
        self._close_control(address)

    def _close_control(self, address: str) -> None:
        """Close the control connection. Its open questions stay without answers; the next one may lead to another process."""
        self._refusing.discard(address)
        self._answering.pop(address, None)
        self._asked.pop(address, None)
        self._leases.on_disconnected(address)
        self._emit(CloseControl(address))

    # ---- time --------------------------------------------------------------------------------------------------------

    def on_timer(self, now: float) -> None:
        """Give up the handshakes that were not answered in time."""
        for handshake in [handshake for handshake in self._open.values() if handshake.deadline <= now]:
            self._on_unanswered(handshake, now)

    def next_timer(self) -> float:
        """Return when the next handshake times out; infinite without one."""
        return min((handshake.deadline for handshake in self._open.values()), default=math.inf)

    def _on_unanswered(self, handshake: _OpenHandshake, now: float) -> None:
        """End the loads that have waited long enough; repeat the handshake once for those that came later."""
        address, timeout_s = handshake.peer_id.address, self._terms.handshake_timeout_s
        error = ErrorInfo.of(PeerUnreachable(f"no answer to the handshake from {address} in {timeout_s:g} s"))
        waiting = self._waiting_at(address)
        later = [load.started_at for load in waiting if load.started_at + timeout_s > now]
        if later and now - handshake.asked_at < 2 * timeout_s:  # an older one needs a new connection
            self._send(replace(handshake, deadline=min(later) + timeout_s))
            for load in waiting[: -len(later)]:  # in the order of their starts
                self._end(load, error, now)
            return
        self._give_up(address, error, now)

    def _give_up(self, address: str, error: ErrorInfo, now: float) -> None:
        """Fail a handshake without an answer. What is open at the address keeps the connection; else the next one is new."""
        self._fail(address, error, now)
        if not self._peers.at(address):
            self._close_control(address)
