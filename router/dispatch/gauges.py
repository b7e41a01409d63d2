"""The router's gauges of workers and requests."""

from __future__ import annotations

from collections.abc import Callable

from core.clock import Clock
from router.dispatch.core import RouterCore
from router.dispatch.policy import unpaired
from router.dispatch.progress import Standing
from router.dispatch.request_state import RequestPhase
from router.dispatch.route_costs import RouteCosts
from router.metrics import RouterMetrics

_ROLES = ("encode", "prefill", "decode", "aggregated")


def add_gauges(metrics: RouterMetrics, core: RouterCore, clock: Clock) -> None:
    """Have the metrics read them at every scrape."""
    dispatcher, membership = core.dispatcher, core.membership

    def count_role(role: str) -> Callable[[], float]:
        return lambda: sum(member.role == role for member in membership.members)

    def count_phase(phase: RequestPhase) -> Callable[[], float]:
        return lambda: sum(request.phase is phase for request in dispatcher.requests.values())

    metrics.watch("num_requests_running", "Requests that are with a worker.", lambda: len(dispatcher) - dispatcher.num_waiting)
    metrics.watch_each(
        "num_requests_by_phase",
        "Requests by the leg they are on.",
        "phase",
        {phase.value: count_phase(phase) for phase in RequestPhase},
    )
    metrics.watch("num_requests_waiting", "Requests that wait for a worker.", lambda: dispatcher.num_waiting)
    metrics.watch(
        "foreseen_prompt_wait_seconds",
        "How long a new prompt would wait where it is begun with first.",
        lambda: core.wait_estimates.shortest_wait_s(membership.workers, clock.now()),
    )
    _add_routing_gauges(metrics, core.route_costs)
    metrics.watch(
        "workers_unpaired",
        "Prefill and decode workers that none of the other role fits.",
        lambda: len(unpaired(membership.workers)),
    )
    metrics.watch_each("workers", "Live workers.", "role", {role: count_role(role) for role in _ROLES})
    metrics.watch(
        "workers_draining",
        "Workers that end their requests and take no new ones.",
        lambda: sum(member.is_draining for member in membership.members),
    )
    metrics.watch(
        "workers_stalled",
        "Workers whose engines make no progress.",
        lambda: sum(member.progress.standing is Standing.STALLED for member in membership.members),
    )


def _add_routing_gauges(metrics: RouterMetrics, costs: RouteCosts) -> None:
    """Have the metrics read what routing knows, and how true it was."""
    metrics.watch(
        "routing_predicted_hit_tokens",
        "Prompt tokens expected in caches, since the start, of prompts whose workers have told what they found.",
        lambda: costs.num_predicted_hit_tokens,
    )
    metrics.watch(
        "routing_real_hit_tokens",
        "Prompt tokens found in caches of these prompts' workers, since the start.",
        lambda: costs.num_real_hit_tokens,
    )
    metrics.watch(
        "routing_indexed_blocks",
        "Blocks of all workers that the index of their contents holds.",
        lambda: costs.contents.reports.num_blocks,
    )
    metrics.watch(
        "routing_unknown_workers",
        "Workers whose contents are unknown until their next snapshot: a report was lost, or claims did not hold.",
        lambda: costs.contents.reports.num_unknown_workers,
    )
    metrics.watch(
        "routing_prefill_time_error_ratio",
        "Recent mean error of the predicted prefill time, of the least predictable pool that is known well.",
        costs.mean_error,
    )
