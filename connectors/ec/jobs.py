"""Messages inside an EC connector that fetches embeddings: step messages to the worker side, and its reports.

Plain values without behaviour. The scheduler side decides and names chunks of the worker's host memory; the worker side copies
complete items into the encoder cache and passes the other orders to a p2p agent or the thread of a store.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from connectors.p2p.transport.interface import PeerId
from core.kv.seals import ExpectedSeal
from core.request import ECConnectorMetadata, ECConnectorWorkerMetadata
from core.wire.media import ECSeal
from core.wire.messages import ErrorInfo


@dataclass(frozen=True, slots=True)
class PeerSource:
    """Embeddings in the memory of an encode worker: its chunks, their expected seals, and the lease that keeps them."""

    owner: PeerId
    transfer_id: str
    chunks: tuple[int, ...]
    expected: tuple[ExpectedSeal, ...]


@dataclass(frozen=True, slots=True)
class StoreSource:
    """Embeddings that may be in the store, under the hashes of their chunks; the store has not been queried."""


Source = PeerSource | StoreSource


@dataclass(frozen=True, slots=True)
class Fetch:
    """Fetch the embeddings of an item into these chunks by ``deadline`` on the worker's clock.

    ``seal`` is the seal that the peer announced. It is None for a store, where only the seals of the chunks are checked:
    another worker may have stored the image first, and its embeddings may differ in the last bits.
    """

    identifier: bytes
    num_embeds: int
    chunks: range
    source: Source
    deadline: float
    seal: ECSeal | None = None


@dataclass(frozen=True, slots=True)
class CacheLoad:
    """Copy a complete item into the encoder cache."""

    identifier: bytes
    num_embeds: int
    chunks: range


@dataclass(slots=True)
class FetchingMetadata(ECConnectorMetadata):
    """Orders of one step, carried out in the order of the fields. The engine must run again by ``wake_at``."""

    loads: list[CacheLoad] = field(default_factory=list)
    holds: list[PeerSource] = field(default_factory=list)  # keep these leases alive
    fetches: list[Fetch] = field(default_factory=list)
    aborts: list[bytes] = field(default_factory=list)  # fetches that no request waits for any more
    releases: list[PeerSource] = field(default_factory=list)  # done with these leases
    wake_at: float | None = None

    @property
    def has_orders(self) -> bool:
        """True if it contains orders that move bytes."""
        return bool(self.holds or self.fetches or self.aborts or self.releases)


@dataclass(frozen=True, slots=True)
class FetchEnded:
    """The end of a fetch, reported once. Without an error all rows are in place and verified against the seals of the chunks.

    ``was_aborted``: the scheduler side aborted it. A transfer may still write the chunks ``quarantined`` until ``ChunksFreed``.
    """

    identifier: bytes
    error: ErrorInfo | None = None
    quarantined: tuple[int, ...] = ()
    was_aborted: bool = False


@dataclass(frozen=True, slots=True)
class ChunksFreed:
    """No transfer writes these chunks any more."""

    chunks: tuple[int, ...]


Report = FetchEnded | ChunksFreed


@dataclass(slots=True)
class FetchingReports(ECConnectorWorkerMetadata):
    """Reports of the worker side to the scheduler side, in order."""

    reports: list[Report] = field(default_factory=list)
