import gc
import mmap
import os

import pytest
import torch

from connectors.p2p.transport.interface import POOL_REGION, PeerId, regions_of
from connectors.p2p.transport.shm import ShmTransport
from core.attention.base import KVLayout
from core.config_workers import CacheSection
from core.digest import BlockDigester
from core.engine.kv_pool import PoolOptions, allocate_kv_pool
from core.engine.kv_sizing import kv_cache_config
from core.errors import ConfigError
from core.ids import RandomIds
from core.kv.seals import SEAL_BYTES, ExpectedSeal, decode_seal, layout_fingerprint
from core.memory_file import huge_page_stock
from core.model.arch import parse_arch

CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
BLOCK_BYTES = 3 * 2 * 2 * 16 * 8 * 4  # layers, key and value, heads, tokens, head_dim, float32


@pytest.fixture
def pool():
    config = kv_cache_config(parse_arch(CONFIG), CacheSection(block_size=16, num_blocks=5), torch.float32.itemsize)
    pool = allocate_kv_pool(config, torch.float32, KVLayout.HND, torch.device("cpu"))
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("section", "num_blocks"),
    [
        (CacheSection(block_size=16, memory_bytes=10 * BLOCK_BYTES), 10),
        (CacheSection(block_size=16, memory_bytes=11 * BLOCK_BYTES - 1), 10),
        (CacheSection(block_size=16, memory_bytes=10 * BLOCK_BYTES, num_blocks=7), 7),
        (CacheSection(block_size=32, memory_bytes=10 * BLOCK_BYTES), 5),
    ],
)
def test_block_count_comes_from_memory_unless_it_is_set(section, num_blocks):
    config = kv_cache_config(parse_arch(CONFIG), section, torch.float32.itemsize)
    assert config.num_blocks == num_blocks
    assert config.groups[0].layer_indices == (0, 1, 2)


@pytest.mark.parametrize("section", [CacheSection(block_size=16, memory_bytes=2 * BLOCK_BYTES - 1), CacheSection(num_blocks=1)])
def test_memory_for_less_than_one_usable_block_is_refused(section):
    with pytest.raises(ConfigError, match="at least 2"):
        kv_cache_config(parse_arch(CONFIG), section, torch.float32.itemsize)


def test_layout_describes_one_block(pool):
    layout = pool.layout
    assert (layout.dtype, layout.order, layout.block_size) == ("float32", "HND", 16)
    assert (layout.num_layers, layout.num_kv_heads, layout.head_dim) == (3, 2, 8)
    assert layout.block_bytes == BLOCK_BYTES == pool.region.block_bytes
    assert pool.cache.pool.shape == (5, 3, 2, 2, 16, 8)


def test_pool_starts_zeroed_and_all_views_alias_it(pool):
    assert not pool.cache.pool.any()
    pool.cache.key(1)[3, 0, 2, 5] = 7.0
    region = torch.frombuffer(pool.region.buffer, dtype=torch.float32)
    assert region.view_as(pool.cache.pool)[3, 1, 0, 0, 2, 5] == 7.0
    assert pool.region.base_address == pool.cache.pool.data_ptr()


