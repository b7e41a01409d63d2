"""Learns the coefficients of a prefill's time from completed prompts, one kind of equal workers at a time.

Recursive least squares with forgetting, kept as the sums of the normal equations, on relative errors: a prompt of 100 ms counts
as much as one of 10 s. An observation whose error is far above the usual one counts less (Huber's weight), whether it took
longer or shorter than predicted: neither a stalled worker nor a prompt of which more was cached than we knew spoils the fit. A
lasting change makes the usual error grow until the fit follows. Coefficients are never negative. Before the first observation a
prompt costs by its tokens.

Sources: L. Ljung, "System Identification", 2nd edition, 1999, section 11.2 (recursive least squares); P. J. Huber, "Robust
Estimation of a Location Parameter", 1964 (the weight).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations

from router.routing.cost import PrefillTime

_FORGETTING = 0.995  # the fit covers about the last 200 prompts
_HUBER = 2.0  # errors beyond this multiple of the usual error count less
_LEAST_ERROR = 0.02  # the usual error is never taken to be smaller
_FEWEST = 8  # observations before the fit counts, and the usual error is known
_FIRST_LIMIT = 1.0  # errors beyond this count less until then
_MEMORY = 0.95  # of the usual error
_UNITS = (1.0, 1e3, 1e7)  # of the features: a step, tokens, pairs of tokens
_PRIOR = (10.0, 100.0, 10.0)  # ms for one unit
_SHORTEST_MS, _LONGEST_MS = 1e-3, 1e9
_PRIOR_WEIGHT = 1e-4  # in observations: decides only what the observations leave open


@dataclass(slots=True)
class PrefillFit:
    """The estimate for one kind of worker.

    ``mean_error`` is the recent mean of the errors, each as a share of the shorter time: 1 for half and for twice the time.
    """

    num_seen: int = 0
    mean_error: float = 0.0
    time: PrefillTime = field(default_factory=lambda: _time_of(_PRIOR))
    _squares: list[list[float]] = field(default_factory=lambda: [[0.0] * 3 for _ in range(3)])
    _products: list[float] = field(default_factory=lambda: [0.0] * 3)

    @property
    def is_settled(self) -> bool:
        """True after enough prompts to tell the fixed time from that of the tokens."""
        return self.num_seen >= _FEWEST

    def observe(self, num_new: int, num_hit: int, real_ms: float) -> None:
        """Learn from one prompt: it had ``num_hit`` cached tokens and ``num_new`` others, and took ``real_ms``.

        Observations without new tokens or with a time that no prefill has are ignored.
        """
        if num_new <= 0 or not _SHORTEST_MS <= real_ms <= _LONGEST_MS:
            return
        predicted = max(self.time.ms(num_new, num_hit), 1e-6)
        error = max(real_ms, predicted) / min(real_ms, predicted) - 1
        limit = _HUBER * max(self.mean_error, _LEAST_ERROR) if self.is_settled else _FIRST_LIMIT
        self.num_seen += 1
        self.mean_error += max(1 - _MEMORY, 1 / self.num_seen) * (min(error, limit) - self.mean_error)
        # Predicted, or nearer to the real time; not that itself, since a very short time would outweigh all others.
        scale = min(max(predicted, real_ms / 3), max(real_ms * 3, predicted / 3))
        weight = limit / max(error, limit) / scale**2
        features = [value / unit for value, unit in zip((1, num_new, num_new * (num_hit + num_new / 2)), _UNITS, strict=True)]
        for i in range(3):
            self._products[i] = _FORGETTING * self._products[i] + weight * features[i] * real_ms
            for j in range(3):
                self._squares[i][j] = _FORGETTING * self._squares[i][j] + weight * features[i] * features[j]
        self.time = _time_of(self._solve())

    def _solve(self) -> list[float]:
        """Return the best coefficients that are not negative: the best of the solutions with some of them at zero."""
        squares = [list(row) for row in self._squares]
        products = list(self._products)
        for i, prior in enumerate(_PRIOR):
            squares[i][i] += _PRIOR_WEIGHT / prior**2
            products[i] += _PRIOR_WEIGHT / prior
        best, least = [0.0, 0.0, 0.0], 0.0
        for size in (3, 2, 1):
            for free in combinations(range(3), size):
                found = _solve_for(squares, products, free)
                cost = sum(found[i] * (sum(squares[i][j] * found[j] for j in range(3)) - 2 * products[i]) for i in range(3))
                if min(found) >= 0 and cost < least:
                    best, least = found, cost
            if size == 3 and least < 0:
                break  # no constraint is active
        return best


def _time_of(coefficients: Sequence[float]) -> PrefillTime:
    return PrefillTime(*(value / unit for value, unit in zip(coefficients, _UNITS, strict=True)))


def _solve_for(squares: list[list[float]], products: list[float], free: tuple[int, ...]) -> list[float]:
    """Solve the normal equations for some coefficients, the others being zero, by Gaussian elimination with pivots."""
    rows = [[squares[i][j] for j in free] + [products[i]] for i in free]
    size = len(free)
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(rows[row][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        if not rows[column][column]:
            return [-1.0, 0.0, 0.0]  # singular: no solution
        for row in range(size):
            if row != column:
                factor = rows[row][column] / rows[column][column]
                rows[row] = [value - factor * above for value, above in zip(rows[row], rows[column], strict=True)]
    result = [0.0, 0.0, 0.0]
    for index, i in enumerate(free):
        result[i] = rows[index][size] / rows[index][index]
    return result
