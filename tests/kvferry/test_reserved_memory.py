"""What the processes of a machine reserve, and which of it lies in huge pages."""

import pytest

from core.config import load_config
from core.errors import ConfigError
from core.memory_file import HugePageStock
from kvferry import preflight, reserved_memory
from kvferry.cluster_plan import workers_here
from kvferry.preflight import check_memory
from kvferry.reserved_memory import reserved_bytes

GIB = 1 << 30
OFFLOADED = ("connector.name=offload", "connector.offload.huge_pages=always")
POOLS, OFFLOAD, STORE = "2 KV pools of 1 GiB", "connector.offload.memory_bytes", "kvstore.memory_bytes"


@pytest.fixture(autouse=True)
def processor_with_huge_pages(monkeypatch):
    monkeypatch.setattr(reserved_memory, "why_no_cuda", lambda: "none")
    monkeypatch.setattr(preflight, "memory_limit_bytes", lambda: 64 * GIB)
    monkeypatch.setattr(reserved_memory, "huge_page_stock", lambda: HugePageStock(2 << 20, 2048, 1536))


def reserved(*assignments):
    config = load_config(assignments=assignments)
    return reserved_bytes(config, workers_here(config))


@pytest.mark.parametrize(
    ("assignments", "expected"),
    [
        ([], {POOLS: 2 * GIB}),
        (["model.device=cuda"], {}),
        (["cache.num_blocks=7"], {}),
        (["local.engine=vllm"], {}),
        (["local.num_encode=3"], {POOLS: 2 * GIB}),
        (["worker.engine_id=p0"], {"1 KV pool of 1 GiB": GIB}),
        (["worker.workers_on_host=2"], {POOLS: 2 * GIB}),
        (["connector.name=offload"], {POOLS: 2 * GIB, OFFLOAD: 2 * GIB}),
        (["connector.name=store"], {POOLS: 2 * GIB, STORE: 2 * GIB}),
        (["connector.name=store", "local.kvstore=true"], {POOLS: 2 * GIB, STORE: GIB}),
        (["connector.name=store", "kvstore.address=tcp://s:1"], {POOLS: 2 * GIB}),
    ],
)
def test_sections_in_use_count_for_every_process(assignments, expected):
    assert reserved(*assignments) == expected


def test_sections_take_their_huge_pages_from_one_stock():
    offload = ["connector.name=offload", "connector.offload.huge_pages=auto"]
    assert reserved(*offload) == {POOLS: 2 * GIB}
    assert reserved(*offload, "cache.huge_pages=auto") == {OFFLOAD: 2 * GIB}
    smaller = ["cache.huge_pages=auto", "connector.offload.memory_bytes=512MiB"]
    assert reserved(*offload, *smaller) == {}


def check(*assignments):
    config = load_config(assignments=assignments)
    check_memory(config, workers_here(config))


@pytest.mark.parametrize(
    ("assignments", "setting"),
    [
        (["cache.memory_bytes=2GiB", "cache.huge_pages=always"], "cache.huge_pages"),
        ([*OFFLOADED, "connector.offload.memory_bytes=2GiB"], "connector.offload.huge_pages"),
        (["local.kvstore=true", "kvstore.memory_bytes=4GiB", "kvstore.huge_pages=always"], "kvstore.huge_pages"),
    ],
)
def test_huge_pages_that_a_cluster_cannot_do_without_are_missed_before_it_starts(assignments, setting):
    said = rf"^{setting} = always: 2048 pages of 2048 kB are needed, 1536 of 2048 are free; reserve them .* or set it to auto$"
    with pytest.raises(ConfigError, match=said) as refused:
        check(*assignments)
    assert refused.value.param == setting


STORE_AND_POOL = ["local.aggregated=true", "local.num_prefill=1", "local.kvstore=true", "kvstore.memory_bytes=2GiB"]
NEEDY_POOL = ["cache.memory_bytes=2GiB", "cache.huge_pages=always", "kvstore.huge_pages=auto"]
NEEDY_STORE = ["cache.memory_bytes=2GiB", "cache.huge_pages=auto", "kvstore.huge_pages=always"]
SHARED_EMBEDDINGS = ["local.num_encode=1", "ec_connector.name=shared"]


@pytest.mark.parametrize(
    ("block_bytes", "served", "refused", "setting"),
    [
        ("0", NEEDY_POOL, NEEDY_STORE, "kvstore.huge_pages"),  # its arena is made for its first client, which has a pool
        ("64KiB", NEEDY_STORE, NEEDY_POOL, "cache.huge_pages"),
        ("0", [*NEEDY_STORE, *SHARED_EMBEDDINGS], [*NEEDY_POOL, *SHARED_EMBEDDINGS], "cache.huge_pages"),
    ],
)
def test_a_store_takes_huge_pages_before_pools_if_it_knows_its_blocks_earlier(block_bytes, served, refused, setting):
    cluster = [*STORE_AND_POOL, f"kvstore.block_bytes={block_bytes}"]
    check(*cluster, *served)
    said = rf"^{setting} = always: 1024 pages of 2048 kB are needed, 512 of 2048 are free"
    with pytest.raises(ConfigError, match=said):
        check(*cluster, *refused)
