"""The free queue, the order of reuse, reference counts, the prefix map and its events."""

import pytest

from core.kv.block import KVCacheBlock
from core.kv.events import AllBlocksCleared, BlockRemoved, BlockStored
from core.kv.pool import BlockPool, FreeKVCacheBlockQueue


def hash_of(index: int) -> bytes:
    return index.to_bytes(16, "big")


def ids(blocks) -> list[int]:
    return [block.block_id for block in blocks]


@pytest.fixture
def queue_blocks():
    return [KVCacheBlock(block_id) for block_id in range(5)]


@pytest.fixture
def queue(queue_blocks):
    return FreeKVCacheBlockQueue(queue_blocks)


@pytest.fixture
def pool():
    return BlockPool(num_blocks=6, enable_caching=True, hash_block_size=16, enable_kv_cache_events=True)


def cache(pool, blocks, first_hash=0, block_size=16, group_id=0):
    k = block_size // 16
    chain = [hash_of(first_hash + index) for index in range(len(blocks) * k)]
    pool.cache_full_blocks(blocks, chain, 0, block_size, group_id)


# ---- free queue ------------------------------------------------------------------------------------------------------


def test_queue_starts_in_block_order(queue):
    assert ids(queue) == [0, 1, 2, 3, 4]
    assert queue.num_free_blocks == 5


@pytest.mark.parametrize("position", range(5))
def test_queue_removes_a_block_anywhere(queue, queue_blocks, position):
    queue.remove(queue_blocks[position])
    assert ids(queue) == [block_id for block_id in range(5) if block_id != position]
    assert queue.num_free_blocks == 4


def test_queue_refuses_to_remove_a_block_it_does_not_hold(queue):
    block = queue.popleft()
    with pytest.raises(RuntimeError, match="not in the free queue"):
        queue.remove(block)


def test_queue_pops_from_the_left_and_appends_at_the_end(queue):
    taken = queue.popleft_n(3)
    assert ids(taken) == [0, 1, 2]
    queue.append_n(taken[1:])
    queue.append(taken[0])
    assert ids(queue) == [3, 4, 1, 2, 0]


def test_queue_prepends_in_the_given_order(queue, queue_blocks):
    queue.popleft_n(4)
    queue.prepend_n([queue_blocks[2], queue_blocks[0]])
    assert ids(queue) == [2, 0, 4]


def test_queue_refuses_to_pop_more_than_it_holds_and_keeps_all(queue):
    with pytest.raises(ValueError, match="cannot take 6 blocks, 5 are free"):
        queue.popleft_n(6)
    assert ids(queue) == [0, 1, 2, 3, 4]
    queue.popleft_n(5)
    with pytest.raises(ValueError, match="0 are free"):
        queue.popleft()
    assert ids(queue) == []


def test_queue_refuses_a_block_it_holds_already(queue, queue_blocks):
    with pytest.raises(AssertionError, match="already"):
        queue.append(queue_blocks[2])


# ---- allocation and reuse --------------------------------------------------------------------------------------------


def test_null_block_is_never_handed_out(pool):
    assert pool.num_usable_blocks == pool.num_free_blocks == 5
    assert ids(pool.get_new_blocks(5)) == [1, 2, 3, 4, 5]
    assert pool.usage == 1.0


@pytest.mark.parametrize("num_blocks", [0, 1])
def test_pool_without_a_usable_block_is_refused(num_blocks):
    with pytest.raises(ValueError, match="at least 2"):
        BlockPool(num_blocks, True, 16)


def test_too_large_an_allocation_changes_nothing(pool):
    cache(pool, pool.get_new_blocks(2))
    generations = [block.generation for block in pool.blocks]
    with pytest.raises(ValueError, match="cannot take 4 blocks, 3 are free"):
        pool.get_new_blocks(4)
    assert [block.generation for block in pool.blocks] == generations
    assert pool.num_free_blocks == 3


def test_unhashed_blocks_are_reused_before_hashed_ones(pool):
    hashed = pool.get_new_blocks(2)
    unhashed = pool.get_new_blocks(2)
    cache(pool, hashed)
    pool.free_blocks(reversed(hashed))
    pool.free_blocks(reversed(unhashed))
    assert [ids(pool.get_new_blocks(1)) for _ in range(5)] == [[4], [3], [5], [2], [1]]


