"""The workers that can be read: who lives at an address, and the handshake that finds out.

Owns the handshakes in progress, one per address however many loads wait for it, and the peers that are open. One life of a
worker is one peer: a restarted process at the same address is another. Does no I/O; called by ``connectors.p2p.pull``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from connectors.p2p.actions import Action, ClosePeer, OpenPeer, SendControl
from connectors.p2p.handshake import WorkerIdentity
from connectors.p2p.verification import SealTerms
from core.errors import ProtocolError
from core.kv.seals import layout_fingerprint
from core.transport import PeerId
from core.wire.kv import Handshake, HandshakeReply, KVLayoutInfo, KVVerify
from core.wire.pairing import check_compatible, check_verifiable, verifies_digests


@dataclass(slots=True)
class Peer:
    """A worker that can be read. ``last_progress_at`` is when the last read of it ended well.

    ``layout_version`` is what its seals say of its ``layout``.
    """

    peer_id: PeerId
    transport: str
    num_blocks: int
    layout: KVLayoutInfo
    layout_version: int
    verifies_digests: bool
    last_progress_at: float

    @property
    def seal_terms(self) -> SealTerms:
        """What is demanded of every seal of it."""
        return SealTerms(self.peer_id.incarnation, self.layout_version, self.verifies_digests)


@dataclass(frozen=True, slots=True)
class ReaderTerms:
    """How this worker reads: transports in order of preference, what it verifies, how long it waits for an answer."""

    transports: tuple[str, ...]
    kv_verify: KVVerify
    handshake_timeout_s: float


@dataclass(frozen=True, slots=True)
class _OpenHandshake:
    """A question that is not answered yet: until when it may be, and by which transports the peer may be read."""

    deadline: float
    transports: tuple[str, ...]


class Peers:
    """Handshakes by address, open peers by address and incarnation. ``emit`` receives the actions."""

    def __init__(self, identity: WorkerIdentity, terms: ReaderTerms, emit: Callable[[Action], None]) -> None:
        self._identity = identity
        self._terms = terms
        self._emit = emit
        self._peers: dict[PeerId, Peer] = {}
        self._handshakes: dict[str, _OpenHandshake] = {}  # by address
        self._failed: dict[PeerId, dict[str, str]] = {}  # transports by which a peer could not be opened, and why

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
        """True if an answer from there is awaited."""
        return address in self._handshakes

    def shake_hands(self, peer_id: PeerId, now: float) -> bool:
        """Ask who lives at a peer's address; False if that question is open already."""
        address = peer_id.address
        if address in self._handshakes:
            return False
        handshake = _OpenHandshake(now + self._terms.handshake_timeout_s, self._offered_to(peer_id))
        self._handshakes[address] = handshake
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
        self._emit(SendControl(address, message))
        return True

    def end_handshake(self, address: str) -> bool:
        """Wait for no answer any more; False if none was awaited."""
        return self._handshakes.pop(address, None) is not None

    def unanswered(self, now: float) -> list[str]:
        """Return the addresses that have not answered in time."""
        return [address for address, handshake in self._handshakes.items() if handshake.deadline <= now]

    def next_timeout(self) -> float:
        """Return when the next address is unanswered; infinite if none is going to be."""
        return min((handshake.deadline for handshake in self._handshakes.values()), default=math.inf)

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
        peer = self._peers.get(peer_id)
        if peer is None:
            wants_digests = verifies_digests(self._terms.kv_verify, reply.transport)
            peer = Peer(
                peer_id,
                reply.transport,
                reply.num_blocks,
                reply.layout,
                layout_fingerprint(reply.layout),
                wants_digests,
                last_progress_at=now,
            )
            self._peers[peer_id] = peer
            block_bytes = reply.layout.block_bytes
            instead_of = "; ".join(f"{name}: {reason}" for name, reason in self._failed.get(peer_id, {}).items())
            self._emit(OpenPeer(peer_id, reply.transport, reply.transport_metadata, reply.num_blocks, block_bytes, instead_of))
        return peer

    def avoid(self, peer_id: PeerId, transport: str, reason: str) -> bool:
        """Offer a transport to this life of a worker no more, since it could not be opened by it; False if none is left."""
        for other in [other for other in self._failed if other.address == peer_id.address and other != peer_id]:
            del self._failed[other]
        failed = self._failed.setdefault(peer_id, {})
        failed[transport] = reason
        is_left = any(name not in failed for name in self._terms.transports)
        if not is_left:
            del self._failed[peer_id]  # whatever it was, nothing is lost by trying again
        return is_left

    def _offered_to(self, peer_id: PeerId) -> tuple[str, ...]:
        failed = self._failed.get(peer_id, {})
        return tuple(name for name in self._terms.transports if name not in failed)

    def close(self, peer_id: PeerId) -> bool:
        """Fence a peer: what is read of it becomes terminal. False if it is not open."""
        if self._peers.pop(peer_id, None) is None:
            return False
        self._emit(ClosePeer(peer_id))
        return True
