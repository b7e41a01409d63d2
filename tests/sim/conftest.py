"""How many runs are played. The simulated code logs what it should warn of; here that is everything that is tested."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest

from kvferry.sim.runs import silence


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    silence()
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="session")
def first_seeds(request: pytest.FixtureRequest) -> Callable[[int, int], range]:
    """Return as many seeds as every run of the suite plays, or with --full as the second number says."""
    is_full = request.config.getoption("--full")
    return lambda num_always, num_full: range(num_full if is_full else num_always)
