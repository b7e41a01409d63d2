"""The prefill worker's half of the handshake: is this reader compatible, and by which transport does it read?

Pure: takes a ``Handshake``, returns the answer. Knows the worker's own identity and what its transports told about themselves;
sockets belong to ``connectors.p2p.control``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from core.config import DIGEST_TRANSPORTS
from core.errors import ConnectorUnavailable, KVFerryError, LayoutMismatch
from core.wire.kv import Handshake, HandshakeRefused, HandshakeReply, KVLayoutInfo, KVVerify
from core.wire.messages import ErrorInfo

SAME_HOST_TRANSPORTS = frozenset({"shm"})

UNKNOWN_CODE = "other"
MAX_PEER_MESSAGE_CHARS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """What a worker says about itself in a handshake."""

    engine_id: str
    incarnation: int
    model_fingerprint: bytes
    layout: KVLayoutInfo
    host_id: str


@dataclass(frozen=True, slots=True)
class HandshakeResponder:
    """Answers handshakes. ``offers`` maps the transports that serve here to their metadata."""

    identity: WorkerIdentity
    num_blocks: int
    offers: Mapping[str, bytes]
    has_digests: bool = False  # the seals made here hold digests

    def answer(self, handshake: Handshake) -> HandshakeReply | HandshakeRefused:
        """Accept with the first transport of the reader's preferences that works for both, or refuse with both values."""
        try:
            check_compatible(self.identity, handshake.model_fingerprint, handshake.layout)
            transport = self._choose_transport(handshake)
        except KVFerryError as error:
            return HandshakeRefused(
                engine_id=self.identity.engine_id,
                incarnation=self.identity.incarnation,
                code=error.code,
                message=f"{error.message} (reader {handshake.engine_id}, owner {self.identity.engine_id})",
            )
        return HandshakeReply(
            engine_id=self.identity.engine_id,
            incarnation=self.identity.incarnation,
            model_fingerprint=self.identity.model_fingerprint,
            layout=self.identity.layout,
            transport=transport,
            transport_metadata=self.offers[transport],
            num_blocks=self.num_blocks,
            has_digests=self.has_digests,
        )

    def _choose_transport(self, handshake: Handshake) -> str:
        """Return the reader's first preference that works between the two and that it can verify.

        Raises:
            ConnectorUnavailable: there is none; the message says what stands in the way of the first that works otherwise.
        """
        same_host = handshake.host_id == self.identity.host_id
        common = [
            name for name in handshake.transports if name in self.offers and (same_host or name not in SAME_HOST_TRANSPORTS)
        ]
        for name in common:
            if self.has_digests or not verifies_digests(handshake.kv_verify, name):
                return name
        if common:
            check_verifiable(handshake.kv_verify, common[0], self.has_digests)
        hosts = "the same host" if same_host else "different hosts"
        raise ConnectorUnavailable(
            f"no common transport: the reader has {list(handshake.transports)}, the owner {list(self.offers)}, on {hosts}"
        )


def check_compatible(ours: WorkerIdentity, model_fingerprint: bytes, layout: KVLayoutInfo) -> None:
    """Check that the peer holds KV of the same model in the same layout.

    Raises:
        LayoutMismatch: it does not; the message holds both values.
    """
    if model_fingerprint != ours.model_fingerprint:
        raise LayoutMismatch(
            f"model fingerprint {model_fingerprint.hex()} at the peer, {ours.model_fingerprint.hex()} at {ours.engine_id}"
        )
    differences = [
        f"{field} {getattr(layout, field)} at the peer, {getattr(ours.layout, field)} at {ours.engine_id}"
        for field in (field.name for field in msgspec.structs.fields(KVLayoutInfo))
        if getattr(layout, field) != getattr(ours.layout, field)
    ]
    if differences:
        raise LayoutMismatch("KV layouts differ: " + "; ".join(differences))


def verifies_digests(kv_verify: KVVerify, transport: str) -> bool:
    """Say whether a reader checks the bytes of what it reads by this transport, and not only the seals."""
    return kv_verify == "digest" or (kv_verify == "auto" and transport in DIGEST_TRANSPORTS)


def check_verifiable(kv_verify: KVVerify, transport: str, has_digests: bool) -> None:
    """Check that the owner's seals hold what the reader is going to verify.

    Raises:
        ConnectorUnavailable: they do not; the message holds both values.
    """
    if verifies_digests(kv_verify, transport) and not has_digests:
        raise ConnectorUnavailable(
            f"the reader verifies digests (kv_verify = {kv_verify} over {transport}), the owner's seals have none "
            "(it makes them with kv_verify = digest, or with auto if it serves tcp from host memory)"
        )


def peer_error(code: str, message: str) -> ErrorInfo:
    """Return what a peer reports, within bounds: its code becomes a label of our metrics, its message goes into our logs."""
    known = code if code in _KNOWN_CODES else UNKNOWN_CODE
    return ErrorInfo(code=known, message=message[:MAX_PEER_MESSAGE_CHARS], http_status=502)


def _codes(kind: type[KVFerryError]) -> set[str]:
    return {kind.code}.union(*(_codes(child) for child in kind.__subclasses__()))


_KNOWN_CODES = frozenset(_codes(KVFerryError))
