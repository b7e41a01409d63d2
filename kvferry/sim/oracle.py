"""The causal oracle: every error, and every unused handoff, has a cause on its own path at its own time.

Judges each request after the run by its path (``kvferry.sim.request_path``) and by the real troubles of the run
(``kvferry.sim.troubles``). An event that no row of the two tables explains is a violation. A fault elsewhere, or at another
time, explains nothing; nor does the loss of a worker while another could have served. The router's own pause explains no error:
its workers lived. ``docs/kv-handoff.md`` shows the tables.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from connectors.p2p.consumer.transport_health import BreakerTerms
from core.errors import EncoderInputMissing, WorkerStalled
from core.wire.messages import Role
from kvferry.sim.client import ROUTER_LOST, Client
from kvferry.sim.faults import Fault
from kvferry.sim.plan import ClusterPlan, WorkerPlan
from kvferry.sim.request_path import RequestPath, Setback
from kvferry.sim.role_history import LEARN_ROLE_S
from kvferry.sim.troubles import Kind, Troubles

# Troubles that make a worker unavailable. The router's own pause is none of them.
UNAVAILABLE = frozenset(
    {Kind.DOWN, Kind.FROZEN, Kind.HUNG, Kind.DRAINING, Kind.REPLACED, Kind.CUT, Kind.PARTED, Kind.LATE, Kind.DROPPED}
)
_PATIENCE_S = 0.5  # shorter availability of a worker may go unnoticed
_BEFORE_S = 0.5  # a trouble that ended this shortly before may still be the cause
_SHORT_LEASE_S = 2.0  # drawn as a fault: delays of frames and steps are of this size
_ROUNDING_S = 1e-3
_FREE_STALLS = 2  # in a row that cost a request no retry


@dataclass(frozen=True, slots=True)
class Case:
    """One ended request, and everything that may explain it."""

    plan: ClusterPlan
    troubles: Troubles
    client: Client
    at: float  # when it ended

    @property
    def path(self) -> RequestPath:
        """The path of the request."""
        return self.client.path

    def on_path(self, kinds: Iterable[Kind], since: float) -> bool:
        """Return True if a process or link on the path had trouble of these kinds."""
        return bool(self.troubles.find(frozenset(kinds), self.path.names, since - _BEFORE_S, self.at))

    def kept_role(self, worker: WorkerPlan, role: Role, since: float, until: float) -> bool:
        """Return True if a worker had this role all the time, and every router has had time to learn it."""
        return self.troubles.roles.between(worker.engine_id, worker.role, since - LEARN_ROLE_S, until) == {role}

    def never_had_role(self, worker: WorkerPlan, role: Role, since: float, until: float) -> bool:
        """Return True if a worker had other roles all the time, and every router has had time to learn them."""
        return role not in self.troubles.roles.between(worker.engine_id, worker.role, since - LEARN_ROLE_S, until)

    def spec(self, engine_id: str) -> WorkerPlan:
        """Return the plan of a worker."""
        return next(worker for worker in self.plan.workers if worker.engine_id == engine_id)


Cause = Callable[[Case], bool]


# ---- causes of errors --------------------------------------------------------------------------------------------------


def client_left(case: Case) -> bool:
    """The client closed its connection."""
    return case.client.has_left


def stopped_reading(case: Case) -> bool:
    """The client had read nothing for as long as the router waits, and was not going to."""
    reading = case.client.plan.reading
    if reading is None or not case.client.was_cut:
        return False
    first_write_at = case.path.first_output_at or case.path.answered_at or case.at
    unread_s = case.at - max(case.client.last_read_at, first_write_at)
    is_stopped = reading.stops_at <= case.at <= reading.resumes_at
    return is_stopped and unread_s >= case.plan.config.router.send_timeout_s - _ROUNDING_S


def router_died(case: Case) -> bool:
    """The router that it was connected to died then, or was dead."""
    return bool(case.troubles.find({Kind.DOWN}, {case.path.router}, case.at, case.at))


def time_was_up(case: Case) -> bool:
    """The request's own time was up: by the fastest clock that counted it, or by one that jumped."""
    rate = max((case.spec(turn.engine_id).clock_rate for turn in case.path.turns), default=1.0)
    elapsed_s = (case.at - case.path.submitted_at) * max(1.0, rate)
    is_over = elapsed_s >= case.plan.config.router.request_timeout_s - _ROUNDING_S
    return is_over or case.on_path({Kind.JUMPED}, case.path.submitted_at)


