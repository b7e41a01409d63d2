"""Wakes the engine at a given time without an event: a request has used up its time for its embeddings.

Owns one timer of the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from core.clock import Clock


class WakeupTimer:
    """Calls ``ring`` once, at the time that was set last. For one event loop; one other thread may call ``set_soon``."""

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
        """Cancel the timer. Idempotent."""
        self._loop = None
        if self._timer is not None:
            self._timer.cancel()

    def set_soon(self, at: float) -> None:
        """Set the time, replacing the previous one."""
        loop = self._loop
        if at != self._set_at and loop is not None and not loop.is_closed():  # every step sets it again
            self._set_at = at
            loop.call_soon_threadsafe(self._set, at)

    def _set(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._loop is not None:
            self._timer = self._loop.call_later(max(0.0, at - self._clock.now()), self._ring)
