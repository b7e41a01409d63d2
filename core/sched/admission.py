"""The second pass of a step: waiting requests get blocks and start to run, or start to load.

Runs only if every running request got its blocks. Asks the connector's scheduler side what can be loaded, and reports to it
what was allocated.

Holders come first: requests that hold blocks while they wait (they load, or have loaded). If a holder cannot get its next
block, other holders may still try, but no request without blocks is admitted. Otherwise the admitted request could take the
blocks that the holder needs while the holder pins blocks that the other one needs.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum, auto
from itertools import chain, islice

from core.kv.manager import KVCacheBlocks
from core.request import PrefillStats, Request, RequestStatus
from core.sched.early_loading import count_yielding_blocks, give_way, is_arriving, take_over
from core.sched.queue import priority_key
from core.sched.remote_kv import promote_loaded_request, settle_failed_load
from core.sched.running import next_chunk
from core.sched.state import SchedulerState, Step

_LOADS_AHEAD_SHARE = 2  # one load ahead per this many running slots, however few blocks are free
_MAX_HELD_BACK = 16  # loads that one step looks past: each is looked up, and its connector asked, in vain


class _Outcome(Enum):
    """What became of a waiting request in this pass."""

    RUNS = auto()
    LOADS = auto()  # holds blocks now; the connector fills them while others run
    SKIPPED = auto()  # KV or embeddings have not arrived, or the connector cannot tell yet
    EMPTY_HANDED = auto()  # its failed load has left nothing: it waits without blocks now
    # Too many loads are ahead of free slots, or an earlier load was held back in this step. Requests after it that need no load
    # may run.
    HELD_BACK = auto()
    NO_BLOCKS = auto()


@dataclass(slots=True)
class _Prefix:
    """The part of a waiting request that need not be computed: local hits, then tokens that the connector loads.

    ``blocks`` are the hits, possibly none. None means that nothing was looked up: the request is a holder and continues
    with its blocks, so it is not admitted again and counts neither as hit nor as miss.
    """

    blocks: KVCacheBlocks | None = None
    num_local_tokens: int = 0
    num_external_tokens: int = 0
    load_kv_async: bool = False


def schedule_waiting(state: SchedulerState, step: Step) -> None:
    """Admit waiting requests, in order, while the budget, the running slots and the blocks last."""
    step_skipped_kv_holding: deque[Request] = deque()
    if _resume_holders(state, step, step_skipped_kv_holding):
        _admit_others(state, step, step_skipped_kv_holding)
    # Each deque of skipped requests is newest first, and prepending one by one reverses it: the original order is back.
    state.kv_holding_waiting.prepend_requests(step_skipped_kv_holding)


def _resume_holders(state: SchedulerState, step: Step, step_skipped_kv_holding: deque[Request]) -> bool:
    """Start every holder that can continue; return True if none lacks blocks, so that other requests may be admitted."""
    holder_lacks_blocks = False
    empty_handed: deque[Request] = deque()
    while state.kv_holding_waiting and _has_room(state, step):
        request = state.kv_holding_waiting.pop_request()
        outcome = _resume_holder(state, step, request)
        if outcome is _Outcome.EMPTY_HANDED:
            empty_handed.appendleft(request)
        elif outcome is not _Outcome.RUNS:
            step_skipped_kv_holding.appendleft(request)
            holder_lacks_blocks |= outcome is _Outcome.NO_BLOCKS
    step.refuses_blocks |= holder_lacks_blocks
    for request in empty_handed:  # as after a preemption: they were admitted before the requests that wait here
        state.waiting.requeue_request(request)
    return not holder_lacks_blocks


def _admit_others(state: SchedulerState, step: Step, step_skipped_kv_holding: deque[Request]) -> None:
    """Admit requests without blocks, up to the first that gets none; those that start to load become holders.

    A load that may not begin yet keeps its place, and no later load begins before it.
    """
    step.holders = step_skipped_kv_holding
    step_skipped_waiting: deque[Request] = deque()
    num_held_back = 0
    while state.waiting and _has_room(state, step):
        request = state.waiting.pop_request()
        outcome = _admit(state, step, request)
        if outcome is _Outcome.LOADS:
            step_skipped_kv_holding.appendleft(request)
        elif outcome is not _Outcome.RUNS:
            step_skipped_waiting.appendleft(request)
        num_held_back += outcome is _Outcome.HELD_BACK
        step.refuses_blocks |= outcome in (_Outcome.NO_BLOCKS, _Outcome.HELD_BACK)
        if outcome is _Outcome.NO_BLOCKS or num_held_back == _MAX_HELD_BACK:
            break
    state.waiting.prepend_requests(step_skipped_waiting)


def _has_room(state: SchedulerState, step: Step) -> bool:
    return step.token_budget > 0 and len(state.running) < state.config.max_num_seqs


def _resume_holder(state: SchedulerState, step: Step, request: Request) -> _Outcome:
    """Start a request whose load has ended. It keeps its blocks without a new lookup, unless the load has left none."""
    request_id = request.request_id
    if not _has_its_kv(state, request):
        state.encoder.announce(request)
        return _Outcome.SKIPPED
    if request_id in state.failed_recving_kv_req_ids and not settle_failed_load(state, request):
        step.output.preempted_req_ids.add(request_id)  # its blocks are free: other requests may go on in the next step
        return _Outcome.EMPTY_HANDED
    return _allocate_and_start(state, step, request, _Prefix())


def _has_its_kv(state: SchedulerState, request: Request) -> bool:
    if state.recompute_ownership and state.recompute_ownership.holds_back(request.request_id):
        return False
    return request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS or promote_loaded_request(state, request)


def _admit(state: SchedulerState, step: Step, request: Request) -> _Outcome:
    """Give a request without blocks its first ones, or again after a preemption."""
    prefix = _look_up_prefix(state, request)
    if prefix is None:
        return _Outcome.SKIPPED
    return _allocate_and_start(state, step, request, prefix)


def _look_up_prefix(state: SchedulerState, request: Request) -> _Prefix | None:
    """Find what is cached here and what the connector can add; None if that is not known yet."""
    if is_arriving(state, request):
        return None
    blocks, num_local_tokens = state.kv_cache_manager.get_computed_blocks(request)
    prefix = _Prefix(blocks, num_local_tokens)
    if state.connector is None or request.skip_reading_prefix_cache or request.has_failed_load:
        return prefix  # a failed load is not repeated, so a request cannot fall back without end
    num_external_tokens, load_kv_async = state.connector.get_num_new_matched_tokens(request, num_local_tokens)
    if num_external_tokens is None:
        return None
    if num_external_tokens == 0:
        return prefix
    assert 0 < num_external_tokens <= request.num_tokens - num_local_tokens, (
        f"{request!r}: the connector offers {num_external_tokens} tokens beyond {num_local_tokens}"
    )
    if not load_kv_async:  # runs in this step, so at least the last token must be left to compute
        num_external_tokens = min(num_external_tokens, request.num_tokens - 1 - num_local_tokens)
    prefix.num_external_tokens = num_external_tokens
    prefix.load_kv_async = load_kv_async
    return prefix


def _allocate_and_start(state: SchedulerState, step: Step, request: Request, prefix: _Prefix) -> _Outcome:
    """Allocate the blocks of a request, inform the connector, and add the request to this step or start its load."""
    num_computed_tokens = request.num_computed_tokens + prefix.num_local_tokens + prefix.num_external_tokens
    if not state.encoder.is_available(request, num_computed_tokens):
        return _Outcome.SKIPPED
    num_new_tokens, plan = 0, None
    if prefix.load_kv_async:
        if step.refuses_blocks or not _may_load_ahead(state, step, request):
            return _Outcome.HELD_BACK
    else:
        num_new_tokens, plan = next_chunk(state, step, request, num_computed_tokens)
        if num_new_tokens == 0:
            return _Outcome.SKIPPED
    while not _allocate(state, request, prefix, num_new_tokens):
        if _early_pulls_suffice(state, request, prefix, num_computed_tokens) and give_way(state, request):
            continue
        if not state.free_spare_blocks():
            return _Outcome.NO_BLOCKS
    take_over(state, request)
    if plan is not None:
        state.encoder.allocate(request, plan, step.output)
    if state.connector is not None:
        blocks = state.kv_cache_manager.get_blocks(request.request_id)
        state.connector.update_state_after_alloc(request, blocks, prefix.num_external_tokens)
    if prefix.blocks is not None:
        _record_admission(state, request, prefix)
    request.num_computed_tokens = num_computed_tokens
    if prefix.load_kv_async:
        return _begin_load(state, request)
    return _begin_run(state, step, request, num_new_tokens, prefix.num_external_tokens)


def _allocate(state: SchedulerState, request: Request, prefix: _Prefix, num_new_tokens: int) -> bool:
    """Allocate slots for the prefix and the new tokens; False if the request does not get its blocks now."""
    blocks = state.kv_cache_manager.allocate_slots(
        request,
        num_new_tokens,
        num_new_computed_tokens=prefix.num_local_tokens,
        new_computed_blocks=prefix.blocks,
        num_external_computed_tokens=prefix.num_external_tokens,
        delay_cache_blocks=prefix.num_external_tokens > 0,  # no hit before the data is there
        full_sequence_must_fit=True,
        reserved_blocks=reserved_blocks(state) if prefix.load_kv_async else 0,
        has_scheduled_reqs=bool(state.running),
    )
    return blocks is not None


def _early_pulls_suffice(state: SchedulerState, request: Request, prefix: _Prefix, num_computed_tokens: int) -> bool:
    """Return False if a request lacks blocks even when every early pull has given way, or if there is none.

    The end of a pull can only raise what a request without blocks needs: its hits may be in the free queue then. A holder may
    need less, since blocks of a window that it shared with a round are its own then; so pulls give way to it in any case.
    """
    if not state.early_pulls:
        return False
    if prefix.blocks is None:
        return True
    manager = state.kv_cache_manager
    num_missing = manager.get_num_missing_blocks(request, prefix.blocks, num_computed_tokens)
    return num_missing <= manager.block_pool.num_free_blocks + count_yielding_blocks(state, with_leaving=True)


def _may_load_ahead(state: SchedulerState, step: Step, request: Request) -> bool:
    """Return True if a load may begin now, ahead of a free running slot.

    A loaded request keeps its blocks until it runs and cannot be preempted, while running requests without blocks are. So a
    load without a free slot must leave enough free blocks for the requests with a slot, whose outputs may grow to
    ``max_tokens``. A few loads may begin in any case, because most requests end well before ``max_tokens``. Blocks of early
    pulls count as free, because they give way; blocks that the connector has to spare do not.
    """
    num_slots = state.config.max_num_seqs
    num_ahead = len(state.running) + len(step.holders) + 1 - num_slots
    if num_ahead <= num_slots // _LOADS_AHEAD_SHARE:
        return True
    num_free = state.kv_cache_manager.block_pool.num_free_blocks + count_yielding_blocks(state)
    return _blocks_for(state, request.num_tokens) + _blocks_to_grow(state, step) <= num_free


def _blocks_to_grow(state: SchedulerState, step: Step) -> int:
    """Return how many more blocks the running requests, and the holders that are next for the free slots, take at most."""
    num_free_slots = state.config.max_num_seqs - len(state.running)
    holders = sorted(step.holders, key=priority_key) if state.config.policy == "priority" else reversed(step.holders)
    return sum(
        _blocks_for(state, min(request.num_prompt_tokens + request.max_tokens, state.max_model_len))
        - _blocks_for(state, request.num_computed_tokens)
        for request in chain(state.running, islice(holders, num_free_slots))
    )


def _blocks_for(state: SchedulerState, num_tokens: int) -> int:
    """Return how many blocks hold so many tokens in all groups; windows free some of them on the way."""
    return sum(-(-num_tokens // group.spec.block_size) for group in state.kv_cache_manager.kv_cache_config.groups)


def _begin_load(state: SchedulerState, request: Request) -> _Outcome:
    """Make the request wait for its KV; it uses neither budget nor a running slot."""
    request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    state.inflight_prefills[request.request_id] = request
    state.encoder.announce(request)
    return _Outcome.LOADS


def _begin_run(state: SchedulerState, step: Step, request: Request, num_new_tokens: int, num_loaded_in_step: int) -> _Outcome:
    """Add the request to the step and to the running ones."""
    if request.num_computed_tokens + num_new_tokens < request.num_tokens:
        state.inflight_prefills[request.request_id] = request
    if num_loaded_in_step:
        step.output.has_sync_kv_loads = True
        step.synchronous_loads.append(request)
    if request.first_scheduled_time is None:
        state.note_exposed(request)
        request.first_scheduled_time = state.clock.now()
    step.add_new(request, num_new_tokens, state.kv_cache_manager.get_block_ids(request.request_id))
    request.status = RequestStatus.RUNNING
    state.running.append(request)
    return _Outcome.RUNS


def reserved_blocks(state: SchedulerState) -> int:
    """Return how many blocks in-flight prefills and loads still need.

    A load pins its blocks without making progress and cannot be preempted, so it must not take the blocks that these need.
    """
    manager = state.kv_cache_manager
    return sum(manager.get_num_missing_blocks(request) for request in state.inflight_prefills.values())


def _record_admission(state: SchedulerState, request: Request, prefix: _Prefix) -> None:
    """Count hits, also against what a failed load has lost, and snapshot where the prompt came from at the first admission.

    The snapshot is never changed later: a preemption or a failed load must not turn its differences negative.
    """
    num_local, num_external = prefix.num_local_tokens, prefix.num_external_tokens
    state.waiting.refund_cached(request, num_local + num_external)
    if request.request_id in state.empty_handed:
        state.empty_handed.remove(request.request_id)
        state.subtract_recomputed(request, num_local)
    was_preempted = request.num_preemptions > 0
    if not request.skip_reading_prefix_cache:
        state.kv_cache_manager.record_prefix_cache_stats(request.num_tokens, num_local, was_preempted)
        if state.connector is not None:
            state.connector_prefix_cache_stats.record(request.num_tokens - num_local, num_external, was_preempted)
    if was_preempted or request.prefill_stats is not None:
        return
    num_prompt_tokens = request.num_prompt_tokens  # hits may reach into the output of a request taken over
    num_local_cached = min(num_local, num_prompt_tokens)
    request.prefill_stats = PrefillStats(
        num_prompt_tokens=num_prompt_tokens,
        num_local_cached_tokens=num_local_cached,
        num_external_cached_tokens=min(num_external, num_prompt_tokens - num_local_cached),
        queue_s=max(0.0, state.clock.now() - request.arrival_time),
    )
