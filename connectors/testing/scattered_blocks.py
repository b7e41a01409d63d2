"""A block pool that hands out its blocks in random order, as one may be after long use, whatever order its engine prefers.

A connector that mixes up blocks, or relies on neighbours, shows only on blocks that lie in different orders on both sides.
"""

from __future__ import annotations

import random

from core.kv.block import KVCacheBlock
from core.kv.pool import BlockPool


def scatter_blocks(pool: BlockPool, seed: str) -> None:
    """Shuffle the free blocks of a pool, and from now on those of every allocation. Equal seeds give equal orders."""
    dice, allocate = random.Random(seed), pool.get_new_blocks

    def get_new_blocks(count: int) -> list[KVCacheBlock]:
        blocks = allocate(count)
        dice.shuffle(blocks)
        return blocks

    pool.get_new_blocks = get_new_blocks  # type: ignore[method-assign]
    pool.free_blocks(pool.get_new_blocks(pool.num_free_blocks))
