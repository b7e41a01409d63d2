"""Percentiles from counts: of a sketch with fixed relative error, and of the buckets of a histogram."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

_GROWTH = 1.1
_LOG_GROWTH = math.log(_GROWTH)
_SMALLEST, _LARGEST = 1e-5, 1e5


@dataclass(slots=True)
class Sketch:
    """Counts of values in buckets whose bounds grow by a tenth, so percentiles are within 5 %. At most 243 buckets."""

    _counts: dict[int, int] = field(default_factory=dict)

    def add(self, value: float) -> None:
        """Count a value; those outside of 1e-5 to 1e5 count as the nearest of these."""
        index = math.floor(math.log(min(_LARGEST, max(_SMALLEST, value))) / _LOG_GROWTH)
        self._counts[index] = self._counts.get(index, 0) + 1

    def percentile(self, share: float) -> float | None:
        """Return the smallest value that ``share`` of all do not exceed, by the middle of its bucket; None without values."""
        wanted, seen = share * sum(self._counts.values()), 0
        for index in sorted(self._counts):
            seen += self._counts[index]
            if seen >= wanted:
                return math.exp((index + 0.5) * _LOG_GROWTH)
        return None


def percentile(counts: Mapping[float, int], share: float) -> float | None:
    """Return a percentile of a histogram, from counts that are cumulative over its upper bounds; None without any count.

    Inside a bucket values are taken as evenly spread. Above the last finite bound that bound is returned: it is a minimum.
    """
    bounds = sorted(counts)
    total = counts[bounds[-1]] if bounds else 0
    if total <= 0:
        return None
    wanted, lower, below = share * total, 0.0, 0
    for bound in bounds:
        if counts[bound] >= wanted and counts[bound] > below:
            if bound == float("inf"):
                return lower
            return lower + (bound - lower) * (wanted - below) / (counts[bound] - below)
        lower, below = bound, counts[bound]
    return lower
