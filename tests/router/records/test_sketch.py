"""Percentiles of sketches and of histograms."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies

from router.records.sketch import Sketch, percentile

INFINITE = float("inf")


@hypothesis.given(strategies.lists(strategies.floats(1e-4, 1e4), min_size=1), strategies.sampled_from([0.01, 0.5, 0.99, 1.0]))
def test_a_percentile_of_a_sketch_is_within_5_percent(values, share):
    sketch = Sketch()
    for value in values:
        sketch.add(value)
    exact = next(value for index, value in enumerate(sorted(values), 1) if index >= share * len(values))
    assert sketch.percentile(share) == pytest.approx(exact, rel=0.0501)


def test_a_sketch_takes_any_value_in_bounded_memory():
    sketch = Sketch()
    assert sketch.percentile(0.5) is None
    for power in range(-300, 300):
        sketch.add(10.0**power)
    sketch.add(0.0)
    sketch.add(-1.0)
    assert len(sketch._counts) <= 243


def test_a_percentile_lies_inside_its_bucket():
    counts = {1.0: 10, 2.0: 10, 4.0: 30, INFINITE: 40}
    assert percentile(counts, 0.25) == pytest.approx(1.0)
    assert percentile(counts, 0.5) == pytest.approx(3.0)
    assert percentile(counts, 0.99) == 4.0  # of the last bucket only the lower bound is known
    assert percentile({}, 0.5) is None
    assert percentile({1.0: 0, INFINITE: 0}, 0.5) is None
