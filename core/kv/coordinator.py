"""Keeps the groups of one KV cache in step: one request, one block table per group, one pool for all.

Owns the pool and one manager per group; adds up demand and makes every group move together. ``core.kv.manager`` decides whether
a request may have blocks. Which subclass serves a cache depends on how its prefix hits are found: never, in one group, or in
several whose hits are reconciled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Sequence

from core.kv.block import KVCacheBlock
from core.kv.hashing import ExtraKey
from core.kv.pool import BlockPool
from core.kv.seals import SealTable
from core.kv.single_type import get_manager_for_kv_cache_spec
from core.kv.spec import KVCacheConfig, KVCacheSizes

BlocksPerGroup = tuple[Sequence[KVCacheBlock], ...]


def _check_divisible(what: str, value: int, by: str, divisor: int) -> None:
    if value < 1 or divisor < 1 or value % divisor:
        raise ValueError(f"{what} {value} must be a positive multiple of {by} {divisor}")


class KVCacheCoordinator(ABC):
    """The groups of one KV cache.

    Prefix hits end at multiples of ``scheduler_block_size``, which every group's block size divides; every block size is a
    multiple of ``hash_block_size``, so that a block's hash is a value of the chain.
    Raises: ValueError, naming both sizes, if one of these does not hold.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        sizes: KVCacheSizes,
        enable_caching: bool,
        enable_kv_cache_events: bool = False,
        seals: SealTable | None = None,
    ) -> None:
        scheduler_block_size, hash_block_size = sizes.scheduler_block_size, sizes.hash_block_size
        _check_divisible("scheduler_block_size", scheduler_block_size, "hash_block_size", hash_block_size)
        for index, group in enumerate(kv_cache_config.groups):
            name = f"block_size of group {index},"
            _check_divisible(name, group.spec.block_size, "hash_block_size", hash_block_size)
            _check_divisible("scheduler_block_size", scheduler_block_size, name, group.spec.block_size)
        self.scheduler_block_size = scheduler_block_size
        self.hash_block_size = hash_block_size
        self.enable_caching = enable_caching
        num_blocks = kv_cache_config.num_blocks
        self.block_pool = BlockPool(num_blocks, enable_caching, hash_block_size, enable_kv_cache_events, seals)
        self.managers = tuple(
            get_manager_for_kv_cache_spec(group.spec, self.block_pool, index, sizes)
            for index, group in enumerate(kv_cache_config.groups)
        )
        # Empty for full attention: a decode step then pays nothing for windows.
        self._recycling_managers = tuple(manager for manager in self.managers if manager.spec.recycles)
        self.no_blocks: BlocksPerGroup = tuple(() for _ in self.managers)

    @abstractmethod
    def find_longest_cache_hit(self, block_hashes: Sequence[bytes], max_length: int) -> tuple[BlocksPerGroup, int]:
        """Return the tables of the longest prefix that is cached in every group, and its length in tokens."""

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: BlocksPerGroup,
        num_processed_tokens: int = 0,
        apply_admission_cap: bool = False,
    ) -> int:
        """Return how many free blocks all groups together take for ``num_tokens`` slots of the request."""
        num_blocks = 0
        for manager, blocks in zip(self.managers, new_computed_blocks, strict=True):
            num_blocks += manager.get_num_blocks_to_allocate(
                request_id, num_tokens, blocks, num_processed_tokens, apply_admission_cap
            )
        return num_blocks

    def allocate_new_computed_blocks(
        self, request_id: str, new_computed_blocks: BlocksPerGroup, num_computed_tokens: int, num_processed_tokens: int
    ) -> BlocksPerGroup:
        """Start the tables of a request: local hits, then blocks for the computed tokens that are loaded.

        In two phases: every group takes references of its hits before any group allocates, since an allocation may reuse
        a hit without references. Blocks that no token after ``num_processed_tokens`` attends to are left out.
        Returns the blocks of the second phase.
        """
        for manager, blocks in zip(self.managers, new_computed_blocks, strict=True):
            manager.add_local_computed_blocks(request_id, blocks, num_processed_tokens)
        return self.allocate_new_blocks(request_id, num_computed_tokens)

    def allocate_new_blocks(self, request_id: str, num_tokens: int) -> BlocksPerGroup:
        """Extend every table to ``num_tokens`` slots; return the blocks added."""
        return tuple(manager.allocate_new_blocks(request_id, num_tokens) for manager in self.managers)

    def has_request(self, request_id: str) -> bool:
        """Return True if the request holds tables."""
        return request_id in self.managers[0].req_to_blocks

    def get_blocks(self, request_id: str) -> BlocksPerGroup:
        """Return the tables of the request, empty ones if it has none. They are live: do not change them."""
        return tuple(manager.req_to_blocks.get(request_id, ()) for manager in self.managers)

    def remove_skipped_blocks(self, request_id: str, num_processed_tokens: int) -> None:
        """Free blocks that no token after ``num_processed_tokens`` attends to."""
        for manager in self._recycling_managers:
            manager.remove_skipped_blocks(request_id, num_processed_tokens)

    def cache_blocks(
        self,
        request_id: str,
        block_hashes: Sequence[bytes],
        num_tokens: int,
        token_ids: Sequence[int] = (),
        extra_keys: Sequence[ExtraKey] = (),
    ) -> None:
        """Make the full blocks of the first ``num_tokens`` tokens hits, in every group.

        ``token_ids`` and ``extra_keys`` are the request's; they go into the event.
        """
        for manager in self.managers:
            manager.cache_blocks(request_id, block_hashes, num_tokens, token_ids, extra_keys)

    def seal_blocks(self, request_id: str, block_hashes: Sequence[bytes], num_tokens: int) -> None:
        """Seal the full blocks of the first ``num_tokens`` tokens, in every group."""
        for manager in self.managers:
            manager.seal_blocks(request_id, block_hashes, num_tokens)

    def seal_partial_block(self, request_id: str, num_tokens: int, block_hash: bytes) -> None:
        """Seal the block in which the first ``num_tokens`` tokens end, in every group where they do not fill it."""
        for manager in self.managers:
            manager.seal_partial_block(request_id, num_tokens, block_hash)

    def rewrite_sealed(self, request_id: str, num_tokens: int) -> None:
        """Unseal the blocks that are written again from ``num_tokens`` on, in every group."""
        for manager in self.managers:
            manager.rewrite_sealed(request_id, num_tokens)

    def truncate(self, request_id: str, num_tokens: int) -> BlocksPerGroup:
        """Unhash the blocks beyond ``num_tokens`` and give them a new generation; return them."""
        beyond = tuple(manager.truncate(request_id, num_tokens) for manager in self.managers)
        for blocks in beyond:
            self.block_pool.invalidate_blocks(blocks)
        return beyond

    def drop_shared_tail(self, request_id: str, num_tokens: int, kept: Container[int]) -> list[KVCacheBlock]:
        """Drop the shared blocks after ``num_tokens`` from the tables; return them, in the order of their eviction."""
        return [block for manager in self.managers for block in manager.drop_shared_tail(request_id, num_tokens, kept)]

    def num_cached_tokens(self, request_id: str) -> int:
        """Return how many leading tokens of the request are hashed in every group, rounded down to where it can continue."""
        num_hashed = min(m.num_cached_block[request_id] * m.block_size for m in self.managers)
        return self.find_boundary(request_id, self.floor_to_boundary(num_hashed))

    def find_boundary(self, request_id: str, num_tokens: int) -> int:
        """Return where a hit may end, at most ``num_tokens``, so that every group holds what the next token needs."""
        while True:
            boundary = self.floor_to_boundary(min(manager.get_boundary(request_id, num_tokens) for manager in self.managers))
            if boundary == num_tokens:
                return boundary
            num_tokens = boundary

    def floor_to_boundary(self, num_tokens: int) -> int:
        """Round down to where a prefix hit may end."""
        return num_tokens - num_tokens % self.scheduler_block_size

    def pop_blocks(self, request_id: str) -> list[KVCacheBlock]:
        """End the request in every group; return its blocks in eviction order, the last tokens' first in all groups."""
        if len(self.managers) == 1:
            return self.managers[0].pop_blocks(request_id)
        by_end: list[tuple[int, KVCacheBlock]] = []
        for manager in self.managers:
            num_blocks = len(manager.req_to_blocks.get(request_id, ()))
            blocks = manager.pop_blocks(request_id)
            by_end += [((num_blocks - i) * manager.block_size, block) for i, block in enumerate(blocks)]
        by_end.sort(key=lambda entry: -entry[0])
        return [block for _, block in by_end]


