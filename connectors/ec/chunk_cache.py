"""Which chunks of a worker's host memory hold which embeddings, and which are evicted first.

It owns the allocation of chunks and knows no memory, seals or threads. An item takes adjacent chunks. It is kept while it has
an owner (a request that waits for it or uses it, or a lease of a reader). Items without owners are evicted, the least recently
used first, when others need the chunks. Chunks that an aborted transfer may still write are in quarantine.

    reserve ──▶ being filled ──settle──▶ here ──evicted by reserve──▶ free
                     └──────────drop─────────┘      drop(quarantined) ──unquarantine──▶ free
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

_FREE, _TAKEN = 0, 1


@dataclass(slots=True, eq=False)
class CachedChunk:
    """Chunks ``first_chunk`` to ``first_chunk + num_chunks - 1`` hold, or will hold, an item of ``num_embeds`` rows."""

    identifier: bytes
    num_embeds: int
    first_chunk: int
    num_chunks: int
    is_here: bool = False
    wanted_by: set[str] = field(default_factory=set)

    @property
    def chunks(self) -> range:
        """The chunks, in the order of the rows."""
        return range(self.first_chunk, self.first_chunk + self.num_chunks)


class ChunkCache:
    """Items by identifier on ``num_chunks`` chunks."""

    def __init__(self, num_chunks: int) -> None:
        self.num_chunks = num_chunks
        self.num_evicted = 0
        self._taken = bytearray(num_chunks)
        self._items: dict[bytes, CachedChunk] = {}  # unwanted ones in the order of their last use
        self._quarantined: set[int] = set()

    @property
    def num_wanted_chunks(self) -> int:
        """Number of chunks of items that have an owner or are being filled. Any thread may call it."""
        return sum(item.num_chunks for item in list(self._items.values()) if not _can_go(item))

    @property
    def num_quarantined_chunks(self) -> int:
        """Number of chunks in quarantine."""
        return len(self._quarantined)

    def get(self, identifier: bytes) -> CachedChunk | None:
        """Return an item, complete or being filled."""
        return self._items.get(identifier)

    def has_room(self, num_chunks: int) -> bool:
        """Return True if a new item of so many chunks would get its place now."""
        left = bytearray(self._taken)
        for item in self._items.values():
            if _can_go(item):
                left[item.first_chunk : item.first_chunk + item.num_chunks] = bytes(item.num_chunks)
        return left.find(bytes(num_chunks)) >= 0

    def reserve(self, identifier: bytes, num_embeds: int, num_chunks: int) -> CachedChunk | None:
        """Allocate chunks for a new item, evicting items without owners if necessary. None = no room now."""
        assert identifier not in self._items, f"{identifier.hex()} is on the chunk_cache already"
        if not self.has_room(num_chunks):
            return None
        first = self._find_room(num_chunks)
        for item in [item for item in self._items.values() if _can_go(item)]:
            if first >= 0:
                break
            self.num_evicted += 1
            self.drop(item)
            first = self._find_room(num_chunks)
        item = self._items[identifier] = CachedChunk(identifier, num_embeds, first, num_chunks)
        self._mark(item.chunks, _TAKEN)
        return item

    def settle(self, item: CachedChunk) -> None:
        """Mark an item as complete: all its rows are in place and verified."""
        item.is_here = True

    def drop(self, item: CachedChunk, quarantined: Iterable[int] = ()) -> None:
        """Forget an item and free its chunks, except those in quarantine."""
        del self._items[item.identifier]
        kept = set(quarantined)
        self._quarantined |= kept
        self._mark((chunk for chunk in item.chunks if chunk not in kept), _FREE)

    def unquarantine(self, chunks: Iterable[int]) -> None:
        """Free chunks that no transfer writes any more."""
        freed = self._quarantined.intersection(chunks)
        self._quarantined -= freed
        self._mark(freed, _FREE)

    def want(self, item: CachedChunk, owner: str) -> None:
        """Add an owner to an item. Idempotent."""
        item.wanted_by.add(owner)

    def unwant(self, item: CachedChunk, owner: str) -> None:
        """Remove an owner from an item. Idempotent."""
        if owner in item.wanted_by:
            item.wanted_by.discard(owner)
            self._items[item.identifier] = self._items.pop(item.identifier)  # used last

    def _find_room(self, num_chunks: int) -> int:
        return self._taken.find(bytes(num_chunks))

    def _mark(self, chunks: Iterable[int], state: int) -> None:
        for chunk in chunks:
            self._taken[chunk] = state


def _can_go(item: CachedChunk) -> bool:
    return item.is_here and not item.wanted_by
