"""Which workers can do handoffs with a worker of the other role. Pure functions without I/O.

Compares kinds of workers instead of workers: a cluster has hundreds of workers, but of few kinds.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter

from core.errors import KVFerryError
from router.dispatch.members import GenerationWorker

_Mismatch = Callable[[GenerationWorker, GenerationWorker], KVFerryError | None]  # of a prefill and a decode worker
_Ordered = list[tuple[int, GenerationWorker]]
_Kind = tuple[object, ...]

# Of the facts that decide about a handoff only whether the hosts are equal is not here.
_kind_of: Callable[[object], _Kind] = attrgetter(
    "connector", "transports", "model_fingerprint", "layout", "kv_verify", "has_digests"
)


class Partners:
    """Workers of one role, in an order, as partners of those of the other role.

    Takes time that grows with their number, and asks ``mismatch`` at most twice for each two kinds of workers: once for equal
    hosts, once for different ones.
    """

    def __init__(self, workers: Iterable[GenerationWorker], mismatch: _Mismatch) -> None:
        self._mismatch = mismatch
        self._by_kind: dict[_Kind, dict[str, _Ordered]] = {}  # then by host
        self._every: dict[_Kind, _Ordered] = {}
        for item in enumerate(workers):
            facts = item[1].facts
            kind = _kind_of(facts)
            self._by_kind.setdefault(kind, {}).setdefault(facts.host_id, []).append(item)
            self._every.setdefault(kind, []).append(item)
        self._decided: dict[tuple[_Kind, _Kind, bool], bool] = {}
        self._found: dict[tuple[_Kind, str], list[_Ordered]] = {}

    def fit(self, worker: GenerationWorker) -> bool:
        """Return True if any of them can do a handoff with a worker."""
        return bool(self._find(worker))

    def of(self, worker: GenerationWorker) -> Iterator[GenerationWorker]:
        """Yield those that can do a handoff with a worker, in their order."""
        found = self._find(worker)
        return (partner for _, partner in (found[0] if len(found) == 1 else heapq.merge(*found)))

    def _find(self, worker: GenerationWorker) -> list[_Ordered]:
        """Return the partners of a worker; by their kinds, none of which is empty."""
        kind, host = _kind_of(worker.facts), worker.facts.host_id
        found = self._found.get((kind, host))
        if found is None:
            each = (self._find_of_kind(worker, kind, other) for other in self._by_kind)
            found = self._found[kind, host] = [partners for partners in each if partners]
        return found

    def _find_of_kind(self, worker: GenerationWorker, kind: _Kind, other: _Kind) -> _Ordered:
        host, by_host, every = worker.facts.host_id, self._by_kind[other], self._every[other]
        here = by_host.get(host, [])
        far = next((there for name, there in by_host.items() if name != host), [])  # those of any other host
        fits_here = bool(here) and self._decide(worker, here[0][1], (kind, other, True))
        fits_far = bool(far) and self._decide(worker, far[0][1], (kind, other, False))
        if fits_far:
            return every if fits_here or not here else [item for item in every if item[1].facts.host_id != host]
        return here if fits_here else []

    def _decide(self, worker: GenerationWorker, partner: GenerationWorker, kinds: tuple[_Kind, _Kind, bool]) -> bool:
        if kinds not in self._decided:
            prefill, decode = (partner, worker) if partner.role == "prefill" else (worker, partner)
            self._decided[kinds] = self._mismatch(prefill, decode) is None
        return self._decided[kinds]