def has_little_time(case: Case) -> bool:
    """The request was refused at once, in a run in which requests have little time."""
    return Fault.DEADLINE in case.plan.kinds and not case.path.turns


def no_worker_could_continue(case: Case) -> bool:
    """No worker that could have served was available: at that moment if it was refused, else for the whole bounded wait."""
    if not case.path.turns:
        return not _has_route(case, case.at)
    since = case.path.waits_since
    if _waited_s(case, since) < case.plan.config.router.worker_wait_s - _ROUNDING_S:
        return False
    if case.path.first_output_at is None:
        moments = [since + _PATIENCE_S * number for number in range(int((case.at - since) / _PATIENCE_S))]
        were_routes = [_has_route(case, moment) and not _stands_still(case, moment) for moment in moments]
        return not any(each and following for each, following in itertools.pairwise(were_routes))
    others = [worker for worker in case.plan.workers if case.never_had_role(worker, "prefill", since, case.at)]
    return not any(_could_take(case, worker, since) for worker in others)


def every_attempt_was_hit(case: Case) -> bool:
    """All allowed attempts were lost, each to trouble between its router and its own worker.

    A request may leave a stalled worker without cost, as often as it may without a token in between.
    """
    setbacks = list(case.path.setbacks)
    if case.path.turns:  # the last attempt, after which it did not continue
        setbacks.append(Setback(case.at, case.path.turns[-1].engine_id, case.client.outcome))
    stalls = [each for each in setbacks if each.code == WorkerStalled.code]
    costly = [each for each in setbacks if each.code != WorkerStalled.code] + stalls[_FREE_STALLS:]
    return sum(_was_hit(case, each) for each in costly) > case.plan.config.router.max_retries


def shows_what_only_encoders_have(case: Case) -> bool:
    """The prompt shows an image whose file computing workers lack, and its embeddings did not arrive within the drawn waits."""
    images = case.plan.images
    return images is not None and not images.absent.isdisjoint(case.client.plan.media)


def _has_route(case: Case, at: float) -> bool:
    """Return True if an aggregated worker was available, or a decode worker to a router that knew a worker it can read."""
    available = [worker for worker in case.plan.workers if _is_available(case, worker, at)]
    if any(case.kept_role(worker, "aggregated", at, at) for worker in available):
        return True
    prefills = [worker for worker in case.plan.workers if case.kept_role(worker, "prefill", at, at)]
    return any(
        prefill.kv_dtype == decode.kv_dtype and (prefill in available or _was_known(case, prefill, at))
        for decode in available
        for prefill in prefills
        if case.kept_role(decode, "decode", at, at)
    )


def _is_available(case: Case, worker: WorkerPlan, at: float) -> bool:
    return not case.troubles.find(UNAVAILABLE, {case.path.router, worker.engine_id}, at, at)


def _was_known(case: Case, worker: WorkerPlan, at: float) -> bool:
    """Return True if the router, in its present incarnation, knew a worker before."""
    router = case.path.router
    start = max((trouble.end for trouble in case.troubles.find({Kind.DOWN}, {router}, 0.0, at)), default=0.0)
    return case.troubles.longest_without(UNAVAILABLE | {Kind.PAUSED}, {router, worker.engine_id}, start, at) > _PATIENCE_S


def _waited_s(case: Case, since: float) -> float:
    """Return how long a worker was waited for, without the pauses of the router."""
    pauses = case.troubles.find({Kind.PAUSED}, {case.path.router}, since, case.at)
    return case.at - since - sum(min(case.at, pause.end) - max(since, pause.start) for pause in pauses)


