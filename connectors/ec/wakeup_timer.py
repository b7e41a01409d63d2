"""Wakes the engine at a time, although nothing has happened: a request's time for its embeddings is over then.

Owns one timer of the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from core.clock import Clock


class WakeupTimer:
    """Calls ``ring`` once, at the time that was set last. For one event loop; ``set_soon`` is called by one other thread."""

    def __init__(self, clock: Clock, ring: Callable[[], None]) -> None:
        self._clock = clock
        self._ring = ring
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._set_at = 0.0

    def start(self) -> None:
        """Use the running event loop from now on."""
        self._loop = asyncio.get_running_loop()

    def stop(self) -> None:
        """Ring no more. Idempotent."""
        self._loop = None
        if self._timer is not None:
            self._timer.cancel()

    def set_soon(self, at: float) -> None:
        """Ring at a time, and not at the one that was set before."""
        loop = self._loop
        if at != self._set_at and loop is not None and not loop.is_closed():  # said anew in each step
            self._set_at = at
            loop.call_soon_threadsafe(self._set, at)

    def _set(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._loop is not None:
            self._timer = self._loop.call_later(max(0.0, at - self._clock.now()), self._ring)
