"""The second pass of a step: requests that wait get blocks and start to run, or start to load.

Called by ``Scheduler.schedule``, and only if every running request got its blocks. Knows the connector's scheduler side: it
asks what can be loaded, and tells what was allocated.

Holders first: a request that holds blocks while it waits (it loads, or has loaded) comes before any that holds none, and one
that cannot get its next block lets other holders try but nobody else. Otherwise blocks would be pinned behind a request that
waits for just these blocks.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum, auto
from itertools import chain, islice

from core.kv.manager import KVCacheBlocks
from core.request import PrefillStats, Request, RequestStatus
from core.sched.remote_kv import promote_loaded_request, settle_failed_load
from core.sched.running import next_chunk
from core.sched.state import SchedulerState, Step

_LOADS_AHEAD_SHARE = 2  # one load ahead for so many running slots, whatever blocks there are


class _Outcome(Enum):
    """What became of a waiting request in this pass."""

    RUNS = auto()
    LOADS = auto()  # holds blocks now; the connector fills them while others run
    SKIPPED = auto()  # not its turn: KV or embeddings not here yet, or the connector wants to be asked again
    EMPTY_HANDED = auto()  # its load has failed and left nothing: it waits without blocks now
    NO_BLOCKS = auto()


@dataclass(slots=True)
class _Prefix:
    """The part of a waiting request that need not be computed: local hits, then tokens that the connector loads.

    ``blocks`` are the hits, none of them included. None: nothing was looked up, since the request is a holder that goes on with
    the blocks that it has; so it is not admitted, and counts as no hit or miss.
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
    """Start every holder that can go on; say whether none of them lacks blocks, so that others may be admitted."""
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
    state.waiting.prepend_requests(empty_handed)  # as after a preemption: their turn had come before anybody's here
    return not holder_lacks_blocks


def _admit_others(state: SchedulerState, step: Step, step_skipped_kv_holding: deque[Request]) -> None:
    """Admit requests without blocks, up to the first that gets none; those that begin to load are holders from now on."""
    step.holders = step_skipped_kv_holding
    step_skipped_waiting: deque[Request] = deque()
    while state.waiting and _has_room(state, step):
        request = state.waiting.pop_request()
        outcome = _admit(state, step, request)
        if outcome is _Outcome.LOADS:
            step_skipped_kv_holding.appendleft(request)
        elif outcome is not _Outcome.RUNS:
            step_skipped_waiting.appendleft(request)
        if outcome is _Outcome.NO_BLOCKS:
            break
    state.waiting.prepend_requests(step_skipped_waiting)


def _has_room(state: SchedulerState, step: Step) -> bool:
    return step.token_budget > 0 and len(state.running) < state.config.max_num_seqs


def _resume_holder(state: SchedulerState, step: Step, request: Request) -> _Outcome:
    """Let a request run whose load has ended. It has its blocks and is not looked up again, unless nothing is left of them."""
    request_id = request.request_id
    if not _has_its_kv(state, request):
        state.encoder.announce(request)
        return _Outcome.SKIPPED
    if request_id in state.failed_recving_kv_req_ids and not settle_failed_load(state, request):
        step.output.preempted_req_ids.add(request_id)  # blocks have become free: others may go on in the next step
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
    """Find what is cached here and what the connector can add; None if the connector cannot tell yet."""
    blocks, num_local_tokens = state.kv_cache_manager.get_computed_blocks(request)
    prefix = _Prefix(blocks, num_local_tokens)
    if state.connector is None:
        return prefix
    num_external_tokens, load_kv_async = state.connector.get_num_new_matched_tokens(request, num_local_tokens)
    if request.skip_reading_prefix_cache or request.has_failed_load:
        return prefix  # what failed once is not tried again: every failure must bring the request nearer to its end
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
    """Give a request the blocks that it needs to begin, tell the connector, and have it run in this step, or load."""
    num_computed_tokens = request.num_computed_tokens + prefix.num_local_tokens + prefix.num_external_tokens
    if not state.encoder.is_available(request, num_computed_tokens):
        return _Outcome.SKIPPED
    num_new_tokens, plan = 0, None
    if not prefix.load_kv_async:
        num_new_tokens, plan = next_chunk(state, step, request, num_computed_tokens)
        if num_new_tokens == 0:
            return _Outcome.SKIPPED
    if prefix.load_kv_async and not _may_load_ahead(state, step, request):
        return _Outcome.NO_BLOCKS
    if not _allocate(state, request, prefix, num_new_tokens):
        return _Outcome.NO_BLOCKS
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
        reserved_blocks=_reserved_blocks(state) if prefix.load_kv_async else 0,
        has_scheduled_reqs=bool(state.running),
    )
    return blocks is not None


