"""Metrics of an encode worker about images, in addition to those of every worker.

Owns names and labels. Counted on the engine thread, read at each scrape.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from core.metrics import PREFIX

_SECONDS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class EncodeMetrics:
    """Counters of one encode worker."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._images = Counter(
            f"{PREFIX}encoder_images",
            "Images by what was done: computed, or found in the cache; bad; or failed: not embedded, or not offered.",
            ["outcome"],
            registry=registry,
        )
        self._embeds = Counter(f"{PREFIX}encoder_embeds", "Embeddings computed.", registry=registry)
        self._seconds = Histogram(
            f"{PREFIX}encoder_seconds", "Embedding of one image that is decoded.", buckets=_SECONDS_BUCKETS, registry=registry
        )
        for outcome in ("computed", "cached", "bad", "failed"):
            self._images.labels(outcome)

    def count(self, outcome: str) -> None:
        """Count an image for which a request was answered."""
        self._images.labels(outcome).inc()

    def count_computed(self, num_embeds: int, seconds: float) -> None:
        """Count an image that was computed."""
        self.count("computed")
        self._embeds.inc(num_embeds)
        self._seconds.observe(seconds)
