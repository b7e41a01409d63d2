"""vLLM's KV caches as a pool: rows and digests in both layouts, and what is known of the bytes in a block."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from connectors.p2p.transport.interface import RowRegion
from connectors.vllm.pool import block_layout, kv_written, pool_of
from core.errors import ConfigError
from core.kv.block_form import plane_rows

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 5, 2, 32, 8
BLOCK_BYTES = LAYERS * HEADS * TOKENS * CONTENT * 4
IN_BLOCK, APART = "BLHNC", "LBHNC"


def caches(layout, names=LAYERS, kernel_blocks=1, num_blocks=BLOCKS):
    """Return views of one allocation as vLLM makes them, with logical [layers, blocks, heads, tokens, content] counted up."""
    storage = torch.zeros(num_blocks * BLOCK_BYTES, dtype=torch.int8).view(torch.float32)
    tokens = TOKENS // kernel_blocks
    order = (LAYERS, num_blocks * kernel_blocks) if layout == APART else (num_blocks * kernel_blocks, LAYERS)
    blocks = storage.view(*order, HEADS, tokens, CONTENT)
    by_layer = blocks if layout == APART else blocks.transpose(0, 1)
    by_layer.copy_(torch.arange(by_layer.numel(), dtype=torch.float32).view(by_layer.shape))
    return {f"layer{number}": by_layer[number % LAYERS] for number in range(names)}


def config(layout, num_blocks=BLOCKS, **spec):
    values = {"num_kv_heads": HEADS, "head_size": CONTENT // 2, "block_size": TOKENS} | spec
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(**values))
    return SimpleNamespace(kv_cache_layout=layout, num_blocks=num_blocks, transfer_group_ids=(0,), kv_cache_groups=[group])


def pool(layout, **arguments):
    views = caches(layout, **arguments)
    info = block_layout(views, config(layout), "auto", [])
    return views, pool_of(views, BLOCKS, info, 7, has_digests=True)


@pytest.mark.parametrize(("layout", "num_planes"), [(IN_BLOCK, 1), (APART, LAYERS)])
def test_a_block_is_its_rows(layout, num_planes):
    views, region = pool(layout)
    assert (region.layout.num_planes, region.layout.num_layers, region.block_bytes) == (num_planes, LAYERS, BLOCK_BYTES)
    rows = RowRegion.of_pool(region)
    assert (rows.num_rows, rows.row_bytes) == (BLOCKS * num_planes, BLOCK_BYTES // num_planes)
    content = np.frombuffer(rows.buffer, dtype=np.float32).reshape(rows.num_rows, -1)
    found = np.concatenate([content[row] for row in plane_rows((4,), num_planes, BLOCKS)])
    wanted = torch.cat([view[4].flatten() for view in views.values()])
    assert np.array_equal(found, wanted.numpy())


def test_a_block_has_the_same_digest_in_both_layouts():
    pools = [pool(layout) for layout in (IN_BLOCK, APART)]  # the memory lives as long as the views
    digests = [region.new_digester()([0, 3]) for _, region in pools]
    assert digests[0] == digests[1]
    assert digests[0][0] != digests[0][1]


@pytest.mark.parametrize(
    ("instruction_sets", "cache_dtype", "order"),
    [
        ([], "auto", "HNC"),
        ([], "fp8", "HNC"),
        (["vec"], "auto", "HNC-vec"),
        (["vec16"], "auto", "HNC-vec"),
        (["vec"], "fp8", "HNC-vec+fp8"),
        (["amx"], "auto", "HNC-amx+auto"),
    ],
)
def test_the_order_of_bytes_depends_on_who_packs_them(instruction_sets, cache_dtype, order):
    assert block_layout(caches(APART), config(APART), cache_dtype, instruction_sets).order == order


def test_of_blocks_that_kernels_cut_nothing_is_known():
    found = block_layout(caches(IN_BLOCK, kernel_blocks=2), config(IN_BLOCK), "auto", [])
    assert (found.order[:7], found.block_bytes) == ("opaque-", BLOCK_BYTES)


def mixed_layout(wide, num_blocks=BLOCKS):
    """Return the layout of blocks of three layers, one of which is stored in twice the bytes; it comes last, as in vLLM."""
    page = HEADS * TOKENS * CONTENT
    storage = torch.zeros(num_blocks * 4 * page, dtype=torch.int8)

    def view(dtype, offset):
        strides = (4 * page // dtype.itemsize, TOKENS * CONTENT, CONTENT, 1)
        shape = (num_blocks, HEADS, TOKENS, CONTENT)
        return storage.view(dtype).as_strided(shape, strides, offset // dtype.itemsize)

    narrow = [name for name in ("layer0", "layer1", "layer2") if name != wide]
    views = {name: view(torch.uint8, index * page) for index, name in enumerate(narrow)}
    views[wide] = view(torch.bfloat16, 2 * page)
    return block_layout(views, config(IN_BLOCK, num_blocks), "fp8", [])


def test_engines_that_store_other_layers_in_more_bytes_have_other_blocks():
    assert mixed_layout("layer1").block_bytes == mixed_layout("layer2").block_bytes
    assert mixed_layout("layer1") != mixed_layout("layer2")
    assert mixed_layout("layer1") == mixed_layout("layer1", num_blocks=7)


def test_layers_of_several_types_are_not_told_apart_by_their_size():
    found = []
    for name in ("layer1", "layer2"):
        views = caches(APART)
        views[name] = views[name].view(torch.int32)
        found.append(block_layout(views, config(APART), "auto", []).order)
    assert [order[:7] for order in found] == ["opaque-", "opaque-"]
    assert found[0] != found[1]


@pytest.mark.parametrize("layout", [IN_BLOCK, APART])
def test_opaque_blocks_are_the_same_in_pools_of_any_size(layout):
    found = [block_layout(caches(layout, LAYERS, 2, size), config(layout, size), "auto", []) for size in (BLOCKS, 7)]
    assert found[0] == found[1]


def order_of_odd_heads(layout, kernel_blocks):
    return block_layout(caches(layout, LAYERS, kernel_blocks), config(layout, num_head_slots=2), "auto", []).order


def test_opaque_blocks_have_the_same_order_where_their_runs_have_it():
    """Unless kernels cut them: then their pieces lie layer by layer in the one layout, and piece by piece in the other."""
    whole, cut = ([order_of_odd_heads(layout, count) for layout in (IN_BLOCK, APART)] for count in (1, 2))
    assert whole[0] == whole[1]
    assert cut[0] != cut[1]


@pytest.mark.parametrize("spec", [{"num_head_slots": 2}, {"num_kv_heads": 4, "num_head_slots": 8}])
def test_where_rows_are_no_heads_nothing_is_known(spec):
    found = block_layout(caches(APART), config(APART, **spec), "auto", [])
    assert found.order.startswith("opaque-")


def test_keys_and_values_of_different_sizes_are_not_told_apart_on_a_cpu():
    found = block_layout(caches(APART), config(APART, head_size_v=6), "auto", ["vec"])
    assert found.order == "HNC-vec+auto"


class MLAAttentionSpec(SimpleNamespace):
    """A spec of vLLM's by its name."""


