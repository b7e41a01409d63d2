"""How long loads wait for blocks that a store has and cannot bring up now."""

from __future__ import annotations

import math

from core.clock import Clock

WITHHELD_S = 2.0  # without a block, and those that are withheld count as missing: a tier may hang
HUNG_S = 10.0  # after that, they count as missing at once, unless one arrives


class WithheldPatience:
    """One for all loads from a store: a tier that hangs is waited for once, not by each load."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._hung_until = -math.inf

    def is_over(self, withheld_since: float) -> bool:
        """Return True if a load to which nothing came since then shall wait no longer."""
        now = self._clock.now()
        if now - withheld_since >= WITHHELD_S:
            self._hung_until = now + HUNG_S
        return now < self._hung_until

    def on_arrival(self) -> None:
        """A load has got a block that was withheld: the tier does not hang."""
        self._hung_until = -math.inf
