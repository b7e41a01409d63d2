"""Metrics of an EC connector on the registry of its worker, read at each scrape."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from connectors.ec.mover import EmbeddingTransfer
from connectors.ec.scheduler import FetchingScheduler
from core.metrics import read_gauge, read_labelled_counter


def publish_fetches(registry: CollectorRegistry, scheduler: FetchingScheduler) -> None:
    """Publish a reader's waiting requests and held chunks. All gauges are 0 once its requests have ended."""
    gauges = {
        "ec_waiting_requests": ("Requests that wait for embeddings.", lambda: scheduler.num_waiting_requests),
        "ec_fetching_items": ("Images whose embeddings are on their way.", lambda: scheduler.num_fetching_items),
        "ec_wanted_chunks": ("Chunks of host memory with embeddings for requests.", lambda: scheduler.num_wanted_chunks),
        "ec_quarantined_chunks": (
            "Chunks that must not be used, since an abandoned transfer may still write them.",
            lambda: scheduler.num_quarantined_chunks,
        ),
    }
    for name, (documentation, read) in gauges.items():
        read_gauge(registry, name, documentation, read)
    read_labelled_counter(
        registry,
        "ec_fetches",
        "Fetches of embeddings that are over: ok, aborted, or why they failed.",
        ("result",),
        lambda: [((result,), count) for result, count in list(scheduler.counts.items())],
    )


def publish_store(registry: CollectorRegistry, mover: EmbeddingTransfer, num_saving_bytes: Callable[[], float]) -> None:
    """Publish the embeddings on their way to a store."""
    read_gauge(registry, "ec_saving_bytes", "Embeddings on their way to the store.", num_saving_bytes)
    read_labelled_counter(
        registry,
        "ec_saves",
        "Embeddings that were put into the store, by what became of them.",
        ("result",),
        lambda: [((result,), count) for result, count in list(mover.counts.items())],
    )
