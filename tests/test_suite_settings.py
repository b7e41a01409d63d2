"""The settings of the suite itself: no test can hang it, in Python or outside."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support.side_by_side import ALONE as ALONE_UNIT
from tests.support.side_by_side import scope_of

ROOT = Path(__file__).parents[1]
COMMAND = [  # pytest with the settings of this suite
    *(sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider"),
    *("-p", "tests.support.watchdog", "-p", "tests.support.side_by_side", "-p", "tests.support.cpu_seconds"),
]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}  # where the plugins are
IN_PYTHON = """
import time


def test_hangs():
    time.sleep(1000)
"""
BUSY = """
import subprocess
import sys

LOOP = "import time\\nwhile time.process_time() < 2.0: pass"


def test_works():
    exec(LOOP)
    subprocess.run([sys.executable, "-c", LOOP], check=True)
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

SIDE_BY_SIDE = """
import os
from pathlib import Path

import pytest

STATE = Path({folder!r})


@pytest.fixture(scope="session")
def shared():
    mark = STATE / f"busy-{{os.getpid()}}"
    mark.touch()
    yield
    mark.unlink(missing_ok=True)


@pytest.mark.parametrize("number", range(20))
def test_side_by_side(shared, number):
    (STATE / f"ran-{{os.getpid()}}").touch()
    assert not list(STATE.glob("alone-*"))
"""
ALONE = """
import os
from pathlib import Path

import pytest

STATE = Path({folder!r})


@pytest.mark.parametrize("number", range(3))
def test_alone(number):
    (STATE / f"alone-{{os.getpid()}}").touch()
    assert len(list(STATE.glob("alone-*"))) == 1
    assert {{path.name for path in STATE.glob("busy-*")}} <= {{f"busy-{{os.getpid()}}"}}
"""


def run_to_end(command, folder):
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=folder, env=ENVIRONMENT)


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
        pytest.param(WITH_THE_LOCK_OF_THE_INTERPRETER, "lock", marks=pytest.mark.full),
        (AT_THE_END, "_shutdown"),
    ],
    ids=["outside-python", "in-a-teardown", "with-the-lock", "at-the-end"],
)
def test_what_hangs_ends_the_run_shows_where_and_leaves_no_child(tmp_path, run_suite, source, function):
    printed = run_suite(source, "timeout=1", "watchdog_grace=4")
    assert "most recent call first" in printed
    assert f"in {function}\n" in printed
    assert [path for path in tmp_path.glob("pid") if psutil.pid_exists(int(path.read_text()))] == []


@pytest.mark.slow
def test_what_hangs_ends_a_run_of_several_workers(run_suite):
    printed = run_suite(IN_A_TEARDOWN_BEHIND_A_FAILURE, "timeout=1", "watchdog_grace=9", workers=2)  # also for the others' end
    assert "worker restarting disabled" in printed
    assert "failed" in printed.splitlines()[-1]


@pytest.mark.slow
def test_tests_that_run_alone_run_behind_all_others_and_are_counted_with_them(tmp_path):
    state, root = tmp_path / "state", tmp_path / "root"
    for folder in (state, root / "a_alone"):
        folder.mkdir(parents=True)
    (root / "a_alone" / "test_alone.py").write_text(ALONE.format(folder=str(state)))
    for name in "bcde":
        (root / f"test_{name}.py").write_text(SIDE_BY_SIDE.format(folder=str(state)))
    command = [*COMMAND, "--rootdir", str(root), "-n", "2"]
    result = run_to_end([*command, "-o", "alone=a_alone", str(root)], root)
    assert result.returncode == 0, result.stdout
    assert "83 passed" in result.stdout.splitlines()[-1]
    assert len(list(state.glob("ran-*"))) == 2


@pytest.mark.slow
def test_a_run_tells_its_cpu_seconds_with_those_of_its_workers_and_their_children(tmp_path):
    (tmp_path / "test_busy.py").write_text(BUSY)
    command = [*COMMAND, "--rootdir", str(tmp_path), str(tmp_path)]
    for arguments in ([], ["-n", "2"]):
        printed = run_to_end([*command, *arguments], tmp_path).stdout
        assert int(re.search(r"^(\d+) CPU seconds$", printed, re.MULTILINE)[1]) >= 4, printed


def test_whatever_starts_processes_runs_alone(request):
    alone = [item for item in request.session.items if item.get_closest_marker("e2e")]
    paths = request.config.getini("alone")
    assert [item.nodeid for item in alone if scope_of(item.nodeid, paths) != ALONE_UNIT] == []


@pytest.fixture
def run_suite(tmp_path) -> Callable[..., str]:
    """Run one test file under the settings of this suite, some of them changed; it has to fail. Returns what is printed."""

    def run(source: str, *settings: str, workers: int = 0) -> str:
        (tmp_path / "test_hang.py").write_text(source)
        command = [*COMMAND, "--rootdir", str(tmp_path), f"-n{workers}"]
        options = [option for setting in settings for option in ("-o", setting)]
        result = run_to_end([*command, *options, str(tmp_path)], tmp_path)
        assert result.returncode != 0
        return result.stderr + result.stdout

    return run
