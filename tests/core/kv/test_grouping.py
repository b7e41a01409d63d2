"""Layers are grouped by what they keep, in groups of equal size, into one pool."""

import pytest

from core.kv.grouping import group_layers
from core.kv.spec import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheConfig, SlidingWindowSpec

SHAPE = {"block_size": 16, "num_kv_heads": 1, "head_dim": 256, "dtype_bytes": 2}
FULL = FullAttentionSpec(**SHAPE)
WINDOW = SlidingWindowSpec(sliding_window=512, **SHAPE)
CHUNK = ChunkedLocalAttentionSpec(attention_chunk_size=64, **SHAPE)


def test_gemma_3_has_six_groups_of_three_layers():
    groups = group_layers([FULL if layer % 6 == 5 else WINDOW for layer in range(18)])
    assert [group.layer_indices for group in groups] == [
        (0, 1, 2),
        (3, 4, 6),
        (5, 11, 17),
        (7, 8, 9),
        (10, 12, 13),
        (14, 15, 16),
    ]
    assert [group.spec is FULL for group in groups] == [False, False, True, False, False, False]


def test_layers_that_keep_the_same_are_one_group_in_their_order():
    assert [group.layer_indices for group in group_layers([WINDOW] * 5)] == [(0, 1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("counts", "sizes"),
    [
        ((1, 3), [1, 1, 1, 1]),
        ((4, 6), [4, 4, 2]),  # with 6 slots as many would be empty
        ((5, 12), [5, 6, 6]),  # one slot is empty; with 5 slots it would be 3
        ((12, 13), [12, 13]),
        ((2, 4, 6), [2, 2, 2, 2, 2, 2]),
    ],
)
def test_size_of_groups_leaves_the_fewest_slots_empty(counts, sizes):
    specs = [spec for spec, count in zip((FULL, WINDOW, CHUNK), counts, strict=False) for _ in range(count)]
    groups = group_layers(specs)
    assert [len(group.layer_indices) for group in groups] == sizes
    assert sorted(layer for group in groups for layer in group.layer_indices) == list(range(sum(counts)))


def test_slots_of_a_block_are_the_layers_of_the_largest_group():
    config = KVCacheConfig(9, group_layers([FULL, FULL, FULL, WINDOW, WINDOW, WINDOW, WINDOW]))
    assert config.layer_groups == ((0, 1, 2), (3, 4, 5, 6))
    assert config.layers_per_group == 4
    assert config.block_bytes == 4 * FULL.page_size_bytes


def test_layers_that_cannot_share_a_pool_are_refused_with_both_sizes():
    other = FullAttentionSpec(**SHAPE | {"block_size": 32})
    with pytest.raises(ValueError, match=r"differ in block_size: \[16, 32\]"):
        group_layers([FULL, other])
    other = FullAttentionSpec(**SHAPE | {"head_dim": 128})
    with pytest.raises(ValueError, match=r"differ in page_size_bytes: \[8192, 16384\]"):
        group_layers([FULL, other])
    with pytest.raises(ValueError, match="at least one layer"):
        group_layers([])
