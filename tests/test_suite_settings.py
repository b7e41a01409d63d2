"""The settings of the suite itself: no test can hang it, whatever it hangs in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SETTINGS = Path(__file__).parents[1] / "pyproject.toml"
IN_PYTHON = """
import time


def test_hangs():
    time.sleep(1000)
"""
OUTSIDE_PYTHON = """
import ctypes


def test_hangs():
    mutex = ctypes.create_string_buffer(64)
    libc = ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)  # no signal ends this
"""


def test_every_test_has_a_time_limit(pytestconfig):
    assert float(pytestconfig.getini("timeout")) > 0
    assert float(pytestconfig.getini("faulthandler_timeout")) > float(pytestconfig.getini("timeout"))


@pytest.mark.slow
@pytest.mark.parametrize(("source", "sign"), [(IN_PYTHON, "1 failed"), (OUTSIDE_PYTHON, "most recent call first")])
def test_a_test_that_hangs_ends(tmp_path, source, sign):
    (tmp_path / "test_hang.py").write_text(source)
    limits = ["-o", "timeout=1", "-o", "faulthandler_timeout=3"]
    command = [sys.executable, "-m", "pytest", "-c", str(SETTINGS), "--rootdir", str(tmp_path), "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, *limits, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path
    )
    assert result.returncode != 0
    assert sign in result.stdout + result.stderr
