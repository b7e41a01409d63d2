"""Numbers about the scheduler for gauges and counters. Reads; changes only the counters that it drains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from core.kv.stats import PrefixCacheStats
from core.request import RequestStatus
from core.sched.encoder_inputs import EncoderCounts
from core.sched.state import SchedulerState
from core.wire.messages import LoadFailurePolicy


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """One reading.

    The first three counts are requests and add up to the unfinished ones. Block counts are current values, and no block is in
    two of them: *loading* blocks belong to unfinished requests and are written by a transfer; *parked* blocks belong to ended
    requests whose blocks a transfer still reads or writes; *quarantined* blocks belong to no request, an abandoned transfer may
    still write them. The prefix cache counters, ``num_preemptions``, ``num_ignored_reports`` (late or duplicate reports of a
    connector) and ``num_load_fallbacks`` (requests whose KV could not be loaded, by reason and policy) count since the previous
    reading.
    """

    num_running: int
    num_waiting: int
    num_loading: int
    kv_cache_usage: float  # 0..1
    num_loading_blocks: int
    num_parked_blocks: int
    num_quarantined_blocks: int
    num_preemptions: int
    num_ignored_reports: int
    num_load_fallbacks: Mapping[tuple[str, LoadFailurePolicy], int]
    prefix_cache: PrefixCacheStats
    connector_prefix_cache: PrefixCacheStats
    encoder_cache_usage: float  # 0..1
    encoder: EncoderCounts  # since the start


def make_stats(state: SchedulerState) -> SchedulerStats:
    """Take a reading and reset the counts since the previous one."""
    loading = [r.request_id for r in state.kv_holding_waiting if r.status is RequestStatus.WAITING_FOR_REMOTE_KVS]
    num_preemptions, state.num_preemptions = state.num_preemptions, 0
    num_ignored_reports, state.num_ignored_reports = state.num_ignored_reports, 0
    num_load_fallbacks, state.num_load_fallbacks = state.num_load_fallbacks, Counter()
    connector_stats, state.connector_prefix_cache_stats = state.connector_prefix_cache_stats, PrefixCacheStats()
    return SchedulerStats(
        num_running=len(state.running),
        num_waiting=len(state.waiting) + len(state.kv_holding_waiting) - len(loading),
        num_loading=len(loading),
        kv_cache_usage=state.kv_cache_manager.usage,
        num_loading_blocks=_count_blocks(state, loading),
        num_parked_blocks=_count_blocks(state, state.awaiting_sending | state.awaiting_recving),
        num_quarantined_blocks=len(state.quarantined),
        num_preemptions=num_preemptions,
        num_ignored_reports=num_ignored_reports,
        num_load_fallbacks=num_load_fallbacks,
        prefix_cache=state.kv_cache_manager.make_prefix_cache_stats(),
        connector_prefix_cache=connector_stats,
        encoder_cache_usage=state.encoder.cache.usage,
        encoder=state.encoder.counts,
    )


def _count_blocks(state: SchedulerState, request_ids: Iterable[str]) -> int:
    get_block_ids, quarantined = state.kv_cache_manager.get_block_ids, state.quarantined
    tables = [ids for request_id in request_ids for ids in get_block_ids(request_id)]
    return sum(len(ids) for ids in tables) - sum(block_id in quarantined for ids in tables for block_id in ids)
