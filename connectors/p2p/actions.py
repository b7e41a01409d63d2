"""The messages inside the p2p connector: those of its scheduler side, and the actions and events of its agent.

Plain values without behaviour. An agent's machines (``consumer``, ``producer``, ``asks``) take events and return actions, which
the driver carries out in order:
control messages on sockets, ``TransferCommand`` by ``TransferExecutor.execute``, ``Report`` by ``P2PConnectorWorker.report``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from connectors.p2p.transport.interface import PeerId
from connectors.reports import LoadEnded, SendingEnded
from core.errors import KVFerryError
from core.kv.block_form import HeadRange
from core.kv.seals import ExpectedSeal
from core.wire.early import MeetProducer
from core.wire.kv import ControlMessage, Handshake, KVHandoff, KVLayoutInfo

# ---- scheduler side → event loop -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """Producer: the blocks of a finished request are held under this handoff."""

    transfer_id: str
    request_id: str
    num_blocks: int


@dataclass(frozen=True, slots=True)
class HandoffRef:
    """Consumer: a handoff and the incarnation of its producer."""

    transfer_id: str
    producer: PeerId

    @classmethod
    def of(cls, handoff: KVHandoff) -> HandoffRef:
        """Return the reference of a handoff."""
        return cls(handoff.transfer_id, PeerId(handoff.control_address, handoff.incarnation))


class TokenCopy(NamedTuple):
    """Tokens of a producer's block and their place in a local block, as offsets from the start of each block."""

    remote_row: int
    remote_start: int
    local_row: int
    local_start: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ReadUnit:
    """Blocks of the producer and of ours that are read, verified, and used or rejected together. Units share no tokens.

    Without ``copies`` the unit is one block on each side, with equal bytes. With them the two sides' blocks differ in size, and
    the bytes are converted after the read; a slot of our blocks that no copy fills becomes zero. The seal of ``remote_rows[i]``
    must be ``expected[i]``. The unit holds ``num_tokens`` tokens of the request.
    """

    remote_rows: tuple[int, ...]
    local_rows: tuple[int, ...]
    expected: tuple[ExpectedSeal, ...]
    num_tokens: int
    copies: tuple[TokenCopy, ...] = ()


def row_units(remote_rows: Iterable[int], local_rows: Iterable[int], expected: Iterable[ExpectedSeal]) -> tuple[ReadUnit, ...]:
    """Return one unit per pair of blocks; the blocks of both sides have the same size."""
    return tuple(
        ReadUnit((remote,), (local,), (seal,), seal.num_tokens)
        for remote, local, seal in zip(remote_rows, local_rows, expected, strict=True)
    )


@dataclass(frozen=True, slots=True)
class PullRequest:
    """Consumer: read these units of the producer's pool, which hold ``num_tokens`` tokens together.

    ``deadline`` is when the request's own budget ends, on the worker's clock. ``layout`` is the layout of the producer's blocks
    according to its handoff; None = the same as ours. Of converted blocks only these KV ``heads`` are used; None = all. Blocks
    that are not leased may be reused while they are read, which their seals show.
    """

    request_id: str
    handoff: HandoffRef
    units: tuple[ReadUnit, ...]
    num_tokens: int
    deadline: float | None = None
    layout: KVLayoutInfo | None = None
    heads: HeadRange | None = None
    is_leased: bool = True

    @property
    def remote_rows(self) -> tuple[int, ...]:
        """The producer's blocks."""
        return tuple(row for unit in self.units for row in unit.remote_rows)

    @property
    def local_rows(self) -> tuple[int, ...]:
        """Our blocks."""
        return tuple(row for unit in self.units for row in unit.local_rows)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Consumer: why a load fails without being tried, and the producer of its blocks."""

    error: KVFerryError
    producer: PeerId


@dataclass(slots=True)
class ConsumerStep:
    """One engine step's orders to the consumer, carried out in the order of the fields."""

    holds: list[HandoffRef] = field(default_factory=list)  # keep these leases alive
    pulls: list[PullRequest] = field(default_factory=list)
    refused: dict[str, Refusal] = field(default_factory=dict)  # by request id
    aborts: list[str] = field(default_factory=list)  # request ids of loads to abort
    releases: list[HandoffRef] = field(default_factory=list)  # done with these leases

    def is_empty(self) -> bool:
        """True if there is nothing to do."""
        return not (self.holds or self.pulls or self.refused or self.aborts or self.releases)


