"""Requests whose KV is loaded from, or read by, another process: the end of loads and of sends.

    WAITING --(asynchronous load)--> WAITING_FOR_REMOTE_KVS --(finished_recving, next pass)--> WAITING --> RUNNING

Admission promotes loaded requests; the worker side's report ends transfers.
"""

from __future__ import annotations

from core.request import KVConnectorOutput, Request, RequestStatus
from core.sched.finish import free_blocks
from core.sched.state import SchedulerState


def promote_loaded_request(state: SchedulerState, request: Request) -> bool:
    """Make a loading request an ordinary waiting one if its load has ended; return True if it has.

    All loaded blocks are hashed and sealed first, by the full count; only then the last token of a completely loaded sequence
    is marked as not computed, since there must be one to sample from. So a prompt of full blocks has all of them cached, needs
    no block and computes one token; the last block loses its seal when that token is scheduled, and is sealed again after it.
    ``settle_failed_load`` handles what a failed load has left.
    """
    if request.request_id not in state.finished_recving_kv_req_ids:
        return False
    state.finished_recving_kv_req_ids.remove(request.request_id)
    request.has_optional_load = False
    state.note_exposed(request)
    request.status = RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING
    if request.request_id not in state.failed_recving_kv_req_ids:
        state.kv_cache_manager.cache_blocks(request, request.num_computed_tokens)
        state.kv_cache_manager.seal_blocks(request, request.num_computed_tokens)
        if request.num_computed_tokens == request.num_tokens:
            request.num_computed_tokens -= 1
    return True


def settle_failed_load(state: SchedulerState, request: Request) -> bool:
    """Prepare a request whose failed load has ended to compute the rest; return False if it holds no block any more.

    Valid blocks stay, hashed and sealed. Blocks that another request may write are replaced by fresh ones; the others will be
    written in place. If nothing is valid the request frees its blocks: it may find other hits when it is admitted again.
    """
    state.failed_recving_kv_req_ids.remove(request.request_id)
    manager, num_kept = state.kv_cache_manager, request.num_computed_tokens
    if num_kept == 0:
        manager.free(request)
        state.inflight_prefills.pop(request.request_id, None)
        state.empty_handed.add(request.request_id)
        return False
    manager.drop_shared_tail(request, num_kept, state.recompute_ownership.blocks_of(request))
    manager.truncate(request, num_kept)
    manager.cache_blocks(request, num_kept)
    manager.seal_blocks(request, num_kept)
    return True


def update_from_kv_xfer_finished(state: SchedulerState, output: KVConnectorOutput) -> None:
    """Apply the terminal transfers: loaded requests may run, blocks of finished ones are freed.

    A finished request may wait for a load that can still write and for a reader; the last of the two frees the blocks. Late
    and duplicate reports are counted and change nothing.
    """
    for request_id in sorted(output.finished_recving):  # the order in which blocks are freed must not depend on hashing
        request = state.requests.get(request_id)
        is_loading = request is not None and request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        if is_loading and request_id not in state.finished_recving_kv_req_ids:
            state.finished_recving_kv_req_ids.add(request_id)
        else:
            _end_wait(state, state.awaiting_recving, request_id)
    for request_id in sorted(output.finished_sending):
        _end_wait(state, state.awaiting_sending, request_id)


def _end_wait(state: SchedulerState, awaiting: set[str], request_id: str) -> None:
    """Count one ended transfer of a finished request."""
    if request_id not in awaiting:
        state.num_ignored_reports += 1
        return
    awaiting.remove(request_id)
    _free_if_settled(state, state.requests[request_id])


def _free_if_settled(state: SchedulerState, request: Request) -> None:
    if request.request_id not in state.awaiting_recving and request.request_id not in state.awaiting_sending:
        free_blocks(state, request)
