"""Which workers serve a request: the cheapest ones that fit together. Pure functions without I/O.

What it costs to compute the prompt comes with the ``Demand``. Without costs, and among equal ones, the least loaded worker is
chosen, by slots or by KV cache, whichever is fuller; the decode worker always is.

Knows the workers (``router.dispatch.members``) and a request's ``Demand``, and no other state of requests.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from core.errors import (
    ConnectorUnavailable,
    ContextTooLong,
    InvalidRequest,
    KVFerryError,
    NoWorker,
    Overloaded,
    PeerUnreachable,
)
from core.wire.messages import Register, Role
from core.wire.pairing import check_compatible, choose_transport
from router.dispatch.members import GenerationWorker, WorkerKey
from router.dispatch.partners import Partners


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a request needs of a worker: context for ``num_tokens`` (prompt and output), and room for its choices.

    Workers in ``avoid`` have failed it before, and ``bad_pairs`` of prefill and decode worker had failing handoffs recently;
    both are chosen only as a last resort. The room of workers in ``kept`` is for other requests; those in ``refusing`` have
    refused only this one, a short time ago. With a ``model_fingerprint``, only workers with these weights are chosen, because
    the identifiers of the request's images are valid only for them.
    ``costs`` are those of the prompt at each worker, in ms; empty = choose by load.
    """

    num_tokens: int
    num_prompt_tokens: int = 0
    num_choices: int = 1
    avoid: frozenset[WorkerKey] = frozenset()
    kept: frozenset[WorkerKey] = frozenset()
    refusing: frozenset[WorkerKey] = frozenset()
    model_fingerprint: bytes = b""  # empty = any
    bad_pairs: frozenset[tuple[WorkerKey, WorkerKey]] = frozenset()
    costs: Mapping[WorkerKey, float] = field(default_factory=dict)

    def order(self, worker: GenerationWorker) -> tuple[float, float, int]:
        """Return the key of the order in which workers are chosen to compute the prompt, the best first."""
        return self.costs.get(worker.key, 0.0), *_least_loaded(worker)

    def has_room(self, worker: GenerationWorker) -> bool:
        """Return True if a worker has room for the choices that is not kept for others, and may take this request."""
        return worker.has_room(self.num_choices) and worker.key not in self.kept and worker.key not in self.refusing


@dataclass(frozen=True, slots=True)
class Route:
    """The workers that serve a request: a prefill and a decode worker, or one worker alone (``prefill`` is None)."""

    prefill: GenerationWorker | None
    decode: GenerationWorker
    is_local: bool = False  # the decode worker computes the prompt, since that is sooner

    @property
    def is_degraded(self) -> bool:
        """True if a decode worker serves alone because no prefill worker is available."""
        return self.prefill is None and self.decode.role == "decode" and not self.is_local

    @property
    def workers(self) -> tuple[GenerationWorker, ...]:
        """The workers of the route, prefill first."""
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)

    @property
    def max_model_len(self) -> int:
        """The most tokens, prompt and output together, that every worker of the route can hold."""
        return min(worker.facts.max_model_len for worker in self.workers)

    @property
    def load(self) -> float:
        """The load by slots of its fuller worker; the KV cache does not count."""
        return max(worker.load for worker in self.workers)


def mismatch(prefill: GenerationWorker, decode: GenerationWorker) -> KVFerryError | None:
    """Return why these workers cannot do a handoff, with both values; None if they can.

    This is the decision of the handshake, made from the registrations of both workers.
    """
    return _mismatch(prefill.facts, decode.facts)


def can_hand_over(owner: Register, reader: Register) -> bool:
    """Return True if workers with these registrations can do a handoff, whatever roles they have now."""
    return _mismatch(owner, reader) is None


def _mismatch(owner: Register, reader: Register) -> KVFerryError | None:
    names = f"prefill {owner.engine_id} and decode {reader.engine_id}"
    if owner.connector != reader.connector:
        return ConnectorUnavailable(f"{names} use different connectors: {owner.connector!r} and {reader.connector!r}")
    try:
        if owner.transports or reader.transports:
            choose_transport(reader, owner)
        else:  # a connector without transports
            check_compatible(owner, reader.model_fingerprint, reader.layout, converts_blocks=False)
    except KVFerryError as error:
        return type(error)(f"{names} cannot hand over: {error.message}")
    return None


