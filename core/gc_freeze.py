"""Garbage collection keeps off what lives long: imports, what start-up makes, and the open requests of a process with many.

A full collection stops every thread while it walks all modules, classes and weight wrappers that the process keeps for its
whole life. Closing a NIXL agent runs one each time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_FULL_AFTER = 2  # collections of the middle generation: some 20,000 objects that a full one has not seen
_OBJECTS_PER_OPEN = 250  # of a request, at most, as far as is known
_LEAST_EXEMPT = 300_000  # objects of none: start-up makes a third of that


@contextmanager
def without_collections() -> Iterator[None]:
    """Collect nothing while the block runs, which imports large libraries: what they make stays, and there is a lot of it."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def freeze_loaded_objects() -> None:
    """Collect once, then exempt all remaining objects from collection. Takes as long as a full one. Source: ``gc.freeze``."""
    gc.collect()
    gc.freeze()


class ShortCollections:
    """Keeps full collections short while a process has many requests open.

    An open request of a router is some 150 objects, and a full collection visits all of them: 0.1 ms for each request, in which
    none goes on. Here it visits those that are new since the one before: what survives is exempt from the next ones. An object
    without references is freed as always. Only rings, objects that refer to each other and were exempt before they became
    garbage, stay; ``look`` searches everything for them once there are more objects than the open requests explain.
    """

    def __init__(self) -> None:
        self._most_exempt = _LEAST_EXEMPT  # without those of open requests
        self._thresholds = gc.get_threshold()

    def __enter__(self) -> ShortCollections:
        youngest, middle, _ = self._thresholds
        gc.set_threshold(youngest, middle, _FULL_AFTER)
        gc.callbacks.append(_exempt_survivors)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(_exempt_survivors)
        gc.set_threshold(*self._thresholds)

    def look(self, num_open: int) -> None:
        """Search all objects if there are too many for so many open requests; call it now and then.

        Counting takes some milliseconds for a million objects. If a search finds little, the next one waits for twice as many.
        """
        if _num_exempt(num_open) > self._most_exempt:
            gc.unfreeze()
            gc.collect()
            self._most_exempt = max(_LEAST_EXEMPT, 2 * _num_exempt(num_open))


def _num_exempt(num_open: int) -> int:
    """Return how many exempt objects there are beside those of open requests."""
    return gc.get_freeze_count() - _OBJECTS_PER_OPEN * num_open


def _exempt_survivors(phase: str, info: dict[str, Any]) -> None:
    if phase == "stop" and info["generation"] == 2:
        gc.freeze()
