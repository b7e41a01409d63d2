"""What a tier below the arena is, and the jobs that are given to it.

A tier keeps blocks with their seals under packed keys (``kvstore.key``). It may wait for a disk or a network, so it has a
thread of its own (``kvstore.tiers.worker``), which makes every call except ``knows``. A tier that fails is a tier that has
nothing: its errors are counted, never raised beyond its thread. Implementations: ``disk`` and ``redis_tier`` beside this file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple


class TierBlock(NamedTuple):
    """What a tier has brought: ``num_bytes`` bytes at the beginning of the target, and their seal."""

    num_bytes: int
    seal: bytes


@dataclass(slots=True)
class TierStatistics:
    """What has become of the jobs of a tier, and what it holds. ``used_bytes`` is None where only the tier itself knows."""

    loaded_blocks: int = 0
    missing_blocks: int = 0
    saved_blocks: int = 0
    failed_saves: int = 0
    corrupt_blocks: int = 0
    errors: int = 0
    lost_blocks: int = 0  # the tier could not read them any more, and has forgotten them
    num_blocks: int | None = None
    used_bytes: int | None = None


class Tier(ABC):
    """Keeps blocks by packed key.

    Raises, from every method but ``knows``: StoreError if the tier cannot be used at the moment.
    """

    name: ClassVar[str]

    @abstractmethod
    def knows(self, key: bytes) -> bool | None:
        """Say at once, from any thread, whether the tier has a block; None = it has to be asked with ``locate``."""

    @abstractmethod
    def locate(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether the tier has its block."""

    @abstractmethod
    def load(self, key: bytes, target: memoryview) -> TierBlock | None:
        """Read a block into the target; None if it is not there. The bytes have not been checked.

        Raises:
            CorruptBlock: what is there is no block, or does not fit; the caller removes it.
        """

    @abstractmethod
    def save(self, key: bytes, seal: bytes, block: memoryview) -> bool:
        """Keep a block; False if there is no room. One that is there already is left alone."""

    @abstractmethod
    def remove(self, key: bytes) -> None:
        """Forget a block, because it is corrupt. Unknown keys are ignored."""

    def occupancy(self) -> tuple[int | None, int | None]:
        """Return the number of blocks and bytes held, from any thread; None where only the tier itself knows."""
        return None, None

    def limit_bytes(self) -> int | None:
        """Return what the tier may hold at the moment, from any thread; None where only the tier itself knows."""
        return None

    def num_lost_blocks(self) -> int:
        """Return how many blocks the tier has forgotten because it could not read them, from any thread."""
        return 0

    @abstractmethod
    def close(self) -> None:
        """Give files and connections back."""


@dataclass(slots=True, eq=False)
class TierJob:
    """Something to do for the tier at this position in the order of tiers.

    ``is_wanted`` may turn false, and true again, until the job is done, from another thread than the tier's: a job that nobody
    waits for any more when its turn comes is not done, and says so with ``is_skipped``.
    """

    tier: int
    is_wanted: bool = field(default=True, kw_only=True)
    is_skipped: bool = field(default=False, kw_only=True)


@dataclass(slots=True, eq=False)
class LocateJob(TierJob):
    """Ask which keys are there. ``found`` is the answer."""

    keys: Sequence[bytes]
    found: Sequence[bool] = field(default=(), kw_only=True)


@dataclass(slots=True, eq=False)
class LoadJob(TierJob):
    """Bring a block into ``target``. ``loaded`` is None if it is not there, or did not pass the checks."""

    key: bytes
    target: memoryview
    loaded: TierBlock | None = field(default=None, kw_only=True)


@dataclass(slots=True, eq=False)
class SaveJob(TierJob):
    """Keep a block; ``block`` stays unchanged until the job is done."""

    key: bytes
    seal: bytes
    block: memoryview
    is_saved: bool = field(default=False, kw_only=True)
