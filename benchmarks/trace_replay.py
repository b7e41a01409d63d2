"""Replay request traces through eviction policies, and compare their hit rates with the best possible one.

Owns the format of the Mooncake traces and the clairvoyant bound. A request is a list of block ids from the beginning of its
prompt, equal ids = equal prefix. A hit is a block whose whole prefix is cached too; missing blocks are stored afterwards.

Source: L. Belady, "A study of replacement algorithms for a virtual-storage computer", 1966 (the clairvoyant policy).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from core.errors import ConfigError
from kvstore.eviction import EvictionPolicy

Trace = Sequence[Sequence[int]]


class _TraceLine(msgspec.Struct):
    hash_ids: list[int]


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Number of requested blocks and of hits."""

    num_blocks: int
    num_hits: int

    @property
    def hit_rate(self) -> float:
        """Share of the blocks that were found, 0 to 1."""
        return self.num_hits / self.num_blocks if self.num_blocks else 0.0


def read_trace(path: Path) -> list[list[int]]:
    """Return the block ids of every request of a Mooncake trace: one JSON object a line with ``hash_ids``.

    Raises:
        ConfigError: the file cannot be read, or is no such trace.
    """
    try:
        return [msgspec.json.decode(line, type=_TraceLine).hash_ids for line in path.read_bytes().splitlines() if line.strip()]
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}", param="trace") from None


def replay(trace: Trace, policy: EvictionPolicy[int]) -> ReplayResult:
    """Run a trace through a policy in a cache of ``policy.capacity`` blocks."""
    cached: set[int] = set()
    num_blocks = num_hits = 0
    for blocks in trace:
        num_found = next((index for index, block in enumerate(blocks) if block not in cached), len(blocks))
        num_blocks += len(blocks)
        num_hits += num_found
        for block in reversed(blocks[: policy.capacity]):  # from the end: the beginning is the most recent
            if block in cached:
                policy.use(block)
                continue
            if len(cached) >= policy.capacity:
                victim = policy.evict(_anything)
                assert victim is not None, "nothing is pinned"
                cached.remove(victim)
            cached.add(block)
            policy.insert(block)
    return ReplayResult(num_blocks, num_hits)


def clairvoyant(trace: Trace, capacity: int) -> ReplayResult:
    """Return the result of the best possible policy: it knows the future and evicts the block whose next use is farthest away.

    The beginning of a prompt is used again no later than its end, and ties are evicted from the end. So the policy keeps whole
    prefixes, and its hits are comparable with those of ``replay``.
    """
    uses: dict[int, list[int]] = {}
    for time, blocks in enumerate(trace):
        for block in blocks:
            uses.setdefault(block, []).append(time)
    for times in uses.values():
        times.reverse()  # the next use is the last item
    next_use: dict[int, float] = {}  # cached block -> time
    heap: list[tuple[float, int, int]] = []  # (-next use, -depth, block); out of date where next_use says otherwise
    num_blocks = num_hits = 0
    for blocks in trace:
        num_blocks += len(blocks)
        num_hits += next((index for index, block in enumerate(blocks) if block not in next_use), len(blocks))
        for depth, block in enumerate(blocks):
            uses[block].pop()
            following = float(uses[block][-1]) if uses[block] else math.inf
            next_use[block] = following
            heapq.heappush(heap, (-following, -depth, block))
        while len(next_use) > capacity:
            negated, _, block = heapq.heappop(heap)
            if next_use.get(block) == -negated:
                del next_use[block]
    return ReplayResult(num_blocks, num_hits)


def _anything(_: object) -> bool:
    return True
