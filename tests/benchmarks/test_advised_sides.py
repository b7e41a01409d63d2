"""How the goodput of a side is searched for."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest


@pytest.fixture(scope="module")
def sides(load_benchmark):
    return load_benchmark("advised_sides")


def search(sides, limit: float, first: float, least: float = 0.0) -> dict[float, float]:
    """Run rates of a side that serves all requests up to ``limit`` a second, and half of them beyond."""
    shares: dict[float, float] = {}
    step = round(math.log(first, sides.STEP))
    while step is not None:
        rate = sides.STEP**step
        assert rate not in shares
        shares[rate] = 1.0 if rate <= limit else 0.5
        step = sides.next_step(shares, least)
    return shares


@pytest.mark.parametrize("first", [0.3, 1.0, 3.0])
def test_search_ends_at_neighbours_that_enclose_the_limit(sides, first):
    shares = search(sides, 1.1, first)
    served, failed = max(rate for rate in shares if rate <= 1.1), min(rate for rate in shares if rate > 1.1)
    assert failed / served == pytest.approx(sides.STEP)
    found = sides.goodput(shares)
    assert served < found.least == found.most < failed


def test_search_gives_up_below_the_least_rate(sides):
    shares = search(sides, 0.1, 1.0, least=0.4)
    assert min(shares) == pytest.approx(sides.STEP**-5)  # 0.402
    assert (sides.goodput(shares).least, sides.goodput(shares).most) == (0.0, min(shares))


def test_goodput_is_at_least_the_last_rate_where_none_is_too_fast(sides):
    assert str(sides.goodput({1.0: 0.95, 0.5: 1.0})) == "at least 1.00"


@pytest.mark.parametrize(
    ("advised", "ours", "other", "agrees"),
    [
        (2.0, {1.0: 1.0, 1.2: 0.8}, {0.4: 0.5}, True),  # the other is below 0.4
        (2.0, {0.3: 1.0, 0.36: 0.8}, {0.4: 0.5}, False),  # below 0.4 may be more
        (0.5, {1.0: 1.0, 1.2: 0.8}, {0.4: 0.5}, False),
        (0.5, {0.4: 0.5}, {1.0: 1.0, 1.2: 0.8}, True),
        (1.0, {1.0: 1.0, 1.2: 0.8}, {1.0: 1.0, 1.2: 0.75}, True),
        (1.0, {1.0: 1.0}, {1.0: 1.0}, False),  # none has met its limit
        (1.3, {1.0: 1.0, 1.2: 0.8}, {1.0: 1.0, 1.2: 0.75}, False),
    ],
)
def test_advice_agrees_only_with_what_is_known_of_both_sides(sides, advised, ours, other, agrees):
    study = SimpleNamespace(ratio=SimpleNamespace(mean=advised))
    compared = sides.Compared(sides.MIXES[0], study, {"1P1D": ours, "aggregated": other})
    assert compared.agrees == agrees
