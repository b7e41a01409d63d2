"""Garbage collection keeps off the objects that imports make: none while they run, and ``gc.freeze()`` after start-up.

A full collection stops every thread while it walks all modules, classes and weight wrappers that the process keeps for its
whole life. Closing a NIXL agent runs one each time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
