"""Metrics of a tier connector on the registry of its worker: ``kvferry_<name>_...``, read at each scrape."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from connectors.tier.scheduler import TierConnectorScheduler
from connectors.tier.transfer import TierTransfer
from core.metrics import read_counter, read_gauge, read_labelled_counter
from kvstore.base import BlockStore


def publish_tier(
    registry: CollectorRegistry, scheduler: TierConnectorScheduler, mover: TierTransfer, store: BlockStore, name: str
) -> None:
    """Register the metrics of one tier."""

    def blocks() -> list[tuple[Sequence[str], float]]:
        counted = mover.counts.copy()
        counted["missed_blocks"] = scheduler.num_missed_saves
        return [((event,), count) for event, count in sorted(counted.items())]

    read_labelled_counter(
        registry, f"{name}_events", f"Loads, saves and their blocks by what became of them: {name}.", ("event",), blocks
    )
    read_labelled_counter(
        registry,
        f"{name}_rejected_blocks",
        f"Blocks that came back and did not pass their check, by reason: {name}.",
        ("reason",),
        lambda: [((reason,), count) for reason, count in sorted(store.statistics().rejected.items())],
    )
    for read, event, documentation in (
        (lambda: store.statistics().lookup_keys, "lookup_keys", "Blocks that were asked for"),
        (lambda: store.statistics().lookup_hits, "lookup_hits", "Blocks that were there"),
        (lambda: store.statistics().got_bytes, "got_bytes", "Bytes that came from there"),
        (lambda: store.statistics().put_bytes, "put_bytes", "Bytes that were stored there"),
        (lambda: store.statistics().timeouts, "timeouts", "Calls that were not answered in time"),
    ):
        read_counter(registry, f"{name}_{event}", f"{documentation}: {name}.", read)
    saving = "Blocks that are kept until they are copied"
    read_gauge(registry, f"{name}_saving_blocks", f"{saving}: {name}.", lambda: scheduler.num_saving_blocks)
    read_gauge(registry, f"{name}_connected", f"1 if the tier answers: {name}.", lambda: store.is_connected)
