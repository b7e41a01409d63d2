"""Children are started, logged, restarted and reaped, however they behave or end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest

from core.clock import SystemClock
from core.errors import StartFailed
from kvferry.child import FAILURE, SupervisorPipe
from kvferry.processes import ChildSpec, ProcessKeeper, RestartBackoff, describe_exit

# Children are scripts; each is called with --ready-fd FD --parent-pid PID at the end of its arguments.
TELL = 'import os, sys; os.write(int(sys.argv[-3]), b\'{"ops_address": "here"}\\n\'); os.close(int(sys.argv[-3]));'
SLEEP = "import time; time.sleep(600)"

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_child_left")]


def child(script, name="c", log_file=None):
    return ChildSpec(name, [sys.executable, "-c", script], log_file)


@pytest.fixture
def exits():
    return []


@pytest.fixture
def keeper(exits):
    """A keeper that notes unexpected exits and restarts nothing."""

    def on_exit(child, lived_s):
        exits.append(child.process.returncode)

    keeper = ProcessKeeper(SystemClock(), on_exit)
    yield keeper
    keeper.close()


def test_child_tells_its_addresses(keeper):
    started = keeper.start(child(TELL + SLEEP))
    assert started.addresses.result(30) == {"ops_address": "here"}
    assert keeper.current("c") is started


def test_child_that_ends_without_telling_fails_the_wait_and_is_reported(keeper, exits):
    started = keeper.start(child("import sys; sys.exit(3)"))
    with pytest.raises(ChildProcessError, match="exit code 3"):
        started.addresses.result(30)
    assert started.ended.wait(30)
    assert exits == [3]
    assert keeper.current("c") is None


def test_output_goes_to_the_log_file(keeper, tmp_path):
    log = tmp_path / "c.log"
    started = keeper.start(
        child("import sys; print('to stdout', flush=True); print('to stderr', file=sys.stderr)", log_file=log)
    )
    assert started.ended.wait(30)
    assert log.read_text() == "to stdout\nto stderr\n"


def test_input_is_read_again_for_every_start():
    lines, third = [], threading.Event()

    def on_exit(child, lived_s):
        lines.append(child.addresses.result()["heard"])
        return 0.01 if len(lines) < 3 else third.set()

    def read_input():
        return f"start {len(lines)}"

    script = "import json, os, sys; os.write(int(sys.argv[-3]), json.dumps({'heard': sys.stdin.read()}).encode() + b'\\n')"
    keeper = ProcessKeeper(SystemClock(), on_exit)
    keeper.start(ChildSpec("c", [sys.executable, "-c", script], None, read_input))
    assert third.wait(30)
    keeper.close()
    assert lines == ["start 0", "start 1", "start 2"]


def test_dead_child_is_restarted_until_told_otherwise():
    deaths, third = [], threading.Event()

    def on_exit(child, lived_s):
        deaths.append(child.pid)
        if len(deaths) == 3:
            third.set()
            return None
        return 0.01

    keeper = ProcessKeeper(SystemClock(), on_exit)
    keeper.start(child("pass"))
    assert third.wait(30)
    keeper.close()
    assert len(set(deaths)) == 3


def test_ended_child_is_neither_reported_nor_restarted(keeper, exits):
    started = keeper.start(child(TELL + SLEEP))
    started.addresses.result(30)
    keeper.end(["c"], grace_s=30)
    assert started.process.returncode == -signal.SIGTERM
    assert exits == []


def test_ending_cancels_a_planned_restart():
    died = threading.Event()
    keeper = ProcessKeeper(SystemClock(), lambda child, lived_s: died.set() or 3600.0)
    keeper.start(child("pass"))
    assert died.wait(30)
    keeper.end(["c"], grace_s=0)
    assert keeper.start(child("pass")).ended.wait(30)  # the name is free again
    keeper.close()


def test_child_that_will_not_leave_is_killed_with_its_own_children(keeper):
    script = (
        "import signal, subprocess, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        f"grandchild = subprocess.Popen([sys.executable, '-c', {SLEEP!r}]);"
        'import os; os.write(int(sys.argv[-3]), b\'{"pid": "%d"}\\n\' % grandchild.pid); os.close(int(sys.argv[-3]));' + SLEEP
    )
    started = keeper.start(child(script))
    grandchild = psutil.Process(int(started.addresses.result(30)["pid"]))
    keeper.end(["c"], grace_s=0.1)
    assert started.process.returncode == -signal.SIGKILL
    _, alive = psutil.wait_procs([grandchild], timeout=30)
    assert alive == []


def test_signal_to_a_child_that_has_ended_hits_no_process(keeper):
    started = keeper.start(child("pass"))
    assert started.ended.wait(30)
    assert keeper.send_signal(started, signal.SIGKILL) is False


def test_closing_kills_what_is_left_even_if_it_is_stopped():
    keeper = ProcessKeeper(SystemClock(), lambda child, lived_s: 0.0)
    started = keeper.start(child(TELL + SLEEP))
    started.addresses.result(30)
    keeper.send_signal(started, signal.SIGSTOP)
    keeper.close()
    keeper.close()
    assert started.process.returncode == -signal.SIGKILL


def test_child_dies_with_a_parent_that_is_killed():
    """A process that keeps one child is killed; the child, which ignores SIGTERM, must be gone."""
    inner = (
        "import signal, sys; from kvferry.child import SupervisorPipe, die_with_parent;"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); die_with_parent(int(sys.argv[-1]));"
        "SupervisorPipe(int(sys.argv[-3])).announce({'ops_address': 'here'});" + SLEEP
    )
    outer = (
        "import sys; from core.clock import SystemClock; from kvferry.processes import ChildSpec, ProcessKeeper;"
        "keeper = ProcessKeeper(SystemClock(), lambda child, lived_s: None);"
        f"child = keeper.start(ChildSpec('c', [sys.executable, '-c', {inner!r}], None));"
        "child.addresses.result(60); print(child.pid, flush=True);" + SLEEP
    )
    parent = subprocess.Popen([sys.executable, "-c", outer], stdout=subprocess.PIPE, text=True)
    orphan = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    _, alive = psutil.wait_procs([orphan], timeout=30)
    assert alive == []


def test_child_refuses_to_start_without_its_parent():
    script = "from kvferry.child import die_with_parent; die_with_parent(1)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert os.getpid() != 1
    assert "the parent process 1 is gone" in result.stderr


def test_pipe_to_no_supervisor_does_nothing_and_a_real_one_carries_one_line_each():
    SupervisorPipe(None).announce({"a": "b"})
    read_fd, write_fd = os.pipe()
    pipe = SupervisorPipe(write_fd)
    pipe.announce({"a": "b"})
    pipe.fail("two\nlines " + "x" * 100_000)
    os.close(write_fd)
    with os.fdopen(read_fd) as lines:
        addresses, failure = map(json.loads, lines)
    assert addresses == {"a": "b"}
    assert failure[FAILURE].startswith("two lines xxx")
    assert len(failure[FAILURE]) == 2000


def test_child_s_own_words_are_known_when_it_ends(keeper):
    script = (
        "import sys; from kvferry.child import SupervisorPipe; pipe = SupervisorPipe(int(sys.argv[-3]));"
        "pipe.announce({'ops_address': 'here'}); pipe.fail('no luck'); sys.exit(2)"
    )
    started = keeper.start(child(script))
    assert started.ended.wait(30)
    assert started.addresses.result(0) == {"ops_address": "here"}
    assert started.describe_end() == "ended with exit code 2: no luck"


@pytest.mark.parametrize("is_stopped", [False, True])
def test_child_that_is_replaced_counts_as_one_that_died(keeper, exits, is_stopped):
    started = keeper.start(child(TELL + SLEEP))
    started.addresses.result(30)
    if is_stopped:
        keeper.send_signal(started, signal.SIGSTOP)
        os.waitid(os.P_PID, started.pid, os.WSTOPPED | os.WNOWAIT)
    keeper.replace(started, "it hangs")
    assert keeper.current("c") is None  # asked on the keeper's thread, hence after its report
    number = signal.SIGKILL if is_stopped else signal.SIGTERM
    assert exits == [-number]
    assert started.describe_end() == f"ended with signal {number.name}: it hangs"


def test_child_that_was_told_to_leave_is_not_replaced(keeper, exits):
    started = keeper.start(child(TELL + SLEEP))
    started.addresses.result(30)
    keeper.end(["c"], 30.0)
    keeper.replace(started, "it hangs")
    assert exits == []


def test_backoff_doubles_up_to_its_limit_and_starts_over_after_a_long_life():
    backoff = RestartBackoff(0.5, 3.0)
    assert [backoff.next_delay_s(lived_s=0.1) for _ in range(4)] == [0.5, 1.0, 2.0, 3.0]
    assert backoff.next_delay_s(lived_s=10.0) == 0.5


def test_a_line_that_is_no_message_is_no_end_of_the_supervision(keeper):
    script = 'import os, sys; os.write(int(sys.argv[-3]), b\'no json\\n{"\\xff": 1}\\n7\\n[]\\n{"ops_address": "here"}\\n\');'
    started = keeper.start(child(script + SLEEP))
    assert started.addresses.result(30) == {"ops_address": "here"}
    assert keeper.current("c") is started


def test_child_that_nobody_could_watch_is_not_left_running(keeper, monkeypatch):
    opened, pids = os.pidfd_open, []

    def fail_once(pid):
        monkeypatch.setattr(os, "pidfd_open", opened)
        pids.append(pid)
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", fail_once)
    num_open = psutil.Process().num_fds()
    with pytest.raises(OSError, match="Too many open files"):
        keeper.start(child(SLEEP))
    assert not psutil.pid_exists(pids[0])
    assert psutil.Process().num_fds() == num_open
    assert keeper.current("c") is None
    assert keeper.start(child(TELL + SLEEP)).addresses.result(30)


@pytest.mark.parametrize("error", [OSError, MemoryError])
def test_restart_that_fails_is_tried_again(error, monkeypatch):
    monkeypatch.setattr("kvferry.processes._SPAWN_RETRY_S", 0.01)
    starts, third = [], threading.Event()

    def read_input():
        starts.append(None)
        if len(starts) == 2:
            raise error
        if len(starts) == 3:
            third.set()
        return ""

    keeper = ProcessKeeper(SystemClock(), lambda child, lived_s: 0.01 if len(starts) == 1 else None)
    keeper.start(ChildSpec("c", [sys.executable, "-c", "pass"], None, read_input))
    assert third.wait(30)
    keeper.close()


def test_an_error_of_the_keeper_ends_all_children_and_is_told():
    def on_exit(child, lived_s):
        raise RuntimeError("a bug")

    keeper = ProcessKeeper(SystemClock(), on_exit)
    lasting = keeper.start(child(TELL + SLEEP, "lasting"))
    silent = keeper.start(child(SLEEP, "silent"))
    lasting.addresses.result(30)
    keeper.start(child("pass", "brief"))
    assert keeper.has_failed.wait(30)
    assert [each.process.returncode for each in (lasting, silent)] == [-signal.SIGKILL] * 2
    assert lasting.ended.is_set()
    with pytest.raises(ChildProcessError, match="SIGKILL"):
        silent.addresses.result(30)
    assert keeper.current("lasting") is None
    assert keeper.send_signal(lasting, signal.SIGTERM) is False
    with pytest.raises(StartFailed, match="has died"):
        keeper.start(child("pass"))
    keeper.replace(lasting, "it hangs")
    keeper.end(["lasting"], grace_s=30)
    keeper.close()


def test_signals_without_a_name_are_told_by_their_number():
    assert [describe_exit(code) for code in (3, -signal.SIGKILL, -35)] == ["exit code 3", "signal SIGKILL", "signal 35"]
