"""What it costs to load cached tokens from a tier below a worker's pool, instead of computing them.

The time per token is learned on line from the workers' own loads. Before the first one a load costs a share of the time to
compute the tokens, by where they are.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.wire.contents import HOST

_FIRST_SHARE = {HOST: 0.2}  # of the time to compute the tokens, as other routers credit 0.8 for host memory
_ANY_FIRST_SHARE = 0.5  # a store may have them on disk
_WEIGHT = 0.2  # of a new load
_LARGEST_STEP = 4.0  # a load counts as at most this multiple of the price, so that one slow load changes little


@dataclass(slots=True)
class LoadPrice:
    """The price of one tier, in ms per token; 0 before the first load."""

    token_ms: float = 0.0

    def observe(self, num_tokens: int, load_ms: float) -> None:
        """Learn from a load; one without tokens or time teaches nothing."""
        if num_tokens <= 0 or load_ms <= 0:
            return
        found = load_ms / num_tokens
        if not self.token_ms:
            self.token_ms = found
            return
        found = min(found, _LARGEST_STEP * self.token_ms)
        self.token_ms += _WEIGHT * (found - self.token_ms)

    def ms(self, num_tokens: int, medium: str, compute_ms: float) -> float:
        """Return the predicted time to load so many tokens, which would take ``compute_ms`` to compute."""
        return num_tokens * self.token_ms if self.token_ms else compute_ms * _FIRST_SHARE.get(medium, _ANY_FIRST_SHARE)
