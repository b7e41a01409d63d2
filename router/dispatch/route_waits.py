"""Who waits for workers that may serve a request soon, and in which order they look again.

Owns the waiting tasks. ``router.dispatch.worker_gateway`` says when something may have opened a route.
"""

from __future__ import annotations

import asyncio
import heapq
from dataclasses import dataclass
from itertools import count

WOKEN_PER_TURN = 4  # each compares all workers

_Waiter = tuple[int, int, asyncio.Future[None]]  # the number of its place, and a number of its own


@dataclass(slots=True)
class Place:
    """The place in the queue of a task that looks again and again. ``seen`` is the number of changes when it looked."""

    number: int
    seen: int


class RouteWaits:
    """Wakes tasks that found no route once something may have opened one, in the order of their places.

    A change wakes all of them, a few in each turn of the event loop, so that many do not stop everything else. Those that have
    not had their turn at the next change look once for both. All methods belong to one event loop.
    """

    def __init__(self) -> None:
        self._num_changes = 0
        self._numbers = count()
        self._waiting: list[_Waiter] = []
        self._woken: list[_Waiter] = []  # their turn comes; a heap
        self._is_waking = False
        self._num_waiting = 0

    def __len__(self) -> int:
        """How many tasks wait."""
        return self._num_waiting

    def note_change(self) -> None:
        """Record that a route may have opened."""
        self._num_changes += 1
        for waiter in self._waiting:
            heapq.heappush(self._woken, waiter)
        self._waiting.clear()
        self._wake_soon()

    def looked(self, place: Place | None = None) -> Place:
        """Note that a task has looked just now, so that it misses no change; return its place, the last one if it had none."""
        if place is None:
            return Place(next(self._numbers), self._num_changes)
        place.seen = self._num_changes
        return place

    async def wait(self, place: Place | None = None) -> None:
        """Wait for a change since the look of the place; without one, at the end of the queue."""
        place = place or self.looked()
        waiter = asyncio.get_running_loop().create_future()
        if place.seen == self._num_changes:
            self._waiting.append((place.number, next(self._numbers), waiter))
        else:
            heapq.heappush(self._woken, (place.number, next(self._numbers), waiter))
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
            waiter = heapq.heappop(self._woken)[-1]
            if not waiter.done():  # else its task was cancelled
                waiter.set_result(None)
                num_left -= 1
        self._wake_soon()
