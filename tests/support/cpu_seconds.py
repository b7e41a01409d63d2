"""A pytest plugin: the run ends with the CPU seconds that it took, its workers and all processes that they reaped included."""

from __future__ import annotations

import resource

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the CPU seconds of this process and of its descendants that have ended; pytest-xdist has reaped its workers."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    terminalreporter.write_line(f"{sum(usage.ru_utime + usage.ru_stime for usage in usages):.0f} CPU seconds")
