"""The statistics of an engine: one reading after each step, with the metric of each number.

Owns names, kinds and documentation of the engine's metrics. Does not know how they are served.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from core.kv.block import NULL_BLOCK_ID
from core.metrics import Metric
from core.request import RequestStatus
from core.sched.state import SchedulerState
from core.wire.messages import LoadFailurePolicy


def _gauge(name: str, documentation: str) -> Any:  # noqa: ANN401
    return field(default=0, metadata={"metric": Metric(name, "gauge", documentation)})


def _counter(name: str, documentation: str) -> Any:  # noqa: ANN401
    return field(default=0, metadata={"metric": Metric(name, "counter", documentation)})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Gauges are values of one moment; counters count since the start.

    Two fields have no metric here: ``num_loading_blocks`` is for the simulation; ``num_load_fallbacks`` has labels, and is
    published by ``core.worker.stats``.

    The first three are requests and add up to the unfinished ones. *Loading* blocks belong to unfinished requests that a
    transfer writes for; *parked* blocks belong to ended requests whose blocks a transfer still reads or writes; *early* blocks
    belong to early pulls; *quarantined* blocks, which an abandoned transfer may still write, count in none of the others. A
    block that several requests share counts once in each number, but may count in several numbers.
    """

    num_running: int = _gauge("num_requests_running", "Requests in the running batch.")
    num_waiting: int = _gauge("num_requests_waiting", "Requests that wait for admission, or for their grammar.")
    num_loading: int = _gauge("num_requests_loading", "Requests whose KV cache is being loaded (WAITING_FOR_REMOTE_KVS).")
    kv_cache_usage: float = _gauge(
        "kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1; cached blocks that may be evicted do not count."
    )
    num_loading_blocks: int = 0
    num_parked_blocks: int = _gauge(
        "kv_parked_blocks", "Blocks of ended requests whose release is delayed, for a reader or by a transfer."
    )
    num_quarantined_blocks: int = _gauge(
        "kv_quarantined_blocks", "Blocks of no request that an abandoned transfer may still write."
    )
    num_early_blocks: int = _gauge(
        "kv_early_blocks", "Blocks that hold, or wait for, KV of prompts that prefill workers still compute."
    )
    encoder_cache_usage: float = _gauge(
        "encoder_cache_usage_perc", "Share of the encoder cache that requests refer to, 0 to 1."
    )
    num_early_rounds: int = _counter(
        "kv_early_loads", "Loads of the sealed part of a prompt, verified before its end was computed."
    )
    num_early_bytes: int = _counter("kv_early_bytes", "Bytes that these loads have read.")
    num_early_given_way: int = _counter("kv_early_evictions", "Early pulls that ended because requests needed their blocks.")
    num_steps: int = _counter("engine_steps", "Steps of the engine.")
    num_preemptions: int = _counter("num_preemptions", "Running requests that were put back for lack of blocks.")
    num_prefix_queried_tokens: int = _counter("prefix_cache_queries", "Tokens that were looked up in the prefix cache.")
    num_prefix_hit_tokens: int = _counter("prefix_cache_hits", "Tokens that were found there.")
    num_external_queried_tokens: int = _counter(
        "external_prefix_cache_queries", "Tokens that the connector was asked for, beyond what the prefix cache had."
    )
    num_external_hit_tokens: int = _counter("external_prefix_cache_hits", "Tokens that it offered to load.")
    num_encoder_computed: int = _counter(
        "encoder_inputs_computed", "Images whose embeddings were computed for requests of this worker."
    )
    num_encoder_loaded: int = _counter("encoder_inputs_loaded", "Images whose embeddings came by the EC connector.")
    num_encoder_hits: int = _counter("encoder_inputs_cached", "Images whose embeddings were in the encoder cache.")
    num_encoder_deferrals: int = _counter(
        "encoder_deferrals", "Times that a request was passed over in a step, as embeddings or pixels were not there yet."
    )
    num_ignored_reports: int = _counter(
        "ignored_transfer_reports", "Late and duplicate reports of a connector about transfers or blocks."
    )
    num_load_fallbacks: Mapping[tuple[str, LoadFailurePolicy], int] = field(default_factory=dict)  # by reason and policy


ENGINE_METRICS: Mapping[str, Metric] = {
    entry.name: entry.metadata["metric"] for entry in fields(EngineStats) if "metric" in entry.metadata
}  # by field


def make_stats(state: SchedulerState) -> EngineStats:
    """Take a reading."""
    loading = [r.request_id for r in state.kv_holding_waiting if r.status is RequestStatus.WAITING_FOR_REMOTE_KVS]
    local, external = state.kv_cache_manager.prefix_cache_stats, state.connector_prefix_cache_stats
    encoder = state.encoder.counts
    return EngineStats(
        num_running=len(state.running),
        num_waiting=len(state.waiting) + len(state.kv_holding_waiting) - len(loading) + len(state.grammar_waiting),
        num_loading=len(loading),
        kv_cache_usage=state.kv_cache_manager.usage,
        num_loading_blocks=_count_blocks(state, loading),
        num_parked_blocks=_count_blocks(state, state.awaiting_sending | state.awaiting_recving),
        num_quarantined_blocks=len(state.quarantined),
        num_early_blocks=_count_blocks(state, [request.request_id for request in state.early_pulls.rounds()]),
        num_early_rounds=state.early_pulls.num_rounds,
        num_early_bytes=state.early_pulls.num_bytes,
        num_early_given_way=state.early_pulls.num_given_way,
        encoder_cache_usage=state.encoder.cache.usage,
        num_steps=state.num_steps,
        num_preemptions=state.num_preemptions,
        num_prefix_queried_tokens=local.queries,
        num_prefix_hit_tokens=local.hits,
        num_external_queried_tokens=external.queries,
        num_external_hit_tokens=external.hits,
        num_encoder_computed=encoder.num_computed,
        num_encoder_loaded=encoder.num_loaded,
        num_encoder_hits=encoder.num_hits,
        num_encoder_deferrals=encoder.num_deferrals,
        num_ignored_reports=state.num_ignored_reports,
        num_load_fallbacks=dict(state.num_load_fallbacks),
    )


def _count_blocks(state: SchedulerState, request_ids: Iterable[str]) -> int:
    get_block_ids = state.kv_cache_manager.get_block_ids
    held = {NULL_BLOCK_ID}.union(*(ids for request_id in request_ids for ids in get_block_ids(request_id)))
    held -= state.quarantined
    return len(held) - 1  # the null block is never in quarantine
