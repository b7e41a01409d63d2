"""Sizes of blocks and requests, and that the pool is sized by the same number that caps admission."""

import pytest

from core.kv.spec import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheConfig, KVCacheGroup, SlidingWindowSpec

SHAPE = {"block_size": 16, "num_kv_heads": 3, "head_dim": 64, "dtype_bytes": 4}


def window(size, **shape):
    return SlidingWindowSpec(sliding_window=size, **SHAPE | shape)


def chunks(size, **shape):
    return ChunkedLocalAttentionSpec(attention_chunk_size=size, **SHAPE | shape)


def test_page_holds_keys_and_values_of_one_layer(make_spec):
    assert make_spec(64).page_size_bytes == 2 * 64 * 3 * 64 * 4


def test_block_of_a_group_holds_all_its_layers(make_spec):
    # SmolLM2-135M: 30 layers, 3 KV heads of 64, float32, blocks of 16 tokens.
    assert KVCacheConfig(2, (KVCacheGroup(tuple(range(30)), make_spec(16)),)).block_bytes == 720 * 1024


@pytest.mark.parametrize(("max_model_len", "num_blocks"), [(1, 1), (16, 1), (17, 2), (10_000, 625)])
def test_full_attention_keeps_every_token_whatever_is_in_flight(make_spec, max_model_len, num_blocks):
    assert make_spec(16).max_admission_blocks_per_request(1, max_model_len) == num_blocks
    assert make_spec(16).max_admission_blocks_per_request(10**6, max_model_len) == num_blocks


@pytest.mark.parametrize("field", ["block_size", "num_kv_heads", "head_dim", "dtype_bytes"])
def test_size_below_one_is_refused(field):
    sizes = {"block_size": 16, "num_kv_heads": 3, "head_dim": 64, "dtype_bytes": 4} | {field: 0}
    with pytest.raises(ValueError, match=f"{field} must be positive, not 0"):
        FullAttentionSpec(**sizes)


def test_cache_without_usable_block_or_group_is_refused(make_spec):
    with pytest.raises(ValueError, match="at least 2"):
        KVCacheConfig(1, (KVCacheGroup((0,), make_spec(16)),))
    with pytest.raises(ValueError, match="at least one group"):
        KVCacheConfig(8, ())


@pytest.mark.parametrize(
    ("spec", "in_flight", "max_model_len", "num_blocks"),
    [
        (window(128), 64, 10_000, 13),  # 191 tokens are 12 blocks, and one because the window starts anywhere
        (window(128), 64, 100, 8),
        (window(1), 1, 10_000, 2),
        (chunks(128), 64, 10_000, 12),  # chunks start where a block does
        (chunks(128), 64, 100, 7),
    ],
)
def test_recycling_types_hold_what_they_attend_to_and_what_is_in_flight(spec, in_flight, max_model_len, num_blocks):
    assert spec.max_admission_blocks_per_request(in_flight, max_model_len) == num_blocks


@pytest.mark.parametrize("spec", [window(512), chunks(512), FullAttentionSpec(**SHAPE)])
@pytest.mark.parametrize("in_flight", [1, 64, 4096])
def test_memory_is_the_bound_of_admission_in_bytes(spec, in_flight):
    num_blocks = spec.max_admission_blocks_per_request(in_flight, 10_000)
    assert spec.max_memory_usage_bytes(in_flight, 10_000) == num_blocks * spec.page_size_bytes


@pytest.mark.parametrize("spec", [window(40), window(1), window(16), window(33), chunks(32), chunks(64)])
@pytest.mark.parametrize("in_flight", [1, 7, 16, 50])
def test_no_request_ever_holds_more_than_the_bound(spec, in_flight):
    """Held before a chunk: the blocks from the first token that is still seen; then the chunk's own."""
    held = [-(-(start + in_flight) // 16) - spec.num_skipped_tokens(start) // 16 for start in range(500)]
    assert max(held) <= spec.max_admission_blocks_per_request(in_flight, 10_000)


def test_skipped_are_the_tokens_that_the_next_one_does_not_see():
    assert [window(4).num_skipped_tokens(n) for n in (0, 3, 4, 10)] == [0, 0, 1, 7]
    assert [window(1).num_skipped_tokens(n) for n in (0, 3)] == [0, 3]
    assert [chunks(16).num_skipped_tokens(n) for n in (0, 15, 16, 40)] == [0, 0, 16, 32]
    assert FullAttentionSpec(**SHAPE).num_skipped_tokens(1000) == 0


def test_windows_and_chunks_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="sliding_window must be positive, not 0"):
        window(0)
    with pytest.raises(ValueError, match="block_size must be positive"):
        window(4, block_size=0)
    with pytest.raises(ValueError, match="attention_chunk_size 40 is not a multiple of block_size 16"):
        chunks(40)


def test_longest_sequence_is_the_longest_that_the_pool_holds():
    groups = (KVCacheGroup((0,), FullAttentionSpec(**SHAPE)), KVCacheGroup((1,), window(33)))
    config = KVCacheConfig(11, groups)  # of 10 blocks the window takes 4 at most, with 16 tokens in flight
    assert config.num_blocks_of_sequence(96, 16, 1000) == 6 + 4
    assert config.num_blocks_of_sequence(97, 16, 1000) == 7 + 4
    assert config.max_tokens_of_sequence(16, 1000) == 96
    assert config.max_tokens_of_sequence(16, 50) == 50
    assert KVCacheConfig(2, groups).max_tokens_of_sequence(16, 1000) == 0