def has_successor(case: Case, at: float) -> bool:
    """Return True if some worker could continue the request at a time, or begin it if it has not begun."""
    if case.path.first_output_at is None or at < case.path.first_output_at:
        return _has_route(case, at)
    others = [worker for worker in case.plan.workers if case.never_had_role(worker, "prefill", at, at)]
    return any(_is_available(case, worker, at) for worker in others)


def _stands_still(case: Case, at: float) -> bool:
    return bool(case.troubles.find({Kind.PAUSED}, {case.path.router}, at, at))


def _could_take(case: Case, worker: WorkerPlan, since: float) -> bool:
    names = {case.path.router, worker.engine_id}
    return case.troubles.longest_without(UNAVAILABLE | {Kind.PAUSED}, names, since, case.at) > _PATIENCE_S


def _was_hit(case: Case, setback: Setback) -> bool:
    if setback.code == EncoderInputMissing.code:
        return shows_what_only_encoders_have(case)
    start = case.path.start_of_turn(setback.engine_id, setback.at)
    names = {case.path.router, setback.engine_id}
    return bool(case.troubles.find(UNAVAILABLE, names, start - _BEFORE_S, setback.at))


# ---- causes of unused handoffs -----------------------------------------------------------------------------------------


def trouble(*kinds: Kind) -> Cause:
    """Return a cause: trouble of this kind on the path since the prompt was sent to a prefill worker."""

    def is_cause(case: Case) -> bool:
        return case.on_path(kinds, case.path.start_of_handoff())

    return is_cause


def busy_reader(case: Case) -> bool:
    """Another read of its reader stalled, or has no answer: both share the staging area, and the quarantine's limit."""
    since = case.path.start_of_handoff()
    return any(
        case.troubles.touching({Kind.STALLED, Kind.DROPPED, Kind.UNANSWERED, Kind.DATA_PARTED}, turn.engine_id, since, case.at)
        for turn in case.path.turns
        if turn.role == "decode"
    )


def transport_was_off(case: Case) -> bool:
    """The pair's reads have failed before, and its transport was not to be retried yet.

    The back-off doubles with each failed probe, so it lasts no longer than the failures did by then plus its first value.
    """
    since = case.path.start_of_handoff()
    kinds = {Kind.FAILED, Kind.STALLED, Kind.UNANSWERED, Kind.DATA_PARTED}
    failures = [each for each in case.troubles.find(kinds, case.path.names, 0.0, since) if len(each.names) > 1]
    if not failures:
        return False
    first, last = min(each.start for each in failures), max(min(each.end, since) for each in failures)
    slowest = min([1.0, *(case.spec(turn.engine_id).clock_rate for turn in case.path.turns)])
    return since - last <= (last - first + BreakerTerms().retry_s) / slowest + _BEFORE_S


def lease_was_over(case: Case) -> bool:
    """The request took longer than its lease may last, or than a lease as short as other delays."""
    connector = case.plan.config.connector
    rate = max((case.spec(turn.engine_id).clock_rate for turn in case.path.turns), default=1.0)
    elapsed_s = (case.at - case.path.start_of_handoff()) * max(1.0, rate)
    is_short = connector.lease_s <= _SHORT_LEASE_S
    return elapsed_s >= (connector.lease_s - connector.lease_renew_interval_s if is_short else connector.lease_max_s)


