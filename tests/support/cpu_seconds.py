"""A pytest plugin: the run ends with the CPU seconds that it took, its workers and all processes that they reaped included."""

from __future__ import annotations

import resource
from typing import Any

import pytest

_KEY = "cpu_seconds"
_WORKERS = pytest.StashKey[list[float]]()


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its descendants that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def pytest_configure(config: pytest.Config) -> None:
    """Begin to collect."""
    config.stash[_WORKERS] = []


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send a worker's seconds to the process that started it."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput[_KEY] = cpu_seconds()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:  # xdist has no types
    """Take a worker's seconds; one that died has sent none."""
    output = getattr(node, "workeroutput", {})
    node.config.stash[_WORKERS].append(output.get(_KEY, 0.0))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the sum."""
    terminalreporter.write_line(f"{cpu_seconds() + sum(config.stash[_WORKERS]):.0f} CPU seconds")
