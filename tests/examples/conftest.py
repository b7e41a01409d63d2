"""Where the examples are."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def examples_dir() -> Path:
    return Path(__file__).parents[2] / "examples"