def load_takes_longer(case: Case) -> bool:
    """The deadline is shorter than a load of its prompt takes without faults."""
    turns = [turn for turn in case.path.turns if turn.role == "prefill"]
    block_size = min((case.spec(turn.engine_id).block_size for turn in turns), default=16)
    num_rows = len(case.plan.attentions) * (len(case.client.plan.prompt_token_ids) // block_size + 1)
    rows_s = 2 * 3 * num_rows * case.plan.faults.reads.row_s  # blocks, a second time after a wrong digest, and seals
    frames_s = 4 * case.plan.faults.network.delay_s
    return rows_s * case.client.plan.n + frames_s > case.plan.config.connector.transfer_deadline_s / 1.3


def prefill_was_away(case: Case) -> bool:
    """At some time since its arrival, each prefill worker that one of its decode workers can read was unavailable."""
    since = case.path.submitted_at - _BEFORE_S
    kinds = UNAVAILABLE | {Kind.PAUSED}

    def were_away(kv_dtype: str) -> bool:
        alike = [each for each in case.plan.workers if each.kv_dtype == kv_dtype]
        prefills = [each.engine_id for each in alike if case.kept_role(each, "prefill", since, case.at)]
        return all(case.troubles.find(kinds, {case.path.router, name}, since, case.at) for name in prefills)

    roles, turns = case.troubles.roles, case.path.turns
    may_be_alone = [turn for turn in turns if turn.role == "decode" or roles.has_switched(turn.engine_id)]
    return any(were_away(case.spec(turn.engine_id).kv_dtype) for turn in may_be_alone)


def readers_were_away(case: Case) -> bool:
    """Each worker that can read its KV was unavailable to its router, just before a worker that does not read it continued it.

    That is an aggregated worker, or, of workers that can switch, the one that has its KV.
    """
    since = case.path.start_of_handoff()
    prefills = [turn for turn in case.path.turns if turn.role == "prefill"]
    if not prefills:
        return False
    later = [turn for turn in case.path.turns if turn.role != "prefill" and turn.start >= since]
    successors = [turn for turn in later if turn.role == "aggregated" or turn.engine_id == prefills[-1].engine_id]
    if not successors:
        return False
    dtype, until = case.spec(prefills[-1].engine_id).kv_dtype, successors[0].start
    alike = [worker for worker in case.plan.workers if worker.kv_dtype == dtype and worker.engine_id != prefills[-1].engine_id]
    readers = [worker.engine_id for worker in alike if case.kept_role(worker, "decode", until, until)]
    return all(case.troubles.find(UNAVAILABLE, {case.path.router, name}, until - _BEFORE_S, until) for name in readers)


def has_another_layout(case: Case) -> bool:
    """A worker of the request has another layout than the one with its KV; an aggregated one only if no reader was there."""
    dtypes = [(turn.role, case.spec(turn.engine_id).kv_dtype) for turn in case.path.turns]
    owners = {dtype for role, dtype in dtypes if role == "prefill"}
    others = {role for role, dtype in dtypes if role != "prefill" and owners - {dtype}}
    return "decode" in others or ("aggregated" in others and readers_were_away(case))


def load_in_its_step_was_bad(case: Case) -> bool:
    """One of its workers loaded garbage for it within a step."""
    names = case.path.names | {case.client.plan.name}
    return bool(case.troubles.find({Kind.BAD_LOAD}, names, case.path.submitted_at, case.at))


def store_was_in_trouble(case: Case) -> bool:
    """Its store, for loads or for its blocks, did not answer, lost something, or was full."""
    tier = case.plan.tier
    if tier is None:
        return False
    names = {tier.process} if tier.name == "store" else set(case.path.names)
    kinds = {Kind.STORE, Kind.FROZEN, Kind.CORRUPTED}
    return bool(case.troubles.find(kinds, names, case.path.submitted_at - _BEFORE_S, case.at))


def store_dropped_what_it_read(case: Case) -> bool:
    """The store dropped a block while it was copied, because another reader had found the block corrupt."""
    tier = case.plan.tier
    if tier is None or tier.name != "store":
        return False
    return bool(case.troubles.find({Kind.CORRUPTED}, {tier.process}, case.path.submitted_at, case.at))


# ---- the tables --------------------------------------------------------------------------------------------------------

_LOST = (no_worker_could_continue, every_attempt_was_hit)

# The error that a client gets → its possible causes; any other error has none.
ERRORS: Mapping[str, tuple[Cause, ...]] = {
    "cancelled": (client_left, stopped_reading),
    ROUTER_LOST: (router_died,),
    "deadline_exceeded": (time_was_up,),
    "deadline_unreachable": (has_little_time,),
    "no_worker": _LOST,
    "peer_lost": _LOST,
    "worker_stalled": _LOST,
    "protocol_error": _LOST,
    "router_silent": _LOST,
    EncoderInputMissing.code: (shows_what_only_encoders_have,),
}

_LINK = tuple(UNAVAILABLE)

# The reason why available KV was computed again → its possible causes.
FALLBACKS: Mapping[str, tuple[Cause, ...]] = {
    "stale": (
        trouble(*_LINK, Kind.PAUSED, Kind.JUMPED, Kind.STALLED, Kind.CORRUPTED, Kind.DATA_PARTED),
        busy_reader,
        lease_was_over,
        store_dropped_what_it_read,
    ),
    "digest": (trouble(Kind.CORRUPTED), store_was_in_trouble),
    "peer_lost": (
        trouble(*_LINK, Kind.PAUSED, Kind.JUMPED, Kind.STALLED, Kind.FAILED, Kind.DATA_PARTED),
        busy_reader,
        transport_was_off,
    ),
    "deadline": (trouble(*_LINK, Kind.PAUSED, Kind.JUMPED, Kind.STALLED, Kind.DATA_PARTED), busy_reader, load_takes_longer),
    "store_miss": (store_was_in_trouble, trouble(*_LINK, Kind.PAUSED, Kind.JUMPED)),
    "no_prefill": (prefill_was_away,),
    "layout": (has_another_layout,),
    "rejected": (trouble(*_LINK, Kind.PAUSED, Kind.FAILED), readers_were_away, load_in_its_step_was_bad),
}

# The error of a load, for a client with policy fail → the reason why its KV was not used.
LOAD_ERRORS: Mapping[str, str] = {
    "stale": "stale",
    "lease_expired": "stale",
    "digest": "digest",
    "deadline": "deadline",
    "peer_lost": "peer_lost",
    "layout": "layout",
    "store_miss": "store_miss",
    "store_unavailable": "store_miss",
    "transfer_error": "rejected",
}


class CausalOracle:
    """Judges the requests of one run."""

    def __init__(self, plan: ClusterPlan, troubles: Troubles) -> None:
        self._plan = plan
        self._troubles = troubles

    def case(self, client: Client) -> Case:
        """Return a request's case."""
        assert client.ended_at is not None, f"{client.plan.name} has no end"
        return Case(self._plan, self._troubles, client, client.ended_at)

    def judge(self, client: Client) -> list[str]:
        """Return the events of a request that have no cause."""
        case = self.case(client)
        found, reason, outcome = [], client.fallback_reason, client.outcome
        if outcome == "ok" and not reason and _was_to_read_another_layout(case):
            found.append(f"{client.plan.name}: was told to read KV of another layout")
        if reason and not _has_cause(case, FALLBACKS.get(reason, ())):
            found.append(f"{client.plan.name}: its KV was not used ({reason}), without a cause on its path")
        if outcome != "ok" and not _has_cause(case, self._causes_of_error(client)):
            found.append(f"{client.plan.name}: ended with {outcome} ({client.message}), without a cause on its path")
        return found

    def _causes_of_error(self, client: Client) -> tuple[Cause, ...]:
        causes = ERRORS.get(client.outcome, ())
        if client.plan.policy == "fail" and client.outcome in LOAD_ERRORS:
            causes += FALLBACKS[LOAD_ERRORS[client.outcome]]
        return causes


def _was_to_read_another_layout(case: Case) -> bool:
    """Return True if the last prefill worker made its KV for a reader of another layout."""
    owner = ""
    for turn in case.path.turns:
        dtype = case.spec(turn.engine_id).kv_dtype
        owner = dtype if turn.role == "prefill" else owner
        if turn.role == "decode" and turn.has_handoff and dtype != owner:
            return True
    return False


def _has_cause(case: Case, causes: Iterable[Cause]) -> bool:
    return any(cause(case) for cause in causes)
