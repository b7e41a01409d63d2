"""Where the examples are, and the one that others import."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def examples_dir() -> Path:
    return Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def folder_connector(examples_dir):
    path = examples_dir / "folder_connector" / "folder_connector.py"
    spec = importlib.util.spec_from_file_location("folder_connector", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["folder_connector"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["folder_connector"]