def why_not_read(prefill: GenerationWorker | None, successor: GenerationWorker) -> KVFerryError | None:
    """Return why ``successor`` cannot read the KV of a prefill worker; None if it can."""
    if prefill is None:
        return PeerUnreachable("the prefill worker was lost")
    if prefill.key == successor.key:  # after a switch of its role
        return ConnectorUnavailable(f"worker {successor.key.engine_id} holds the KV in its own prefix cache")
    if successor.role != "decode" and not successor.facts.can_switch_role:
        return ConnectorUnavailable(f"{successor.role} worker {successor.key.engine_id} reads no handoffs")
    return mismatch(prefill, successor)


def routes(workers: Iterable[GenerationWorker]) -> Iterator[Route]:
    """Yield every route that takes new requests."""
    workers = _open(workers)
    decoders = _partners(workers, "decode")
    for worker in workers:
        if worker.role == "prefill":
            yield from (Route(worker, decode) for decode in decoders.of(worker))
        elif worker.role == "aggregated":
            yield Route(None, worker)
    yield from (Route(None, worker) for worker in _alone_beside(workers, workers))


def _open(workers: Iterable[GenerationWorker]) -> list[GenerationWorker]:
    return [worker for worker in workers if not worker.is_closed]


def _alone(workers: Iterable[GenerationWorker]) -> list[GenerationWorker]:
    """Return the decode workers that serve requests alone: those that may, and that can read from no open prefill worker."""
    open_workers = _open(workers)
    return _alone_beside(open_workers, open_workers)


def _alone_beside(open_workers: Sequence[GenerationWorker], workers: Iterable[GenerationWorker]) -> list[GenerationWorker]:
    """Return those of ``workers`` that would serve alone if they took requests, while these workers are open.

    A prefill worker that is closed or away keeps none from it: it may return later than they, or never.
    """
    candidates = [worker for worker in workers if worker.role == "decode" and worker.may_serve_alone]
    prefills = _partners(open_workers if candidates else (), "prefill")
    return [worker for worker in candidates if not prefills.fit(worker)]


def _partners(workers: Iterable[GenerationWorker], role: Role) -> Partners:
    return Partners((worker for worker in workers if worker.role == role), mismatch)


def computing(workers: Iterable[GenerationWorker]) -> list[GenerationWorker]:
    """Return the workers that compute prompts: all but the decode workers that read from a prefill worker."""
    members = list(workers)
    alone = {worker.key for worker in _alone(members)}
    return [worker for worker in members if worker.role != "decode" or worker.key in alone]


def local_candidates(
    workers: Iterable[GenerationWorker], prefill: GenerationWorker | None, demand: Demand
) -> list[GenerationWorker]:
    """Return the decode workers that could compute the prompt at once, instead of reading it from a prefill worker.

    They have no queue, and room for prompt and output of every choice beside what they hold. Without ``prefill``, they need
    not fit any.
    """
    num_tokens = demand.num_choices * demand.num_tokens
    return [
        worker
        for worker in _fitting(workers, demand)
        if worker.role == "decode"
        and demand.has_room(worker)
        and not (worker.num_waiting or worker.is_reserve or worker.key in demand.avoid)
        and worker.has_free_tokens(num_tokens)
        and (prefill is None or mismatch(prefill, worker) is None)
    ]


def starters(workers: Iterable[GenerationWorker], demand: Demand) -> list[GenerationWorker]:
    """Return the workers that could compute the prompt of a request, now or once they have room."""
    members = list(workers)
    fitting, alone = _fitting(members, demand), {worker.key for worker in _alone(members)}
    decoders = _partners(fitting, "decode")

    def can_begin(worker: GenerationWorker) -> bool:
        has_partner = worker.role == "prefill" and decoders.fit(worker)
        return worker.role == "aggregated" or has_partner or worker.key in alone

    return [worker for worker in fitting if can_begin(worker)]


def could_hold(workers: Iterable[GenerationWorker], demand: Demand) -> list[GenerationWorker]:
    """Return the open workers that hold a request once they have room for it, whether or not they have a partner."""
    return [worker for worker in _fitting(workers, demand) if worker.may_hold(demand.num_choices)]


def usable(workers: Iterable[GenerationWorker], demand: Demand) -> list[GenerationWorker]:
    """Return the workers of all routes that a request may get, now or once they have room; none that refuses only it.

    The room of one is of no use to it without a partner that it can use as well.
    """
    open_workers = _open(workers)
    return _usable_beside(open_workers, open_workers, demand)


