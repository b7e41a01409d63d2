"""Who waits for workers that may serve a request soon, and in which order they look again.

Owns the waiting tasks. ``router.dispatch.worker_gateway`` says when something may have opened a route.
"""

from __future__ import annotations

import asyncio
from collections import deque

WOKEN_PER_TURN = 4  # each compares all workers, which takes about a millisecond with a thousand of them


class RouteWaits:
    """Wakes tasks that found no route once something may have opened one, in the order in which they began to wait.

    A change wakes all of them, a few in each turn of the event loop, so that many do not stop everything else. Those that have
    not had their turn at the next change look once for both. All methods belong to one event loop.
    """

    def __init__(self) -> None:
        self.num_changes = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._woken: deque[asyncio.Future[None]] = deque()  # their turn comes
        self._is_waking = False
        self._num_waiting = 0

    def __len__(self) -> int:
        """How many tasks wait."""
        return self._num_waiting

    def note_change(self) -> None:
        """Record that a route may have opened."""
        self.num_changes += 1
        self._woken += self._waiting
        self._waiting.clear()
        self._wake_soon()

    async def wait(self, since: int | None = None) -> None:
        """Wait for a change; ``since`` is the ``num_changes`` from before the caller looked, so that it misses none."""
        waiter = asyncio.get_running_loop().create_future()
        if since is None or since == self.num_changes:
            self._waiting.append(waiter)
        else:
            self._woken.append(waiter)
            self._wake_soon()
        self._num_waiting += 1
        try:
            await waiter
        finally:
            self._num_waiting -= 1

    def _wake_soon(self) -> None:
        if self._woken and not self._is_waking:
            self._is_waking = True
            asyncio.get_running_loop().call_soon(self._wake_some)

    def _wake_some(self) -> None:
        num_left, self._is_waking = WOKEN_PER_TURN, False
        while self._woken and num_left:
            waiter = self._woken.popleft()
            if not waiter.done():  # else its task was cancelled
                waiter.set_result(None)
                num_left -= 1
        self._wake_soon()
