"""The life-cycle table of ``core.kv.block``, row by row, on a real pool."""

import pytest

from core.kv.block import BlockState, KVCacheBlock
from core.kv.pool import BlockPool


@pytest.fixture
def pool():
    return BlockPool(num_blocks=3, enable_caching=True, hash_block_size=16)


def test_null_block_is_null_forever(pool):
    assert pool.null_block.state is BlockState.NULL
    pool.touch([pool.null_block])
    pool.free_blocks([pool.null_block])
    pool.get_new_blocks(2)
    assert pool.null_block.state is BlockState.NULL


def test_unhashed_block_goes_from_free_to_allocated_and_back(pool):
    assert pool.blocks[1].state is BlockState.FREE
    (block,) = pool.get_new_blocks(1)
    assert block.state is BlockState.ALLOCATED
    pool.free_blocks([block])
    assert block.state is BlockState.FREE


def test_hashed_block_stays_a_hit_after_its_free_and_keeps_its_generation_on_a_hit(pool):
    (block,) = pool.get_new_blocks(1)
    pool.cache_full_blocks([block], [b"h" * 16], 0, 16, 0)
    assert block.state is BlockState.FULL
    pool.free_blocks([block])
    assert block.state is BlockState.EVICTABLE
    generation = block.generation
    pool.touch([block])
    assert block.state is BlockState.FULL
    assert block.generation == generation


def test_reuse_ends_the_content_and_starts_a_generation(pool):
    (block,) = pool.get_new_blocks(1)
    pool.cache_full_blocks([block], [b"h" * 16], 0, 16, 0)
    pool.free_blocks([block])
    generation = block.generation
    pool.get_new_blocks(2)
    assert block.state is BlockState.ALLOCATED
    assert block.generation == generation + 1


def test_block_that_loses_its_hash_is_allocated_or_free(pool):
    (block,) = pool.get_new_blocks(1)
    pool.cache_full_blocks([block], [b"h" * 16], 0, 16, 0)
    pool.evict_blocks([block.block_id])
    assert block.state is BlockState.ALLOCATED
    pool.free_blocks([block])
    assert block.state is BlockState.FREE


def test_repr_names_state_and_generation():
    block = KVCacheBlock(7, ref_cnt=2, block_hash=bytes.fromhex("0123456789abcdef"), generation=3)
    assert repr(block) == "KVCacheBlock(id=7, full, refs=2, hash=01234567, generation=3)"
