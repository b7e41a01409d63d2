"""The rule of a hit in a tier is that of the pool."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.tier.prefix_lookup import PrefixLookup
from core.kv.coordinator import get_kv_cache_coordinator
from core.kv.spec import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSizes,
    SlidingWindowSpec,
)

NUM_TOKENS = 256
HASHES = [bytes([index]) * 16 for index in range(NUM_TOKENS // 16)]
LAYOUT = bytes(16)


def sizes(scheduler_block_size=32):
    return KVCacheSizes(
        scheduler_block_size=scheduler_block_size, hash_block_size=16, max_in_flight_tokens=64, max_model_len=NUM_TOKENS
    )


def full(block_size=32):
    return FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_dim=1, dtype_bytes=4)


def sliding(window, block_size=32):
    return SlidingWindowSpec(block_size=block_size, num_kv_heads=1, head_dim=1, dtype_bytes=4, sliding_window=window)


def chunked(chunk, block_size=32):
    return ChunkedLocalAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_dim=1, dtype_bytes=4, attention_chunk_size=chunk
    )


SPECS = st.one_of(
    st.builds(full, st.sampled_from([16, 32])),
    st.builds(sliding, st.integers(1, 150), st.sampled_from([16, 32])),
    st.builds(chunked, st.sampled_from([32, 64, 128]), st.sampled_from([16, 32])),
)


def hit_in_pool(specs, has_block):
    """Return what the pool calls a hit if it holds these blocks."""
    groups = tuple(KVCacheGroup((group,), spec) for group, spec in enumerate(specs))
    coordinator = get_kv_cache_coordinator(
        KVCacheConfig(1 + sum(NUM_TOKENS // s.block_size for s in specs), groups), sizes(), True
    )
    pool = coordinator.block_pool
    for group_id, spec in enumerate(specs):
        blocks = pool.get_new_blocks(NUM_TOKENS // spec.block_size)
        mask = [has_block(group_id, index) for index in range(len(blocks))]
        pool.cache_full_blocks(blocks, HASHES, 0, spec.block_size, group_id, block_mask=mask)
    return coordinator.find_longest_cache_hit(HASHES, NUM_TOKENS)[1]


@given(data=st.data(), specs=st.lists(SPECS, min_size=1, max_size=3), start=st.sampled_from([0, 32, 96, 160]))
def test_a_hit_ends_where_the_pool_would_end_it_if_it_had_the_blocks(data, specs, start):
    coordinator = PrefixLookup(specs, sizes(), LAYOUT)
    keys = coordinator.keys_between(HASHES, start, NUM_TOKENS)
    hits = data.draw(st.lists(st.booleans(), min_size=len(keys), max_size=len(keys)))
    present = {key for key, is_hit in zip(keys, hits, strict=True) if is_hit}

    def is_here_or_there(group_id, index):
        return index * specs[group_id].block_size < start or coordinator.key(HASHES, group_id, index) in present

    assert coordinator.find_hit(hits, start, NUM_TOKENS) == max(start, hit_in_pool(specs, is_here_or_there))


@given(specs=st.lists(SPECS, min_size=1, max_size=3), start=st.sampled_from([0, 64]), end=st.sampled_from([128, 256]))
def test_what_is_loaded_is_what_the_next_token_needs(specs, start, end):
    coordinator = PrefixLookup(specs, sizes(), LAYOUT)
    for group_id, indices in coordinator.needed(start, end):
        spec = specs[group_id]
        wanted = [
            index
            for index in range(start // spec.block_size, end // spec.block_size)
            if (index + 1) * spec.block_size > spec.num_skipped_tokens(end)
        ]
        assert list(indices) == wanted


def test_keys_name_the_chain_at_each_blocks_end():
    coordinator = PrefixLookup([full(32), sliding(40, 16)], sizes(), LAYOUT)
    keys = coordinator.keys_between(HASHES, 32, 96)
    assert [(key.block_hash, key.group_id) for key in keys] == [
        (HASHES[3], 0),
        (HASHES[5], 0),
        (HASHES[2], 1),
        (HASHES[3], 1),
        (HASHES[4], 1),
        (HASHES[5], 1),
    ]


def test_steps_in_flight_fill_blocks_of_every_group():
    assert PrefixLookup([full(32), sliding(40, 16)], sizes(), LAYOUT).num_blocks_in_flight == 2 + 4


@pytest.mark.parametrize("block_size", [24, 64])
def test_blocks_that_do_not_fit_are_refused(block_size):
    with pytest.raises(ValueError, match=str(block_size)):
        PrefixLookup([full(block_size)], sizes(), LAYOUT)
