"""Which outcomes the faults of a run excuse: an error or a recomputation that nothing has caused is a violation too.

The table of failures in ``docs/kv-handover.md``, read from the other side. Judges whole runs by their kinds of faults, so a run
with few kinds tells most.
"""

from __future__ import annotations

from collections.abc import Sequence

from core.errors import EncoderInputMissing
from core.testing.sim_faults import STORE_FAULTS, Fault
from kvferry.sim.client import ROUTER_LOST, Client
from kvferry.sim.plan import ClusterPlan

_LOST_WORKERS = frozenset({Fault.CRASH, Fault.FREEZE, Fault.PARTITION, Fault.CUT, Fault.DRAIN, Fault.TWIN, Fault.ROUTER_CRASH})
_BAD_TIMING = frozenset(
    {
        Fault.SHORT_LEASE,
        Fault.DRIFT,
        Fault.JUMP,
        Fault.STALL,
        Fault.DELAY,
        Fault.DEADLINE,
    }
)

# outcome → kinds of faults of which the run must have one. None explains "overloaded": a worker has room for over a thousand
# choices (``worker.max_waiting_requests``), so in runs of a few dozen nobody is full, whoever drains, is slow or lacks blocks.
_OUTCOMES: dict[str, frozenset[Fault]] = {
    "cancelled": frozenset({Fault.ABORT}),
    "deadline_exceeded": frozenset({Fault.DEADLINE}),
    "deadline_unreachable": frozenset({Fault.DEADLINE}),
    "no_worker": _LOST_WORKERS,
    "peer_lost": _LOST_WORKERS,
    "protocol_error": frozenset({Fault.CUT, Fault.PARTITION, Fault.FREEZE}),
    "router_silent": _LOST_WORKERS,
    ROUTER_LOST: frozenset({Fault.ROUTER_CRASH}),
}
# why KV was not used → kinds of faults of which the run must have one
_FALLBACKS: dict[str, frozenset[Fault]] = {
    "stale": _LOST_WORKERS | _BAD_TIMING | {Fault.CORRUPT, Fault.PRESSURE},  # who waits long for blocks outlives its lease
    "digest": frozenset({Fault.CORRUPT, Fault.STORE_CORRUPT}),
    "peer_lost": _LOST_WORKERS | _BAD_TIMING | {Fault.READ_ERROR},
    "deadline": _LOST_WORKERS | _BAD_TIMING,
    "store_miss": _LOST_WORKERS | _BAD_TIMING | frozenset(STORE_FAULTS),
    "rejected": _LOST_WORKERS | {Fault.READ_ERROR},  # an aggregated worker that goes on after a loss reads no hand-over
}
# errors that a client gets for a load only if it asks for them
_LOAD_ERRORS = {
    "stale": "stale",
    "lease_expired": "stale",
    "digest": "digest",
    "deadline": "deadline",
    "peer_lost": "peer_lost",
    "store_miss": "store_miss",
    "store_unavailable": "store_miss",
    "transfer_error": "rejected",
}


def find_unexcused(plan: ClusterPlan, clients: Sequence[Client]) -> list[str]:
    """Return the outcomes that the plan's faults do not explain."""
    return [problem for client in clients if (problem := _judge(plan, client)) is not None]


def _judge(plan: ClusterPlan, client: Client) -> str | None:
    name, reason = client.plan.name, client.fallback_reason
    if reason and not _FALLBACKS.get(reason, frozenset()) & plan.kinds:
        return f"{name}: its KV was not used ({reason}), which nothing in this run explains"
    if client.outcome == "ok" or (client.outcome == EncoderInputMissing.code and _lacks_files(plan, client)):
        return None
    causes = _OUTCOMES.get(client.outcome, frozenset())
    if client.plan.policy == "fail" and client.outcome in _LOAD_ERRORS:
        causes |= _FALLBACKS[_LOAD_ERRORS[client.outcome]]
    if causes & plan.kinds:
        return None
    return f"{name}: ended with {client.outcome} ({client.message}), which nothing in this run explains"


def _lacks_files(plan: ClusterPlan, client: Client) -> bool:
    """Say whether an image that the request shows can only come from an encode worker."""
    return plan.images is not None and not plan.images.absent.isdisjoint(client.plan.media)
