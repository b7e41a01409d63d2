"""How true the claims of one worker's contents are: predicted against real hits.

A worker that reports blocks which it does not hold attracts prompts and computes them whole. That costs time only, and the
share of its claims that came true bounds how long: later claims count by that share, until the worker sends a snapshot. One
that is wrong again soon after its snapshot is not forgiven a second time.
"""

from __future__ import annotations

from dataclasses import dataclass

_MEMORY = 0.9  # the share covers about the last ten prompts with a predicted hit
_DRIFT = 0.05  # share of missing tokens from which the claims are called wrong
_FEWEST = 4  # prompts before a worker is judged
_PROBATION = 32  # prompts after a snapshot: a worker that is wrong before their end gets no credit for the next snapshot


@dataclass(slots=True)
class HitAccuracy:
    """The recent predicted and real hits of one worker, in tokens, and their totals for metrics."""

    predicted_tokens: int = 0
    real_tokens: int = 0
    _num_seen: int = 0
    _predicted: float = 0.0
    _found: float = 0.0
    _was_forgiven: bool = False

    def observe(self, predicted_tokens: int, real_tokens: int) -> bool:
        """Record one prompt: the hit that the worker's contents promised, and the one it had.

        Returns True if the claims have just turned out to be wrong.
        """
        was_wrong = self.is_wrong
        self.predicted_tokens += predicted_tokens
        self.real_tokens += real_tokens
        if predicted_tokens > 0:
            self._num_seen += 1
            self._predicted = _MEMORY * self._predicted + predicted_tokens
            self._found = _MEMORY * self._found + min(predicted_tokens, real_tokens)
        return self.is_wrong and not was_wrong

    @property
    def share(self) -> float:
        """The share of the promised tokens that was there lately, 0 to 1; 1 before the worker can be judged."""
        return self._found / self._predicted if self._num_seen >= _FEWEST else 1.0

    @property
    def is_wrong(self) -> bool:
        """True if so much is missing that the worker's contents should be asked for again."""
        return self.share < 1 - _DRIFT

    def credit(self, claimed_tokens: int) -> int:
        """Return how many tokens of a claimed hit to count on."""
        return int(claimed_tokens * self.share) if self.is_wrong else claimed_tokens

    def forgive(self) -> None:
        """Judge the worker anew, since it has sent a snapshot; without effect if the last snapshot was wrong, too."""
        if self._was_forgiven and self._num_seen < _PROBATION:
            return
        self._was_forgiven = True
        self._num_seen = 0
        self._predicted = self._found = 0.0
