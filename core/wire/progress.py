"""How long a worker's engine may go without progress before it counts as stalled.

One rule for both ends: the router stops using a worker by it, and the worker judges its own health by it. Pure.
"""

from __future__ import annotations

_LEAST_BOUND_S = 2.0
_FACTOR = 3.0  # a step may take this many times as long as the slowest of the last minute


def stall_bound_s(slowest_step_s: float, predicted_step_s: float) -> float:
    """Return after how many seconds without progress an engine is stalled.

    ``slowest_step_s`` is the slowest step of the last minute, ``predicted_step_s`` what the step in hand should take.
    """
    return max(_LEAST_BOUND_S, _FACTOR * slowest_step_s + predicted_step_s)
