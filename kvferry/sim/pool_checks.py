"""Rules that must hold right after a call of a pool, even if no answer would reveal a violation later.

A block that is allocated, rewritten, invalidated or evicted has lost its seal; after a new generation, no earlier seal or
handoff may match it. Wraps the methods of one pool and one manager.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from core.kv.block import KVCacheBlock
from core.kv.manager import KVCacheManager
from core.kv.seals import BROKEN


class PoolChecks:
    """Watches one pool. ``complain`` receives violations."""

    def __init__(self, name: str, manager: KVCacheManager, complain: Callable[[str], None]) -> None:
        self._name = name
        self._pool = pool = manager.block_pool
        self._complain = complain
        self._generations = [block.generation for block in pool.blocks]  # the newest seen of each block
        get_new, rewrite, invalidate = pool.get_new_blocks, pool.rewrite_blocks, pool.invalidate_blocks
        evict, evict_by_manager = pool.evict_blocks, manager.evict_blocks

        def get_new_blocks(count: int) -> list[KVCacheBlock]:
            blocks = get_new(count)
            self._check_new_generation(blocks, "allocated")
            return blocks

        def rewrite_blocks(blocks: Iterable[KVCacheBlock]) -> None:
            rewritten = [block for block in blocks if not block.is_null]
            rewrite(rewritten)
            self._check_new_generation(rewritten, "rewritten")

        def invalidate_blocks(blocks: Iterable[KVCacheBlock]) -> None:
            invalid = [block for block in blocks if not block.is_null]
            invalidate(invalid)
            self._check_unhashed(invalid, "invalid")

        def evict_blocks(block_ids: Iterable[int]) -> None:
            ids = list(block_ids)
            evict(ids)
            self._check_evicted(ids)

        def evict_blocks_by_manager(block_ids: Iterable[int]) -> None:
            ids = list(block_ids)
            evict_by_manager(ids)
            self._check_evicted(ids)

        for owner, wrapped in (
            (pool, (get_new_blocks, rewrite_blocks, invalidate_blocks, evict_blocks)),
            (manager, (evict_blocks_by_manager,)),
        ):
            for method in wrapped:
                setattr(owner, method.__name__.removesuffix("_by_manager"), method)

    def _check_new_generation(self, blocks: Iterable[KVCacheBlock], how: str) -> None:
        for block in blocks:
            if block.generation <= self._generations[block.block_id]:
                self._complain(f"{self._name}: {block} was {how} without a new generation")
            self._generations[block.block_id] = block.generation
            self._check_unsealed(block, how)

    def _check_evicted(self, block_ids: Iterable[int]) -> None:
        blocks = [self._pool.blocks[block_id] for block_id in block_ids]
        self._check_unhashed(blocks, "evicted")
        for block in blocks:
            self._check_unsealed(block, "evicted")

    def _check_unhashed(self, blocks: Iterable[KVCacheBlock], how: str) -> None:
        for block in blocks:
            if block.block_hash is not None:
                self._complain(f"{self._name}: {block} is {how}, and still a hit")

    def _check_unsealed(self, block: KVCacheBlock, how: str) -> None:
        seals = self._pool.seals
        if seals is not None and not block.is_null and seals.sealed_generation(block.block_id) != BROKEN:
            self._complain(f"{self._name}: {block} was {how}, and is still sealed")