# ---- router → event loop ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExpectHandoff:
    """Consumer: a coming request may load this handoff; ask for its lease."""

    handoff: HandoffRef


@dataclass(frozen=True, slots=True)
class MeetPeer:
    """Consumer: a handoff of this producer is about to come; shake hands with it."""

    producer: PeerId

    @classmethod
    def of(cls, message: MeetProducer) -> MeetPeer:
        """Return the event for what the router has sent."""
        return cls(PeerId(message.control_address, message.incarnation))


@dataclass(frozen=True, slots=True)
class ReleaseHandoffs:
    """Producer: no consumer will read these handoffs; end their leases."""

    transfer_ids: Iterable[str]


@dataclass(frozen=True, slots=True)
class RenewHandoffs:
    """Producer: extend the leases of these handoffs."""

    transfer_ids: Iterable[str]


# ---- control sockets → state machine. A message to the control address of a producer is an event itself. -------------


@dataclass(frozen=True, slots=True)
class ControlReceived:
    """Consumer: a message from the producer connected at ``address``."""

    address: str
    message: ControlMessage


@dataclass(frozen=True, slots=True)
class ControlLost:
    """Consumer: the control connection to an address was lost or refused."""

    address: str


@dataclass(frozen=True, slots=True)
class HandshakeUnsent:
    """Consumer: this handshake was not sent to the address, and no answer will come."""

    address: str
    message: Handshake
    reason: str


# ---- state machine → control sockets ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendControl:
    """Send a control message; connect first if there is no connection."""

    address: str
    message: ControlMessage


@dataclass(frozen=True, slots=True)
class CloseControl:
    """Close the connection to an address."""

    address: str


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer the control message that the producer is handling."""

    message: ControlMessage


# ---- state machine → transfer thread ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenPeer:
    """Make a peer readable by this transport. According to the handshake its pool has ``num_blocks`` blocks of this layout.

    ``instead_of`` names the preferred transports that could not be opened, and why. ``number`` tells openings of a peer apart.
    """

    peer: PeerId
    transport: str
    metadata: bytes
    num_blocks: int
    layout: KVLayoutInfo
    instead_of: str = ""
    number: int = 0


@dataclass(frozen=True, slots=True)
class ClosePeer:
    """Fence a peer; its in-flight reads become terminal."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class PostRead:
    """Read blocks of a peer's pool: each into a block of ours, or, with ``copies``, by way of the staging area.

    Then tokens are copied from there, of the KV ``heads`` that both sides hold; None = all.

    The digests of blocks read by way of the staging area are computed there, before the conversion.
    """

    read_id: int
    peer: PeerId
    remote_rows: tuple[int, ...]
    local_rows: tuple[int, ...]
    copies: tuple[TokenCopy, ...] = ()
    wants_digests: bool = False
    heads: HeadRange | None = None


@dataclass(frozen=True, slots=True)
class PostSealRead:
    """Read the seals of ``remote_rows`` of a peer when all their blocks have been read into ``local_rows``.

    The read begins when every read in ``after`` has ended, successfully or not; earlier reads have ended already. It begins at
    once if the producer serves reads in order (``Transport.reads_in_order``). A seal read that is cancelled before it has begun
    ends at once. With ``wants_digests`` each block has been read unconverted into one of ours, and the digest of its bytes is
    computed.
    """

    read_id: int
    peer: PeerId
    remote_rows: tuple[int, ...]
    local_rows: tuple[int, ...]
    wants_digests: bool
    after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CancelRead:
    """End a read early if the transport can; ``ReadEnded`` reports it like any other read."""

    read_id: int


