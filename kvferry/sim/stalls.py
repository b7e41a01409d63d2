"""Stalls: a client gets nothing for longer than it takes to detect a fault, though some worker could serve it.

A wait has a cause while the router is paused, while no worker that could continue is available, while one of the request's
workers computes for others, and while a read of or from one of them is stalled. The rest must not exceed ``bound_s``: the time
in which a silent or hung worker is detected, a handoff is abandoned, and another worker takes over.
"""

from __future__ import annotations

from bisect import bisect_right

from core.engine.step_watch import STEP_SPREAD
from core.wire.progress import stall_bound_s
from kvferry.sim.network import HEARTBEAT_TIMEOUT_S
from kvferry.sim.oracle import Case, has_successor
from kvferry.sim.plan import ClusterPlan
from kvferry.sim.troubles import Kind

_SAMPLE_S = 0.25
_SLACK_S = 3.0  # frames, turns, registrations
_TIER_WAIT_S = 10.0  # for a store that does not answer, load by load
_READS = frozenset({Kind.STALLED, Kind.DROPPED, Kind.DATA_PARTED})


def bound_s(plan: ClusterPlan) -> float:
    """Return how long a client may get nothing without a lasting cause."""
    router, connector = plan.config.router, plan.config.connector
    slowest_s = max(worker.step_s for worker in plan.workers)
    notice_s = max(HEARTBEAT_TIMEOUT_S, router.heartbeat_timeout_s, stall_bound_s(slowest_s, STEP_SPREAD * slowest_s))
    load_s = connector.transfer_deadline_s + connector.handshake_timeout_s
    images_s = plan.images.encode_timeout_s + 2 * plan.images.deadline_s if plan.images is not None else 0.0
    tier_s = _TIER_WAIT_S if plan.tier is not None or plan.embedding_store is not None else 0.0
    slowest_clock = max(1 / worker.clock_rate for worker in plan.workers)
    frames_s = 4 * (plan.faults.network.spike_s + plan.faults.network.delay_s)
    return slowest_clock * (notice_s + load_s + images_s + tier_s) + frames_s + _SLACK_S


def find_stalls(case: Case) -> list[str]:
    """Return the unexplained stalls of a request."""
    longest_s = bound_s(case.plan)
    found = []
    path, last = case.path, case.at if case.path.answered_at is None else min(case.at, case.path.answered_at)
    for start, end in [*path.gaps, (path.last_output_at or path.submitted_at, last)]:
        unexplained_s = _unexplained_s(case, start, end) if end - start > longest_s else 0.0
        if unexplained_s > longest_s:
            period = f"from {start:.3f} to {end:.3f}"
            found.append(f"{case.client.plan.name}: nothing came {period}, {unexplained_s:.1f} s without a cause")
    return found


def _unexplained_s(case: Case, start: float, end: float) -> float:
    """Return the longest time within a period that has neither output nor explanation."""
    longest = current = 0
    for number in range(int((end - start) / _SAMPLE_S)):
        current = 0 if _has_cause(case, start + number * _SAMPLE_S) else current + 1
        longest = max(longest, current)
    return longest * _SAMPLE_S


def _has_cause(case: Case, at: float) -> bool:
    troubles, path = case.troubles, case.path
    if troubles.find({Kind.PAUSED, Kind.DOWN}, {path.router}, at, at) or not has_successor(case, at):
        return True
    names = [turn.engine_id for turn in path.turns if turn.start <= at]
    return any(_is_busy(case, name, at) or troubles.touching(_READS, name, at, at) for name in names)


def _is_busy(case: Case, name: str, at: float) -> bool:
    """Return True if a worker was computing at a time: it began a step not long before."""
    steps = case.troubles.steps.get(name, [])
    index = bisect_right(steps, at)
    return index > 0 and at - steps[index - 1] <= 2 * case.spec(name).step_s + _SAMPLE_S
