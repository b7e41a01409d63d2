"""Block tables of one group: hits from the left, demand in blocks, hashing, rollback."""

import pytest

from core.kv.pool import BlockPool
from core.kv.single_type import FullAttentionManager, get_manager_for_kv_cache_spec
from core.kv.spec import KVCacheSizes, KVCacheSpec

SIZES = KVCacheSizes(scheduler_block_size=64, hash_block_size=16, max_in_flight_tokens=64, max_model_len=1024)


class UnknownSpec(KVCacheSpec):
    """A type without a manager."""

    def max_admission_blocks_per_request(self, max_in_flight_tokens, max_model_len):
        return 1


@pytest.fixture
def chain():
    return [bytes([index]) * 16 for index in range(16)]


@pytest.fixture
def manager(make_spec):
    pool = BlockPool(num_blocks=11, enable_caching=True, hash_block_size=16)
    return FullAttentionManager(make_spec(32), pool, group_id=0, scheduler_block_size=32)


def start(manager, request_id, num_tokens):
    manager.add_local_computed_blocks(request_id, (), 0)
    return manager.allocate_new_blocks(request_id, num_tokens)


def test_hit_ends_at_the_first_missing_block(manager, chain):
    blocks = start(manager, "a", 128)
    manager.cache_blocks("a", chain, 128)
    manager.block_pool.evict_blocks([blocks[2].block_id])
    assert manager.find_longest_cache_hit(chain, 256) == blocks[:2]


@pytest.mark.parametrize(("max_length", "alignment", "num_hits"), [(128, 32, 4), (127, 32, 3), (31, 32, 0), (127, 64, 2)])
def test_hit_is_cut_to_the_limit_and_the_alignment(manager, chain, max_length, alignment, num_hits):
    blocks = start(manager, "a", 128)
    manager.cache_blocks("a", chain, 128)
    manager.scheduler_block_size = alignment
    assert manager.find_longest_cache_hit(chain, max_length) == blocks[:num_hits]


def test_hit_needs_a_hash_for_every_token_of_its_blocks(manager, chain):
    blocks = start(manager, "a", 128)
    manager.cache_blocks("a", chain, 128)
    assert manager.find_longest_cache_hit(chain[:3], 128) == blocks[:1]


def test_demand_counts_hits_that_lie_in_the_free_queue(manager, chain):
    shared, evictable = start(manager, "a", 64)
    manager.cache_blocks("a", chain, 64)
    manager.block_pool.touch([shared])
    manager.block_pool.free_blocks(manager.pop_blocks("a"))
    assert manager.get_num_blocks_to_allocate("b", 96, [shared, evictable]) == 1 + 1
    assert manager.get_num_blocks_to_allocate("b", 64, [shared]) == 1


def test_demand_of_a_known_request_is_what_its_table_lacks(manager):
    start(manager, "a", 40)
    assert [manager.get_num_blocks_to_allocate("a", n, ()) for n in (1, 64, 65, 129)] == [0, 0, 1, 3]


def test_cap_limits_demand_for_admission_only(make_spec):
    pool = BlockPool(num_blocks=11, enable_caching=True, hash_block_size=16)
    manager = FullAttentionManager(make_spec(16), pool, 0, 16, max_admission_blocks=3)
    assert manager.get_num_blocks_to_allocate("a", 160, (), apply_admission_cap=True) == 3
    assert manager.get_num_blocks_to_allocate("a", 160, ()) == 10


def test_only_full_blocks_are_hashed_and_each_once(manager, chain):
    blocks = start(manager, "a", 96)
    manager.cache_blocks("a", chain, 63)
    manager.cache_blocks("a", chain, 64)
    manager.cache_blocks("a", chain, 40)
    assert [block.block_hash for block in blocks] == [chain[1], chain[3], None]
    assert manager.num_cached_block["a"] == 2


def test_rollback_returns_what_is_not_wholly_kept_and_allows_hashing_again(manager, chain):
    blocks = start(manager, "a", 128)
    manager.cache_blocks("a", chain, 128)
    assert manager.truncate("a", 70) == blocks[2:]
    manager.block_pool.invalidate_blocks(blocks[2:])
    manager.cache_blocks("a", chain, 128)
    assert [block.block_hash for block in blocks] == [chain[1], chain[3], chain[5], chain[7]]


def test_rollback_beyond_what_is_hashed_does_not_claim_more(manager, chain):
    start(manager, "a", 128)
    manager.cache_blocks("a", chain, 32)
    manager.truncate("a", 128)
    assert manager.num_cached_block["a"] == 1


def test_popped_blocks_come_last_first_and_leave_nothing(manager, chain):
    blocks = list(start(manager, "a", 96))
    assert manager.pop_blocks("a") == blocks[::-1]
    assert manager.pop_blocks("a") == []
    assert not manager.req_to_blocks
    assert not manager.num_cached_block


def test_hashing_more_tokens_than_there_are_blocks_is_caught(manager, chain):
    start(manager, "a", 32)
    with pytest.raises(AssertionError, match="no blocks for 64 tokens"):
        manager.cache_blocks("a", chain, 64)


def test_factory_knows_full_attention_and_refuses_the_rest(make_spec):
    pool = BlockPool(num_blocks=4, enable_caching=True, hash_block_size=16)
    manager = get_manager_for_kv_cache_spec(make_spec(64), pool, 1, SIZES)
    assert isinstance(manager, FullAttentionManager)
    assert (manager.block_size, manager.group_id, manager.max_admission_blocks) == (64, 1, None)
    with pytest.raises(ValueError, match="UnknownSpec"):
        get_manager_for_kv_cache_spec(UnknownSpec(block_size=16, num_kv_heads=1, head_dim=1, dtype_bytes=1), pool, 0, SIZES)
