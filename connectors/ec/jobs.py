"""What crosses the borders inside an EC connector that fetches embeddings: step messages, and what comes back.

Plain values without behaviour. The scheduler side decides and names chunks of the worker's host memory; the worker side copies
what is there into the encoder cache and passes the rest on to what moves bytes: a p2p agent, or a store's thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from connectors.p2p.transport.interface import PeerId
from core.ec_connector import ECConnectorMetadata, ECConnectorWorkerMetadata
from core.kv.seals import ExpectedSeal
from core.wire.media import ECSeal
from core.wire.messages import ErrorInfo


@dataclass(frozen=True, slots=True)
class PeerSource:
    """Embeddings in the memory of an encode worker: its chunks, what their seals must say, and the lease that keeps them."""

    owner: PeerId
    transfer_id: str
    chunks: tuple[int, ...]
    expected: tuple[ExpectedSeal, ...]


@dataclass(frozen=True, slots=True)
class StoreSource:
    """Embeddings in the store of the host, under the hashes of their chunks; perhaps: nobody has looked."""


Source = PeerSource | StoreSource


@dataclass(frozen=True, slots=True)
class Fetch:
    """Bring the embeddings of an item into these chunks, by ``deadline`` on the worker's clock.

    ``seal`` is what a peer has announced of what it holds. It is None for a store: whoever came first has put these chunks, and
    another computation of the same image may differ in its last bits. Then the seals of the chunks alone are checked.
    """

    identifier: bytes
    num_embeds: int
    chunks: range
    source: Source
    deadline: float
    seal: ECSeal | None = None


@dataclass(frozen=True, slots=True)
class CacheLoad:
    """Copy an item that is here into the encoder cache."""

    identifier: bytes
    num_embeds: int
    chunks: range


@dataclass(slots=True)
class FetchingMetadata(ECConnectorMetadata):
    """One step's news, carried out in the order of the fields. By ``wake_at`` the engine must look again."""

    loads: list[CacheLoad] = field(default_factory=list)
    holds: list[PeerSource] = field(default_factory=list)  # keep these leases alive
    fetches: list[Fetch] = field(default_factory=list)
    aborts: list[bytes] = field(default_factory=list)  # fetches that nobody waits for any more
    releases: list[PeerSource] = field(default_factory=list)  # done with these leases
    wake_at: float | None = None

    @property
    def has_orders(self) -> bool:
        """True if there is something for who moves the bytes."""
        return bool(self.holds or self.fetches or self.aborts or self.releases)


@dataclass(frozen=True, slots=True)
class FetchEnded:
    """A fetch is over, told once. Without an error everything is in place, and checked against the seals of the chunks.

    ``was_aborted``: nobody wanted it any more. Something may still write the chunks ``quarantined``, until ``ChunksFreed``.
    """

    identifier: bytes
    error: ErrorInfo | None = None
    quarantined: tuple[int, ...] = ()
    was_aborted: bool = False


@dataclass(frozen=True, slots=True)
class ChunksFreed:
    """Nothing writes these chunks any more."""

    chunks: tuple[int, ...]


Report = FetchEnded | ChunksFreed


@dataclass(slots=True)
class FetchingReports(ECConnectorWorkerMetadata):
    """What a worker side tells its scheduler side, in order."""

    reports: list[Report] = field(default_factory=list)