def test_a_latent_on_a_cpu_is_no_pair_of_keys_and_values():
    latents = config(APART)
    latents.kv_cache_groups[0].kv_cache_spec = MLAAttentionSpec(num_kv_heads=1, head_size=CONTENT, block_size=TOKENS)
    assert block_layout(caches(APART), latents, "auto", ["vec"]).order == "HNC-vec+auto"
    assert block_layout(caches(APART), latents, "auto", []).order == "HNC"


def test_layers_of_two_groups_that_share_bytes_count_once():
    assert block_layout(caches(APART, names=2 * LAYERS), config(APART), "auto", []).num_planes == LAYERS


def test_another_layout_is_refused():
    with pytest.raises(ConfigError, match="needs the KV cache layout BLHNC or LBHNC; this engine has LBNHC"):
        block_layout(caches(APART), config("LBNHC"), "auto", [])


def test_a_layout_that_does_not_match_the_tensors_is_refused():
    for named, real in ((APART, IN_BLOCK), (IN_BLOCK, APART)):
        with pytest.raises(ConfigError, match="are not 5 equal blocks"):
            block_layout(caches(real), config(named), "auto", [])


def test_the_kv_of_a_step_on_a_cpu_is_written_when_it_returns():
    assert kv_written(torch.device("cpu")) is None


@pytest.mark.gpu
def test_the_kv_of_a_step_on_a_gpu_is_written_when_its_event_has_come():
    device = torch.device("cuda")
    factor, cache = torch.rand(4096, 4096, device=device), torch.zeros(4096, dtype=torch.int64, device=device)
    for _ in range(200):
        factor = torch.nn.functional.normalize(factor @ factor)
    cache.fill_(7)
    written = kv_written(device)
    written.synchronize()
    with torch.cuda.stream(torch.cuda.Stream(device)):
        assert cache.sum().item() == 7 * 4096
