"""Which worker a session prefers among workers of about equal cost: always the same one, without a table.

Rendezvous hashing (Thaler and Ravishankar, 1996) over the workers' names: a restarted router and other routers choose alike,
and a worker that comes or goes moves only its own sessions.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from hashlib import blake2b
from typing import TypeVar

NEAR = 0.05  # of the own time of the cheapest: scores that differ by less are about equal, since predictions err by more
CROWDED = 0.25  # of its slots: a worker that holds so many choices more than the emptiest is nobody's preferred one

Worker = TypeVar("Worker", bound=tuple[str, int])  # name and incarnation


def rank(session: bytes, workers: Iterable[Worker]) -> list[Worker]:
    """Return workers in the order of a session's preference; only their names count, so that a restart changes nothing."""
    seed = blake2b(session).digest()
    return sorted(workers, key=lambda worker: blake2b(worker[0].encode(), key=seed, digest_size=8).digest())


def slack_ms(candidates: Iterable[tuple[float, float]]) -> float:
    """Return by how much scores may differ to be about equal, given score and own time of each candidate, in ms."""
    return NEAR * min(candidates, default=(0.0, 0.0))[1]


def crowded(loads: Mapping[Worker, float]) -> frozenset[Worker]:
    """Return the workers that are much fuller than the emptiest, given choices per slot.

    The cost of a prompt knows the prompts before it and not the choices that are being generated.
    """
    least = min(loads.values(), default=0.0)
    return frozenset(worker for worker, load in loads.items() if load > least + CROWDED)


def with_preference(
    scores: Mapping[Worker, float], slack: float, session: bytes, last: Container[Worker] = ()
) -> dict[Worker, float]:
    """Return the scores within ``slack`` of the lowest, made equal but for the session's order; those in ``last`` come last."""
    lowest = min(scores.values(), default=0.0)
    near = [worker for worker, score in scores.items() if score <= lowest + slack]
    step = slack / (1 + len(near))
    order = sorted(rank(session, near), key=lambda worker: worker in last)
    return {worker: lowest + step * place for place, worker in enumerate(order)}
