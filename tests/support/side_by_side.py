"""A pytest plugin (``-p tests.support.side_by_side``): with ``-n`` files run side by side, and some tests after them, alone.

Tests below the paths of the setting ``alone`` start processes, want the processors for themselves, or look at what is left in
/dev/shm. All of them are one unit of work, the last, which begins when the other workers have finished, their session fixtures
included. It is still one run: one report, one closing line. Libraries in a worker compute with one thread, as other workers
run at the same time. Without ``-n`` nothing changes.

How it is known that the others have finished: every worker holds a shared lock on a file from its first test to the end of its
session, and the one that comes to the unit wants the lock exclusively. The kernel releases what a dead worker held.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

ALONE = "alone"


def scope_of(nodeid: str, alone: list[str]) -> str:
    """Return the unit of work to which a test belongs: its file, or the unit of those that run alone."""
    path = nodeid.partition("::")[0]
    return ALONE if any(Path(path).is_relative_to(each) for each in alone) else path


class WorkersLock:
    """One worker's end of the lock on ``path``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        self._kind = fcntl.LOCK_UN

    def take(self, kind: int) -> None:
        """Hold ``fcntl.LOCK_SH`` or, then to the end, ``fcntl.LOCK_EX``; return when that is possible."""
        if self._file is None:
            self._file = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        if self._kind not in {kind, fcntl.LOCK_EX}:
            fcntl.flock(self._file, kind)
            self._kind = kind

    def release(self) -> None:
        """Let the others continue."""
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            os.close(self._file)
            self._file = None


_LOCK = pytest.StashKey[WorkersLock]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the setting ``alone``."""
    parser.addini("alone", "paths, relative to the root, whose tests do not run beside others", type="linelist", default=[])


def pytest_configure(config: pytest.Config) -> None:
    """Bound the threads of libraries that are not imported yet."""
    if hasattr(config, "workerinput"):
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the tests that run alone after the others, in a worker."""
    if hasattr(config, "workerinput"):
        alone = config.getini("alone")
        items.sort(key=lambda item: scope_of(item.nodeid, alone) == ALONE)
        config.stash[_LOCK] = WorkersLock(Path(config.getoption("basetemp")).parent / "side_by_side.lock")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Wait, outside of any time limit, until the test may run."""
    lock = item.config.stash.get(_LOCK, None)
    if lock is not None:
        is_alone = scope_of(item.nodeid, item.config.getini("alone")) == ALONE
        lock.take(fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH)
    return (yield)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Let the next worker begin."""
    lock = session.config.stash.get(_LOCK, None)
    if lock is not None:
        lock.release()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:  # xdist has no types
    """Hand out files in their order and then the unit."""
    from xdist.scheduler import LoadScopeScheduling

    alone = config.getini("alone")
    if not alone or config.getoption("dist") != "load":
        return None

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid, alone)

    config.option.loadscopereorder = False
    return Scheduling(config, log)
