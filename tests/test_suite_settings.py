"""The settings of the suite itself: no test can hang it, in Python or outside."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support.side_by_side import ONE_AT_A_TIME, scope_of

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

IN_THE_UNIT = """
import os
from pathlib import Path

import pytest

STATE = Path({folder!r})


@pytest.fixture(scope="session")
def cluster():
    mark = STATE / f"{{Path(__file__).stem}}-{{os.getpid()}}"
    mark.touch()
    yield
    mark.unlink()


def test_starts_a_cluster(cluster):
    (STATE / f"unit-{{os.getpid()}}").touch()
"""
IN_A_FILE = """
import os
from pathlib import Path

import pytest

STATE = Path({folder!r})


@pytest.mark.parametrize("number", range(20))
{mark}
def test_of_a_file(number):
    with (STATE / f"ran-{{os.getpid()}}").open("a") as ran:
        ran.write(Path(__file__).stem)
    assert not list(STATE.glob(f"test_*-{{os.getpid()}}"))
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
    printed = run_suite(source, "timeout=1", "watchdog_grace=2")
    assert "most recent call first" in printed
    assert f"in {function}\n" in printed
    assert [path for path in tmp_path.glob("pid") if psutil.pid_exists(int(path.read_text()))] == []


@pytest.mark.slow
@pytest.mark.full
def test_what_hangs_ends_a_run_of_several_workers(run_suite):
    printed = run_suite(IN_A_TEARDOWN_BEHIND_A_FAILURE, "timeout=1", "watchdog_grace=9", workers=2)  # also for the others' end
    assert "worker restarting disabled" in printed
    assert "failed" in printed.splitlines()[-1]


@pytest.mark.slow
def test_tests_of_clusters_run_one_at_a_time_beside_files_and_end_what_they_started(tmp_path):
    state, root = tmp_path / "state", tmp_path / "root"
    for folder in (state, root / "z_clusters"):
        folder.mkdir(parents=True)
    for name in "ab":
        (root / "z_clusters" / f"test_{name}.py").write_text(IN_THE_UNIT.format(folder=str(state)))
    for name, mark in {"c": "", "d": "", "e": "", "f": "@pytest.mark.slow"}.items():
        (root / f"test_{name}.py").write_text(IN_A_FILE.format(folder=str(state), mark=mark))
    result = run_to_end([*COMMAND, "--rootdir", str(root), "-n", "2", "-o", "one_at_a_time=z_clusters", str(root)], root)
    assert result.returncode == 0, result.stdout
    assert "82 passed" in result.stdout.splitlines()[-1]
    (unit,) = (path.name.removeprefix("unit-") for path in state.glob("unit-*"))
    ran = {path.name.removeprefix("ran-"): path.read_text() for path in state.glob("ran-*")}
    assert ran.pop(unit)  # it went on with files, without its cluster
    (of_the_other,) = ran.values()
    assert of_the_other.startswith("test_f")  # slow ones come first


@pytest.mark.slow
def test_a_run_tells_its_cpu_seconds_with_those_of_its_workers_and_their_children(tmp_path):
    (tmp_path / "test_busy.py").write_text(BUSY)
    before = cpu_seconds_of_children()
    printed = run_to_end([*COMMAND, "--rootdir", str(tmp_path), "-n", "2", str(tmp_path)], tmp_path).stdout
    told = int(re.search(r"^(\d+) CPU seconds$", printed, re.MULTILINE)[1])
    assert abs(told - (cpu_seconds_of_children() - before)) < 1.8, printed  # the test and its child take 2 each


def cpu_seconds_of_children():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_of_the_tests_that_start_clusters_no_two_run_at_the_same_time(request):
    items = [item for item in request.session.items if item.get_closest_marker("e2e")]
    paths = request.config.getini(ONE_AT_A_TIME)
    assert [item.nodeid for item in items if scope_of(item.nodeid, paths) != ONE_AT_A_TIME] == []


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
