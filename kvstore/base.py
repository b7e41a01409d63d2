"""The interface of a store of KV blocks: look up, get, put, release. No call waits.

This module owns the interface and the tickets, and knows no requests, prompts or pools. A call returns a ticket at once.
``ticket.is_done`` becomes true within ``request_timeout_s``; if the store is dead, frozen or restarted, the call is a miss. All
methods may be called from any thread. There are two implementations: ``kvstore.embedded`` is a store in this process, and
``kvstore.client.StoreClient`` talks to a store process, through its arena on the same host and by frames otherwise. Both pass
``kvstore.testing.store_suite``.

A block is stored and returned with its seal (``core.kv.seals``, 64 bytes), which must carry a digest. A returned block may be
used only after ``copy_out`` or ``verify`` has accepted it: they compare hash, group and layout with the key and the bytes with
the digest, and then check the state of the slot again.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvstore.key import StoreKey


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """One block of a get. ``content`` is a read-only view, valid until the ticket is released.

    The view is a slot of the arena if this process maps it, and otherwise a received frame. ``is_current`` says whether the
    view still shows this block; call it after copying the bytes.
    """

    key: StoreKey
    content: memoryview
    seal: bytes
    is_current: Callable[[], bool]


@dataclass(slots=True, eq=False)
class Ticket:
    """An open or finished call. ``is_done`` is set last, after the result; the result of an unanswered call is empty.

    ``failure`` is the reason for which a call was not answered, for logs; "" if it was answered.
    """

    keys: Sequence[StoreKey]
    number: int
    is_done: bool = False
    failure: str = ""


@dataclass(slots=True, eq=False)
class LookupTicket(Ticket):
    """``hits[i]`` says whether the store has ``keys[i]``, in any tier. The block may be evicted before a get."""

    hits: Sequence[bool] = ()

    @property
    def num_prefix_hits(self) -> int:
        """Number of leading keys that are all hits."""
        return next((index for index, is_hit in enumerate(self.hits) if not is_hit), len(self.hits))


@dataclass(slots=True, eq=False)
class GetTicket(Ticket):
    """``blocks[i]`` is the block of ``keys[i]`` or None. The blocks are pinned in memory until the ticket is released.

    ``withheld`` are the indices of blocks that the store has and could not pin, because this or other clients have pinned too
    many. A get succeeds after some of those are released.
    """

    blocks: Sequence[StoredBlock | None] = ()
    withheld: Collection[int] = ()

    @property
    def num_prefix_blocks(self) -> int:
        """Number of leading blocks that were all returned."""
        return next((index for index, block in enumerate(self.blocks) if block is None), len(self.blocks))


@dataclass(slots=True, eq=False)
class PutTicket(Ticket):
    """``stored[i]`` says whether the store has ``keys[i]`` now, from this call or an earlier one.

    The caller must not change the blocks until ``is_done``; the store does not read them afterwards.
    """

    blocks: Sequence[memoryview] = ()
    seals: Sequence[bytes] = ()
    stored: Sequence[bool] = ()


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Counts of one client since it was created. ``rejected`` counts blocks that failed verification, by reason."""

    lookups: int = 0
    lookup_keys: int = 0
    lookup_hits: int = 0
    got_blocks: int = 0
    got_bytes: int = 0
    put_blocks: int = 0
    put_bytes: int = 0
    refused_puts: int = 0
    timeouts: int = 0
    restarts_noticed: int = 0
    rejected: Mapping[str, int] = field(default_factory=dict)


class BlockStore(Protocol):
    """A store of sealed KV blocks."""

    @property
    @abstractmethod
    def is_connected(self) -> bool:
        """Whether the store can be reached. If not, each call is a miss at once."""

    @property
    def own_memory(self) -> memoryview | None:
        """Return the memory that holds all block contents if this process owns it until ``close``, otherwise None."""
        return None

    def follow_evictions(self, on_evicted: Callable[[Sequence[StoreKey]], None]) -> bool:
        """Call ``on_evicted`` with all blocks that the store gives up, in any thread; return False if it cannot tell.

        The function must not call the store.
        """
        return False

    @abstractmethod
    def lookup(self, keys: Sequence[StoreKey]) -> LookupTicket:
        """Ask which of the keys the store has. It pins and moves no blocks."""

    @abstractmethod
    def get(self, keys: Sequence[StoreKey]) -> GetTicket:
        """Load the blocks into memory from any tier and pin them. Every get needs a ``release``, done or not."""

    @abstractmethod
    def put(self, keys: Sequence[StoreKey], blocks: Sequence[memoryview], seals: Sequence[bytes]) -> PutTicket:
        """Store blocks with their seals. The first writer wins: blocks that the store already has are not copied again.

        ``blocks[i]`` are contiguous bytes. A block whose seal does not fit its key, or has no digest, is not stored.
        """

    @abstractmethod
    def release(self, ticket: GetTicket) -> None:
        """Unpin the blocks of a get and invalidate its views. Cancels a get that is still open. Idempotent."""

    @abstractmethod
    def copy_out(self, block: StoredBlock, target: memoryview) -> None:
        """Copy a block and verify the copy.

        Raises:
            CorruptBlock: the bytes do not match the seal; the store is informed, and the content of ``target`` is garbage.
            StaleBlock: the seal is not that of the key, or the slot has been reused.
        """

    @abstractmethod
    def verify(self, block: StoredBlock) -> None:
        """Verify a block in place. A caller that copies it afterwards must then check ``block.is_current()``.

        Raises:
            CorruptBlock, StaleBlock: as ``copy_out``.
        """

    @abstractmethod
    def statistics(self) -> StoreStatistics:
        """Return the counts so far."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources. Open calls end as misses, and views become invalid."""
