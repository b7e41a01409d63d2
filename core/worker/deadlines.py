"""The deadlines of a worker's requests. O(log n) per request, also if most requests end before their deadline.

Owns the times by request id and knows nothing else of a request.
"""

from __future__ import annotations

import heapq


class Deadlines:
    """A heap that forgets the deadlines of ended requests once they are the majority."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str]] = []  # (time, serial, request id), ended requests included
        self._live: dict[str, int] = {}  # the serial of each live request that has a deadline
        self._last_serial = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request_id: str, time: float) -> None:
        """Add a deadline; ids may be used again once removed."""
        self._last_serial += 1
        self._live[request_id] = self._last_serial
        heapq.heappush(self._heap, (time, self._last_serial, request_id))

    def remove(self, request_id: str) -> None:
        """Forget a request that has ended, if it had a deadline."""
        self._live.pop(request_id, None)
        if len(self._heap) > 2 * len(self._live):
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)

    def pop_due(self, now: float) -> str | None:
        """Return a request whose time is up, and forget its deadline; None if there is none."""
        while self._heap and self._heap[0][0] <= now:
            entry = heapq.heappop(self._heap)
            if self._is_live(entry):
                del self._live[entry[2]]
                return entry[2]
        return None

    @property
    def next_time(self) -> float | None:
        """The earliest time at which ``pop_due`` may return a request."""
        return self._heap[0][0] if self._heap else None

    def _is_live(self, entry: tuple[float, int, str]) -> bool:
        return self._live.get(entry[2]) == entry[1]
