"""Failed loads of KV: which requests are affected, and whether each ends or recomputes.

A connector reports failures by request (``failed_recving``, asynchronous loads) or by block (``invalid_block_ids``). A request
that relies on such KV ends with an error (policy *fail*) or computes the KV itself (*recompute*). Under both policies the bad
KV is evicted and loses its seal. Runs before any output of the step is used, and again when the owner of an awaited block has
left. KV that a step computed on missing embeddings (``encoder_failures``) is discarded in the same way.

A request that is rolled back keeps its place and its blocks. Blocks that another request may write are replaced by fresh ones;
the others are written again in place. The runner's copy of the request has a token too many, so the request is sent as new
with its next tokens.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain

from core.errors import TransferError, fallback_reason
from core.kv.block import NULL_BLOCK_ID
from core.request import KVConnectorOutput, Request, RequestStatus, SchedulerOutput
from core.sched.inflight_steps import discard_inflight_steps, evict_departed_blocks
from core.sched.invalid_blocks import (
    AffectedRequest,
    BlocksInUse,
    Holder,
    find_departed,
    find_holders,
    spread_invalidity,
    update_requests_with_invalid_blocks,
)
from core.sched.recompute_ownership import OwnedBlock
from core.sched.state import SchedulerState, Step
from core.wire.messages import ErrorInfo


def handle_load_failures(state: SchedulerState, output: KVConnectorOutput) -> dict[str, ErrorInfo]:
    """Apply a connector's report of failed loads; return the errors of the requests that end.

    Blocks newly in quarantine count as invalid, as they may still be written. Affected running requests that recompute are in
    ``state.rolled_back``; their output of the step must not be used.
    """
    errors = _handle_failed_recving(state, output.failed_recving)
    invalid_block_ids = output.invalid_block_ids | (output.quarantined_block_ids & state.quarantined)
    if invalid_block_ids:
        report = _Report(invalid_block_ids, output.load_errors, _in_flight_tokens(state))
        _handle_invalid_blocks(state, report, errors)
    return errors


def reassign_orphans(state: SchedulerState) -> None:
    """Give every awaited block whose owner has left to the next request that holds it."""
    orphans = state.recompute_ownership.take_orphans(lambda request_id: _live_block_ids(state, request_id))
    for error in dict.fromkeys(orphans.values()):
        block_ids = {block_id for block_id, why in orphans.items() if why == error}
        _handle_invalid_blocks(state, _Report(block_ids, {}, _in_flight_tokens(state), error), None)


def discard_computed(state: SchedulerState, step: Step, requests: Iterable[Request], error: ErrorInfo) -> None:
    """Discard the KV this step computed for ``requests`` and for any request that reused it; they recompute it.

    The blocks were not hits before the step was scheduled, so no departed request has used them.
    """
    manager = state.kv_cache_manager
    block_ids: set[int] = set()
    for request in requests:
        discard_inflight_steps(state, request)  # the steps after it
        request.num_in_flight_tokens = 0
        step.void.add(request.request_id)
        start = request.num_computed_tokens - step.output.num_scheduled_tokens[request.request_id]
        for ids, group in zip(manager.get_block_ids(request.request_id), manager.kv_cache_config.groups, strict=True):
            block_ids.update(ids[start // group.spec.block_size :])
    block_ids.discard(NULL_BLOCK_ID)
    manager.evict_blocks(sorted(block_ids))
    _handle_invalid_blocks(state, _Report(block_ids, {}, _in_flight_tokens(state), error), None)


def release_recomputed(state: SchedulerState, scheduler_output: SchedulerOutput, dropped: Container[str]) -> None:
    """Release the requests whose awaited blocks the step has made whole.

    Tokens of ``dropped`` requests do not count, nor those of an owner that started again in other blocks.
    """

    def is_whole(block_id: int, owned: OwnedBlock) -> bool:
        request_id = owned.owner.request_id
        num_later = owned.owner.num_in_flight_tokens - scheduler_output.num_scheduled_tokens.get(request_id, 0)
        has_computed = request_id not in dropped and owned.owner.num_computed_tokens - num_later >= owned.num_tokens
        return has_computed and block_id in set(_live_block_ids(state, request_id))

    state.recompute_ownership.release_recomputed(is_whole)


def _in_flight_tokens(state: SchedulerState) -> dict[str, int]:
    """Return by running request how many of its computed tokens are in unprocessed steps, the one being processed included.

    A rolled-back request has none: ``num_computed_tokens`` are the tokens that it keeps, although its step is still counted.
    """
    return {
        request.request_id: request.num_in_flight_tokens
        for request in state.running
        if request.request_id not in state.rolled_back
    }


def _live_block_ids(state: SchedulerState, request_id: str) -> Iterable[int]:
    request = state.requests.get(request_id)
    if request is None or request.status.is_finished:
        return ()
    return chain.from_iterable(state.kv_cache_manager.get_block_ids(request_id))


# ---- by request ------------------------------------------------------------------------------------------------------


def _handle_failed_recving(state: SchedulerState, failed_recving: Mapping[str, ErrorInfo]) -> dict[str, ErrorInfo]:
    """End or roll back the loading requests whose loads failed. Requests that were aborted meanwhile are ignored.

    Nothing of a failed load may be used: the request keeps only the local hits that the load started from.
    """
    errors: dict[str, ErrorInfo] = {}
    for request_id, error in failed_recving.items():
        request = state.requests.get(request_id)
        if request is None or request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
            continue
        if request.is_early:
            state.early_pulls.spoiled.add(request_id)
            continue
        if _must_end(state, request, error):
            errors[request_id] = error
            continue
        num_valid = request.num_computed_tokens
        num_kept = min(num_valid, state.kv_cache_manager.num_cached_tokens(request_id))
        _roll_back(state, AffectedRequest(request, num_valid, num_kept, num_kept), error)
    return errors


# ---- by block --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Report:
    """Invalid blocks, the errors by request id, and the tokens in flight by request id.

    ``error`` is used for requests that are not in ``errors``.
    """

    block_ids: set[int]
    errors: Mapping[str, ErrorInfo]
    num_in_flight_tokens: Mapping[str, int]
    error: ErrorInfo = field(
        default_factory=lambda: ErrorInfo.of(TransferError("KV that the request relies on could not be loaded"))
    )

    def error_of(self, request: Request) -> ErrorInfo:
        """Return why KV of this request is invalid."""
        return self.errors.get(request.request_id, self.error)


def _handle_invalid_blocks(state: SchedulerState, report: _Report, errors: dict[str, ErrorInfo] | None) -> None:
    """Evict invalid blocks and all blocks computed from them; end or roll back the requests that hold them.

    Running requests come first, in their order: they are scheduled first, so no request waits for an owner that cannot run.
    The errors of requests that end are added to ``errors``. None: the failure policy was applied when the failure was first
    reported, so no request ends.
    """
    manager = state.kv_cache_manager
    pool = manager.block_pool
    reported = {block_id for block_id in report.block_ids if 0 < block_id < pool.num_blocks}
    state.num_ignored_reports += len(report.block_ids) - len(reported)
    alive = list(chain(state.running, state.kv_holding_waiting))
    ended = [request for request in state.requests.values() if request.status.is_finished]
    holders = find_holders(manager, chain(alive, ended), report.num_in_flight_tokens)
    invalid = spread_invalidity(manager, holders, reported, find_departed(manager, state.departures))
    if any(pool.blocks[block_id].block_hash is not None for block_id in invalid & reported):
        # The block was a hit, so requests that have left may have computed from it and left blocks in the cache.
        evict_departed_blocks(state)
    early = {request.request_id: set(_live_block_ids(state, request.request_id)) for request in state.early_pulls.rounds()}
    state.early_pulls.spoil_holders(early, invalid)
    pool.invalidate_blocks(pool.blocks[block_id] for block_id in sorted(invalid))
    going_on = [holder for holder in holders if not holder.request.status.is_finished]
    if errors is not None:
        for holder in going_on:
            _note_end(state, holder, invalid, report, errors)
        going_on = [holder for holder in going_on if holder.request_id not in errors]
    _assign_owners_and_roll_back(state, going_on, invalid, report)


def _assign_owners_and_roll_back(state: SchedulerState, holders: list[Holder], invalid: set[int], report: _Report) -> None:
    owned: dict[int, OwnedBlock] = {}
    awaited: dict[str, set[int]] = {}
    in_use = BlocksInUse(state.recompute_ownership.owners, state.quarantined)
    for affected in update_requests_with_invalid_blocks(state.kv_cache_manager, holders, invalid, in_use):
        request, error = affected.request, report.error_of(affected.request)
        owned |= {block_id: OwnedBlock(request, num_tokens, error) for block_id, num_tokens in affected.recomputed.items()}
        if affected.awaited:
            awaited[request.request_id] = affected.awaited
        _roll_back(state, affected, error)
    state.recompute_ownership.add(owned, awaited)


def _note_end(
    state: SchedulerState, holder: Holder, invalid: Container[int], report: _Report, errors: dict[str, ErrorInfo]
) -> None:
    """Add the error of a request that holds invalid blocks under policy *fail*, and discard its in-flight steps."""
    request, error = holder.request, report.error_of(holder.request)
    if request.request_id not in errors and holder.first_of(invalid) is not None and _must_end(state, request, error):
        errors[request.request_id] = error
        discard_inflight_steps(state, request)


# ---- what becomes of a request ---------------------------------------------------------------------------------------


def _must_end(state: SchedulerState, request: Request, error: ErrorInfo) -> bool:
    """Return True, and count it, if the request's failure policy, or else the engine's, is *fail*.

    No policy applies to an optional load: what it would have brought is computed.
    """
    if request.has_optional_load:
        return False
    policy = request.kv_load_failure_policy or state.kv_load_failure_policy
    if policy == "fail":
        state.num_load_fallbacks[fallback_reason(error.code), "fail"] += 1
    return policy == "fail"


def _roll_back(state: SchedulerState, affected: AffectedRequest, error: ErrorInfo) -> None:
    """Reset a request to the tokens that it keeps.

    A loading request keeps its blocks until the load has ended; ``settle_failed_load`` does the rest.
    """
    request, manager = affected.request, state.kv_cache_manager
    request_id = request.request_id
    discard_inflight_steps(state, request)
    request.num_computed_tokens = affected.num_kept
    is_loading = request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    if affected.num_kept < affected.num_valid:
        request.has_failed_load = True
        if request.has_optional_load:
            _uncount_external(request, affected.num_kept)
        else:
            state.add_recomputed(request, affected.num_valid - affected.num_kept, fallback_reason(error.code))
        if request.status is not RequestStatus.RUNNING:
            state.failed_recving_kv_req_ids.add(request_id)
    state.inflight_prefills[request_id] = request
    if not is_loading:
        manager.drop_shared_tail(request, affected.num_kept, affected.recomputed)
        manager.truncate(request, min(affected.num_kept, affected.first_invalid))
    if request.status is RequestStatus.RUNNING:
        state.rolled_back.add(request_id)
        state.encoder.give_up(request)  # it may wait for long, and the owner it waits for may need the room


def _uncount_external(request: Request, num_kept: int) -> None:
    """Count the tokens that an optional load has not brought as computed, which they will be."""
    stats = request.prefill_stats
    if stats is not None and not request.num_preemptions:
        num_external = max(0, min(stats.num_external_cached_tokens, num_kept - stats.num_local_cached_tokens))
        request.prefill_stats = replace(stats, num_external_cached_tokens=num_external)
