"""The producer's half of the handshake: is this consumer compatible, and by which transport does it read?

Pure: takes a ``Handshake``, returns the answer. Knows the worker's own identity and the metadata of its transports; sockets
belong to ``connectors.p2p.control``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from core.errors import KVFerryError, error_codes
from core.wire.kv import Handshake, HandshakeRefused, HandshakeReply, KVLayoutInfo
from core.wire.messages import ErrorInfo
from core.wire.pairing import choose_transport

UNKNOWN_CODE = "other"
_KNOWN_CODES = frozenset(error_codes())
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

    @property
    def engine_id(self) -> str:
        """Stable name of this worker."""
        return self.identity.engine_id

    @property
    def model_fingerprint(self) -> bytes:
        """The model whose KV this worker holds."""
        return self.identity.model_fingerprint

    @property
    def layout(self) -> KVLayoutInfo:
        """The layout of its blocks."""
        return self.identity.layout

    @property
    def host_id(self) -> str:
        """Where this worker runs."""
        return self.identity.host_id

    @property
    def transports(self) -> tuple[str, ...]:
        """Transports that serve here."""
        return tuple(self.offers)

    def answer(self, handshake: Handshake) -> HandshakeReply | HandshakeRefused:
        """Accept with the first transport of the consumer's preferences that works for both, or refuse with both values."""
        try:
            transport = choose_transport(handshake, self)
        except KVFerryError as error:
            return HandshakeRefused(
                engine_id=self.engine_id,
                incarnation=self.identity.incarnation,
                code=error.code,
                message=f"{error.message} (reader {handshake.engine_id}, owner {self.engine_id})",
            )
        return HandshakeReply(
            engine_id=self.engine_id,
            incarnation=self.identity.incarnation,
            model_fingerprint=self.model_fingerprint,
            layout=self.layout,
            transport=transport,
            transport_metadata=self.offers[transport],
            num_blocks=self.num_blocks,
            has_digests=self.has_digests,
        )


def peer_error(code: str, message: str) -> ErrorInfo:
    """Return a peer's error within bounds: its code becomes a label of our metrics, its message goes into our logs."""
    known = code if code in _KNOWN_CODES else UNKNOWN_CODE
    return ErrorInfo(code=known, message=message[:MAX_PEER_MESSAGE_CHARS], http_status=502)
