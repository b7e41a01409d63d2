"""Changes of one worker's prefix cache, for routers and shared stores that follow it.

The stream describes a set of (block hash, group id): replaying it gives exactly the keys that are hits now. ``BlockStored``
may repeat a key that is present already (two blocks can hold the same content); ``BlockRemoved`` comes only when the last
copy of a key is gone. Produced by ``core.kv.pool``, drained by ``BlockPool.take_events``; ordered, never reordered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from core.kv.hashing import ExtraKey


@dataclass(slots=True, frozen=True)
class BlockStored:
    """Consecutive full blocks became hits; ``parent_hash`` precedes the first one (None at the start of a sequence).

    ``token_ids`` are the tokens of all these blocks, empty if the caller did not pass them. ``extra_keys`` has one entry for
    each block: what entered its hash besides tokens and parent (``core.kv.hashing.block_extra_keys``); empty = nothing in any.
    """

    block_hashes: tuple[bytes, ...]
    parent_hash: bytes | None
    block_size: int
    group_id: int
    token_ids: tuple[int, ...] = ()
    extra_keys: tuple[tuple[ExtraKey, ...], ...] = ()


@dataclass(slots=True, frozen=True)
class BlockRemoved:
    """These blocks are no longer hits."""

    block_hashes: tuple[bytes, ...]
    group_id: int


@dataclass(slots=True, frozen=True)
class AllBlocksCleared:
    """The whole prefix cache was dropped."""


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventFollower(Protocol):
    """Gets the events of each step, on the engine's thread."""

    def publish(self, events: Sequence[KVCacheEvent]) -> None:
        """Take in the events of one step, in order; there may be none."""

    def close(self) -> None:
        """Get no more."""
