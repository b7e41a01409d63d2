"""The first pass of a step: tokens for the requests that run, and preemption where blocks run out.

A running request asks for what it lacks, a chunk of its prompt or the one token it sampled last; there is no other difference
between prefill and decode. Does not look at waiting requests.
"""

from __future__ import annotations

from core.kv.manager import KVCacheBlocks
from core.request import Request, RequestStatus
from core.sched.early_loading import give_way
from core.sched.encoder_inputs import EncoderPlan
from core.sched.inflight_steps import detach_from_inflight_steps
from core.sched.queue import priority_key
from core.sched.state import SchedulerState, Step


def schedule_running(state: SchedulerState, step: Step) -> None:
    """Give every running request its next tokens, in order, while the budget lasts.

    The loop is the scheduler's hot path: a decoding request whose token neither opens nor completes a hash block needs no
    block and makes none a hit, so it skips the KV cache manager altogether.

        position in the hash block | 0 | 1  2  ...  n-2 | n-1 |
        manager is needed          | x |                |  x  |
    """
    running = state.running
    size = state.kv_cache_manager.hash_block_size
    last = size - 1
    cached = step.output.scheduled_cached_reqs
    add_id, add_blocks, add_computed = cached.req_ids.append, cached.new_block_ids.append, cached.num_computed_tokens.append
    num_scheduled, scheduled, rolled_back = step.output.num_scheduled_tokens, step.scheduled, state.rolled_back
    index = 0
    while index < len(running) and step.token_budget > 0:
        request = running[index]
        if rolled_back and request.request_id in rolled_back:
            if not _schedule_rolled_back(state, step, request):
                break
            index = _position(running, request, index) + 1
            continue
        num_computed = request.num_computed_tokens
        num_new_tokens = request.num_tokens - num_computed
        if request.num_output_placeholders:
            if not _can_schedule_ahead(state, request):
                index += 1
                continue
            num_new_tokens += request.num_output_placeholders
        new_block_ids: tuple[list[int], ...] | None = None
        if num_new_tokens != 1 or not 0 < num_computed % size < last or num_computed < request.mm_end:
            num_new_tokens, plan = _chunk_if_available(state, step, request, num_computed)
            if num_new_tokens == 0:
                index += 1  # all its tokens are in flight, or it waits for embeddings; later requests may still go
                continue
            blocks = _allocate_or_preempt(state, step, request, num_new_tokens)
            if blocks is None:
                break
            if plan is not None:
                state.encoder.allocate(request, plan, step.output)
            index = _position(running, request, index)
            new_block_ids = blocks.get_block_ids() if any(blocks.blocks) else None
        request_id = request.request_id
        add_id(request_id)
        add_blocks(new_block_ids)
        add_computed(num_computed)
        num_scheduled[request_id] = num_new_tokens
        scheduled.append(request)
        step.token_budget -= num_new_tokens
        index += 1


def _can_schedule_ahead(state: SchedulerState, request: Request) -> bool:
    """Return True if the next token of a request may be computed although its newest one is not known yet.

    False if the newest token ends the request in any case, by length, or if its blocks go to a decode worker at its end: no
    step may write into them by then.
    """
    num_promised = request.num_output_placeholders
    has_room = request.num_output_tokens + num_promised < request.max_tokens
    return has_room and request.num_tokens + num_promised < state.max_model_len and not request.needs_handoff


def _schedule_rolled_back(state: SchedulerState, step: Step, request: Request) -> bool:
    """Give a request whose KV was invalid its next tokens, unless it has to wait; False if blocks have run out.

    The runner has appended a token to it that does not count, so it gets the request as it is now.
    """
    request_id = request.request_id
    if state.recompute_ownership and state.recompute_ownership.holds_back(request_id):
        return True
    num_new_tokens, plan = _chunk_if_available(state, step, request, request.num_computed_tokens)
    if num_new_tokens == 0:
        return True
    if _allocate_or_preempt(state, step, request, num_new_tokens) is None:
        return False
    if plan is not None:
        state.encoder.allocate(request, plan, step.output)
    state.rolled_back.discard(request_id)
    step.add_new(request, num_new_tokens, state.kv_cache_manager.get_block_ids(request_id))
    return True