def test_freed_hits_are_reused_least_recently_freed_first_and_tail_before_head(pool):
    first, second = pool.get_new_blocks(2), pool.get_new_blocks(2)
    cache(pool, first, 0)
    cache(pool, second, 10)
    pool.free_blocks(reversed(second))
    pool.free_blocks(reversed(first))
    pool.get_new_blocks(1)  # block 5, never used
    assert [ids(pool.get_new_blocks(1)) for _ in range(4)] == [[4], [3], [2], [1]]


def test_blocks_of_one_allocation_come_in_the_order_of_their_ids(pool):
    """Neighbours in a prompt are neighbours in memory, whatever was freed when: transports read such runs at once."""
    pool.free_blocks(reversed(pool.get_new_blocks(5)))
    assert [block.block_id for block in pool.free_block_queue] == [5, 4, 3, 2, 1]
    assert ids(pool.get_new_blocks(3)) == [3, 4, 5]
    assert ids(pool.get_new_blocks(2)) == [1, 2]


def test_without_caching_every_freed_block_is_reused_at_once():
    pool = BlockPool(num_blocks=4, enable_caching=False, hash_block_size=16)
    pool.free_blocks(pool.get_new_blocks(2))
    assert ids(pool.get_new_blocks(3)) == [1, 2, 3]


def test_shared_block_is_free_only_after_its_last_reference(pool):
    (block,) = pool.get_new_blocks(1)
    pool.touch([block])
    pool.free_blocks([block])
    assert pool.num_free_blocks == 4
    pool.free_blocks([block])
    assert pool.num_free_blocks == 5


def test_touch_saves_a_hit_from_reuse(pool):
    block = pool.get_new_blocks(1)[0]
    cache(pool, [block])
    pool.free_blocks([block])
    pool.touch([block])
    assert block.block_id not in ids(pool.get_new_blocks(4))
    assert pool.get_cached_block(hash_of(0), 0) is block


def test_double_free_is_caught(pool):
    (block,) = pool.get_new_blocks(1)
    pool.free_blocks([block])
    with pytest.raises(AssertionError, match="more often than referenced"):
        pool.free_blocks([block])


# ---- prefix map ------------------------------------------------------------------------------------------------------


def test_freed_content_is_a_hit_until_the_block_is_reused(pool):
    blocks = pool.get_new_blocks(2)
    cache(pool, blocks)
    pool.free_blocks(reversed(blocks))
    assert [pool.get_cached_block(hash_of(index), 0) for index in range(2)] == blocks
    pool.get_new_blocks(4)  # three unused blocks and the tail
    assert [pool.get_cached_block(hash_of(index), 0) for index in range(2)] == [blocks[0], None]


def test_groups_do_not_hit_each_others_blocks(pool):
    left, right = pool.get_new_blocks(2)
    cache(pool, [left], group_id=0)
    cache(pool, [right], group_id=1)
    assert pool.get_cached_block(hash_of(0), 0) is left
    assert pool.get_cached_block(hash_of(0), 1) is right
    assert pool.get_cached_block(hash_of(0), 2) is None


def test_second_copy_of_a_content_takes_over_when_the_first_goes(pool):
    first, second, third = pool.get_new_blocks(3)
    for block in (first, second, third):
        cache(pool, [block])
    assert pool.get_cached_block(hash_of(0), 0) is first
    pool.evict_blocks([first.block_id])
    assert pool.get_cached_block(hash_of(0), 0) is second
    pool.evict_blocks([third.block_id, second.block_id])
    assert pool.get_cached_block(hash_of(0), 0) is None
    assert len(pool.cached_blocks) == 0


def test_large_block_takes_the_chain_value_at_its_end(pool):
    blocks = pool.get_new_blocks(2)
    cache(pool, blocks, block_size=64)
    assert [block.block_hash for block in blocks] == [hash_of(3), hash_of(7)]


def test_caching_skips_null_blocks_and_those_done_before(pool):
    blocks = pool.get_new_blocks(2)
    chain = [hash_of(index) for index in range(3)]
    pool.cache_full_blocks([blocks[0], pool.null_block, blocks[1]], chain, 1, 16, 0)
    assert [block.block_hash for block in blocks] == [None, hash_of(2)]
    assert pool.null_block.block_hash is None


