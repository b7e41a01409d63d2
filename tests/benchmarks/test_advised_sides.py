"""How the goodput of a side is searched for."""

from __future__ import annotations

import math

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
    assert served < sides.goodput(shares) < failed


def test_search_gives_up_below_the_least_rate(sides):
    shares = search(sides, 0.1, 1.0, least=0.4)
    assert min(shares) == pytest.approx(sides.STEP**-5)  # 0.402
    assert sides.goodput(shares) == pytest.approx(0.2 * min(shares))  # on the line from all at rate 0 to half of them


def test_goodput_is_the_last_rate_where_none_is_too_fast(sides):
    assert sides.goodput({1.0: 0.95, 0.5: 1.0}) == 1.0
