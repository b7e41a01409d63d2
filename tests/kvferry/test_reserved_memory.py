"""What the processes of a machine reserve, and which of it lies in huge pages."""

import pytest

from core.config import load_config
from core.memory_file import HugePageStock
from kvferry import reserved_memory
from kvferry.cluster_plan import workers_here
from kvferry.reserved_memory import reserved_bytes

GIB = 1 << 30
POOLS, OFFLOAD, STORE = "2 KV pools of 1 GiB", "connector.offload.memory_bytes", "kvstore.memory_bytes"


@pytest.fixture(autouse=True)
def processor_with_huge_pages(monkeypatch):
    monkeypatch.setattr(reserved_memory, "why_no_cuda", lambda: "none")
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