@dataclass(frozen=True, slots=True)
class AskProgress:
    """Ask whether bytes of a peer's reads have arrived since one of its reads ended or the last question.

    ``PeerProgress`` is the answer.
    """

    peer: PeerId


@dataclass(frozen=True, slots=True)
class StartProbe:
    """Read 64 bytes of a peer that is not open by this transport, to test the transport; ``ProbeEnded`` has the result."""

    probe_id: int
    how_to_open: OpenPeer


@dataclass(frozen=True, slots=True)
class EndProbe:
    """Abandon a probe: fence its peer and report nothing. Ignored if the probe has ended."""

    probe_id: int


# ---- transfer thread → state machine ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReadEnded:
    """A read is terminal: it writes nothing from now on.

    A successful seal read carries a copy of every seal, concatenated, and ``digests`` if the command wanted them, both in the
    order of its ``remote_rows``. With ``has_no_room`` the read was not posted, since open reads fill the staging area: post it
    again when one of them has ended.
    """

    read_id: int
    error: KVFerryError | None = None
    seals: bytes = b""
    digests: tuple[int, ...] = ()
    has_no_room: bool = False


@dataclass(frozen=True, slots=True)
class PeerOpened:
    """A peer can now be read by this transport. ``instead_of`` is copied from ``OpenPeer``."""

    peer: PeerId
    transport: str
    instead_of: str = ""


@dataclass(frozen=True, slots=True)
class PeerFailed:
    """A peer could not be opened."""

    how_to_open: OpenPeer
    error: KVFerryError


@dataclass(frozen=True, slots=True)
class PeerLost:
    """An open peer can be read no longer. The reads that failed for it have been reported before."""

    how_to_open: OpenPeer
    error: KVFerryError


@dataclass(frozen=True, slots=True)
class PeerProgress:
    """Whether bytes of a peer's reads have arrived since its last read ended or the last question; None = unknown."""

    peer: PeerId
    has_advanced: bool | None


@dataclass(frozen=True, slots=True)
class ProbeEnded:
    """The result of a probe; without an error the transport works."""

    probe_id: int
    error: KVFerryError | None = None


TransferEvent = ReadEnded | PeerOpened | PeerFailed | PeerLost | PeerProgress | ProbeEnded


@dataclass(frozen=True, slots=True)
class TransferReport:
    """Consumer: an event of the transfer thread; ``at`` is its time."""

    event: TransferEvent
    at: float


# ---- state machine → engine ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class QuarantineEnded:
    """No read can write these quarantined blocks any more."""

    block_ids: tuple[int, ...]


# ---- state machine → log ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PeerFenced:
    """A peer is fenced while late reads of it are open; ``num_blocks`` are quarantined for them.

    For the log only: ``ClosePeer`` does the fencing.
    """

    peer: PeerId
    num_blocks: int


@dataclass(frozen=True, slots=True)
class TransportBroken:
    """A transport to a peer is not used until a probe succeeds; the first probe starts after ``retry_s`` seconds."""

    peer: PeerId
    transport: str
    reason: str
    retry_s: float


@dataclass(frozen=True, slots=True)
class TransportRestored:
    """A transport to a peer is used again after ``after_s`` seconds."""

    peer: PeerId
    transport: str
    after_s: float


TransferCommand = OpenPeer | ClosePeer | PostRead | PostSealRead | CancelRead | AskProgress | StartProbe | EndProbe
Report = LoadEnded | QuarantineEnded | SendingEnded
LogEntry = PeerFenced | TransportBroken | TransportRestored
Action = SendControl | CloseControl | Reply | LogEntry | TransferCommand | Report
