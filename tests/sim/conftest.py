"""The simulated code logs what it should warn of; here that is everything that is tested."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from kvferry.sim.runs import silence


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    silence()
    yield
    logging.disable(logging.NOTSET)
