"""The reports of ``/status``: the cluster as this router sees it now, its counters, and the latest requests.

Owns the shape of the reports. Workers come from the membership, and counts from the router's metrics, so the page and alerts
cannot disagree. The page computes rates from two reports.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from core.wire.codec import WIRE_VERSION
from router.dispatch.members import GenerationWorker, Member
from router.dispatch.observer import RequestObserver
from router.http.endpoints import Endpoints
from router.metrics import CLIENT_ERRORS
from router.planner.planner import Planner
from router.records.readings import Readings
from router.records.timelines import RequestSummary, Timeline
from router.records.traffic import PairTraffic

_MAX_PAIRS = 256  # in a report: the busiest ones
_NUM_LATEST = 50  # requests in a list


class WorkerStatus(msgspec.Struct, kw_only=True):
    """One live worker by its last heartbeat; an encode worker counts images instead of choices, and has no KV."""

    engine_id: str
    role: str
    is_switching: bool  # requests or leases of a former role are left
    version: str  # of the package; empty if not reported
    state: str  # "ready", "full", "draining", "stalled", or "closed" if it reported that it takes no requests
    num_running: int
    num_waiting: int
    max_num_seqs: int
    kv_cache_usage: float
    num_leased_blocks: int
    transports: tuple[str, ...]  # that work there, in its order of preference
    transport: str  # of its latest load, as reader or as source; empty if it had none in ten minutes
    prompts_per_s: float  # that it has computed for this router in the last minute
    is_agent: bool  # of a vLLM engine


class PlannerStatus(msgspec.Struct, kw_only=True):
    """The planner of this router: how many workers heed it, why it orders nothing now, and its last switch."""

    is_enabled: bool
    num_workers: int
    why_idle: str
    last: PlannedSwitch | None


class PlannedSwitch(msgspec.Struct, kw_only=True):
    """A switch that the planner has ordered; ``outcome`` is "ordered" until it is known."""

    seconds_ago: float
    engine_id: str
    before: str
    role: str
    reason: str
    outcome: str


class PartStatus(msgspec.Struct, kw_only=True):
    """One part of the latency: total seconds, and the number of requests."""

    seconds: float
    num_requests: int


class Status(msgspec.Struct, kw_only=True):
    """The report. Counts run since the start of the router, rates over the last minute."""

    router_id: str
    num_processes: int  # behind this router's port; the report is of one of them
    process_number: int  # which one, from 0
    model: str
    version: str
    wire_version: int  # of this router and all its workers
    is_ready: bool
    reason: str  # why it is not ready, else empty
    num_requests: int
    requests_by_phase: dict[str, int]
    workers: list[WorkerStatus]
    traffic: list[PairTraffic]  # the busiest pairs first
    num_more_pairs: int
    planner: PlannerStatus
    handoffs: dict[str, int]  # by outcome: "loaded", or the reason why not
    failures: dict[str, int]  # of requests, by code, without client errors
    refusals: dict[str, int]  # client errors and cancelled requests, by code
    finished: int
    generation_tokens: int  # of ended requests
    output_tokens: int  # of these and of running ones
    prompt_tokens: int
    first_token_parts: dict[str, PartStatus]
    second_token_parts: dict[str, PartStatus]
    predicted_hit_tokens: int  # of prompts whose workers told what they found; 0 if routes are chosen by load
    real_hit_tokens: int
    prefill_time_error: float  # recent mean error of the predicted prefill time, share of 1


class RequestsReport(msgspec.Struct, kw_only=True):
    """The latest requests, and the timelines of the one that was asked for."""

    latest: list[RequestSummary]
    found: list[Timeline]


def status_of(endpoints: Endpoints, version: str) -> Status:
    """Return the state of the cluster."""
    metrics = Readings(endpoints.metrics.registry)
    errors = metrics.events("request_failure_total", "code")
    reason = endpoints.not_ready_reason
    gateway, now = endpoints.gateway, endpoints.gateway.now
    traffic, rates = gateway.observer.traffic.pairs(now), gateway.observer.traffic.prompts_per_s(now)
    return Status(
        router_id=gateway.core.membership.welcome.router_id,
        num_processes=endpoints.config.processes_at_port,
        process_number=endpoints.config.process_number,
        model=endpoints.model,
        version=version,
        wire_version=WIRE_VERSION,
        is_ready=reason is None,
        reason=reason or "",
        num_requests=endpoints.gateway.num_requests,
        requests_by_phase=metrics.by_label("num_requests_by_phase", "phase"),
        workers=[_worker_status(member, gateway.observer, rates, now) for member in gateway.core.membership.members],
        planner=_planner_status(gateway.core.planner, gateway.core.membership.workers, now),
        traffic=traffic[:_MAX_PAIRS],
        num_more_pairs=max(0, len(traffic) - _MAX_PAIRS),
        handoffs=metrics.events("kv_handoffs_total", "outcome"),
        failures={code: count for code, count in errors.items() if code not in CLIENT_ERRORS},
        refusals={code: count for code, count in errors.items() if code in CLIENT_ERRORS},
        finished=sum(metrics.by_label("request_success_total", "finished_reason").values()),
        generation_tokens=metrics.total("generation_tokens_total"),
        output_tokens=gateway.observer.num_output_tokens,
        prompt_tokens=metrics.total("prompt_tokens_total"),
        first_token_parts=_parts(metrics, "time_to_first_token_part_seconds"),
        second_token_parts=_parts(metrics, "time_to_second_token_part_seconds"),
        predicted_hit_tokens=metrics.total("routing_predicted_hit_tokens"),
        real_hit_tokens=metrics.total("routing_real_hit_tokens"),
        prefill_time_error=gateway.core.route_costs.mean_error(),
    )


def requests_of(endpoints: Endpoints, name: str = "") -> RequestsReport:
    """Return the latest requests, and those that ``name`` is an id of."""
    timelines, now = endpoints.gateway.observer.timelines, endpoints.gateway.now
    found = timelines.find(name, now) if name else []
    return RequestsReport(latest=timelines.latest(_NUM_LATEST, now), found=found)


def _worker_status(worker: Member, observer: RequestObserver, prompts_per_s: dict[str, float], now: float) -> WorkerStatus:
    return WorkerStatus(
        engine_id=worker.key.engine_id,
        role=worker.role,
        is_switching=isinstance(worker, GenerationWorker) and worker.is_switching,
        version=worker.version,
        state=_state_of(worker),
        num_running=worker.num_running,
        num_waiting=worker.num_waiting,
        max_num_seqs=worker.num_slots,
        kv_cache_usage=worker.kv_cache_usage,
        num_leased_blocks=worker.num_leased_blocks,
        transports=worker.transports,
        transport=observer.traffic.transport(worker.key.engine_id, now),
        prompts_per_s=prompts_per_s.get(worker.key.engine_id, 0.0),
        is_agent=isinstance(worker, GenerationWorker) and worker.facts.takes_calls,
    )


def _planner_status(planner: Planner, workers: Iterable[GenerationWorker], now: float) -> PlannerStatus:
    last = planner.last
    shown = None
    if last is not None:
        shown = PlannedSwitch(
            seconds_ago=round(now - last.at, 1),
            engine_id=last.engine_id,
            before=last.before,
            role=last.role,
            reason=last.reason,
            outcome=last.outcome,
        )
    num_workers = len(planner.owned(workers, now)) if planner.is_enabled else 0
    return PlannerStatus(is_enabled=planner.is_enabled, num_workers=num_workers, why_idle=planner.why_idle, last=shown)


def _state_of(worker: Member) -> str:
    if worker.is_closed:
        return "draining" if worker.is_draining else "stalled" if worker.why_unresponsive else "closed"
    return "ready" if worker.has_room(1) else "full"


def _parts(metrics: Readings, name: str) -> dict[str, PartStatus]:
    counts, sums = metrics.by_label(f"{name}_count", "part"), metrics.sums(name, "part")
    return {part: PartStatus(seconds=sums[part], num_requests=count) for part, count in counts.items()}
