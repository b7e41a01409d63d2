"""Checks the invariants of ``core.kv`` and returns the violations.

Takes time in proportion to the pool, so tests and the simulation use it and a serving engine does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from core.kv.block import KVCacheBlock
from core.kv.manager import KVCacheManager
from core.kv.pool import BlockPool, cache_key
from core.kv.seals import BROKEN, SealTable, decode_seal
from core.kv.single_type import SingleTypeKVCacheManager


def find_violations(manager: KVCacheManager, held: Mapping[int, int] | None = None) -> list[str]:
    """Describe every broken invariant, none if all hold.

    ``held`` counts references per block id that no block table accounts for: leases, pins, deferred frees.
    """
    pool = manager.block_pool
    return [
        *_check_free_queue(pool),
        *_check_references(manager, Counter(held or {})),
        *_check_prefix_map(pool),
        *_check_tables(manager),
        *_check_null_block(pool),
        *_check_seals(pool),
    ]


def _check_free_queue(pool: BlockPool) -> Iterator[str]:
    queued: list[KVCacheBlock] = []
    for block in pool.free_block_queue:
        queued.append(block)
        if len(queued) > pool.num_blocks:
            yield "free queue has a cycle"
            return
        after = block.next_free_block
        if after is None or after.prev_free_block is not block:
            yield f"links after {block} do not match"
    if len(queued) != pool.num_free_blocks:
        yield f"free queue counts {pool.num_free_blocks} blocks and links {len(queued)}"
    free_ids = {block.block_id for block in queued}
    for block in pool.blocks:
        is_free = block.ref_cnt == 0 and not block.is_null
        if is_free != (block.block_id in free_ids):
            yield f"{block} is {'not ' if is_free else ''}in the free queue"


def _check_references(manager: KVCacheManager, held: Counter[int]) -> Iterator[str]:
    expected = held.copy()
    for group in manager.coordinator.managers:
        for blocks in group.req_to_blocks.values():
            expected.update(block.block_id for block in blocks if not block.is_null)
    for block in manager.block_pool.blocks:
        if block.ref_cnt != expected[block.block_id]:
            yield f"{block} should have {expected[block.block_id]} references"


def _check_prefix_map(pool: BlockPool) -> Iterator[str]:
    mapped: set[int] = set()
    for key, blocks in pool.cached_blocks.items():
        for block in blocks:
            if block.block_id in mapped:
                yield f"{block} is in the prefix map twice"
            mapped.add(block.block_id)
            if block.block_hash is None or cache_key(block.block_hash, block.group_id) != key:
                yield f"{block} is in the prefix map under {key.hex()}"
    for block in pool.blocks:
        if block.block_hash is not None and block.block_id not in mapped:
            yield f"{block} is hashed but not in the prefix map"


def _check_tables(manager: KVCacheManager) -> Iterator[str]:
    groups = manager.coordinator.managers
    for group in groups:
        if group.req_to_blocks.keys() != groups[0].req_to_blocks.keys():
            yield f"group {group.group_id} holds other requests than group 0"
        if not group.req_to_blocks.keys() == group.num_cached_block.keys() == group.num_sealed_block.keys():
            yield f"group {group.group_id} has tables and counts of cached or sealed blocks for different requests"
        for request_id in group.req_to_blocks:
            yield from _check_table(group, request_id)


def _check_table(group: SingleTypeKVCacheManager, request_id: str) -> Iterator[str]:
    name, blocks = f"table of {request_id} in group {group.group_id}", group.req_to_blocks[request_id]
    ids = [block.block_id for block in blocks if not block.is_null]
    if len(ids) != len(set(ids)):
        yield f"{name} holds a block twice"
    for prefix, counts in (("cached", group.num_cached_block), ("sealed", group.num_sealed_block)):
        if counts.get(request_id, 0) > len(blocks):
            yield f"{name} is shorter than its {prefix} prefix"
    num_null = group.num_null_blocks(request_id)
    if [block.is_null for block in blocks] != [index < num_null for index in range(len(blocks))]:
        yield f"{name} should have {num_null} null blocks, all at its head"
    if group.max_admission_blocks is not None and len(ids) > group.max_admission_blocks:
        yield f"{name} holds {len(ids)} blocks, more than the {group.max_admission_blocks} it was admitted by"


def _check_null_block(pool: BlockPool) -> Iterator[str]:
    null = pool.blocks[0]
    if not null.is_null or null.ref_cnt or null.generation or null.block_hash is not None:
        yield f"null block changed: {null}, generation {null.generation}"


def _check_seals(pool: BlockPool) -> Iterator[str]:
    """A seal is that of the block's present life, and of the content that the prefix map knows it by."""
    seals = pool.seals
    if seals is None:
        return
    for block in pool.blocks:
        if seals.sealed_generation(block.block_id) != BROKEN:
            yield from _check_seal(block, seals)


def _check_seal(block: KVCacheBlock, seals: SealTable) -> Iterator[str]:
    seal = decode_seal(seals.row(block.block_id))
    if seal is None:
        yield f"{block} has a seal that cannot be read"
    elif (seal.incarnation, seal.generation) != (seals.incarnation, block.generation):
        yield f"{block} has a seal of another life: {seal}"
    elif block.block_hash is not None and (seal.block_hash, seal.group_id) != (block.block_hash, block.group_id):
        yield f"{block} has the seal of another content: {seal}"
