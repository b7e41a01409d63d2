"""Groups in step: sizes that fit together, and two-phase adoption of hits."""

import pytest

from core.kv.coordinator import (
    HybridKVCacheCoordinator,
    KVCacheCoordinatorNoPrefixCache,
    UnitaryKVCacheCoordinator,
    get_kv_cache_coordinator,
)
from core.kv.spec import KVCacheSizes


def sizes(scheduler_block_size, hash_block_size=16):
    return KVCacheSizes(
        scheduler_block_size=scheduler_block_size,
        hash_block_size=hash_block_size,
        max_in_flight_tokens=64,
        max_model_len=1024,
    )


@pytest.mark.parametrize(
    ("scheduler_block_size", "hash_block_size", "block_size", "message"),
    [
        (24, 16, 24, "scheduler_block_size 24 must be a positive multiple of hash_block_size 16"),
        (8, 16, 8, "scheduler_block_size 8 must be a positive multiple of hash_block_size 16"),
        (48, 16, 24, "block_size of group 0, 24 must be a positive multiple of hash_block_size 16"),
        (48, 16, 8, "block_size of group 0, 8 must be a positive multiple of hash_block_size 16"),
        (48, 16, 32, "scheduler_block_size 48 must be a positive multiple of block_size of group 0, 32"),
        (16, 16, 32, "scheduler_block_size 16 must be a positive multiple of block_size of group 0, 32"),
        (16, 0, 16, "scheduler_block_size 16 must be a positive multiple of hash_block_size 0"),
        (0, 16, 16, "scheduler_block_size 0 must be a positive multiple of hash_block_size 16"),
    ],
)
@pytest.mark.parametrize("enable_caching", [True, False])
def test_sizes_that_do_not_fit_are_refused_by_name(
    make_config, scheduler_block_size, hash_block_size, block_size, message, enable_caching
):
    config = make_config(block_sizes=(block_size,))
    with pytest.raises(ValueError, match=message):
        get_kv_cache_coordinator(config, sizes(scheduler_block_size, hash_block_size), enable_caching)


def test_any_group_may_be_the_one_that_does_not_fit(make_config):
    with pytest.raises(ValueError, match="block_size of group 1, 24"):
        get_kv_cache_coordinator(make_config(block_sizes=(16, 24)), sizes(48), enable_caching=False)


def test_kind_follows_caching_and_the_number_of_groups(make_config):
    assert type(get_kv_cache_coordinator(make_config(), sizes(16), True)) is UnitaryKVCacheCoordinator
    two_groups = make_config(block_sizes=(16, 32))
    assert type(get_kv_cache_coordinator(two_groups, sizes(32), False)) is KVCacheCoordinatorNoPrefixCache
    assert type(get_kv_cache_coordinator(two_groups, sizes(32), True)) is HybridKVCacheCoordinator


def test_hits_end_at_multiples_of_the_scheduler_block_size(make_config):
    coordinator = get_kv_cache_coordinator(make_config(), sizes(32), True)
    chain = [bytes([index]) * 16 for index in range(3)]
    coordinator.allocate_new_computed_blocks("a", coordinator.no_blocks, 48, 48)
    coordinator.cache_blocks("a", chain, 48)
    (blocks,), num_tokens = coordinator.find_longest_cache_hit(chain, 48)
    assert ([block.block_id for block in blocks], num_tokens) == ([1, 2], 32)


def test_no_group_allocates_over_the_hits_of_another(make_config):
    """The first group's blocks for loaded tokens must not be the second group's hits, which lie free until adopted."""
    coordinator = get_kv_cache_coordinator(make_config(num_blocks=7, block_sizes=(16, 16)), sizes(16), False)
    hit_of_second = coordinator.block_pool.blocks[1]  # at the head of the free queue: the next to be allocated
    added = coordinator.allocate_new_computed_blocks("a", ((), (hit_of_second,)), 32, 32)
    assert [[block.block_id for block in blocks] for blocks in added] == [[2, 3], [4]]
    first, second = coordinator.get_blocks("a")
    assert second[0] is hit_of_second
    assert hit_of_second not in first


def test_demand_and_end_of_a_request_cover_all_groups(make_config):
    coordinator = get_kv_cache_coordinator(make_config(block_sizes=(16, 64)), sizes(64), False)
    assert coordinator.get_num_blocks_to_allocate("a", 65, coordinator.no_blocks) == 5 + 2
    coordinator.allocate_new_computed_blocks("a", coordinator.no_blocks, 65, 65)
    assert [len(blocks) for blocks in coordinator.get_blocks("a")] == [5, 2]
    assert len(coordinator.pop_blocks("a")) == 7
    assert not coordinator.has_request("a")


def test_groups_must_be_given_hits_each(make_config):
    coordinator = get_kv_cache_coordinator(make_config(block_sizes=(16, 64)), sizes(64), False)
    with pytest.raises(ValueError, match="shorter"):
        coordinator.get_num_blocks_to_allocate("a", 65, ((),))
