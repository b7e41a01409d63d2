"""Progress of fetching a model on standard error: a bar on a terminal, elsewhere a line every few seconds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from core.model.progress import LOG_INTERVAL_S, Progress

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

_REFRESH_S = 0.2


class LineProgress(Progress):
    """One line every few seconds."""

    def __init__(self) -> None:
        super().__init__(LOG_INTERVAL_S)

    def show(self, what: str, num_bytes: int, total_bytes: int) -> None:
        """Write a line."""
        total = f" of {total_bytes / 1e6:.0f}" if total_bytes else ""
        print(f"{what}: {num_bytes / 1e6:.0f}{total} MB", file=sys.stderr, flush=True)


class BarProgress(Progress):
    """One bar a task, below each other."""

    def __init__(self, bars: RichProgress) -> None:
        super().__init__(_REFRESH_S)
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def show(self, what: str, num_bytes: int, total_bytes: int) -> None:
        """Move the task's bar; one without a total only counts."""
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=total_bytes or None)
        self._bars.update(self._tasks[what], completed=num_bytes)


@contextmanager
def shown_progress() -> Iterator[Progress]:
    """Yield a progress display for this process's standard error."""
    if not sys.stderr.isatty():
        yield LineProgress()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as RichProgress

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with RichProgress(*columns, console=Console(stderr=True)) as bars:
        yield BarProgress(bars)
