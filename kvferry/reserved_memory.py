"""The memory that the processes of this machine reserve beside their models: KV pools, offloaded blocks, stores.

Owns which settings count, for which processes, and which of them get huge pages: these lie outside of other memory. They go,
as long as there are enough, to whoever asks first: pools, offloaded blocks, then stores, whose first client is a worker that
has its pool. The store of ``serve`` comes before them if it is told the size of its blocks, or by an encode worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from core.config import KVFerryConfig
from core.config_types import HugePages
from core.memory_file import huge_page_stock
from core.wire.messages import Role
from kvferry.cluster_plan import without_local_store
from kvferry.machine import format_bytes, why_no_cuda

Workers = Mapping[str, tuple[Role, KVFerryConfig]]  # by name, with the settings of each


@dataclass(frozen=True, slots=True)
class Reservation:
    """What a section of the settings reserves in all processes together.

    ``lacks`` says why it gets no huge pages; empty if it gets them, or wants none.
    """

    section: str
    name: str
    num_bytes: int
    huge_pages: HugePages
    lacks: str = ""

    @property
    def is_huge(self) -> bool:
        """True if it lies in huge pages."""
        return self.huge_pages != "never" and not self.lacks


def reserved_bytes(config: KVFerryConfig, workers: Workers) -> dict[str, int]:
    """Return the memory that all processes reserve in addition to their models, by purpose; huge pages are left out."""
    return {each.name: each.num_bytes for each in reservations(config, workers) if not each.is_huge}


def reservations(config: KVFerryConfig, workers: Workers) -> list[Reservation]:
    """Return all that the processes reserve, with this machine's free huge pages given to those that want them."""
    return _with_huge_pages(_wishes(config, workers))


def reservations_of(role: Role | Literal["kvstore"], config: KVFerryConfig) -> list[Reservation]:
    """Return what a single process reserves; a worker has a store inside if it has no other."""
    if role == "kvstore":
        return _with_huge_pages([_store_wish(config, 1)])
    config = without_local_store(config)
    return reservations(config, {role: (role, config)})


def _with_huge_pages(wishes: Iterable[Reservation]) -> list[Reservation]:
    found, stock = [], huge_page_stock()
    for each in wishes:
        lacks = stock.lacks(each.num_bytes) if each.huge_pages != "never" else ""
        found.append(replace(each, lacks=lacks))
        if found[-1].is_huge:
            stock = replace(stock, num_free=stock.num_free - -(-each.num_bytes // stock.page_bytes))
    return found


def _wishes(config: KVFerryConfig, workers: Workers) -> Iterator[Reservation]:
    """Yield the reservations of the sections in use. A pool of ``cache.num_blocks`` has a size that depends on the model."""
    is_store_first = config.local.kvstore and (config.kvstore.block_bytes > 0 or _has_client_without_pool(workers))
    if is_store_first:
        yield _store_wish(config, 1)
    with_pool = [section for role, section in workers.values() if role != "encode"]
    pools = [section.cache for section in with_pool if not section.cache.num_blocks]
    if pools and not computes_on_gpu(config):
        total_bytes = sum(pool.memory_bytes for pool in pools)
        is_same = len({pool.memory_bytes for pool in pools}) == 1
        name = "1 KV pool" if len(pools) == 1 else f"{len(pools)} KV pools"
        name = f"{name} of {format_bytes(pools[0].memory_bytes)}" if is_same else name
        yield Reservation("cache", name, total_bytes, pools[0].huge_pages)
    offload = config.connector.offload
    if "offload" in config.connector.names and with_pool:
        num_bytes = offload.memory_bytes * len(with_pool)
        yield Reservation("connector.offload", "connector.offload.memory_bytes", num_bytes, offload.huge_pages)
    num_stores = num_kvstores(config, workers)
    if num_stores and not is_store_first:
        yield _store_wish(config, num_stores)


def _has_client_without_pool(workers: Workers) -> bool:
    """Return True if an encode worker leaves its embeddings in the store; it has loaded before a worker with a pool has."""
    sections = [config.ec_connector for role, config in workers.values() if role == "encode"]
    return any(section.name == "shared" and not section.kvstore_address for section in sections)


def _store_wish(config: KVFerryConfig, num_stores: int) -> Reservation:
    store = config.kvstore
    return Reservation("kvstore", "kvstore.memory_bytes", store.memory_bytes * num_stores, store.huge_pages)


def computes_on_gpu(config: KVFerryConfig) -> bool:
    """Return True if workers will use a GPU."""
    return config.model.device == "cuda" or (config.model.device == "auto" and why_no_cuda() is None)


def uses_kvstore(config: KVFerryConfig) -> bool:
    """Return True if a process has a store, or talks to one."""
    return config.local.kvstore or "store" in config.connector.names


def num_kvstores(config: KVFerryConfig, workers: Workers) -> int:
    """Return how many stores the processes of this cluster contain."""
    if config.local.kvstore:
        return 1
    if "store" not in config.connector.names or config.kvstore.address:
        return 0
    return sum(role != "encode" for role, _ in workers.values())
