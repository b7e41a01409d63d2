"""What a store of KV blocks is for those who use it: look up, get, put, release. None of the calls waits.

Owns the interface and the tickets. A call returns a ticket at once; ``ticket.is_done`` says whether its result is there, and it
is there within ``request_timeout_s`` whatever becomes of the store: a store that is dead, frozen or restarted is a miss. All
methods may be called from any thread. Implemented by ``kvstore.client.StoreClient``, for a store in this process
(``kvstore.embedded``), in a process of this host that shares its arena, and elsewhere; every way passes
``kvstore.testing.store_suite``. Knows no requests, prompts or pools.

A block enters with its seal (``core.kv.seals``, 64 bytes) and leaves with it. The seal must carry a digest. What comes back is
only good once ``copy_out`` or ``verify`` has said so: hash, group and layout are compared with the key, the bytes with the
digest, and then the slot's state once more.
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

    It is a slot of the arena where the arena is mapped here, and received bytes elsewhere. ``is_current`` says whether the
    view still shows this block; asked after the bytes have been copied.
    """

    key: StoreKey
    content: memoryview
    seal: bytes
    is_current: Callable[[], bool]


@dataclass(slots=True, eq=False)
class Ticket:
    """A call that was made. ``is_done`` is set last, once the result is final; the result of an unanswered call is empty.

    ``failure`` names why a call was not answered, for logs: "" if it was.
    """

    keys: Sequence[StoreKey]
    number: int
    is_done: bool = False
    failure: str = ""


@dataclass(slots=True, eq=False)
class LookupTicket(Ticket):
    """``hits[i]`` says whether the store has ``keys[i]``, in any tier. It may be gone when it is got."""

    hits: Sequence[bool] = ()

    @property
    def num_prefix_hits(self) -> int:
        """How many keys from the first on are hits without a gap."""
        return next((index for index, is_hit in enumerate(self.hits) if not is_hit), len(self.hits))


@dataclass(slots=True, eq=False)
class GetTicket(Ticket):
    """``blocks[i]`` is the block of ``keys[i]`` or None. They are pinned in memory until the ticket is released.

    ``withheld`` are indices of blocks that the store has and could not pin: too many are pinned, by this client or others. They
    may be got once some of those are released.
    """

    blocks: Sequence[StoredBlock | None] = ()
    withheld: Collection[int] = ()

    @property
    def num_prefix_blocks(self) -> int:
        """How many blocks from the first on are there without a gap."""
        return next((index for index, block in enumerate(self.blocks) if block is None), len(self.blocks))


@dataclass(slots=True, eq=False)
class PutTicket(Ticket):
    """``stored[i]`` says whether the store has ``keys[i]`` now, by this call or by an earlier one.

    The caller leaves the blocks unchanged until ``is_done``; nothing reads them afterwards.
    """

    blocks: Sequence[memoryview] = ()
    seals: Sequence[bytes] = ()
    stored: Sequence[bool] = ()


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """What a user of a store has counted, since it was made. ``rejected`` counts blocks that did not pass, by reason."""

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
        """Whether calls have a chance; while they have none, each is a miss at once."""

    @property
    def own_memory(self) -> memoryview | None:
        """Return the memory that the contents of blocks are views of, if it is this process's own and stays until ``close``."""
        return None

    @abstractmethod
    def lookup(self, keys: Sequence[StoreKey]) -> LookupTicket:
        """Ask which of the keys are there. Nothing is pinned or moved."""

    @abstractmethod
    def get(self, keys: Sequence[StoreKey]) -> GetTicket:
        """Bring the blocks into memory, from whichever tier, and pin them. Must be followed by ``release``, done or not."""

    @abstractmethod
    def put(self, keys: Sequence[StoreKey], blocks: Sequence[memoryview], seals: Sequence[bytes]) -> PutTicket:
        """Store blocks with their seals; first writer wins, so that storing again costs nothing but the question.

        ``blocks[i]`` are contiguous bytes. A block whose seal does not fit its key, or has no digest, is not stored.
        """

    @abstractmethod
    def release(self, ticket: GetTicket) -> None:
        """Unpin what a get has pinned; its views are not to be read any more. Idempotent. A get under way is given up."""

    @abstractmethod
    def copy_out(self, block: StoredBlock, target: memoryview) -> None:
        """Copy a block and check the copy: nothing that happens to the store afterwards can change it.

        Raises:
            CorruptBlock: the bytes do not match the seal; the store has been told, and the content of ``target`` is garbage.
            StaleBlock: the seal is not that of the key, or the slot has been reused.
        """

    @abstractmethod
    def verify(self, block: StoredBlock) -> None:
        """Check a block where it lies, for those who copy by other means and ask ``block.is_current()`` afterwards.

        Raises:
            CorruptBlock, StaleBlock: as ``copy_out``.
        """

    @abstractmethod
    def statistics(self) -> StoreStatistics:
        """Return what has been counted."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back; open calls end as misses. Views must not be read afterwards."""
