"""A pytest plugin (``-p tests.support.side_by_side``): with ``-n`` files run side by side, and some tests only one at a time.

Tests below the paths of the setting ``one_at_a_time`` start whole clusters of processes. All of them are one unit of work, so
one worker runs them in their order; it is the first unit, and the other workers take files meanwhile. What these tests have
started for the session ends with the last of them. Files with tests marked ``slow`` come next, so that no long one is left for
the end. Libraries in a worker compute with one thread, as other workers run at the same time. Without ``-n`` nothing
changes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

ONE_AT_A_TIME = "one_at_a_time"


def scope_of(nodeid: str, one_at_a_time: list[str]) -> str:
    """Return the unit of work to which a test belongs: its file, or the unit of those that run one at a time."""
    path = nodeid.partition("::")[0]
    return ONE_AT_A_TIME if any(Path(path).is_relative_to(each) for each in one_at_a_time) else path


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the setting ``one_at_a_time``."""
    help_text = "paths, relative to the root, of whose tests no two run at the same time"
    parser.addini(ONE_AT_A_TIME, help_text, type="linelist", default=[])


def pytest_configure(config: pytest.Config) -> None:
    """Bound the threads of libraries that are not imported yet."""
    if hasattr(config, "workerinput"):
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the unit first in a worker, then files with slow tests."""
    if hasattr(config, "workerinput"):
        slow_files = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: (not _runs_one_at_a_time(item), item.path not in slow_files))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> object:
    """Run the last test of the unit as if it were the last of the session, which ends the session's clusters."""
    is_last = hasattr(item.config, "workerinput") and _runs_one_at_a_time(item)
    if is_last and nextitem is not None and not _runs_one_at_a_time(nextitem):
        return item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
    return None


def _runs_one_at_a_time(item: pytest.Item) -> bool:
    return scope_of(item.nodeid, item.config.getini(ONE_AT_A_TIME)) == ONE_AT_A_TIME


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:  # xdist has no types
    """Hand out the unit and then files in their order."""
    from xdist.scheduler import LoadScopeScheduling

    one_at_a_time = config.getini(ONE_AT_A_TIME)
    if not one_at_a_time or config.getoption("dist") != "load":
        return None

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid, one_at_a_time)

    config.option.loadscopereorder = False
    return Scheduling(config, log)
