"""Hits over several groups: the longest prefix after which every group can continue, found by its definition."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.kv.coordinator import get_kv_cache_coordinator
from core.kv.spec import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSizes,
    SlidingWindowSpec,
)

HASH_SIZE, UNIT, NUM_TOKENS = 16, 64, 640
SHAPE = {"num_kv_heads": 1, "head_dim": 8, "dtype_bytes": 2}
CHAIN = [bytes([index]) * 16 for index in range(NUM_TOKENS // HASH_SIZE)]

block_sizes = st.sampled_from([16, 32, 64])
specs = st.one_of(
    st.builds(lambda size: FullAttentionSpec(block_size=size, **SHAPE), block_sizes),
    st.builds(
        lambda size, window: SlidingWindowSpec(block_size=size, sliding_window=window, **SHAPE),
        block_sizes,
        st.sampled_from([1, 2, 16, 17, 33, 64, 65, 66, 130, 300]),
    ),
    st.builds(
        lambda size, chunk: ChunkedLocalAttentionSpec(block_size=size, attention_chunk_size=chunk, **SHAPE),
        block_sizes,
        st.sampled_from([64, 128, 192]),
    ),
)


def coordinator_of(specs, unit=UNIT, num_blocks=400):
    groups = tuple(KVCacheGroup((number,), spec) for number, spec in enumerate(specs))
    sizes = KVCacheSizes(
        scheduler_block_size=unit, hash_block_size=HASH_SIZE, max_in_flight_tokens=64, max_model_len=NUM_TOKENS
    )
    return get_kv_cache_coordinator(KVCacheConfig(num_blocks, groups), sizes, enable_caching=True)


def cache(coordinator, cached):
    """Make blocks hits by their positions, for each group; return the blocks by position."""
    pool = coordinator.block_pool
    known = []
    for manager, positions in zip(coordinator.managers, cached, strict=True):
        blocks = {}
        for index in sorted(positions):
            table = [pool.null_block] * index + pool.get_new_blocks(1)
            pool.cache_full_blocks(table, CHAIN, index, manager.block_size, manager.group_id)
            pool.free_blocks(table)
            blocks[index] = table[-1]
        known.append(blocks)
    return known


def needed_at(spec, length):
    """The blocks before ``length`` that the token there attends to."""
    return range(spec.num_skipped_tokens(length) // spec.block_size, length // spec.block_size)


def longest_hit(specs, cached, max_length):
    for length in range(max_length // UNIT * UNIT, 0, -UNIT):
        if all(set(needed_at(spec, length)) <= positions for spec, positions in zip(specs, cached, strict=True)):
            return length
    return 0


@st.composite
def caches(draw):
    found = draw(st.lists(specs, min_size=1, max_size=4))
    holes = [draw(st.sets(st.integers(0, NUM_TOKENS // spec.block_size - 1), max_size=5)) for spec in found]
    cached = [set(range(NUM_TOKENS // spec.block_size)) - hole for spec, hole in zip(found, holes, strict=True)]
    return found, cached


@pytest.mark.slow
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cache_state=caches(), max_length=st.integers(0, NUM_TOKENS))
def test_hit_is_the_longest_prefix_after_which_every_group_can_continue(cache_state, max_length):
    specs, cached = cache_state
    coordinator = coordinator_of(specs)
    known = cache(coordinator, cached)
    num_free = coordinator.block_pool.num_free_blocks
    tables, length = coordinator.find_longest_cache_hit(CHAIN, max_length)
    assert length == longest_hit(specs, cached, max_length)
    assert coordinator.block_pool.num_free_blocks == num_free  # no reference was taken
    for spec, blocks, table in zip(specs, known, tables, strict=True):
        assert len(table) == length // spec.block_size
        needed = needed_at(spec, length)
        for index, block in enumerate(table):
            assert block is blocks[index] if index in needed else block.is_null


def test_groups_that_shorten_each_other_in_turn_agree_in_the_end():
    """Of ten blocks each window lacks others, so that only what all three have in common is left."""
    spec = SlidingWindowSpec(block_size=64, sliding_window=65, **SHAPE)
    cached = [set(range(10)) - {9, 6, 3}, set(range(10)) - {8, 5}, set(range(10)) - {7, 4, 2}]
    coordinator = coordinator_of([spec] * 3)
    cache(coordinator, cached)
    assert coordinator.find_longest_cache_hit(CHAIN, NUM_TOKENS)[1] == 2 * 64


def test_prefix_that_the_full_layers_lost_is_no_hit_whatever_the_windows_hold():
    specs = [SlidingWindowSpec(block_size=16, sliding_window=17, **SHAPE), FullAttentionSpec(block_size=16, **SHAPE)]
    coordinator = coordinator_of(specs)
    cache(coordinator, [set(range(40)), set(range(40)) - {0}])
    assert coordinator.find_longest_cache_hit(CHAIN, NUM_TOKENS) == (coordinator.no_blocks, 0)


def test_prefix_whose_window_was_evicted_is_a_hit_up_to_the_window_before():
    specs = [SlidingWindowSpec(block_size=64, sliding_window=128, **SHAPE), FullAttentionSpec(block_size=64, **SHAPE)]
    coordinator = coordinator_of(specs)
    cache(coordinator, [{0, 1, 2, 3, 8}, set(range(10))])
    tables, length = coordinator.find_longest_cache_hit(CHAIN, NUM_TOKENS)
    assert length == 4 * 64
    assert [[block.is_null for block in table] for table in tables] == [[True, True, False, False], [False] * 4]


@pytest.mark.parametrize(("unit", "kept"), [(16, [0, 1, 2, 3, 4, 5, 6, 7]), (64, [3, 7]), (128, [7])])
def test_only_tails_of_windows_that_a_hit_can_use_become_hits(unit, kept):
    specs = [SlidingWindowSpec(block_size=16, sliding_window=16, **SHAPE), FullAttentionSpec(block_size=16, **SHAPE)]
    coordinator = coordinator_of(specs, unit)
    coordinator.allocate_new_computed_blocks("r", coordinator.no_blocks, 128, 0)
    coordinator.cache_blocks("r", CHAIN, 128)
    windowed, full = coordinator.get_blocks("r")
    assert [index for index, block in enumerate(windowed) if block.block_hash is not None] == kept
    assert all(block.block_hash is not None for block in full)


def test_last_block_of_a_chunk_is_never_a_hit_because_the_next_chunk_does_not_see_it():
    coordinator = coordinator_of([ChunkedLocalAttentionSpec(block_size=16, attention_chunk_size=64, **SHAPE)], unit=16)
    coordinator.allocate_new_computed_blocks("r", coordinator.no_blocks, 128, 0)
    coordinator.cache_blocks("r", CHAIN, 128)
    (blocks,) = coordinator.get_blocks("r")
    assert [index for index, block in enumerate(blocks) if block.block_hash is None] == [3, 7]


def test_every_group_keeps_its_hits_before_any_group_allocates():
    """A block for loaded tokens of one group must not be a hit of another, though that one is the next to be reused."""
    specs = [FullAttentionSpec(block_size=16, **SHAPE), SlidingWindowSpec(block_size=16, sliding_window=17, **SHAPE)]
    coordinator = coordinator_of(specs, unit=16, num_blocks=8)
    known = cache(coordinator, [{0, 1, 20, 21, 22, 23}, {1}])  # 20 to 23 were used after the hits
    pool = coordinator.block_pool
    pool.touch(known[0].values())
    pool.free_blocks([known[0][index] for index in (0, 1, 20, 21, 22, 23)])
    assert next(iter(pool.free_block_queue)) is known[1][1]
    hits, length = coordinator.find_longest_cache_hit(CHAIN, 32)
    assert length == 32
    coordinator.allocate_new_computed_blocks("r", hits, 48, 47)
    full, windowed = coordinator.get_blocks("r")
    assert full[:2] == [known[0][0], known[0][1]]
    assert windowed[1] is known[1][1]
    assert windowed[1].block_hash == CHAIN[1]
    assert {block.block_id for block in full}.isdisjoint(block.block_id for block in windowed)
