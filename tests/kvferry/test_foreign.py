"""A program of others runs as a child of ours: none of its processes is left, however it or its owners end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from core.clock import SystemClock
from kvferry.processes import ChildSpec, ProcessKeeper
from tests.support.polling import wait_until

pytestmark = pytest.mark.slow

WAIT_S = 30.0
ADDRESS = "http://127.0.0.1:1"

# The program starts a child that outlives it, as vllm serve does; both pids go to a file.
PROGRAM = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open(sys.argv[1] + ".new", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(600)
"""
OWNER = """
import sys, time
from pathlib import Path
from core.clock import SystemClock
from kvferry.processes import ChildSpec, ProcessKeeper
keeper = ProcessKeeper(SystemClock(), lambda child, lived_s: None)
command = [sys.executable, "-P", "-m", "kvferry.foreign"]
keeper.start(ChildSpec("f", command, None, lambda: sys.argv[1]))
time.sleep(600)
"""


def foreign(*command, **fields):
    return json.dumps({"command": command, "http_address": ADDRESS, **fields})


@pytest.fixture
def note(tmp_path):
    return tmp_path / "pids"


@pytest.fixture
def program(note):
    return foreign(sys.executable, "-c", PROGRAM, str(note))


@pytest.fixture
def failures():
    return []


@pytest.fixture
def keeper(failures):
    """A keeper that notes exit codes and reasons and restarts nothing."""
    keeper = ProcessKeeper(SystemClock(), lambda child, _: failures.append((child.process.returncode, child.failure)))
    yield keeper
    keeper.close()


def start(keeper, program, **environment):
    spec = ChildSpec("f", [sys.executable, "-P", "-m", "kvferry.foreign"], None, lambda: program, environment)
    return keeper.start(spec)


def pids_of(note):
    """Return the processes of the program, once it has started both."""
    wait_until(note.exists)
    return [psutil.Process(int(pid)) for pid in note.read_text().split()]


def all_gone(processes):
    return all(not one.is_running() or one.status() == psutil.STATUS_ZOMBIE for one in processes)


def test_the_address_is_announced(keeper, program):
    assert start(keeper, program).addresses.result(WAIT_S) == {"http_address": ADDRESS}


def test_a_program_that_is_asked_to_leave_takes_its_children_along(keeper, program, note):
    start(keeper, program)
    processes = pids_of(note)
    keeper.end(["f"], WAIT_S)
    wait_until(lambda: all_gone(processes))


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("who", ["wrapper", "program"])
def test_what_is_killed_alone_takes_the_rest_along(keeper, program, note, who, is_frozen):
    child = start(keeper, program)
    processes = pids_of(note)
    if is_frozen:
        processes[1].suspend()
    os.kill(child.pid if who == "wrapper" else processes[0].pid, signal.SIGKILL)
    assert child.ended.wait(WAIT_S)
    wait_until(lambda: all_gone(processes))


def test_the_death_of_the_supervisor_ends_all(program, note):
    owner = subprocess.Popen([sys.executable, "-P", "-c", OWNER, program], stdin=subprocess.DEVNULL)
    try:
        processes = pids_of(note)
    finally:
        owner.kill()
        owner.wait()
    wait_until(lambda: all_gone(processes))


WITH_SOCKETS = """
import os, sys, time
open(os.path.join(os.environ["SOCKETS"], "socket"), "w").close()
with open(sys.argv[1] + ".new", "w") as file:
    file.write(os.environ["SOCKETS"])
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize("end", ["asked", "killed", "by itself"])
def test_a_program_s_sockets_go_with_it(keeper, note, end):
    lives_s = "0" if end == "by itself" else "600"
    child = start(keeper, foreign(sys.executable, "-c", WITH_SOCKETS, str(note), lives_s, folder_variable="SOCKETS"))
    wait_until(note.exists)
    folder = Path(note.read_text())
    assert folder.is_absolute()
    if end == "killed":
        os.kill(child.pid, signal.SIGKILL)
    elif end == "asked":
        keeper.end(["f"], WAIT_S)
    wait_until(lambda: not folder.exists())


def test_a_folder_that_the_user_has_chosen_stays(keeper, note, tmp_path):
    program = foreign(sys.executable, "-c", WITH_SOCKETS, str(note), "0", folder_variable="SOCKETS")
    assert start(keeper, program, SOCKETS=str(tmp_path)).ended.wait(WAIT_S)
    assert note.read_text() == str(tmp_path)
    assert (tmp_path / "socket").exists()


def test_a_folder_with_too_long_a_path_is_not_made(keeper, tmp_path):
    deep = tmp_path / ("x" * 64)
    deep.mkdir()
    program = foreign(
        sys.executable, "-c", "import os, sys; sys.exit(7 + ('SOCKETS' in os.environ))", folder_variable="SOCKETS"
    )
    child = start(keeper, program, TMPDIR=str(deep))
    assert child.ended.wait(WAIT_S)
    assert child.process.returncode == 7
    assert list(deep.iterdir()) == []


@pytest.mark.parametrize(
    ("end", "code"), [("import sys; sys.exit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 128 + signal.SIGKILL)]
)
def test_the_exit_code_is_that_of_the_program(keeper, failures, end, code):
    assert start(keeper, foreign(sys.executable, "-c", end)).ended.wait(WAIT_S)
    assert [found for found, _ in failures] == [code]


def test_a_program_that_cannot_be_started_is_named(keeper, failures):
    assert start(keeper, foreign("/nowhere/vllm")).ended.wait(WAIT_S)
    ((code, reason),) = failures
    assert code == 1
    assert "No such file or directory: '/nowhere/vllm'" in reason


def test_variables_of_a_child_are_added_to_its_environment(keeper, failures):
    check = "import os, sys; sys.exit(0 if os.environ.get('KV') == 'x' and 'PATH' in os.environ else 5)"
    assert start(keeper, foreign(sys.executable, "-c", check), KV="x").ended.wait(WAIT_S)
    assert [code for code, _ in failures] == [0]
