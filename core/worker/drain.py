"""How a worker leaves: accept no new requests, finish the running ones, wait for readers of its blocks, then exit.

Owns the phases and their deadline. Knows nothing of requests or sockets: ``core.worker.state`` reports what remains.
"""

from __future__ import annotations


class DrainPhases:
    """The phases serving → requests end → readers end → over.

    ``timeout_s`` is for the requests. The worker waits longer for readers of their blocks: as long as the longest lease lasts
    when the last request has ended or was ended.
    """

    def __init__(self) -> None:
        self._deadline: float | None = None  # of requests
        self._readers_end: float | None = None  # known when no request is left

    @property
    def is_draining(self) -> bool:
        """True from the first request to leave, for good."""
        return self._deadline is not None

    def start(self, now: float, timeout_s: float) -> None:
        """Begin to leave; a later call can only bring the end forward. 0 = wait for nothing, not even for readers."""
        deadline = now + timeout_s
        self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)
        if not timeout_s:
            self._readers_end = now

    def is_out_of_time(self, now: float) -> bool:
        """Return True if the requests that still run must be ended."""
        return self._deadline is not None and now >= self._deadline

    def waits_for_readers(self, now: float) -> bool:
        """Return True as long as blocks that are leased may keep the worker."""
        return self._readers_end is None or now < self._readers_end

    def is_over(self, now: float, num_requests: int, num_leased_blocks: int, longest_lease_s: float) -> bool:
        """Return True if the worker may exit: no request or reader is left, or time is up."""
        if self._deadline is None or num_requests:
            return False
        if self._readers_end is None:
            self._readers_end = max(self._deadline, now + longest_lease_s)
        return not num_leased_blocks or now >= self._readers_end

    def next_timer(self, now: float, interval_s: float) -> float | None:
        """Return when to look again: leases end without a message to the worker, so they are polled while draining."""
        if self._deadline is None:
            return None
        times = [time for time in (self._deadline, self._readers_end) if time is not None and time > now]
        return min([now + interval_s, *times])
