"""Progress of fetching and converting a model, in bytes, while it lasts.

Owns the thread that measures it; the fetching code knows nothing of it. A subclass displays it.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from core.log import event

logger = logging.getLogger(__name__)

LOG_INTERVAL_S = 3.0
_JOIN_S = 10.0


class Progress(ABC):
    """Shows the progress of one task at a time, every ``interval_s`` seconds."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s

    @abstractmethod
    def show(self, what: str, num_bytes: int, total_bytes: int) -> None:
        """Show that a task has ``num_bytes`` of ``total_bytes``; 0 if the total is unknown."""

    @contextmanager
    def of(self, what: str, count_bytes: Callable[[], int], total_bytes: int = 0) -> Iterator[None]:
        """Show a task from its beginning to the end of the block."""
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.wait(self._interval_s):
                self.show(what, count_bytes(), total_bytes)

        self.show(what, 0, total_bytes)
        thread = threading.Thread(target=watch, name="model-progress", daemon=True)
        thread.start()
        try:
            yield
            self.show(what, count_bytes() or total_bytes, total_bytes)
        finally:
            is_over.set()
            thread.join(_JOIN_S)


class LoggedProgress(Progress):
    """One log line every few seconds."""

    def __init__(self, interval_s: float = LOG_INTERVAL_S) -> None:
        super().__init__(interval_s)

    def show(self, what: str, num_bytes: int, total_bytes: int) -> None:
        """Write a line."""
        logger.info(event("model_progress", task=what, megabytes=num_bytes // 10**6, of=total_bytes // 10**6 or "unknown"))


def bytes_below(folder: Path, pattern: str = "*") -> int:
    """Return the size of all files below a folder whose names match; files that vanish meanwhile do not count."""
    num_bytes = 0
    for path in folder.rglob(pattern):
        try:
            state = path.lstat()
        except OSError:
            continue
        num_bytes += state.st_size if path.is_file() else 0
    return num_bytes
