"""Numbers about the scheduler for gauges and counters. Reads; changes only the counters that it drains."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from core.kv.stats import PrefixCacheStats
from core.request import RequestStatus
from core.sched.state import SchedulerState


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """One reading.

    The first counts are requests and add up to those that are unfinished. Block counts are of this moment: *loading* belong
    to unfinished requests and are written by a transfer, *parked* to requests that have ended and whose free is delayed by a
    transfer in either direction; no block is both. The prefix cache counters, ``num_preemptions`` and ``num_ignored_reports``
    (a connector's reports about transfers and blocks that nobody waits for) count since the reading before.
    """

    num_running: int
    num_waiting: int
    num_loading: int
    kv_cache_usage: float  # 0..1
    num_loading_blocks: int
    num_parked_blocks: int
    num_preemptions: int
    num_ignored_reports: int
    prefix_cache: PrefixCacheStats
    connector_prefix_cache: PrefixCacheStats


def make_stats(state: SchedulerState) -> SchedulerStats:
    """Take a reading and reset what counts since the one before."""
    loading = [r.request_id for r in state.kv_holding_waiting if r.status is RequestStatus.WAITING_FOR_REMOTE_KVS]
    num_preemptions, state.num_preemptions = state.num_preemptions, 0
    num_ignored_reports, state.num_ignored_reports = state.num_ignored_reports, 0
    connector_stats, state.connector_prefix_cache_stats = state.connector_prefix_cache_stats, PrefixCacheStats()
    return SchedulerStats(
        num_running=len(state.running),
        num_waiting=len(state.waiting) + len(state.kv_holding_waiting) - len(loading),
        num_loading=len(loading),
        kv_cache_usage=state.kv_cache_manager.usage,
        num_loading_blocks=_count_blocks(state, loading),
        num_parked_blocks=_count_blocks(state, state.awaiting_sending | state.awaiting_recving),
        num_preemptions=num_preemptions,
        num_ignored_reports=num_ignored_reports,
        prefix_cache=state.kv_cache_manager.make_prefix_cache_stats(),
        connector_prefix_cache=connector_stats,
    )


def _count_blocks(state: SchedulerState, request_ids: Iterable[str]) -> int:
    get_blocks = state.kv_cache_manager.get_blocks
    return sum(len(group) for request_id in request_ids for group in get_blocks(request_id).blocks)
