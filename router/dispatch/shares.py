"""Fair shares of the router's and the workers' room: how many requests of each tenant are open.

A tenant is an API key. While everything is full, a tenant with less than an equal share of the open requests may wait for room;
the others are refused. The order of prompts at one worker is the worker's (``core.sched.fair_queue``).
"""

from __future__ import annotations

from collections import Counter

EXTRA_SHARE = 8  # beyond its limit the router keeps this part of it for tenants below their share


class TenantShares:
    """Open requests by tenant. Memory grows with the open requests only."""

    def __init__(self) -> None:
        self._num_open: Counter[int] = Counter()
        self._total = 0

    def num_open(self, tenant: int) -> int:
        """Return how many requests of a tenant are open."""
        return self._num_open.get(tenant, 0)

    def add(self, tenant: int) -> None:
        """Record the beginning of a request."""
        self._num_open[tenant] += 1
        self._total += 1

    def remove(self, tenant: int) -> None:
        """Record the end of a request."""
        self._num_open[tenant] -= 1
        self._total -= 1
        if not self._num_open[tenant]:
            del self._num_open[tenant]

    def is_below(self, tenant: int, *, is_open: bool = False) -> bool:
        """Return True if others are open, and the tenant has less than an equal share of all open requests.

        The request for which this is asked does not count; with ``is_open`` it is one of the open ones.
        """
        num_open, total = self.num_open(tenant) - is_open, self._total - is_open
        num_tenants = len(self._num_open) + (0 if self.num_open(tenant) else 1)
        return num_open * num_tenants < total