def _usable_beside(
    open_workers: Sequence[GenerationWorker], workers: Sequence[GenerationWorker], demand: Demand
) -> list[GenerationWorker]:
    """Return what of ``workers`` would be ``usable`` if they took requests, while these workers are open."""
    alone = {worker.key for worker in _alone_beside(open_workers, workers)}  # of all: that does not depend on the request
    fitting = _with_context(_with_weights(workers, demand), demand)
    able = [worker for worker in fitting if worker.may_hold(demand.num_choices) and worker.key not in demand.refusing]
    prefills, decoders = _partners(able, "prefill"), _partners(able, "decode")

    def is_usable(worker: GenerationWorker) -> bool:
        if worker.role == "prefill":
            return decoders.fit(worker)
        return worker.role == "aggregated" or worker.key in alone or prefills.fit(worker)

    return [worker for worker in able if is_usable(worker)]


def choose_route(workers: Iterable[GenerationWorker], demand: Demand, absent: Sequence[GenerationWorker] = ()) -> Route:
    """Return the route that holds the request, has room for it, and is the cheapest.

    The cheapest prefill worker with a partner is combined with its least loaded partner, and competes with the cheapest
    aggregated worker. The cost of a pair is that of its prefill worker; between equal costs ``Route.load`` decides.

    Prefill workers whose leases leave no room for the prompt come after the others, since readers may take
    long. Among equals the worker picked least recently is chosen, and a pair before an aggregated worker. Pairs with failing
    handoffs come after all others. A decode worker alone comes last, if it can read from no open prefill worker.

    Workers that take no requests, and those in ``absent``, which have left, may soon serve again.

    The texts of ``NoWorker`` and ``Overloaded`` have no numbers of the request: others that wait as it does get them, too.

    Raises:
        NoWorker: no worker can serve now; says what is missing.
        ContextTooLong: there are routes, but none can hold so many tokens, now or soon.
        InvalidRequest: no route can ever hold so many choices at once.
        Overloaded: every route that could take it is full.
    """
    every = list(workers)
    members = _with_weights(every, demand)
    fitting = _fitting(members, demand)
    alone = _fitting(_alone(every), demand)
    for bad_pairs in (demand.bad_pairs, frozenset[tuple[WorkerKey, WorkerKey]]()):
        for candidates in _in_order_of_preference(fitting, demand):
            found = [
                route
                for route in (_best_pair(candidates, demand, bad_pairs), _best_aggregated(candidates, demand))
                if route is not None
            ]
            if found:
                return min(found, key=lambda route: (demand.costs.get(route.workers[0].key, 0.0), route.load))
    for candidates in _in_order_of_preference(alone, demand):
        if candidates:
            return Route(None, min(candidates, key=demand.order))
    if _best_pair(fitting, demand) or _best_aggregated(fitting, demand) or alone:
        _check_num_choices(every, absent, demand)
        others = "requests with other API keys wait for room" if demand.kept else ""
        raise Overloaded(f"{others or 'every worker that could serve the request is full'}: try again later")
    limit, needed = max_model_len(members), demand.num_tokens
    if limit and needed <= longest_model_len(members, _with_weights(absent, demand)):
        raise NoWorker("the workers that hold as many tokens as the request needs take no requests at the moment")
    if limit:
        raise ContextTooLong(f"the request needs {needed} tokens, this model's context holds {limit}", param="prompt")
    if demand.model_fingerprint:
        raise NoWorker(f"no worker with model {demand.model_fingerprint.hex()}, which names the images, takes new requests")
    raise NoWorker(why_not_ready(members) or "no worker can serve at the moment")


def choose_weights(workers: Iterable[GenerationWorker]) -> bytes:
    """Return the model fingerprint of the least loaded route; the identifiers of a request's images depend on it.

    Raises:
        NoWorker: there is no route; says what is missing.
    """
    members = list(workers)
    route = min(routes(members), key=lambda route: route.load, default=None)
    if route is None:
        raise NoWorker(why_not_ready(members) or "no worker can serve at the moment")
    return route.decode.facts.model_fingerprint


