"""The settings of the suite itself: no test can hang it, whatever it hangs in."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
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
IN_A_TEARDOWN_BEHIND_A_FAILURE = """
import subprocess
import sys
import time
from pathlib import Path

import pytest


@pytest.fixture
def child():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    Path("pid").write_text(str(process.pid))
    yield
    time.sleep(1000)


def test_fails(child):
    assert False
"""
WITH_THE_LOCK_OF_THE_INTERPRETER = """
import ctypes

import pytest


@pytest.fixture
def lock():
    yield
    ctypes.PyDLL(None).sleep(1000)


def test_fails(lock):
    assert False
"""
AT_THE_END = """
import threading
import time


def test_leaves_a_thread():
    threading.Thread(target=time.sleep, args=(1000,)).start()
"""


def test_every_test_has_a_time_limit(pytestconfig):
    assert float(pytestconfig.getini("timeout")) > 0
    assert float(pytestconfig.getini("watchdog_grace")) > 0


@pytest.mark.slow
def test_a_test_that_hangs_fails(run_suite):
    assert "1 failed" in run_suite(IN_PYTHON, "timeout=1", "watchdog_grace=60")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "function"),
    [
        (OUTSIDE_PYTHON, "test_hangs"),
        (IN_A_TEARDOWN_BEHIND_A_FAILURE, "child"),
        (WITH_THE_LOCK_OF_THE_INTERPRETER, "lock"),
        (AT_THE_END, "_shutdown"),
    ],
    ids=["outside-python", "in-a-teardown", "with-the-lock", "at-the-end"],
)
def test_what_hangs_ends_the_run_shows_where_and_leaves_no_child(tmp_path, run_suite, source, function):
    printed = run_suite(source, "timeout=1", "watchdog_grace=1")
    assert "most recent call first" in printed
    assert f"in {function}\n" in printed
    assert [path for path in tmp_path.glob("pid") if psutil.pid_exists(int(path.read_text()))] == []


@pytest.fixture
def run_suite(tmp_path) -> Callable[..., str]:
    """Run one test file under the settings of this suite, some of them changed; it has to fail. Returns what is printed."""

    def run(source: str, *settings: str) -> str:
        (tmp_path / "test_hang.py").write_text(source)
        command = [sys.executable, "-m", "pytest", "-c", str(SETTINGS), "--rootdir", str(tmp_path), "-p", "no:cacheprovider"]
        options = [option for setting in settings for option in ("-o", setting)]
        result = subprocess.run(
            [*command, *options, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path
        )
        assert result.returncode != 0
        return result.stdout + result.stderr

    return run
