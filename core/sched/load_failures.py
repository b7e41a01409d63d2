"""KV that could not be loaded: which requests it concerns, and what becomes of them.

A connector reports failures by request (``failed_recving``, asynchronous loads) or by block (``invalid_block_ids``). Whoever
relies on such KV either ends with an error (policy *fail*) or computes it here (*recompute*); under both, nothing of it stays a
hit or keeps its seal. Called by ``Scheduler.update_from_output`` before any output of the step is used, and by
``Scheduler.schedule`` for blocks whose claimant has left. What a step computed on missing embeddings (``encoder_failures``) is
discarded in the same way.

A request that is rolled back keeps its place and its blocks. What of them somebody else may write is replaced by fresh ones;
the rest is written again in place. The runner holds a token too much of it, so it is sent as new with its next tokens.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain

from core.errors import TransferError, fallback_reason
from core.kv.block import NULL_BLOCK_ID
from core.request import KVConnectorOutput, Request, RequestStatus, SchedulerOutput
from core.sched.inflight_steps import evict_left_behind, void_steps
from core.sched.invalid_blocks import (
    AffectedRequest,
    BlocksInUse,
    Holder,
    find_departed,
    find_holders,
    spread_invalidity,
    update_requests_with_invalid_blocks,
)
from core.sched.recompute_ownership import Claim
from core.sched.state import SchedulerState, Step
from core.wire.messages import ErrorInfo


def handle_load_failures(state: SchedulerState, output: KVConnectorOutput) -> dict[str, ErrorInfo]:
    """Apply a connector's report of failed loads; return the errors of the requests that end.

    Blocks newly in quarantine count as invalid: they may still be written. Whoever goes on is in ``state.rolled_back``; its
    output of the step must not be used either.
    """
    errors = _handle_failed_recving(state, output.failed_recving)
    invalid_block_ids = output.invalid_block_ids | (output.quarantined_block_ids & state.quarantined)
    if invalid_block_ids:
        report = _Report(invalid_block_ids, output.load_errors, _in_flight_tokens(state))
        _handle_invalid_blocks(state, report, errors)
    return errors


def reassign_orphans(state: SchedulerState) -> None:
    """Give every block that is waited for, and whose claimant has left, to the next request that holds it."""
    orphans = state.claims.take_orphans(lambda request_id: _live_block_ids(state, request_id))
    for error in dict.fromkeys(orphans.values()):
        block_ids = {block_id for block_id, why in orphans.items() if why == error}
        _handle_invalid_blocks(state, _Report(block_ids, {}, _in_flight_tokens(state), error), None)


def discard_computed(state: SchedulerState, step: Step, requests: Iterable[Request], error: ErrorInfo) -> None:
    """Have what a step that has run computed for these requests computed again, by them and by whoever has built on it since.

    Their blocks were no hits before the step was scheduled, so nobody who has left has used them.
    """
    manager = state.kv_cache_manager
    block_ids: set[int] = set()
    for request in requests:
        void_steps(state, request)  # those behind it
        request.num_in_flight_tokens = 0
        step.void.add(request.request_id)
        start = request.num_computed_tokens - step.output.num_scheduled_tokens[request.request_id]
        for ids, group in zip(manager.get_block_ids(request.request_id), manager.kv_cache_config.groups, strict=True):
            block_ids.update(ids[start // group.spec.block_size :])
    block_ids.discard(NULL_BLOCK_ID)
    manager.evict_blocks(sorted(block_ids))
    _handle_invalid_blocks(state, _Report(block_ids, {}, _in_flight_tokens(state), error), None)


def release_recomputed(state: SchedulerState, scheduler_output: SchedulerOutput, dropped: Container[str]) -> None:
    """Let those go on whose blocks the step has made whole again.

    What ``dropped`` requests have computed does not count, nor what a claimant that had to begin anew computes in other blocks.
    """

    def is_whole(block_id: int, claim: Claim) -> bool:
        request_id = claim.claimant.request_id
        num_later = claim.claimant.num_in_flight_tokens - scheduler_output.num_scheduled_tokens.get(request_id, 0)
        has_computed = request_id not in dropped and claim.claimant.num_computed_tokens - num_later >= claim.num_tokens
        return has_computed and block_id in set(_live_block_ids(state, request_id))

    state.claims.release_recomputed(is_whole)


def _in_flight_tokens(state: SchedulerState) -> dict[str, int]:
    """Return how many tokens of a running request are in steps that are not processed, the one being processed included."""
    return {request.request_id: request.num_in_flight_tokens for request in state.running}


def _live_block_ids(state: SchedulerState, request_id: str) -> Iterable[int]:
    request = state.requests.get(request_id)
    if request is None or request.status.is_finished:
        return ()
    return chain.from_iterable(state.kv_cache_manager.get_block_ids(request_id))


# ---- by request ------------------------------------------------------------------------------------------------------


def _handle_failed_recving(state: SchedulerState, failed_recving: Mapping[str, ErrorInfo]) -> dict[str, ErrorInfo]:
    """End or roll back requests that still load; one that was aborted meanwhile has nothing left to fail.

    Of such a load nothing may be used, so what is left are the local hits that it started from.
    """
    errors: dict[str, ErrorInfo] = {}
    for request_id, error in failed_recving.items():
        request = state.requests.get(request_id)
        if request is None or request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
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
    """Invalid blocks, why by request, and how many tokens of each are in flight.

    ``error`` counts where a request has none of its own.
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
    """Take invalid blocks and all that rests on them out of the prefix cache; end or roll back whoever holds them.

    Running requests come first, in their order: they are the first to be scheduled, so nobody waits for one who cannot run.
    ``errors`` takes those that end. Without it nobody does: the policies have spoken when the failure was reported.
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
        # It had passed for good. Whoever built on it may be gone, and have left blocks in the cache.
        evict_left_behind(state)
    pool.invalidate_blocks(pool.blocks[block_id] for block_id in sorted(invalid))
    going_on = [holder for holder in holders if not holder.request.status.is_finished]
    if errors is not None:
        for holder in going_on:
            _note_end(state, holder, invalid, report, errors)
        going_on = [holder for holder in going_on if holder.request_id not in errors]
    _claim_and_roll_back(state, going_on, invalid, report)


def _claim_and_roll_back(state: SchedulerState, holders: list[Holder], invalid: set[int], report: _Report) -> None:
    claims: dict[int, Claim] = {}
    awaited: dict[str, set[int]] = {}
    in_use = BlocksInUse(state.claims.claimants, state.quarantined)
    for affected in update_requests_with_invalid_blocks(state.kv_cache_manager, holders, invalid, in_use):
        request, error = affected.request, report.error_of(affected.request)
        claims |= {block_id: Claim(request, num_tokens, error) for block_id, num_tokens in affected.claimed.items()}
        if affected.awaited:
            awaited[request.request_id] = affected.awaited
        _roll_back(state, affected, error)
    state.claims.add(claims, awaited)


def _note_end(
    state: SchedulerState, holder: Holder, invalid: Container[int], report: _Report, errors: dict[str, ErrorInfo]
) -> None:
    """Add the error of a holder of invalid blocks whose policy is to end. It leaves nothing that others could use."""
    request, error = holder.request, report.error_of(holder.request)
    if request.request_id not in errors and holder.first_of(invalid) is not None and _must_end(state, request, error):
        errors[request.request_id] = error
        void_steps(state, request)


# ---- what becomes of a request ---------------------------------------------------------------------------------------


def _must_end(state: SchedulerState, request: Request, error: ErrorInfo) -> bool:
    """Tell whether the request's policy, else the engine's, is to end; count it if so."""
    policy = request.kv_load_failure_policy or state.kv_load_failure_policy
    if policy == "fail":
        state.num_load_fallbacks[fallback_reason(error.code), "fail"] += 1
    return policy == "fail"


def _roll_back(state: SchedulerState, affected: AffectedRequest, error: ErrorInfo) -> None:
    """Let a request go on from the tokens that it keeps.

    The blocks of one that still loads stay with it until the load has ended; ``settle_failed_load`` does the rest.
    """
    request, manager = affected.request, state.kv_cache_manager
    request_id = request.request_id
    void_steps(state, request)
    request.num_computed_tokens = affected.num_kept
    is_loading = request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    if affected.num_kept < affected.num_valid:
        request.has_failed_load = True
        state.add_recomputed(request, affected.num_valid - affected.num_kept, fallback_reason(error.code))
        if request.status is not RequestStatus.RUNNING:
            state.failed_recving_kv_req_ids.add(request_id)
    state.inflight_prefills[request_id] = request
    if not is_loading:
        manager.drop_shared_tail(request, affected.num_kept, affected.claimed)
        manager.truncate(request, min(affected.num_kept, affected.first_invalid))
    if request.status is RequestStatus.RUNNING:
        state.rolled_back.add(request_id)
        state.encoder.give_up(request)  # it may be held back for long: whom it waits for may need the room
