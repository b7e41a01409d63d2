"""The end of a request: leave the queues, tell the connectors, free the blocks now or after the last transfer.

Every request passes ``free_request`` exactly once, whether a stop condition, an abort or a failed load ended it.
"""

from __future__ import annotations

from collections.abc import Iterable

from core.request import Request, RequestStatus
from core.sched.inflight_steps import detach_from_inflight_steps
from core.sched.state import SchedulerState
from core.wire.kv import KVHandoff


def finish_requests(state: SchedulerState, request_ids: Iterable[str] | None, status: RequestStatus) -> list[str]:
    """Abort or fail requests, all of them if ``request_ids`` is None; return the ids of those that had not ended yet.

    A loading request keeps its blocks until the load has ended, so that late bytes cannot overwrite another request's block.
    """
    assert status.is_finished, f"{status!r} does not end a request"
    ids = list(state.requests) if request_ids is None else dict.fromkeys(request_ids)
    found = [state.requests[request_id] for request_id in ids if request_id in state.requests]
    ended = [request for request in found if not request.status.is_finished]
    remove_from_running(state, [request for request in ended if request.status is RequestStatus.RUNNING])
    waiting = [request for request in ended if request.status is not RequestStatus.RUNNING]
    state.waiting.remove_requests(waiting)
    state.kv_holding_waiting.remove_requests(waiting)
    for request in ended:
        request_id = request.request_id
        state.grammar_waiting.pop(request_id, None)
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            if request_id not in state.finished_recving_kv_req_ids:
                state.awaiting_recving.add(request_id)
            state.finished_recving_kv_req_ids.discard(request_id)
        request.status = status
        free_request(state, request)
    return [request.request_id for request in ended]


def remove_from_running(state: SchedulerState, requests: list[Request]) -> None:
    """Remove these requests from ``state.running``, in one pass and in place."""
    if requests:
        removed = set(requests)
        state.running[:] = [request for request in state.running if request not in removed]


def free_request(state: SchedulerState, request: Request) -> KVHandoff | None:
    """Tell the connector that the request has ended; free its blocks unless a transfer still needs them. Return its handoff."""
    assert request.status.is_finished, f"{request!r} is freed but not finished"
    request_id = request.request_id
    state.waiting.charge_output(request)
    detach_from_inflight_steps(state, request)
    handoff: KVHandoff | None = None
    if state.connector is not None:
        manager = state.kv_cache_manager
        block_ids = manager.get_block_ids_for_computed_tokens(request_id, request.num_computed_tokens)
        delay_free, handoff = state.connector.request_finished(request, block_ids)
        if delay_free:
            state.awaiting_sending.add(request_id)
    state.encoder.request_finished(request)
    state.inflight_prefills.pop(request_id, None)
    state.transfer_usage.pop(request_id, None)
    for left in (state.failed_recving_kv_req_ids, state.rolled_back, state.empty_handed):
        left.discard(request_id)
    state.finished_req_ids.add(request_id)
    if request_id not in state.awaiting_sending and request_id not in state.awaiting_recving:
        free_blocks(state, request)
    return handoff


def free_blocks(state: SchedulerState, request: Request) -> None:
    """Return the blocks to the pool and forget the request."""
    state.kv_cache_manager.free(request)
    del state.requests[request.request_id]