def next_chunk(state: SchedulerState, step: Step, request: Request, num_computed_tokens: int) -> tuple[int, EncoderPlan | None]:
    """Return how many tokens after the computed ones fit this step, and the source of the embeddings that they need."""
    num_tokens = request.num_tokens + request.num_output_placeholders
    num_new_tokens = _chunk_of(state, step, num_tokens - num_computed_tokens)
    if num_computed_tokens >= request.mm_end:
        return num_new_tokens, None
    plan = state.encoder.try_schedule(request, num_computed_tokens, num_new_tokens)
    return plan.num_new_tokens, plan


def _chunk_if_available(
    state: SchedulerState, step: Step, request: Request, num_computed_tokens: int
) -> tuple[int, EncoderPlan | None]:
    """Return the result of ``next_chunk``, or no token if embeddings for the next tokens have not arrived."""
    if not state.encoder.is_available(request, num_computed_tokens):
        return 0, None
    return next_chunk(state, step, request, num_computed_tokens)


def _chunk_of(state: SchedulerState, step: Step, num_tokens: int) -> int:
    """Return how many of ``num_tokens`` uncomputed tokens fit this step: the budget, and the long-prefill threshold.

    The threshold keeps one long prompt from slowing all others down, so it counts only while there are others.
    """
    threshold = state.config.long_prefill_token_threshold
    if threshold and num_tokens > threshold and _has_company(state):
        num_tokens = threshold
    return min(num_tokens, step.token_budget)


def _has_company(state: SchedulerState) -> bool:
    num_ended = len(state.awaiting_sending | state.awaiting_recving)
    return len(state.requests) - num_ended > 1


def _position(running: list[Request], request: Request, index: int) -> int:
    """Return the position of ``request`` in ``running`` now: preempting earlier requests has moved it to the left."""
    return index if index < len(running) and running[index] is request else running.index(request, 0, index)


def _allocate_or_preempt(state: SchedulerState, step: Step, request: Request, num_new_tokens: int) -> KVCacheBlocks | None:
    """Allocate slots, preempting victims until they fit; None if the request itself was the last victim.

    Early pulls give way first, and blocks that the connector has to spare. No request is preempted while the connector is about
    to free blocks. A request is never preempted for its own next step: it would lose the token that is being computed, start
    again once it fits, and reach the same point without progress.
    """
    is_loading = any(request in earlier.synchronous_loads for earlier in state.inflight_steps)
    while True:
        # Loaded KV, and KV computed from it, becomes a hit only after its step has been processed.
        blocks = state.kv_cache_manager.allocate_slots(request, num_new_tokens, delay_cache_blocks=is_loading)
        if blocks is not None:
            return blocks
        if state.early_pulls and give_way(state):
            continue
        if state.free_spare_blocks():
            continue
        step.lacks_blocks = True
        if state.early_pulls.leaving & state.awaiting_recving:
            return None  # what was read early gives way: its blocks are free in a moment
        if state.connector is not None and state.connector.has_pending_block_frees():
            return None
        victim = _choose_victim(state)
        if victim is request and request.num_in_flight_tokens:
            return None
        preempt(state, step, victim)
        if victim is request:
            return None


def _choose_victim(state: SchedulerState) -> Request:
    """Return the least important running request: the latest admitted, or the least urgent by priority."""
    if state.config.policy == "priority":
        return max(state.running, key=priority_key)
    return state.running[-1]


def preempt(state: SchedulerState, step: Step, request: Request) -> None:
    """Preempt a running request: free its blocks and queue it again (``requeue_request``), to be computed from the start.

    A request already scheduled in this step is removed from it, and the blocks that the step would have filled lose the hashes
    they got in advance, since they will not be computed. Its embeddings are still computed, and released after the step.
    """
    if step.refund(request):
        state.kv_cache_manager.truncate(request, request.num_computed_tokens)
    take_off(state, request, pins_blocks=False)
    request.status = RequestStatus.PREEMPTED
    state.num_preemptions += 1
    state.waiting.requeue_request(request)
    step.output.preempted_req_ids.add(request.request_id)


def take_off(state: SchedulerState, request: Request, *, pins_blocks: bool) -> None:
    """Free the blocks of a running request, to be computed from the start; the caller gives it its next status and place."""
    assert request.status is RequestStatus.RUNNING, f"{request!r} is preempted but not running"
    detach_from_inflight_steps(state, request, pins_blocks=pins_blocks)
    state.kv_cache_manager.free(request)
    state.running.remove(request)
    state.inflight_prefills.pop(request.request_id, None)
    state.rolled_back.discard(request.request_id)
    request.num_computed_tokens = 0
    request.num_preemptions += 1
