"""The report of ``/status``: the cluster as this router sees it now, and its counters.

Owns the shape of the report. Workers come from the membership, and counts from the router's metrics, so the page and alerts
cannot disagree. The page computes rates from two reports.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from core.wire.codec import WIRE_VERSION
from router.dispatch.members import GenerationWorker, Member
from router.http.endpoints import Endpoints
from router.http.errors import CLIENT_ERRORS
from router.metrics import PREFIX
from router.planner.planner import Planner


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
    transports: tuple[str, ...]


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
    """The report. Counts run since the start of the router."""

    model: str
    version: str
    wire_version: int  # of this router and all its workers
    is_ready: bool
    reason: str  # why it is not ready, else empty
    num_requests: int
    requests_by_phase: dict[str, int]
    workers: list[WorkerStatus]
    planner: PlannerStatus
    handoffs: dict[str, int]  # by outcome: "loaded", or the reason why not
    failures: dict[str, int]  # of requests, by code, without client errors
    refusals: dict[str, int]  # client errors and cancelled requests, by code
    finished: int
    generation_tokens: int
    prompt_tokens: int
    first_token_parts: dict[str, PartStatus]
    second_token_parts: dict[str, PartStatus]


def status_of(endpoints: Endpoints, version: str) -> Status:
    """Return the state of the cluster."""
    metrics = _Readings(endpoints.metrics.registry)
    errors = metrics.events("request_failure_total", "code")
    reason = endpoints.not_ready_reason
    core, now = endpoints.gateway.core, endpoints.gateway.now
    return Status(
        model=endpoints.model,
        version=version,
        wire_version=WIRE_VERSION,
        is_ready=reason is None,
        reason=reason or "",
        num_requests=endpoints.gateway.num_requests,
        requests_by_phase=metrics.by_label("num_requests_by_phase", "phase"),
        workers=[_worker_status(member) for member in core.membership.members],
        planner=_planner_status(core.planner, core.membership.workers, now),
        handoffs=metrics.events("kv_handoffs_total", "outcome"),
        failures={code: count for code, count in errors.items() if code not in CLIENT_ERRORS},
        refusals={code: count for code, count in errors.items() if code in CLIENT_ERRORS},
        finished=sum(metrics.by_label("request_success_total", "finished_reason").values()),
        generation_tokens=metrics.total("generation_tokens_total"),
        prompt_tokens=metrics.total("prompt_tokens_total"),
        first_token_parts=metrics.parts("time_to_first_token_part_seconds"),
        second_token_parts=metrics.parts("time_to_second_token_part_seconds"),
    )


def _worker_status(worker: Member) -> WorkerStatus:
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


class _Readings:
    """Samples of a registry at one moment, by name."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._samples = {name: list(samples) for name, samples in _grouped(registry.collect())}

    def by_label(self, name: str, label: str) -> dict[str, int]:
        return {labels[label]: int(value) for labels, value in self._samples.get(PREFIX + name, ())}

    def events(self, name: str, label: str) -> dict[str, int]:
        """Return a counter's non-zero values by a label."""
        return {value: count for value, count in self.by_label(name, label).items() if count}

    def total(self, name: str) -> int:
        return int(sum(value for _, value in self._samples.get(PREFIX + name, ())))

    def parts(self, name: str) -> dict[str, PartStatus]:
        counts = self.by_label(f"{name}_count", "part")
        sums = {labels["part"]: value for labels, value in self._samples.get(f"{PREFIX}{name}_sum", ())}
        return {part: PartStatus(seconds=sums[part], num_requests=count) for part, count in counts.items()}


def _grouped(families: Iterable[Metric]) -> Iterator[tuple[str, list[tuple[dict[str, str], float]]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in families:
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    yield from found.items()
