"""Row arithmetic, specs and refusals of the contract."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from core.attention.base import AttentionSpec, KVLayout, PagedKVCache
from core.errors import ConfigError


@pytest.mark.parametrize(("layout", "inner"), [(KVLayout.HND, (3, 16)), (KVLayout.NHD, (16, 3))])
def test_cache_names_the_axes_of_its_layout(layout, inner):
    cache = PagedKVCache(torch.zeros(7, 5, 2, *inner, 8), layout)
    sizes = (cache.num_blocks, cache.num_layers, cache.num_kv_heads, cache.block_size, cache.head_dim)
    assert sizes == (7, 5, 3, 16, 8)
    assert (cache.dtype, cache.device) == (torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(("layout", "inner"), [(KVLayout.HND, (3, 16)), (KVLayout.NHD, (16, 3))])
def test_one_row_index_finds_a_slot_in_every_layer(layout, inner):
    pool = torch.arange(7 * 5 * 2 * 3 * 16).view(7, 5, 2, *inner, 1)
    cache = PagedKVCache(pool, layout)
    rows = cache.rows_of_slots(np.array([2 * 16 + 9, 6 * 16 + 15, 0]))
    for layer in range(5):
        found = cache.layer_rows(layer)[rows].view(3, 2, 3)
        for token, (block, offset) in enumerate([(2, 9), (6, 15), (0, 0)]):
            for half, view in enumerate((cache.key(layer), cache.value(layer))):
                expected = view[block, :, offset] if layout is KVLayout.HND else view[block, offset]
                assert torch.equal(found[token, half], expected.flatten())


@pytest.mark.parametrize(
    "pool",
    [torch.zeros(7, 5, 2, 3, 16), torch.zeros(7, 5, 3, 3, 16, 8), torch.zeros(7, 5, 2, 3, 8, 16).transpose(4, 5)],
    ids=["rank", "no key and value axis", "not contiguous"],
)
def test_cache_refuses_a_pool_of_another_form(pool):
    with pytest.raises(ConfigError, match="KV pool must be contiguous"):
        PagedKVCache(pool, KVLayout.HND)


def test_spec_refuses_what_no_backend_serves():
    with pytest.raises(ConfigError, match="not a multiple"):
        AttentionSpec(9, 2, 64, 1.0)
    with pytest.raises(ConfigError, match="not both"):
        AttentionSpec(8, 2, 64, 1.0, sliding_window=4, chunk_size=4)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ({}, [0, 0, 0, 0, 0, 0, 0]),
        ({"sliding_window": 3}, [0, 0, 0, 1, 2, 3, 4]),
        ({"sliding_window": 1}, [0, 1, 2, 3, 4, 5, 6]),
        ({"chunk_size": 3}, [0, 0, 0, 3, 3, 3, 6]),
    ],
)
def test_first_visible_key_of_each_position(mask, expected):
    spec = AttentionSpec(1, 1, 8, 1.0, **mask)
    assert [spec.first_visible(position) for position in range(7)] == expected