def _may_load_ahead(state: SchedulerState, step: Step, request: Request) -> bool:
    """Tell whether a load may begin now, so that its request is there when a running slot becomes free.

    A request that has loaded keeps its blocks until it runs, and cannot be preempted; running requests that lack blocks are.
    So a load for which no slot is free leaves free what those with a slot may still ask for: their outputs may get as long as
    ``max_tokens``. Some may load ahead in any case, for requests that promise to be far longer than they become.
    """
    num_slots = state.config.max_num_seqs
    num_ahead = len(state.running) + len(step.holders) + 1 - num_slots
    if num_ahead <= num_slots // _LOADS_AHEAD_SHARE:
        return True
    num_free = state.kv_cache_manager.block_pool.num_free_blocks
    return _blocks_for(state, request.num_tokens) + _blocks_to_grow(state, step) <= num_free


def _blocks_to_grow(state: SchedulerState, step: Step) -> int:
    """Return how many more blocks the running requests, and the oldest holders for the free slots, take at most."""
    num_free_slots = state.config.max_num_seqs - len(state.running)
    oldest_holders = islice(reversed(step.holders), num_free_slots)
    return sum(
        _blocks_for(state, min(request.num_prompt_tokens + request.max_tokens, state.max_model_len))
        - _blocks_for(state, request.num_computed_tokens)
        for request in chain(state.running, oldest_holders)
    )


def _blocks_for(state: SchedulerState, num_tokens: int) -> int:
    """Return how many blocks hold so many tokens in all groups; windows free some of them on the way."""
    return sum(-(-num_tokens // group.spec.block_size) for group in state.kv_cache_manager.kv_cache_config.groups)


def _begin_load(state: SchedulerState, request: Request) -> _Outcome:
    """Let the request wait for its KV: it takes neither budget nor a running slot."""
    request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    state.inflight_prefills[request.request_id] = request
    state.encoder.announce(request)
    return _Outcome.LOADS


def _begin_run(state: SchedulerState, step: Step, request: Request, num_new_tokens: int, num_loaded_in_step: int) -> _Outcome:
    """Make the request part of the step, and a running one from now on."""
    if request.num_computed_tokens + num_new_tokens < request.num_tokens:
        state.inflight_prefills[request.request_id] = request
    if num_loaded_in_step:
        step.output.has_sync_kv_loads = True
        step.synchronous_loads.append(request)
    if request.first_scheduled_time is None:
        request.first_scheduled_time = state.clock.now()
    step.add_new(request, num_new_tokens, state.kv_cache_manager.get_block_ids(request.request_id))
    request.status = RequestStatus.RUNNING
    state.running.append(request)
    return _Outcome.RUNS


def _reserved_blocks(state: SchedulerState) -> int:
    """Count the blocks that in-flight prefills and loads still need.

    A load pins its blocks without making progress and cannot be preempted, so it must not take what they rely on.
    """
    manager = state.kv_cache_manager
    return sum(manager.get_num_missing_blocks(request) for request in state.inflight_prefills.values())


def _record_admission(state: SchedulerState, request: Request, prefix: _Prefix) -> None:
    """Count hits, also against what a failed load has lost, and snapshot where the prompt came from at the first admission.

    The snapshot is never changed later: a preemption or a failed load must not turn its differences negative.
    """
    num_local, num_external = prefix.num_local_tokens, prefix.num_external_tokens
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
