"""The interface of a tier below the arena, and its jobs.

A tier keeps blocks with their seals under packed keys (``kvstore.key``). It may wait for a disk or a network, so each tier has
a thread (``kvstore.tiers.worker``) that makes every call except ``knows``. A tier that fails counts as empty: its errors are
counted and do not leave its thread. The implementations are ``disk`` and ``redis_tier``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple


class TierBlock(NamedTuple):
    """A loaded block: ``num_bytes`` bytes at the beginning of the target, and their seal."""

    num_bytes: int
    seal: bytes


@dataclass(slots=True)
class TierStatistics:
    """Results of the jobs of a tier, and what it holds. ``used_bytes`` is None if the tier does not report it."""

    loaded_blocks: int = 0
    missing_blocks: int = 0
    saved_blocks: int = 0
    failed_saves: int = 0
    corrupt_blocks: int = 0
    errors: int = 0
    lost_blocks: int = 0  # dropped by the tier because they could not be read
    num_blocks: int | None = None
    used_bytes: int | None = None


class Tier(ABC):
    """Keeps blocks by packed key.

    Raises, from every method but ``knows``: StoreError if the tier cannot be used at the moment.
    """

    name: ClassVar[str]

    def check(self) -> None:
        """Say in the log if the tier cannot be used. Called once, on its thread, before its first job. Never raises."""

    @abstractmethod
    def knows(self, key: bytes) -> bool | None:
        """Return at once, from any thread, whether the tier has a block; None = unknown, call ``locate``."""

    @abstractmethod
    def locate(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether the tier has its block."""

    @abstractmethod
    def load(self, key: bytes, target: memoryview) -> TierBlock | None:
        """Read a block into the target; None if the tier lacks it. The bytes are not verified yet.

        Raises:
            CorruptBlock: the record is not a block, or is larger than the target; the caller removes it.
        """

    @abstractmethod
    def save(self, key: bytes, seal: bytes, block: memoryview) -> bool:
        """Store a block; False if there is no room. A block that the tier already has is not changed."""

    @abstractmethod
    def remove(self, key: bytes) -> None:
        """Forget a block, because it is corrupt. Unknown keys are ignored."""

    def occupancy(self) -> tuple[int | None, int | None]:
        """Return the number of blocks and bytes held, from any thread; None if the tier does not report it."""
        return None, None

    def limit_bytes(self) -> int | None:
        """Return the current capacity in bytes, from any thread; None if the tier does not report it."""
        return None

    def num_lost_blocks(self) -> int:
        """Return how many blocks the tier has dropped because it could not read them, from any thread."""
        return 0

    @abstractmethod
    def close(self) -> None:
        """Close files and connections."""


@dataclass(slots=True, eq=False)
class TierJob:
    """A job for the tier with index ``tier`` in the order of tiers.

    Other threads may set ``is_wanted`` to False and back to True until the job is done. The tier skips a job that is not wanted
    when its turn comes, and sets ``is_skipped``.
    """

    tier: int
    is_wanted: bool = field(default=True, kw_only=True)
    is_skipped: bool = field(default=False, kw_only=True)


@dataclass(slots=True, eq=False)
class LocateJob(TierJob):
    """Find out which keys the tier has; the result is ``found``."""

    keys: Sequence[bytes]
    found: Sequence[bool] = field(default=(), kw_only=True)


@dataclass(slots=True, eq=False)
class LoadJob(TierJob):
    """Load a block into ``target``. ``loaded`` is None if the tier lacks it or verification failed."""

    key: bytes
    target: memoryview
    loaded: TierBlock | None = field(default=None, kw_only=True)


@dataclass(slots=True, eq=False)
class SaveJob(TierJob):
    """Save a block; ``block`` must not change until the job is done."""

    key: bytes
    seal: bytes
    block: memoryview
    is_saved: bool = field(default=False, kw_only=True)
