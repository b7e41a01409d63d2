"""Sizes of blocks and requests, and that the pool is sized by the same number that caps admission."""

import pytest

from core.kv.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup


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
