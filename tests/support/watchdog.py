"""A pytest plugin (``-p tests.support.watchdog``): no test hangs the run, in Python or outside, at any time.

pytest-timeout fails a test that takes too long, and pytest's faulthandler can end a run that hangs outside Python. But both
stop watching as soon as a test has failed, because a debugger may take over then: a teardown that hangs behind a failure hangs
for ever. This watch goes on until the teardown is over, and from the last test to the end of the process. It gives a test
``watchdog_grace`` seconds beyond its timeout.

It ends what hangs: the stacks of all threads go to stderr, child processes are killed, the exit status is 1. A thread does
this. Where that thread cannot run, because something waits while it holds the interpreter's lock, faulthandler's timer prints
the stacks and ends the process a little later, and children are left. Knows nothing of kvferry.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Generator

import psutil
import pytest

EXIT_STATUS = 1

_REAP_S = 3.0
_LAST_RESORT_S = 6.0  # after the limit: when faulthandler's timer ends a process whose watching thread could not


class Watchdog:
    """Ends the process when a watch lasts too long; writes to a stderr that capturing does not redirect."""

    def __init__(self) -> None:
        self._stderr = os.dup(sys.__stderr__.fileno() if sys.__stderr__ else 2)
        self._changed = threading.Condition()
        self._watch: tuple[str, float] | None = None  # what is watched, and until when by the monotonic clock
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def watch(self, what: str, limit_s: float) -> None:
        """Watch ``what`` from now on, instead of anything else."""
        self._set((what, time.monotonic() + limit_s))
        self.watch_on()

    def watch_on(self) -> None:
        """Go on until the same time, even if faulthandler's timer was cancelled meanwhile."""
        if self._watch is not None:
            left_s = max(0.0, self._watch[1] - time.monotonic())
            faulthandler.dump_traceback_later(left_s + _LAST_RESORT_S, file=self._stderr, exit=True)

    def rest(self) -> None:
        """Watch nothing."""
        faulthandler.cancel_dump_traceback_later()
        self._set(None)

    def _set(self, watch: tuple[str, float] | None) -> None:
        with self._changed:
            self._watch = watch
            self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            while self._watch is None or time.monotonic() < self._watch[1]:
                self._changed.wait(None if self._watch is None else self._watch[1] - time.monotonic())
            self._end(self._watch[0])

    def _end(self, what: str) -> None:
        os.write(self._stderr, f"\n{what} has not ended in time; what every thread does:\n".encode())
        faulthandler.dump_traceback(self._stderr, all_threads=True)
        children = psutil.Process().children(recursive=True)
        for child in children:
            try:
                child.kill()
            except psutil.NoSuchProcess:  # it ended by itself meanwhile
                continue
        psutil.wait_procs(children, timeout=_REAP_S)
        os._exit(EXIT_STATUS)


_WATCHDOG = pytest.StashKey[Watchdog]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the setting ``watchdog_grace``."""
    parser.addini("watchdog_grace", "seconds behind a test's timeout after which the run is ended; 0 for never", default="0")


def pytest_configure(config: pytest.Config) -> None:
    """Begin, where a limit is set."""
    if float(config.getini("watchdog_grace")) > 0:
        config.stash[_WATCHDOG] = Watchdog()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Watch one test: its setup, its call and its teardown."""
    watchdog = item.config.stash.get(_WATCHDOG, None)
    if watchdog is None:
        return (yield)
    marker = item.get_closest_marker("timeout")
    watchdog.watch(item.nodeid, _limit_s(item.config, marker.args[0] if marker and marker.args else None))
    try:
        return (yield)
    finally:
        watchdog.rest()


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """Continue after a failure, where others stop."""
    watchdog = node.config.stash.get(_WATCHDOG, None)
    if watchdog is not None:
        watchdog.watch_on()


@pytest.hookimpl(trylast=True)
def pytest_enter_pdb(config: pytest.Config) -> None:
    """Leave a person at the debugger alone, to the end of the test."""
    watchdog = config.stash.get(_WATCHDOG, None)
    if watchdog is not None:
        watchdog.rest()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Watch the end of the run: of pytest, of leftover threads, of the interpreter."""
    watchdog = session.config.stash.get(_WATCHDOG, None)
    if watchdog is not None:
        watchdog.watch("the end of the run", _limit_s(session.config))


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Let a worker of pytest-xdist, whose run has ended, wait for the end of the others."""
    watchdog = config.stash.get(_WATCHDOG, None)
    if watchdog is not None and hasattr(config, "workerinput"):
        watchdog.rest()


def _limit_s(config: pytest.Config, timeout_s: float | None = None) -> float:
    timeouts = (timeout_s, config.getoption("timeout", None), config.getini("timeout"))
    return float(next(timeout for timeout in timeouts if timeout is not None)) + float(config.getini("watchdog_grace"))
