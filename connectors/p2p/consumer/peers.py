"""The workers that can be read: which are open, and by which transports the others may be opened.

Owns the open peers, the transports by which a peer could not be opened, and which ones are broken
(``connectors.p2p.consumer.transport_health``). One incarnation of a worker is one peer: a restarted process at the same address
is another. A peer is open by one transport at a time. Knows nothing of messages: ``connectors.p2p.consumer.handshakes`` finds
out which process answers at an address. Does no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from connectors.p2p.actions import Action, ClosePeer, OpenPeer
from connectors.p2p.consumer.transport_health import BreakerTerms, TransportHealth
from connectors.p2p.consumer.verification import SealTerms
from connectors.p2p.producer.handshake import WorkerIdentity
from connectors.p2p.transport.interface import PeerId
from core.errors import PeerUnreachable, ProtocolError
from core.kv.seals import layout_fingerprint
from core.wire.kv import HandshakeReply, KVLayoutInfo, KVVerify
from core.wire.messages import ErrorInfo
from core.wire.pairing import check_compatible, check_verifiable, verifies_digests


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


class Peers:
    """Open peers by address and incarnation. ``emit`` receives the actions."""

    def __init__(self, identity: WorkerIdentity, terms: ConsumerTerms, emit: Callable[[Action], None]) -> None:
        self._identity = identity
        self._terms = terms
        self.emit = emit
        self._peers: dict[PeerId, Peer] = {}
        self._num_opened = 0
        self._failed: dict[PeerId, dict[str, str]] = {}  # transports by which a peer could not be opened, and why
        self.health = TransportHealth(terms.breaker, emit)

    def get(self, peer_id: PeerId) -> Peer | None:
        """Return an open peer, None if there is no such."""
        return self._peers.get(peer_id)

    def opened_by(self, how_to_open: OpenPeer) -> Peer | None:
        """Return the peer that this opening has opened; None if that is closed, opened again or not."""
        peer = self._peers.get(how_to_open.peer)
        return peer if peer is not None and peer.how_to_open == how_to_open else None

    def at(self, address: str) -> list[PeerId]:
        """Return the open peers at an address."""
        return [peer_id for peer_id in self._peers if peer_id.address == address]

    def transports_in_use(self) -> set[str]:
        """Return the transports by which peers are open."""
        return {peer.transport for peer in self._peers.values()}

    def open(self, address: str, reply: HandshakeReply, offered: Collection[str], now: float) -> Peer | None:
        """Accept the answer to a handshake that has ``offered`` these transports, and make its sender readable.

        Returns None if its sender must not be read by the chosen transport, which was offered to another incarnation.

        Raises:
            LayoutMismatch: it holds KV of another model or in another layout; the message holds both values.
            ConnectorUnavailable: digests are demanded here and not made there; the message holds both values.
            ProtocolError: it chose a transport that was not offered.
        """
        check_compatible(self._identity, reply.model_fingerprint, reply.layout)
        if reply.transport not in offered:
            raise ProtocolError(f"{address} chose transport {reply.transport!r}, which was not offered")
        check_verifiable(self._terms.kv_verify, reply.transport, reply.has_digests)
        peer_id = PeerId(address, reply.incarnation)
        peer = self._peers.get(peer_id)
        if peer is None:
            if reply.transport not in self.offered_to(peer_id):
                return None
            instead_of = "; ".join(f"{name}: {reason}" for name, reason in self._why_not(peer_id).items())
            self._num_opened += 1
            peer = Peer(
                OpenPeer(
                    peer_id,
                    reply.transport,
                    reply.transport_metadata,
                    reply.num_blocks,
                    reply.layout,
                    instead_of,
                    self._num_opened,
                ),
                reply.num_blocks,
                reply.layout,
                layout_fingerprint(reply.layout),
                verifies_digests(self._terms.kv_verify, reply.transport),
                last_progress_at=now,
                heard_at=now,
            )
            self._peers[peer_id] = peer
            self.emit(peer.how_to_open)
        return peer

    def note_message(self, address: str, now: float) -> None:
        """Record that a message has come from an address."""
        for peer_id in self.at(address):
            self._peers[peer_id].heard_at = now

    def note_progress(self, peer_id: PeerId, now: float) -> None:
        """Record that a late read has brought its bytes, if the peer is open."""
        peer = self._peers.get(peer_id)
        if peer is not None:
            peer.last_progress_at = now

    def why_unreadable(self, peer_id: PeerId) -> PeerUnreachable | None:
        """Return the error of loads from a peer to which no transport works; None if one is left to try."""
        if self.offered_to(peer_id):
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
        return bool(self.offered_to(peer_id))

    def note_uncommon(self, peer_id: PeerId, offered: Collection[str], refusal: ErrorInfo) -> ErrorInfo:
        """None of the offered transports is common, says the refusal; return the error of its loads.

        If others were withheld, since they are broken or could not be opened, the offered ones are not offered again. If no
        others are left, the next load retries those that could not be opened.
        """
        if not self._why_not(peer_id):
            return refusal
        uncommon = dict.fromkeys(offered, "not common")
        failed = self._failed[peer_id] = self._failed.get(peer_id, {}) | uncommon
        unreadable = self.why_unreadable(peer_id)
        if len(failed) == len(self._terms.transports):
            self._failed[peer_id] = uncommon
        return ErrorInfo.of(unreadable) if unreadable is not None else refusal

    def offered_to(self, peer_id: PeerId) -> tuple[str, ...]:
        """Return the transports by which a peer may be opened now, in order of preference."""
        why_not = self._why_not(peer_id)
        return tuple(name for name in self._terms.transports if name not in why_not)

    def _why_not(self, peer_id: PeerId) -> dict[str, str]:
        """Return the transports by which a peer could not be opened or that are broken, and why."""
        return self._failed.get(peer_id, {}) | self.health.reasons(peer_id)

    def close(self, peer_id: PeerId) -> Peer | None:
        """Fence a peer and return it: its reads become terminal. None if it is not open."""
        peer = self._peers.pop(peer_id, None)
        if peer is not None:
            self.emit(ClosePeer(peer_id))
        return peer
