"""The watch for calls that wait: it finds each kind, on the thread that makes it, and excuses what only looks like one."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging.handlers
import multiprocessing
import os
import queue
import selectors
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

import pytest

from connectors.testing.waiting_calls import WaitingCalls


class Interface:
    def run(self, work):
        raise NotImplementedError

    async def later(self):
        raise NotImplementedError


class Target(Interface):
    def run(self, work):
        return work()


@pytest.fixture
def found():
    """Return a function that says what waited during a call."""

    def run(work):
        waits, target = WaitingCalls(), Target()
        waits.watch(target, Interface)
        before = sys.getprofile()
        target.run(work)
        assert sys.getprofile() is before
        return waits.found

    return run


@pytest.fixture
def sockets():
    both = socket.socketpair()
    yield both
    for one in both:
        one.close()


def wait_for_thread():
    ends = threading.Event()
    thread = threading.Thread(target=ends.wait)
    thread.start()
    thread.join(0.001)
    ends.set()


WAITS = {
    "sleep": lambda: time.sleep(0),
    "stat": lambda: os.path.exists("/"),
    "open": lambda: open(os.devnull).close(),
    "Thread.join": wait_for_thread,
    "Condition.wait": lambda: threading.Event().wait(0.001),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_call_that_waits_is_found_with_its_place(found, name):
    (line,) = found(WAITS[name])
    assert line.startswith(f"Target.run calls {name} in test_waiting_calls.py:")


def test_a_socket_that_blocks_waits_and_another_one_does_not(found, sockets):
    ours, theirs = sockets
    assert [line.split()[2] for line in found(lambda: ours.send(b"a"))] == ["socket.send"]
    ours.setblocking(False)
    assert found(lambda: ours.send(b"a")) == []
    assert theirs.recv(2) == b"aa"


def test_the_work_of_other_threads_is_theirs(found):
    orders = queue.SimpleQueue()
    thread = threading.Thread(target=lambda: (orders.get(), time.sleep(0)))
    assert found(thread.start) == [], "a thread is waited for until it has begun"
    assert found(lambda: orders.put(1)) == []
    thread.join()


def kinds_of(lines):
    return [line.partition(" calls ")[2].split()[0] for line in lines]


def test_a_program_that_runs_is_waited_for(found):
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as program:
        with suppress(subprocess.TimeoutExpired):
            assert program.wait(0.001) is None
        lines = found(lambda: (program.stdin.close(), program.wait()))
        assert found(program.wait) == [], "it has ended"
    assert kinds_of(lines) == ["Popen.wait"]


def test_a_process_that_runs_is_waited_for(found):
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=theirs.recv)
    process.start()
    assert kinds_of(found(lambda: process.join(0.001)))[0] == "Process.join"
    ours.send(None)
    process.join()
    assert found(process.join) == [], "it has ended"


def test_a_message_that_is_not_there_is_waited_for(found):
    waits = WaitingCalls()
    ours, theirs = multiprocessing.Pipe()
    os.set_blocking(ours.fileno(), False)  # so that the test ends
    with pytest.raises(BlockingIOError), waits.watching("call"):
        ours.recv()
    assert kinds_of(waits.found) == ["Connection.recv"]
    theirs.send(1)
    assert found(ours.recv) == [], "it is there"
    theirs.close()
    ours.close()
    with pytest.raises(OSError, match="closed"):
        found(ours.recv)


def test_a_selector_with_time_waits(found):
    with selectors.DefaultSelector() as selector:
        assert kinds_of(found(lambda: selector.select(0.001))) == [f"{type(selector).__name__}.select"]
        assert found(lambda: selector.select(0)) == []


async def test_the_selector_of_the_event_loop_has_nothing_else_to_do():
    waits = WaitingCalls()
    with waits.watching("stop"):
        await asyncio.sleep(0.001)
    assert waits.found == []


def test_a_thread_that_has_ended_is_not_waited_for(found):
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    assert found(thread.join) == []


def test_a_socket_that_blocks_is_sent_to_without_waiting(found, sockets):
    assert found(lambda: sockets[0].send(b"a", socket.MSG_DONTWAIT)) == []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ours, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as theirs:
        theirs.bind(("127.0.0.1", 0))
        assert found(lambda: ours.sendto(b"a", theirs.getsockname())) == []
        assert len(found(lambda: theirs.recv(1))) == 1


def test_the_files_of_logs_are_the_workers(found, tmp_path):
    logger = logging.Logger("watched")
    handler = logging.handlers.WatchedFileHandler(tmp_path / "log", delay=True)
    logger.addHandler(handler)
    assert found(lambda: logger.warning("a line")) == []
    handler.close()
    assert (tmp_path / "log").read_text() == "a line\n"


def test_a_look_at_the_stack_is_no_wait(found):
    assert found(inspect.stack) == []


@pytest.mark.parametrize("name", ["stat", "unlink"])
def test_asyncio_removes_the_path_of_a_unix_server(found, name, tmp_path):
    """Python 3.13 does when the server is closed."""
    path = tmp_path / "path"
    path.touch()
    names = {"call": getattr(os, name)}
    exec(compile("def close(path): call(path)", asyncio.unix_events.__file__, "exec"), names)
    assert found(lambda: names["close"](path)) == []


def test_a_frozen_target_is_watched():
    @dataclass(frozen=True)
    class Frozen(Target):
        pass

    waits, target = WaitingCalls(), Frozen()
    waits.watch(target, Interface)
    target.run(lambda: time.sleep(0))
    assert len(waits.found) == 1


def test_what_ends_with_garbage_is_not_the_calls(found):
    collects = []
    assert found(lambda: collects.append(gc.isenabled())) == []
    assert collects == [False]
    assert gc.isenabled()


def test_a_look_without_time_is_no_wait(found):
    assert found(lambda: threading.Semaphore(0).acquire(timeout=0)) == []


def test_an_import_is_no_wait(found, monkeypatch):
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    assert found(lambda: __import__("colorsys")) == []


def test_what_was_called_before_an_error_is_found_too():
    waits, target = WaitingCalls(), Target()
    waits.watch(target, Interface)

    def fail():
        time.sleep(0)
        raise ValueError

    with pytest.raises(ValueError, match=r"^$"):
        target.run(fail)
    assert len(waits.found) == 1
