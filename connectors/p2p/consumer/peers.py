"""The workers that can be read: which process answers at an address, and the handshake that finds out.

Owns the handshakes in progress, one per address however many loads wait for it, the open peers, and which transports to them
are broken (``connectors.p2p.consumer.transport_health``). One incarnation of a worker is one peer: a restarted process at the
same address is another. A peer is open by one transport at a time. Does no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from connectors.p2p.actions import Action, ClosePeer, OpenPeer, SendControl
from connectors.p2p.consumer.transport_health import BreakerTerms, TransportHealth
from connectors.p2p.consumer.verification import SealTerms
from connectors.p2p.producer.handshake import WorkerIdentity
from connectors.p2p.transport.interface import PeerId
from core.errors import ConnectorUnavailable, PeerUnreachable, ProtocolError, VersionMismatch
from core.kv.seals import layout_fingerprint
from core.wire.kv import Handshake, HandshakeReply, KVLayoutInfo, KVVerify
from core.wire.messages import ErrorInfo
from core.wire.pairing import check_compatible, check_verifiable, verifies_digests
from core.wire.version import RetryBackoff

MAX_OTHER_VERSIONS = 256  # incarnations of workers that are remembered to speak one


@dataclass(slots=True)
class Peer:
    """A worker that can be read. ``last_progress_at`` is when a read of it last succeeded, ``heard_at`` when it last sent a
    control message.

    ``layout_version`` is the one in its seals, for its ``layout``. ``is_retiring``: a preferred transport works again, so
    this one gets no new loads.
    """

    how_to_open: OpenPeer
    num_blocks: int
    layout: KVLayoutInfo
    layout_version: int
    verifies_digests: bool
    last_progress_at: float
    heard_at: float
    is_retiring: bool = False

    @property
    def peer_id(self) -> PeerId:
        """Address and incarnation of the worker."""
        return self.how_to_open.peer

    @property
    def transport(self) -> str:
        """The transport by which it is read."""
        return self.how_to_open.transport

    @property
    def seal_terms(self) -> SealTerms:
        """The demands on each of its seals."""
        return SealTerms(self.peer_id.incarnation, self.layout_version, self.verifies_digests)


@dataclass(frozen=True, slots=True)
class ConsumerTerms:
    """How this worker reads: transports in order of preference, what it verifies, how long it waits for an answer."""

    transports: tuple[str, ...]
    kv_verify: KVVerify
    handshake_timeout_s: float
    breaker: BreakerTerms


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


@dataclass(slots=True)
class _OtherVersion:
    """An incarnation of a worker that speaks another wire version; no handshake with it before ``retry_at``."""

    error: ErrorInfo
    backoff: RetryBackoff
    retry_at: float


class Peers:
    """Handshakes by address, open peers by address and incarnation. ``emit`` receives the actions."""

    def __init__(self, identity: WorkerIdentity, terms: ConsumerTerms, emit: Callable[[Action], None]) -> None:
        self._identity = identity
        self._terms = terms
        self._emit = emit
        self._peers: dict[PeerId, Peer] = {}
        self._handshakes: dict[str, _OpenHandshake] = {}  # by address
        self._other_versions: dict[PeerId, _OtherVersion] = {}  # in the order of their first refusal
        self._answering: dict[str, int] = {}  # by address, the incarnation that has answered on the present control connection
        self._asked: dict[str, set[str]] = {}  # by address, the transports that were offered on the present control connection
        self._refusing: set[str] = set()  # addresses whose process on the present control connection refuses our wire version
        self._failed: dict[PeerId, dict[str, str]] = {}  # transports by which a peer could not be opened, and why
        self.health = TransportHealth(terms.breaker, emit)

    def get(self, peer_id: PeerId) -> Peer | None:
        """Return an open peer, None if there is no such."""
        return self._peers.get(peer_id)

    def at(self, address: str) -> list[PeerId]:
        """Return the open peers at an address."""
        return [peer_id for peer_id in self._peers if peer_id.address == address]

    def transports_in_use(self) -> set[str]:
        """Return the transports by which peers are open."""
        return {peer.transport for peer in self._peers.values()}

    # ---- handshakes --------------------------------------------------------------------------------------------------

    def is_shaking_hands(self, address: str) -> bool:
        """True if a handshake with this address waits for its answer."""
        return address in self._handshakes

    def awaits(self, address: str, reply: HandshakeReply) -> bool:
        """True if this reply may answer the handshake in progress.

        A handshake that was sent twice is answered twice. A second answer is recognised by a transport that was offered earlier
        on this connection and is not offered now.
        """
        handshake = self._handshakes.get(address)
        if handshake is None:
            return False
        return reply.transport in handshake.transports or reply.transport not in self._asked[address]

    def shake_hands(self, peer_id: PeerId, last_lease_question: int, now: float) -> bool:
        """Start a handshake with the process at a peer's address; False if one is open already.

        ``last_lease_question`` is the highest number of a lease question sent so far.
        """
        if peer_id.address in self._handshakes:
            return False
        deadline = now + self._terms.handshake_timeout_s
        self._ask(_OpenHandshake(peer_id, deadline, self._offered_to(peer_id), last_lease_question, now))
        return True

    def repeat_lost_handshake(self, address: str, answered_lease_question: int, last_lease_question: int, now: float) -> bool:
        """Send the handshake again if a lease question that was sent after it was answered; False if none was.

        A connection keeps the order of messages, so the answer to the handshake is lost. The peer lives, and the repetition
        gets the whole timeout: a load that came later must not pay for the lost answer.
        """
        handshake = self._handshakes.get(address)
        if handshake is None or answered_lease_question <= handshake.after_lease_question:
            return False
        deadline = now + self._terms.handshake_timeout_s
        self._ask(replace(handshake, deadline=deadline, after_lease_question=last_lease_question))
        return True

    def repeat_handshake(self, address: str, deadline: float, now: float) -> bool:
        """Send the handshake again, to wait until ``deadline``; False if it is too old and needs a new connection."""
        handshake = self._handshakes[address]
        if now - handshake.asked_at >= 2 * self._terms.handshake_timeout_s:
            return False
        self._ask(replace(handshake, deadline=deadline))
        return True

    def _ask(self, handshake: _OpenHandshake) -> None:
        self._handshakes[handshake.peer_id.address] = handshake
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
        self._emit(SendControl(handshake.peer_id.address, message))

    def note_refusal(self, address: str, error: ErrorInfo, now: float) -> ErrorInfo:
        """Record the refusal of the handshake in progress; return the error of its loads.

        A peer of another wire version is asked less and less often. If a transport was withheld, since it is broken or could
        not be opened, a refusal for want of a transport means that the offered ones are not common; they are not offered again.
        """
        handshake = self._handshakes[address]
        if error.code == ConnectorUnavailable.code and self._why_not(handshake.peer_id):
            return self._note_uncommon(handshake, error)
        if error.code != VersionMismatch.code:
            return error
        self.note_other_version(address)
        peer_id = handshake.peer_id
        other = self._other_versions.setdefault(peer_id, _OtherVersion(error, RetryBackoff(), now))
        other.retry_at = now + other.backoff.next_delay_s()
        while len(self._other_versions) > MAX_OTHER_VERSIONS:
            del self._other_versions[next(iter(self._other_versions))]
        return error

    def _note_uncommon(self, handshake: _OpenHandshake, refusal: ErrorInfo) -> ErrorInfo:
        """Let the next load retry the transports that could not be opened, if no others are left."""
        peer_id, uncommon = handshake.peer_id, dict.fromkeys(handshake.transports, "not common")
        failed = self._failed[peer_id] = self._failed.get(peer_id, {}) | uncommon
        unreadable = self.why_unreadable(peer_id)
        if len(failed) == len(self._terms.transports):
            self._failed[peer_id] = uncommon
        return ErrorInfo.of(unreadable) if unreadable is not None else refusal

    def why_not_asked(self, peer_id: PeerId, now: float) -> ErrorInfo | None:
        """Return why no handshake with this incarnation is tried now; None if one may be."""
        other = self._other_versions.get(peer_id)
        return other.error if other is not None and now < other.retry_at else None

    def may_be_asked(self, peer_id: PeerId, now: float) -> bool:
        """True if a handshake would help: the peer is not open, and nothing is known against it."""
        return self.get(peer_id) is None and self.why_not_asked(peer_id, now) is None and self.why_unreadable(peer_id) is None

    def end_handshake(self, address: str) -> bool:
        """Stop waiting for an answer; False if none was awaited."""
        return self._handshakes.pop(address, None) is not None

    def unanswered(self, now: float) -> list[str]:
        """Return the addresses that have not answered in time."""
        return [address for address, handshake in self._handshakes.items() if handshake.deadline <= now]

    def next_timeout(self) -> float:
        """Return when the next handshake times out; infinite without one."""
        return min((handshake.deadline for handshake in self._handshakes.values()), default=math.inf)

    # ---- control connections -----------------------------------------------------------------------------------------

    def is_answering(self, address: str, incarnation: int) -> bool:
        """True if this incarnation has answered on the present control connection."""
        return self._answering.get(address) == incarnation

    def note_answer(self, address: str, incarnation: int) -> None:
        """Record which process answers on the present control connection."""
        self._answering[address] = incarnation

    def note_other_version(self, address: str) -> None:
        """Record that the process on the present control connection speaks another wire version."""
        self._refusing.add(address)

    def refuses_version(self, address: str) -> bool:
        """True if the process on the present control connection has refused our wire version."""
        return address in self._refusing

    def forget_answers(self, address: str) -> None:
        """The control connection has ended; the process behind the next one is not known."""
        self._refusing.discard(address)
        self._answering.pop(address, None)
        self._asked.pop(address, None)

    # ---- peers -------------------------------------------------------------------------------------------------------

    def open(self, address: str, reply: HandshakeReply, now: float) -> Peer:
        """Accept the answer to the handshake in progress and make its sender readable.

        Raises:
            LayoutMismatch: it holds KV of another model or in another layout; the message holds both values.
            ConnectorUnavailable: digests are demanded here and not made there; the message holds both values.
            ProtocolError: it chose a transport that was not offered.
        """
        check_compatible(self._identity, reply.model_fingerprint, reply.layout)
        if reply.transport not in self._handshakes[address].transports:
            raise ProtocolError(f"{address} chose transport {reply.transport!r}, which was not offered")
        check_verifiable(self._terms.kv_verify, reply.transport, reply.has_digests)
        self.end_handshake(address)
        peer_id = PeerId(address, reply.incarnation)
        self._other_versions.pop(peer_id, None)
        peer = self._peers.get(peer_id)
        if peer is None:
            instead_of = "; ".join(f"{name}: {reason}" for name, reason in self._why_not(peer_id).items())
            peer = Peer(
                OpenPeer(peer_id, reply.transport, reply.transport_metadata, reply.num_blocks, reply.layout, instead_of),
                reply.num_blocks,
                reply.layout,
                layout_fingerprint(reply.layout),
                verifies_digests(self._terms.kv_verify, reply.transport),
                last_progress_at=now,
                heard_at=now,
            )
            self._peers[peer_id] = peer
            self._emit(peer.how_to_open)
        return peer

    def note_message(self, address: str, now: float) -> None:
        """Record that a message has come from an address."""
        for peer_id in self.at(address):
            self._peers[peer_id].heard_at = now

    def why_unreadable(self, peer_id: PeerId) -> PeerUnreachable | None:
        """Return the error of loads from a peer to which no transport works; None if one is left to try."""
        if self._offered_to(peer_id):
            return None
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self._why_not(peer_id).items())
        return PeerUnreachable(f"no transport to {peer_id.address} works at present: {reasons}")

    def retire_if_worse(self, restored: OpenPeer) -> bool:
        """Give no new loads to a peer that is open by a transport that is less preferred than the restored one."""
        peer = self._peers.get(restored.peer)
        order = self._terms.transports
        if peer is None or order.index(peer.transport) < order.index(restored.transport):
            return False
        peer.is_retiring = True
        return True

    def avoid(self, peer_id: PeerId, transport: str, reason: str) -> bool:
        """Stop offering a transport that could not be opened to this incarnation; False if none is left."""
        for other in [other for other in self._failed if other.address == peer_id.address and other != peer_id]:
            del self._failed[other]
        failed = self._failed.setdefault(peer_id, {})
        failed[transport] = reason
        if len(failed) == len(self._terms.transports):
            del self._failed[peer_id]  # trying again costs nothing
            return False
        return bool(self._offered_to(peer_id))

    def _offered_to(self, peer_id: PeerId) -> tuple[str, ...]:
        why_not = self._why_not(peer_id)
        return tuple(name for name in self._terms.transports if name not in why_not)

    def _why_not(self, peer_id: PeerId) -> dict[str, str]:
        """Return the transports by which a peer could not be opened or that are broken, and why."""
        return self._failed.get(peer_id, {}) | self.health.reasons(peer_id)

    def close(self, peer_id: PeerId) -> Peer | None:
        """Fence a peer and return it: its reads become terminal. None if it is not open."""
        peer = self._peers.pop(peer_id, None)
        if peer is not None:
            self._emit(ClosePeer(peer_id))
        return peer
