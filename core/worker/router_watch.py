"""Says in the log that no router takes this worker in, and why: after some seconds, and then rarely.

A worker that is registered anywhere is well: a name may stand for several addresses, of which the router has only some.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from core.log import event
from core.rate_limit import LOG_INTERVAL_S

logger = logging.getLogger(__name__)

PATIENCE_S = 5.0  # longer than a router takes to start again


class RouterWatch:
    """Looks whether the worker is registered whenever it is told the time."""

    def __init__(self) -> None:
        self._due_at: float | None = None  # of the next line; None while all is well

    def look(self, now: float, *, is_well: bool, reasons: Callable[[], Mapping[str, str]]) -> None:
        """Log the reason of each address, if no router has taken the worker in for some time."""
        if is_well:
            self._due_at = None
            return
        if self._due_at is None:
            self._due_at = now + PATIENCE_S
        if now < self._due_at:
            return
        self._due_at = now + LOG_INTERVAL_S
        for address, reason in reasons().items():
            logger.warning(event("router_unreachable", router=address, reason=reason))
