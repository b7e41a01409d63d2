"""What crosses the borders inside a tier connector: step messages of its scheduler side, and reports of its mover.

Plain values without behaviour.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from connectors.load_ended import LoadEnded
from core.connector import KVConnectorMetadata, KVConnectorWorkerMetadata
from kvstore.key import StoreKey

# ---- scheduler side → mover ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TierLoad:
    """Bring the block ``keys[i]`` into the pool's block ``block_ids[i]``; together they make ``num_tokens`` tokens.

    The blocks of a group come in the order of their tokens. What is not there at ``deadline``, on the engine's clock, has
    failed.
    """

    request_id: str
    keys: tuple[StoreKey, ...]
    block_ids: tuple[int, ...]
    num_tokens: int
    deadline: float = math.inf


@dataclass(frozen=True, slots=True)
class SaveItem:
    """Store a block of the pool under ``key``, if it is still what ``generation`` says. The scheduler side keeps it."""

    key: StoreKey
    block_id: int
    generation: int


@dataclass(slots=True)
class TierConnectorMetadata(KVConnectorMetadata):
    """One step's news."""

    loads: list[TierLoad] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)  # request ids whose load is not wanted any more
    saves: list[SaveItem] = field(default_factory=list)

    def is_empty(self) -> bool:
        """True if there is nothing to do."""
        return not (self.loads or self.aborts or self.saves)


# ---- mover → engine --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SaveEnded:
    """These blocks are not read any more, for these items."""

    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SavesAreSlow:
    """No save has come further for a while. Said once, until one does."""


@dataclass(frozen=True, slots=True)
class TierConnectorWorkerMetadata(KVConnectorWorkerMetadata):
    """Blocks whose copies are done, one entry for each time they were to be saved; and whether the others are slow."""

    saved_block_ids: tuple[int, ...] = ()
    is_slow: bool = False


Report = LoadEnded | SaveEnded | SavesAreSlow
