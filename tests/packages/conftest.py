"""The built wheel ``kvferry-vllm``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.plugin_wheel import build_wheel, unpack_wheel


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    """Return the wheel's file."""
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def unpacked(wheel, tmp_path_factory) -> Path:
    """Return the folder in which the wheel is unpacked. No test may change it."""
    return unpack_wheel(wheel, tmp_path_factory.mktemp("unpacked"))
