"""Values of a metrics registry at one moment, by name.

Owns how Prometheus samples are read, so that the status page, its history and alerts count the same events.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import RestrictedRegistry

from router.metrics import PREFIX

Samples = list[tuple[dict[str, str], float]]


class Readings:
    """The samples of a registry, or only those called ``names`` (without the prefix, with the suffixes of samples)."""

    def __init__(self, registry: CollectorRegistry, names: Iterable[str] = ()) -> None:
        source: CollectorRegistry | RestrictedRegistry = registry
        if wanted := [PREFIX + name for name in names]:
            source = registry.restricted_registry(wanted)
        self._samples = _by_name(source.collect())

    def by_label(self, name: str, label: str) -> dict[str, int]:
        """Return a metric's values by a label."""
        return {labels[label]: int(value) for labels, value in self._samples.get(PREFIX + name, ())}

    def events(self, name: str, label: str) -> dict[str, int]:
        """Return a counter's non-zero values by a label."""
        return {value: count for value, count in self.by_label(name, label).items() if count}

    def total(self, name: str) -> int:
        """Return the sum over all labels."""
        return int(sum(value for _, value in self._samples.get(PREFIX + name, ())))

    def sums(self, name: str, label: str) -> dict[str, float]:
        """Return the sums of a histogram by a label, in its unit."""
        return {labels[label]: value for labels, value in self._samples.get(f"{PREFIX}{name}_sum", ())}

    def buckets(self, name: str) -> dict[float, int]:
        """Return the cumulative counts of a histogram without labels, by upper bound in its unit; the last is infinite."""
        return {float(labels["le"]): int(value) for labels, value in self._samples.get(f"{PREFIX}{name}_bucket", ())}


def _by_name(families: Iterable[Metric]) -> dict[str, Samples]:
    found: dict[str, Samples] = {}
    for family in families:
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found