def test_rehashing_a_block_is_harmless_with_the_same_content_only(pool):
    (block,) = pool.get_new_blocks(1)
    cache(pool, [block])
    cache(pool, [block])
    with pytest.raises(AssertionError):
        cache(pool, [block], first_hash=9)
    assert pool.get_cached_block(hash_of(0), 0) is block


def test_eviction_keeps_references_and_generation(pool):
    (block,) = pool.get_new_blocks(1)
    cache(pool, [block])
    generation = block.generation
    pool.evict_blocks([block.block_id])
    pool.evict_blocks([block.block_id])
    assert (block.block_hash, block.ref_cnt, block.generation) == (None, 1, generation)


@pytest.mark.parametrize("bad_id", [-1, 6])
def test_eviction_of_a_block_outside_the_pool_changes_nothing(pool, bad_id):
    (block,) = pool.get_new_blocks(1)
    cache(pool, [block])
    with pytest.raises(ValueError, match=f"block id {bad_id} is outside the pool of 6 blocks"):
        pool.evict_blocks([block.block_id, bad_id])
    assert block.block_hash == hash_of(0)


def test_invalidated_block_loses_its_hash_and_its_name(pool):
    hashed, unhashed = pool.get_new_blocks(2)
    cache(pool, [hashed])
    pool.invalidate_blocks([hashed, unhashed, pool.null_block])
    assert pool.get_cached_block(hash_of(0), 0) is None
    assert (hashed.generation, unhashed.generation, pool.null_block.generation) == (2, 2, 0)


def test_reset_is_refused_while_a_block_is_referenced(pool):
    blocks = pool.get_new_blocks(2)
    cache(pool, blocks)
    pool.free_blocks([blocks[0]])
    pool.take_events()
    assert not pool.reset_prefix_cache()
    assert pool.get_cached_block(hash_of(0), 0) is blocks[0]
    assert pool.take_events() == []
    pool.free_blocks([blocks[1]])
    assert pool.reset_prefix_cache()
    assert pool.get_cached_block(hash_of(0), 0) is None
    assert pool.get_cached_block(hash_of(1), 0) is None
    assert pool.take_events() == [AllBlocksCleared()]


# ---- events ----------------------------------------------------------------------------------------------------------


def test_stored_event_names_the_new_blocks_and_the_one_before(pool):
    blocks = pool.get_new_blocks(3)
    chain = [hash_of(index) for index in range(12)]
    pool.cache_full_blocks(blocks[:1], chain, 0, 64, 2)
    pool.cache_full_blocks(blocks, chain, 1, 64, 2, range(200))
    assert pool.take_events() == [
        BlockStored((hash_of(3),), None, 64, 2),
        BlockStored((hash_of(7), hash_of(11)), hash_of(3), 64, 2, tuple(range(64, 192))),
    ]
    assert pool.take_events() == []


def test_stored_event_says_what_else_entered_the_hashes(pool):
    blocks = pool.get_new_blocks(3)
    chain = [hash_of(index) for index in range(3)]
    keys = (("mm", b"i" * 16, 20, 4), ("cache_salt", "tenant"))
    pool.cache_full_blocks(blocks, chain, 0, 16, 0, range(48), extra_keys=keys)
    (event,) = pool.take_events()
    assert event.extra_keys == ((("cache_salt", "tenant"),), (("mm", b"i" * 16, 4),), ())


def test_removed_event_comes_with_the_last_copy(pool):
    first, second = pool.get_new_blocks(2)
    cache(pool, [first])
    cache(pool, [second])
    pool.take_events()
    pool.evict_blocks([first.block_id])
    assert pool.take_events() == []
    pool.free_blocks([second])
    pool.get_new_blocks(4)
    assert pool.take_events() == [BlockRemoved((hash_of(0),), 0)]


def test_no_events_are_kept_unless_asked_for():
    pool = BlockPool(num_blocks=3, enable_caching=True, hash_block_size=16)
    blocks = pool.get_new_blocks(2)
    cache(pool, blocks)
    pool.evict_blocks(ids(blocks))
    pool.free_blocks(blocks)
    pool.reset_prefix_cache()
    assert pool.take_events() == []
