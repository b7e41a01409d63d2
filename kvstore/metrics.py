"""Metrics of a store, under ``kvferry_kvstore_``.

Owns names and labels; the machine and the tiers' threads keep the counts, which are read at each scrape. For the process of a
store server: a worker with a store of its own publishes the metrics of its connector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Gauge

from core.metrics import PREFIX, read_counter, read_gauge, read_labelled_counter
from kvstore.memory import MemoryTier
from kvstore.server_state import ServerState
from kvstore.tiers.base import TierStatistics
from kvstore.tiers.worker import TierExecutor

_COUNTS = {
    "lookup_keys": "Blocks that were looked up.",
    "lookup_hits": "Blocks that were looked up and are in some tier.",
    "get_keys": "Blocks that were asked for.",
    "get_hits": "Blocks that were given.",
    "put_blocks": "Blocks that were stored.",
    "refused_blocks": "Blocks that were not stored for lack of room.",
    "dropped_blocks": "Blocks that left memory because a reader found them wrong.",
    "forgotten_calls": "Lookups, gets and reservations whose end was lost on the way.",
    "silent_clients": "Clients that lost their session by silence.",
    "refused_messages": "Messages that could not be followed.",
    "bad_frames": "Frames that could not be understood.",
}
_TIER_COUNTS = ("loaded_blocks", "missing_blocks", "saved_blocks", "failed_saves", "corrupt_blocks", "lost_blocks", "errors")


def register_store_metrics(registry: CollectorRegistry, machine: ServerState, workers: Sequence[TierExecutor]) -> None:
    """Register all metrics of a store."""
    for name, documentation in _COUNTS.items():
        read_counter(registry, f"kvstore_{name}", documentation, _reader(machine, name))
    read_labelled_counter(
        registry,
        "kvstore_rejected_blocks",
        "Blocks that did not pass a check, by reason; those of lower tiers are corrupt_blocks of their tier.",
        ("reason",),
        lambda: [((reason,), count) for reason, count in machine.rejected.items()],
    )
    _register_memory(registry, machine)
    if workers:
        _register_tiers(registry, workers)


def _register_memory(registry: CollectorRegistry, machine: ServerState) -> None:
    def gauge(name: str, documentation: str, read: Callable[[MemoryTier], float]) -> None:
        read_gauge(
            registry, f"kvstore_{name}", documentation, lambda: 0.0 if machine.memory is None else float(read(machine.memory))
        )

    gauge("memory_slots", "Slots of the arena.", lambda memory: memory.arena.num_slots)
    gauge("memory_blocks", "Blocks in the arena, those being written included.", len)
    gauge("pinned_slots", "Slots pinned by readers.", lambda memory: memory.arena.num_pinned)
    gauge(
        "dirty_blocks",
        "Blocks that only the arena has, although there are lower tiers (write-back).",
        lambda memory: memory.num_dirty,
    )
    read_gauge(registry, "kvstore_clients", "Open sessions.", lambda: machine.num_clients)
    read_gauge(registry, "kvstore_local_clients", "Open sessions that map the arena.", lambda: machine.num_local_clients)
    read_gauge(
        registry,
        "kvstore_quarantined_slots",
        "Slots that a silent client may still write.",
        lambda: machine.num_quarantined,
    )
    read_counter(
        registry,
        "kvstore_evicted_blocks",
        "Blocks that left memory to make room.",
        lambda: 0 if machine.memory is None else machine.memory.num_evicted,
    )
    read_counter(
        registry,
        "kvstore_dropped_saves",
        "Blocks that were evicted before their turn to be handed to lower tiers.",
        lambda: 0 if machine.tiering is None else machine.tiering.num_dropped_saves,
    )


def _register_tiers(registry: CollectorRegistry, workers: Sequence[TierExecutor]) -> None:
    for name in _TIER_COUNTS:
        read_labelled_counter(
            registry,
            f"kvstore_tier_{name}",
            f"{name.replace('_', ' ').capitalize()} of a tier below memory.",
            ("tier",),
            _tier_reader(workers, name),
        )
    used = Gauge(f"{PREFIX}kvstore_tier_used_bytes", "Size of what a tier holds.", ["tier"], registry=registry)
    limit = Gauge(f"{PREFIX}kvstore_tier_limit_bytes", "Bytes that a tier may hold now.", ["tier"], registry=registry)
    blocks = Gauge(f"{PREFIX}kvstore_tier_blocks", "Blocks that a tier holds.", ["tier"], registry=registry)
    for worker in workers:
        if worker.tier.occupancy() != (None, None):
            blocks.labels(worker.tier.name).set_function(_occupancy(worker, 0))
            used.labels(worker.tier.name).set_function(_occupancy(worker, 1))
            limit.labels(worker.tier.name).set_function(_limit(worker))


def _reader(machine: ServerState, name: str) -> Callable[[], float]:
    return lambda: machine.counts[name]


def _tier_reader(workers: Sequence[TierExecutor], name: str) -> Callable[[], Iterable[tuple[Sequence[str], float]]]:
    def read() -> Iterable[tuple[Sequence[str], float]]:
        for worker in workers:
            statistics: TierStatistics = worker.statistics()
            yield (worker.tier.name,), getattr(statistics, name)

    return read


def _limit(worker: TierExecutor) -> Callable[[], float]:
    return lambda: float(worker.tier.limit_bytes() or 0)


def _occupancy(worker: TierExecutor, index: int) -> Callable[[], float]:
    return lambda: float(worker.tier.occupancy()[index] or 0)
