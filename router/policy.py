"""Which workers serve a request: the least loaded ones that fit together. Pure functions without I/O.

Knows what workers say about themselves (``router.cluster.Worker``), nothing of what they are doing with a request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from core.errors import ContextTooLong, NoWorker
from router.cluster import Worker


@dataclass(frozen=True, slots=True)
class Route:
    """Who serves a request: a prefill and a decode worker, or one aggregated worker (``prefill`` is None)."""

    prefill: Worker | None
    decode: Worker

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The workers of the route, prefill first."""
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)

    @property
    def max_model_len(self) -> int:
        """Tokens, prompt and output together, that every worker on the route can hold."""
        return min(worker.facts.max_model_len for worker in self.workers)

    @property
    def load(self) -> float:
        """The load of the fullest worker."""
        return max(worker.load for worker in self.workers)


def mismatch(prefill: Worker, decode: Worker) -> str | None:
    """Say why the two cannot hand over, with both values; None if they can."""
    mine, theirs = prefill.facts, decode.facts
    names = f"prefill {mine.engine_id} and decode {theirs.engine_id}"
    if mine.model_fingerprint != theirs.model_fingerprint:
        return f"{names} hold different models: {mine.model_fingerprint.hex()} and {theirs.model_fingerprint.hex()}"
    if mine.layout != theirs.layout:
        return f"{names} lay out their KV cache differently: {mine.layout} and {theirs.layout}"
    if mine.connector != theirs.connector:
        return f"{names} use different connectors: {mine.connector!r} and {theirs.connector!r}"
    if (mine.transports or theirs.transports) and not set(mine.transports) & set(theirs.transports):
        return f"{names} share no transport: {', '.join(mine.transports)} and {', '.join(theirs.transports)}"
    return None


def routes(workers: Iterable[Worker]) -> Iterator[Route]:
    """Yield every route that takes new requests."""
    open_workers = [worker for worker in workers if not worker.is_draining]
    decoders = [worker for worker in open_workers if worker.role == "decode"]
    for worker in open_workers:
        if worker.role == "prefill":
            yield from (Route(worker, decode) for decode in decoders if mismatch(worker, decode) is None)
        elif worker.role == "aggregated":
            yield Route(None, worker)


def choose_route(workers: Iterable[Worker], num_tokens: int) -> Route:
    """Return the route that holds ``num_tokens`` (prompt and output) and is the least loaded.

    The least loaded prefill worker that has a partner takes its least loaded one; a pair is as loaded as its fuller half. Of
    equals the one longest not picked wins, and a pair wins over an aggregated worker.

    Raises:
        NoWorker: nobody can serve at the moment; says what is missing.
        ContextTooLong: there are routes, but none holds so many tokens.
    """
    members = list(workers)
    fitting = [worker for worker in members if not worker.is_draining and worker.facts.max_model_len >= num_tokens]
    candidates = [route for route in (_best_pair(fitting), _best_aggregated(fitting)) if route is not None]
    if candidates:
        return min(candidates, key=lambda route: route.load)
    limit = max_model_len(members)
    if limit:
        raise ContextTooLong(f"the request needs {num_tokens} tokens, this model's context holds {limit}", param="prompt")
    raise NoWorker(why_not_ready(members) or "no worker can serve at the moment")


def choose_decode(workers: Iterable[Worker], prefill: Worker, num_tokens: int) -> Worker:
    """Return the least loaded decode worker that can take over ``num_tokens`` from ``prefill``.

    Raises:
        NoWorker: there is none.
    """
    found = [
        worker
        for worker in workers
        if worker.role == "decode"
        and not worker.is_draining
        and worker.facts.max_model_len >= num_tokens
        and mismatch(prefill, worker) is None
    ]
    if not found:
        raise NoWorker(f"no decode worker can take over from prefill worker {prefill.key.engine_id}")
    return min(found, key=_least_loaded)


def max_model_len(workers: Iterable[Worker]) -> int:
    """Return the longest context of any route, 0 if there is no route."""
    return max((route.max_model_len for route in routes(workers)), default=0)


def why_not_ready(workers: Iterable[Worker]) -> str | None:
    """Say what is missing for a route; None if there is one."""
    members = list(workers)
    if next(routes(members), None) is not None:
        return None
    if not members:
        return "no worker has registered"
    open_workers = [worker for worker in members if not worker.is_draining]
    if not open_workers:
        return "all workers are draining"
    prefills = [worker for worker in open_workers if worker.role == "prefill"]
    decodes = [worker for worker in open_workers if worker.role == "decode"]
    if not prefills:
        return "no prefill worker is available, and no aggregated one"
    if not decodes:
        return "no decode worker is available, and no aggregated one"
    return mismatch(prefills[0], decodes[0])


def _least_loaded(worker: Worker) -> tuple[float, int]:
    return worker.load, worker.last_picked


def _best_pair(workers: list[Worker]) -> Route | None:
    for prefill in sorted((worker for worker in workers if worker.role == "prefill"), key=_least_loaded):
        try:
            return Route(prefill, choose_decode(workers, prefill, 0))
        except NoWorker:
            continue
    return None


def _best_aggregated(workers: list[Worker]) -> Route | None:
    found = [worker for worker in workers if worker.role == "aggregated"]
    return Route(None, min(found, key=_least_loaded)) if found else None
