"""How a worker leaves: take nothing new, finish what runs, wait for readers of its blocks, then go.

Owns the phases and their deadline. Knows nothing of requests or sockets: ``core.engine.worker_state`` tells it what is left.
"""

from __future__ import annotations


class Drain:
    """The phases serving → draining → over."""

    def __init__(self) -> None:
        self._deadline: float | None = None

    @property
    def is_draining(self) -> bool:
        """True from the first request to leave, for good."""
        return self._deadline is not None

    def start(self, now: float, timeout_s: float) -> None:
        """Begin to leave within ``timeout_s``; a later call can only bring the end closer."""
        deadline = now + timeout_s
        self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)

    def is_over(self, now: float, num_requests: int, num_leased_blocks: int) -> bool:
        """Say whether the worker may go: nothing is left that somebody waits for, or time is up."""
        if self._deadline is None:
            return False
        return now >= self._deadline or (num_requests == 0 and num_leased_blocks == 0)

    def next_timer(self, now: float, interval_s: float) -> float | None:
        """Return when to look again: leases end without a message to the worker, so they are polled while draining."""
        return None if self._deadline is None else min(now + interval_s, self._deadline)