class KVCacheCoordinatorNoPrefixCache(KVCacheCoordinator):
    """Any number of groups, never a hit."""

    def find_longest_cache_hit(self, block_hashes: Sequence[bytes], max_length: int) -> tuple[BlocksPerGroup, int]:
        """Return no blocks."""
        return self.no_blocks, 0

    def cache_blocks(
        self,
        request_id: str,
        block_hashes: Sequence[bytes],
        num_tokens: int,
        token_ids: Sequence[int] = (),
        extra_keys: Sequence[ExtraKey] = (),
    ) -> None:
        """Do nothing: no block is ever hashed."""


class UnitaryKVCacheCoordinator(KVCacheCoordinator):
    """One group: its hits are the hits."""

    def find_longest_cache_hit(self, block_hashes: Sequence[bytes], max_length: int) -> tuple[BlocksPerGroup, int]:
        """Ask the only group."""
        manager = self.managers[0]
        blocks = manager.find_longest_cache_hit(block_hashes, max_length)
        return (blocks,), len(blocks) * manager.block_size


class HybridKVCacheCoordinator(KVCacheCoordinator):
    """Several groups: a prefix is a hit up to where every group can continue."""

    def find_longest_cache_hit(self, block_hashes: Sequence[bytes], max_length: int) -> tuple[BlocksPerGroup, int]:
        """Ask the groups in turn, each for at most the length that the earlier ones accept, until all agree on one length.

        No group is ever asked for less than the answer: it accepts the answer, so it never returns less. Groups that keep every
        token come first and are asked once: any cut of their hit is a hit as well.
        """
        found: list[Sequence[KVCacheBlock]] = list(self.no_blocks)
        length = self.floor_to_boundary(max_length)
        recycling = self._recycling_managers
        for manager in self.managers:
            if not manager.spec.recycles and length:
                found[manager.group_id] = manager.find_longest_cache_hit(block_hashes, length)
                length = len(found[manager.group_id]) * manager.block_size
        num_agreed = 0
        while length and num_agreed < len(recycling):
            for manager in recycling:
                found[manager.group_id] = manager.find_longest_cache_hit(block_hashes, length)
                shorter = len(found[manager.group_id]) * manager.block_size
                num_agreed = num_agreed + 1 if shorter == length else 1
                length = shorter
                if not length or num_agreed == len(recycling):
                    break
        if not length:
            return self.no_blocks, 0
        return tuple(found[manager.group_id][: length // manager.block_size] for manager in self.managers), length


def get_kv_cache_coordinator(
    kv_cache_config: KVCacheConfig,
    sizes: KVCacheSizes,
    enable_caching: bool,
    enable_kv_cache_events: bool = False,
    seals: SealTable | None = None,
) -> KVCacheCoordinator:
    """Build the coordinator that a cache needs.

    Raises: ValueError for block sizes that do not fit together.
    """
    kind: type[KVCacheCoordinator] = KVCacheCoordinatorNoPrefixCache
    if enable_caching:
        kind = UnitaryKVCacheCoordinator if len(kv_cache_config.groups) == 1 else HybridKVCacheCoordinator
    return kind(kv_cache_config, sizes, enable_caching, enable_kv_cache_events, seals)