def test_another_mapping_of_the_memory_file_sees_a_block_as_one_run(pool):
    pool.cache.pool[2] = 3.0
    with mmap.mmap(os.dup(pool.region.memory_fd), 0) as other:
        assert len(other) == 5 * BLOCK_BYTES
        block = bytes(other[2 * BLOCK_BYTES : 3 * BLOCK_BYTES])
    assert torch.equal(torch.frombuffer(bytearray(block), dtype=torch.float32), torch.full((BLOCK_BYTES // 4,), 3.0))


def test_nhd_swaps_heads_and_tokens():
    config = kv_cache_config(parse_arch(CONFIG), CacheSection(block_size=16, num_blocks=2), torch.bfloat16.itemsize)
    pool = allocate_kv_pool(config, torch.bfloat16, KVLayout.NHD, torch.device("cpu"))
    assert pool.cache.pool.shape == (2, 3, 2, 16, 2, 8)
    assert (pool.layout.order, pool.layout.dtype) == ("NHD", "bfloat16")
    pool.close()


def test_zeroing_a_block_leaves_its_neighbours(pool):
    pool.cache.pool.fill_(1.0)
    pool.zero_blocks([1, 3])
    assert [bool(pool.cache.pool[block].any()) for block in range(5)] == [True, False, True, False, True]


def test_pages_are_present_before_first_use(pool):
    # Allocated pages of the memory file, in units of 512 bytes.
    assert os.fstat(pool.region.memory_fd).st_blocks * 512 >= 5 * BLOCK_BYTES


def test_memory_that_is_not_there_is_a_configuration_error():
    config = kv_cache_config(parse_arch(CONFIG), CacheSection(block_size=16, num_blocks=1 << 42), torch.float32.itemsize)
    with pytest.raises(ConfigError, match="bytes of memory are available"):
        allocate_kv_pool(config, torch.float32, KVLayout.HND, torch.device("cpu"))


def test_closing_keeps_the_memory_of_living_tensors():
    config = kv_cache_config(parse_arch(CONFIG), CacheSection(block_size=16, num_blocks=2), torch.float32.itemsize)
    pool = allocate_kv_pool(config, torch.float32, KVLayout.HND, torch.device("cpu"))
    tensor = pool.cache.pool
    pool.close()
    del pool
    tensor.fill_(2.0)
    assert float(tensor.sum()) == 2.0 * tensor.numel()


def test_seals_lie_in_a_memory_file_of_their_own_and_name_this_life_and_layout():
    config = kv_cache_config(parse_arch(CONFIG), CacheSection(block_size=16, num_blocks=5), torch.float32.itemsize)
    pool = allocate_kv_pool(config, torch.float32, KVLayout.HND, torch.device("cpu"), PoolOptions(incarnation=77))
    seals = pool.region.seals
    seals.seal(3, ExpectedSeal(generation=9, group_id=0, block_hash=bytes(16), num_tokens=16))
    written = decode_seal(os.pread(seals.memory.memory_fd, SEAL_BYTES, 3 * SEAL_BYTES))
    assert (written.incarnation, written.layout_version, written.generation) == (77, layout_fingerprint(pool.layout), 9)
    assert (seals.num_blocks, seals.num_rows) == (5, 11)
    assert os.fstat(seals.memory.memory_fd).st_size == 11 * SEAL_BYTES
    pool.close()


def test_digests_are_those_of_the_blocks_bytes_and_enter_the_seals_if_asked_for():
    config = kv_cache_config(parse_arch(CONFIG), CacheSection(block_size=16, num_blocks=5), torch.bfloat16.itemsize)
    pool = allocate_kv_pool(config, torch.bfloat16, KVLayout.HND, torch.device("cpu"), PoolOptions(makes_digests=True))
    pool.cache.pool[3] = 1.5
    size = pool.region.block_bytes
    expected = BlockDigester(size).digest(pool.region.buffer[3 * size : 4 * size])
    pool.seals.seal(3, ExpectedSeal(generation=1, group_id=0, block_hash=bytes(16), num_tokens=16))
    assert decode_seal(pool.seals.row(3)).digest == expected
    digest_blocks = pool.region.new_digester()
    first, second, again = digest_blocks([2, 3, 3])
    assert first != second == again == expected
    pool.close()


def test_seals_hold_no_digests_unless_asked_for(pool):
    assert not pool.seals.has_digests


def test_closing_gives_both_memory_files_back():
    config = kv_cache_config(parse_arch(CONFIG), CacheSection(block_size=16, num_blocks=2), torch.float32.itemsize)
    pool = allocate_kv_pool(config, torch.float32, KVLayout.HND, torch.device("cpu"))
    memory_fds = (pool.region.memory_fd, pool.seals.memory.memory_fd)
    pool.close()
    pool.close()
    for memory_fd in memory_fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(memory_fd)


def test_huge_pages_that_are_demanded_and_not_there_are_a_configuration_error():
    config = kv_cache_config(parse_arch(CONFIG), CacheSection(block_size=16, num_blocks=1 << 42), torch.float32.itemsize)
    with pytest.raises(ConfigError, match=r"bytes of memory are available"):
        allocate_kv_pool(config, torch.float32, KVLayout.HND, torch.device("cpu"), PoolOptions(huge_pages="always"))
    little = kv_cache_config(parse_arch(CONFIG), CacheSection(block_size=16, num_blocks=2), torch.float32.itemsize)
    if huge_page_stock().num_free == 0:
        with pytest.raises(ConfigError, match=r"cache\.huge_pages = always: .*0 of \d+ are free") as refused:
            allocate_kv_pool(little, torch.float32, KVLayout.HND, torch.device("cpu"), PoolOptions(huge_pages="always"))
        assert refused.value.param == "cache.huge_pages"


@pytest.mark.skipif(huge_page_stock().num_free < 4, reason="no huge pages are reserved here: sysctl vm.nr_hugepages=8")
def test_a_pool_in_huge_pages_is_read_by_another_worker_and_given_back(caplog):
    caplog.set_level("INFO")
    free = huge_page_stock().num_free
    config = kv_cache_config(parse_arch(CONFIG), CacheSection(block_size=16, num_blocks=5), torch.float32.itemsize)
    pool = allocate_kv_pool(config, torch.float32, KVLayout.HND, torch.device("cpu"), PoolOptions(huge_pages="always"))
    assert "event=kv_pool_pages page_bytes=2097152" in caplog.text
    pool.cache.pool[3] = 7.0
    owner, reader, peer = ShmTransport(RandomIds()), ShmTransport(RandomIds()), PeerId("tcp://p:1", 1)
    owner.register(regions_of(pool.region))
    into = allocate_kv_pool(config, torch.float32, KVLayout.HND, torch.device("cpu"))
    reader.register(regions_of(into.region))
    reader.add_peer(peer, owner.describe())
    reader.post_read(peer, POOL_REGION, [3], [1])
    (result,) = reader.poll()
    assert result.error is None
    assert float(into.cache.pool[1].min()) == 7.0
    reader.remove_peer(peer)
    owner.close()
    pool.close()
    assert huge_page_stock().num_free == free - 1  # it is mapped
    del pool
    gc.collect()
    assert huge_page_stock().num_free == free
    into.close()
