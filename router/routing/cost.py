"""What it costs to place a prompt on a worker, in predicted time. Pure functions.

The score of a worker, in ms, lowest is best:

    score = wait + own * (1 + reuse_weight + num_delayed + DISLIKE_WEIGHT * dislike)

``wait`` is the time until the worker begins the prompt, ``own`` the time to compute it there: their sum is the predicted time
to the first token. The rest is the externality. A prompt that misses the cache takes capacity from all later prompts, whatever
worker they get, so its own time counts ``reuse_weight`` times more. If the worker serves short prompts first, the prompt also
delays the ``num_delayed`` queued ones that it overtakes, each by its own time. The last term differs between routers: two
routers that see the same two idle workers would otherwise both send their next prompt to the first one.

The time of a prefill has a part for each step, a part for each token (linear layers), and a part for each pair of a new token
and one that it attends to. With ``hit`` cached tokens and ``new`` others there are ``new * (hit + new / 2)`` pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

REUSE_WEIGHT = 2.0  # flat between 1 and 4: see docs/routing.md
DISLIKE_WEIGHT = 0.2  # of the own time: what a prompt costs more at a worker that another router prefers
PATIENCE = 4.0  # an overtaken prompt waits at most about this multiple of its own time more than in order of arrival


@dataclass(frozen=True, slots=True)
class PrefillTime:
    """The coefficients of a prefill's time, in ms, of one kind of worker and model."""

    base_ms: float
    token_ms: float
    pair_ms: float

    def ms(self, num_new: float, num_hit: float) -> float:
        """Return the predicted time to compute ``num_new`` tokens after ``num_hit`` cached ones."""
        return self.base_ms + num_new * (self.token_ms + self.pair_ms * (num_hit + num_new / 2))


def score(wait_ms: float, own_ms: float, num_delayed: int, dislike: float = 0.0, reuse_weight: float = REUSE_WEIGHT) -> float:
    """Return the cost of a placement, in ms: its predicted time to the first token and its externality."""
    return wait_ms + own_ms * (1.0 + reuse_weight + num_delayed) + dislike_ms(own_ms, dislike)


def dislike_ms(own_ms: float, dislike: float = 1.0) -> float:
    """Return what a router's dislike of a worker adds to the score."""
    return DISLIKE_WEIGHT * dislike * own_ms


def dislike_of(worker_rank: int, router_rank: int, num_routers: int) -> float:
    """Return this router's dislike of a worker: 0 for its share of the workers, 1 for the others'.

    Ranks are places in an order that all routers know, from 0. A single router likes all workers.
    """
    return 0.0 if worker_rank % num_routers == router_rank else 1.0


def patience_ms(own_ms: float, patience: float = PATIENCE) -> float:
    """Return how long after its arrival a prompt is due; a worker computes the prompt that is due first.

    The order of arrival plus a multiple of the own time serves short prompts first and lets no prompt starve: a prompt is
    overtaken only by prompts that arrive within its patience.
    """
    return patience * own_ms
