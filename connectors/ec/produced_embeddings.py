"""The embeddings that an encode worker holds for readers: in its host memory, sealed, kept by leases.

Owns the place of each item and its leases. An item stays after its last lease until others need the room, so that a repeated
image costs no second encode. The agent counts the time of leases (``connectors.p2p.producer.leases``) and reports their ends.
Knows no sockets. For the engine thread, except ``lease_ended`` and ``pass_report``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from connectors.ec.chunk_cache import CachedChunk, ChunkCache
from connectors.ec.chunks import RowsDigester, num_chunks
from connectors.ec.memory import ChunkMemory
from connectors.ec.p2p_adapter import NAME, HeldEmbeddings, as_report, encode_held
from connectors.ec.worker import FetchingWorker, OfferEnded
from connectors.p2p.actions import LeaseGrant, Report
from connectors.reports import SendingEnded
from core.errors import Full
from core.ids import IdSource, new_hex_id
from core.wire.media import ECSeal, ECSource
from core.wire.messages import ErrorInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferTerms:
    """The worker that holds the embeddings, and how long each lease lasts unless its reader renews it."""

    engine_id: str
    incarnation: int
    lease_ms: int


@dataclass(frozen=True, slots=True)
class _Held:
    item: CachedChunk
    seal: ECSeal
    generation: int


class ProducedEmbeddings:
    """Items by identifier in ``memory``. ``grant`` starts a lease. ``control_address`` is where readers reach this worker."""

    def __init__(self, memory: ChunkMemory, terms: OfferTerms, ids: IdSource, grant: Callable[[LeaseGrant], None]) -> None:
        self._memory = memory
        self._terms = terms
        self._ids = ids
        self._grant = grant
        self._chunk_cache = ChunkCache(memory.num_chunks)
        self._held: dict[bytes, _Held] = {}
        self._leases: dict[str, CachedChunk] = {}
        self._ended: deque[str] = deque()
        self._digester = RowsDigester()
        self.control_address = ""
        self.num_refused = 0  # items for which there was no room

    @property
    def num_evicted(self) -> int:
        """The number of items evicted for others."""
        return self._chunk_cache.num_evicted

    def has_room(self, num_embeds: int) -> bool:
        """Return True if an item of so many rows that is not here would be kept."""
        return self._chunk_cache.has_room(num_chunks(num_embeds))

    def offer(self, identifier: bytes, num_embeds: int, rows: memoryview) -> OfferEnded:
        """Keep the rows, unless they are here already, and lease them to their first reader."""
        held = self._held.get(identifier)
        if held is None or held.item.num_embeds != num_embeds:
            held = self._put(identifier, num_embeds, rows)
        if held is None:
            self.num_refused += 1
            error = Full(f"no room for {num_embeds} rows of embeddings among those that readers wait for")
            return OfferEnded(identifier, error=ErrorInfo.of(error))
        return OfferEnded(identifier, self._lease(held))

    def find(self, identifier: bytes) -> ECSource | None:
        """Return the place of an item, with a new lease; None if it is not here."""
        held = self._held.get(identifier)
        return None if held is None else self._lease(held)

    def on_step(self) -> None:
        """Release the items whose leases have ended."""
        while self._ended:
            transfer_id = self._ended.popleft()
            item = self._leases.pop(transfer_id, None)
            if item is not None:
                self._chunk_cache.unwant(item, transfer_id)

    def lease_ended(self, transfer_id: str) -> None:
        """Record that this lease has ended. Any thread."""
        self._ended.append(transfer_id)

    def _put(self, identifier: bytes, num_embeds: int, rows: memoryview) -> _Held | None:
        if self._chunk_cache.get(identifier) is not None:  # of another shape, kept for the readers that it was announced to
            return None
        num_evicted = self._chunk_cache.num_evicted
        item = self._chunk_cache.reserve(identifier, num_embeds, num_chunks(num_embeds))
        if self._chunk_cache.num_evicted > num_evicted:
            self._held = {other: held for other, held in self._held.items() if self._chunk_cache.get(other) is held.item}
        if item is None:
            return None
        seal, generation = self._memory.write(item, rows, self._digester)
        self._chunk_cache.settle(item)
        held = self._held[identifier] = _Held(item, seal, generation)
        return held

    def _lease(self, held: _Held) -> ECSource:
        transfer_id = new_hex_id(self._ids, "ec-")
        self._chunk_cache.want(held.item, transfer_id)
        self._leases[transfer_id] = held.item
        self._grant(LeaseGrant(transfer_id, transfer_id, held.item.num_chunks))
        return ECSource(
            seal=held.seal,
            connector=NAME,
            engine_id=self._terms.engine_id,
            incarnation=self._terms.incarnation,
            lease_ms=self._terms.lease_ms,
            payload=encode_held(
                HeldEmbeddings(
                    transfer_id=transfer_id,
                    control_address=self.control_address,
                    first_chunk=held.item.first_chunk,
                    generation=held.generation,
                )
            ),
        )


def pass_report(report: Report, worker: FetchingWorker, offers: ProducedEmbeddings | None) -> None:
    """Pass an agent's report to the worker side, or to the offers if a lease has ended. Any thread."""
    if not isinstance(report, SendingEnded):
        worker.report(as_report(report))
    elif offers is not None:
        offers.lease_ended(report.request_id)
        worker.wake()