def _check_num_choices(every: Sequence[GenerationWorker], absent: Sequence[GenerationWorker], demand: Demand) -> None:
    """Refuse a request for good if no route could ever hold its choices, however long it waits; ``absent`` may serve later."""

    def with_choices(num_choices: int) -> Demand:
        return replace(demand, num_choices=num_choices, refusing=frozenset())

    wanted = with_choices(demand.num_choices)
    if usable(every, wanted):
        return
    limits = sorted({worker.facts.max_num_choices for worker in _fitting(every, demand)} - {0})
    num_possible = bisect_left(limits, True, key=lambda limit: not usable(every, with_choices(limit)))
    if not num_possible:
        return
    if _usable_beside(_open(every), [*every, *absent], wanted):
        raise NoWorker("the workers that hold as many choices as the request asks for take no requests at the moment")
    raise InvalidRequest(
        f"n = {demand.num_choices}: no worker that could serve the request holds more than {limits[num_possible - 1]} choices",
        param="n",
    )


def choose_decode(workers: Iterable[GenerationWorker], prefill: GenerationWorker, demand: Demand) -> GenerationWorker:
    """Return the least loaded decode worker that can take a handoff from ``prefill``.

    Raises:
        NoWorker: no decode worker fits, or none can ever hold so many choices; says why.
        Overloaded: all that could take it are full.
    """
    others = (worker for worker in _fitting(workers, demand) if worker.key != prefill.key)  # which may be decode worker now
    decoders = [worker for worker in others if worker.role == "decode"]
    reasons = [mismatch(prefill, worker) for worker in decoders]
    able = [worker for worker, reason in zip(decoders, reasons, strict=True) if reason is None]
    if not able:
        why = next((f": {reason.message}" for reason in reasons if reason), "")
        raise NoWorker(f"no decode worker can take over from prefill worker {prefill.key.engine_id}{why}")
    bad = [worker for worker in able if (prefill.key, worker.key) in demand.bad_pairs]
    good = [worker for worker in able if worker not in bad and demand.has_room(worker)]
    return _least_loaded_of(good or able, demand)


def choose_successor(workers: Iterable[GenerationWorker], model_fingerprint: bytes, demand: Demand) -> GenerationWorker:
    """Return the least loaded worker that can continue a request alone, by recomputing prompt and output so far.

    A prefill worker that can switch its role can also do so; it is chosen if there is no other.

    Raises:
        NoWorker: no worker has this model, or none can ever hold so many choices.
        Overloaded: all that could take it are full.
    """
    fitting = [worker for worker in _fitting(workers, demand) if worker.facts.model_fingerprint == model_fingerprint]
    able = [worker for worker in fitting if worker.role != "prefill"]
    able = able or [worker for worker in fitting if worker.facts.can_switch_role]
    if not able:
        raise NoWorker(f"no decode worker with model {model_fingerprint.hex()} is there to go on with the request")
    return _least_loaded_of(able, demand)


def unpaired(workers: Iterable[GenerationWorker]) -> dict[WorkerKey, str]:
    """Return the prefill and decode workers that fit no worker of the other role, although there are some, and why."""
    open_workers = _open(workers)
    prefills = [worker for worker in open_workers if worker.role == "prefill"]
    decodes = [worker for worker in open_workers if worker.role == "decode"]
    if not prefills or not decodes:
        return {}
    owners, readers = _partners(prefills, "prefill"), _partners(decodes, "decode")
    reasons = {prefill.key: mismatch(prefill, decodes[0]) for prefill in prefills if not readers.fit(prefill)}
    reasons |= {decode.key: mismatch(prefills[0], decode) for decode in decodes if not owners.fit(decode)}
    return {key: reason.message for key, reason in reasons.items() if reason is not None}


def max_model_len(workers: Iterable[GenerationWorker]) -> int:
    """Return the longest context of any route, 0 if there is no route."""
    open_workers = _open(workers)
    return _max_model_len_beside(open_workers, open_workers)


def longest_model_len(workers: Sequence[GenerationWorker], absent: Sequence[GenerationWorker]) -> int:
    """Return the longest context of any route that there is, or may be once others take requests, those in ``absent`` too."""
    return _max_model_len_beside(_open(workers), [*workers, *absent])


