"""Chooses the blocks of the pool that are saved next, and pins them until they are copied.

A block is found by its hash, not through a request's table, so it can be saved after its request has ended, as long as it is
cached; a candidate that is not cached any more is dropped. A block is saved only if its seal says that it is complete. It is
pinned from then on until its copy is done, so preemption, abort and the end of its request do not affect the copy. While the
limit of pins is reached, candidates wait. Runs on the engine thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from itertools import islice

from connectors.tier.messages import SaveItem
from connectors.tier.prefix_lookup import PrefixLookup
from core.kv.block import KVCacheBlock
from core.kv.pool import BlockPool
from kvstore.key import StoreKey


class SavePlanner:
    """Candidates and pins. At most ``max_pinned`` blocks are pinned; excess candidates are dropped, the oldest first."""

    def __init__(self, pool: BlockPool, coordinator: PrefixLookup, max_pinned: int) -> None:
        self._pool = pool
        self._coordinator = coordinator
        self._max_pinned = max_pinned
        self._max_waiting = pool.num_usable_blocks
        self._waiting: dict[StoreKey, None] = {}
        self._pinned: dict[int, SaveItem] = {}  # by block id
        self._seen_generation: dict[int, int] = {}  # by block id: what the walk over the free blocks has saved
        self.num_missed = 0  # candidates that were gone, or not complete, when it was their turn

    @property
    def num_pinned(self) -> int:
        """Number of blocks pinned for saves."""
        return len(self._pinned)

    @property
    def pinned_block_ids(self) -> Collection[int]:
        """The blocks pinned for saves."""
        return self._pinned.keys()

    @property
    def can_save(self) -> bool:
        """True if a candidate can be saved now."""
        return bool(self._waiting) and len(self._pinned) < self._max_pinned

    @property
    def will_free_blocks(self) -> bool:
        """True if the end of a save will free a block."""
        return any(self._pool.blocks[block_id].ref_cnt == 1 for block_id in self._pinned)

    def offer(self, keys: Iterable[StoreKey]) -> None:
        """Add candidates, the most useful first: the beginning of a prompt before its end."""
        for key in keys:
            self._waiting.pop(key, None)
            self._waiting[key] = None
        for key in list(islice(self._waiting, max(0, len(self._waiting) - self._max_waiting))):
            del self._waiting[key]
            self.num_missed += 1

    def take(self) -> list[SaveItem]:
        """Pin and return the blocks to save now."""
        items: list[SaveItem] = []
        while self.can_save:
            key = next(iter(self._waiting))
            del self._waiting[key]
            block = self._pool.get_cached_block(key.block_hash, key.group_id)
            if block is None or not self._is_complete(block):
                self.num_missed += 1
            elif block.block_id not in self._pinned:
                items.append(self._pin(block, key))
        return items

    def take_before_eviction(self, num_blocks: int) -> list[SaveItem]:
        """Pin and return the unsaved ones among the next ``num_blocks`` blocks to be reused."""
        room = max(0, self._max_pinned - len(self._pinned))
        found = [
            block
            for block in islice(self._pool.free_block_queue, num_blocks)
            if block.block_hash is not None
            and self._seen_generation.get(block.block_id) != block.generation
            and self._is_complete(block)
        ]
        items = []
        for block in found[:room]:
            assert block.block_hash is not None
            self._seen_generation[block.block_id] = block.generation
            items.append(self._pin(block, self._coordinator.key_of(block.block_hash, block.group_id)))
        return items

    def end(self, block_ids: Iterable[int]) -> None:
        """Unpin copied blocks, the last ones first, so that the beginning of a prompt is reused last."""
        counts = Counter(block_ids)
        assert all(count == 1 and block_id in self._pinned for block_id, count in counts.items()), "a save has ended twice"
        for block_id in reversed(counts):
            del self._pinned[block_id]
            self._pool.free_blocks((self._pool.blocks[block_id],))

    def _pin(self, block: KVCacheBlock, key: StoreKey) -> SaveItem:
        self._pool.touch((block,))
        item = SaveItem(key, block.block_id, block.generation)
        self._pinned[block.block_id] = item
        return item

    def _is_complete(self, block: KVCacheBlock) -> bool:
        seals = self._pool.seals
        assert seals is not None
        return block.generation == seals.sealed_generation(block.block_id)
