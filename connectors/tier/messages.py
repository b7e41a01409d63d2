"""Messages inside a tier connector: step messages of its scheduler side, and reports of ``TierTransfer``.

Plain values without behaviour.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from connectors.reports import LoadEnded
from core.request import KVConnectorMetadata, KVConnectorWorkerMetadata
from kvstore.key import StoreKey

# ---- scheduler side → transfer thread --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TierLoad:
    """Load the block ``keys[i]`` into the pool's block ``block_ids[i]``; all blocks together hold ``num_tokens`` tokens.

    The blocks of a group are in the order of their tokens. Blocks that are not loaded by ``deadline``, on the engine's clock,
    have failed.
    """

    request_id: str
    keys: tuple[StoreKey, ...]
    block_ids: tuple[int, ...]
    num_tokens: int
    deadline: float = math.inf


@dataclass(frozen=True, slots=True)
class SaveItem:
    """Save a block of the pool under ``key`` if it still has this ``generation``. The scheduler side pins it."""

    key: StoreKey
    block_id: int
    generation: int


@dataclass(slots=True)
class TierConnectorMetadata(KVConnectorMetadata):
    """Orders of one step."""

    loads: list[TierLoad] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)  # request ids whose load is not wanted any more
    saves: list[SaveItem] = field(default_factory=list)

    def is_empty(self) -> bool:
        """True if it contains no orders."""
        return not (self.loads or self.aborts or self.saves)


# ---- transfer thread → engine ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SaveEnded:
    """The end of these saves: their blocks are not read any more."""

    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SavesAreSlow:
    """No save has made progress for a while. Reported once, until one does."""


@dataclass(frozen=True, slots=True)
class TierConnectorWorkerMetadata(KVConnectorWorkerMetadata):
    """Blocks whose saves have ended, one entry for each save, and whether the remaining saves are slow."""

    saved_block_ids: tuple[int, ...] = ()
    is_slow: bool = False


Report = LoadEnded | SaveEnded | SavesAreSlow