def _max_model_len_beside(open_workers: Sequence[GenerationWorker], workers: Sequence[GenerationWorker]) -> int:
    """Return the longest context of all routes of ``workers`` if they took requests, while these workers are open.

    Compares only workers that may make it longer, as it takes long.
    """
    longest = max((worker.facts.max_model_len for worker in workers if worker.role == "aggregated"), default=0)
    by_context = sorted(workers, key=lambda worker: worker.facts.max_model_len, reverse=True)
    prefills = [worker for worker in by_context if worker.role == "prefill"]
    decoders = [worker for worker in by_context if worker.role == "decode"]
    readers = _partners(decoders, "decode")
    for prefill in prefills:
        if prefill.facts.max_model_len <= longest:
            break
        decode = next(readers.of(prefill), None)
        if decode is not None:
            longest = max(longest, min(prefill.facts.max_model_len, decode.facts.max_model_len))
    longer = [worker for worker in decoders if worker.facts.max_model_len > longest]
    alone = _alone_beside(open_workers, longer)
    return max((worker.facts.max_model_len for worker in alone), default=longest)


def why_not_ready(workers: Iterable[GenerationWorker]) -> str | None:
    """Return what is missing for a route; None if there is one."""
    members = list(workers)
    if next(routes(members), None) is not None:
        return None
    if not members:
        return "no worker has registered"
    open_workers = _open(members)
    if not open_workers:
        are_draining = all(worker.is_draining for worker in members)
        return "all workers are draining" if are_draining else f"no worker takes requests: {members[0].why_closed}"
    prefills = [worker for worker in open_workers if worker.role == "prefill"]
    decodes = [worker for worker in open_workers if worker.role == "decode"]
    if not prefills:
        return _none_of("prefill", members)
    if not decodes:
        return _none_of("decode", members)
    reason = mismatch(prefills[0], decodes[0])
    return reason.message if reason else None


def _none_of(role: Role, members: Iterable[GenerationWorker]) -> str:
    why = next((f": {worker.why_closed}" for worker in members if worker.role == role and worker.is_closed), "")
    return f"no {role} worker is available, and no aggregated one{why}"


def _least_loaded(worker: GenerationWorker) -> tuple[float, int]:
    return max(worker.load, worker.kv_load), worker.last_picked


def _with_weights(workers: Iterable[GenerationWorker], demand: Demand) -> list[GenerationWorker]:
    wanted = demand.model_fingerprint
    return [worker for worker in workers if not wanted or worker.facts.model_fingerprint == wanted]


def _fitting(workers: Iterable[GenerationWorker], demand: Demand) -> list[GenerationWorker]:
    return _with_context((worker for worker in _with_weights(workers, demand) if not worker.is_closed), demand)


def _with_context(workers: Iterable[GenerationWorker], demand: Demand) -> list[GenerationWorker]:
    return [worker for worker in workers if worker.facts.max_model_len >= demand.num_tokens]


def _in_order_of_preference(workers: list[GenerationWorker], demand: Demand) -> Iterator[list[GenerationWorker]]:
    """Yield the workers with room that have not failed the request; then also those that have; then also those in reserve."""
    with_room = [worker for worker in workers if demand.has_room(worker)]
    trusted = [worker for worker in with_room if not worker.is_reserve]
    yield [worker for worker in trusted if worker.key not in demand.avoid]
    yield trusted
    yield with_room


def _least_loaded_of(workers: list[GenerationWorker], demand: Demand) -> GenerationWorker:
    if not any(worker.may_hold(demand.num_choices) for worker in workers):
        raise NoWorker(f"no worker that could go on with the request ever holds its {demand.num_choices} choices at once")
    for candidates in _in_order_of_preference(workers, demand):
        if candidates:
            return min(candidates, key=_least_loaded)
    raise Overloaded("every worker that could go on with the request is full")


def _best_pair(
    workers: list[GenerationWorker], demand: Demand, bad_pairs: Container[tuple[WorkerKey, WorkerKey]] = ()
) -> Route | None:
    def order(prefill: GenerationWorker) -> tuple[bool, tuple[float, float, int]]:
        return not prefill.has_unleased_blocks(demand.num_prompt_tokens), demand.order(prefill)

    decodes = _partners(sorted((worker for worker in workers if worker.role == "decode"), key=_least_loaded), "decode")
    for prefill in sorted((worker for worker in workers if worker.role == "prefill"), key=order):
        partner = next((decode for decode in decodes.of(prefill) if (prefill.key, decode.key) not in bad_pairs), None)
        if partner is not None:
            return Route(prefill, partner)
    return None


def _best_aggregated(workers: list[GenerationWorker], demand: Demand) -> Route | None:
    found = [worker for worker in workers if worker.role == "aggregated"]
    return Route(None, min(found, key=demand.order)) if found else None
