"""Steps that were scheduled and are not processed yet, and what becomes of them when a request leaves in the meantime.

With ``scheduler.async_scheduling`` the next step is scheduled and launched while one still runs, so that a request may end,
fall back or lose its blocks while the newest step computes a token for it:

    host    | schedule n+1, launch | process n: r stops | schedule n+2, launch | process n+1: r's token is void
    device  |  n ............................ |  n+1 ..................................... | n+2 ...

That token is void. What the step writes for it goes into blocks of the request; these get one more reference until the step is
processed, because nothing orders the bytes of a load from elsewhere behind the step. Other steps are ordered behind it by the
device, which is why a preempted request gives its blocks up at once: the step that takes them admits no load.
"""

from __future__ import annotations

from core.kv.block import KVCacheBlock
from core.request import Request
from core.sched.state import SchedulerState, Step


def void_steps(state: SchedulerState, request: Request, *, pins_blocks: bool = True) -> None:
    """Let what the steps in flight compute for a request count for nothing, and its counters be what they were before these.

    Blocks that they would have filled lose the hashes they got in advance: nobody may hit what nobody vouches for, or seals.
    ``pins_blocks``: those that they may still write are not given to anybody before they are processed.
    """
    request_id = request.request_id
    request.num_output_placeholders = 0
    num_computed = num_optimistic = request.num_computed_tokens
    for step in reversed(state.in_flight):
        num_tokens = step.output.num_scheduled_tokens.get(request_id, 0)
        if not num_tokens or request_id in step.void:
            continue
        step.void.add(request_id)
        request.num_in_flight_tokens -= num_tokens
        request.num_computed_tokens -= num_tokens
        if pins_blocks:
            blocks = _blocks_of(state, request_id, request.num_computed_tokens, num_computed)
            state.kv_cache_manager.block_pool.touch(blocks)
            step.pinned += blocks
        num_computed = request.num_computed_tokens
    if num_computed < num_optimistic:
        state.kv_cache_manager.truncate(request, num_computed)


def end_step(state: SchedulerState, step: Step) -> None:
    """Let go of the blocks that the step alone has kept: it has run."""
    if step.pinned:
        state.kv_cache_manager.block_pool.free_blocks(reversed(step.pinned))
        step.pinned.clear()


def _blocks_of(state: SchedulerState, request_id: str, start: int, end: int) -> list[KVCacheBlock]:
    """Return the request's blocks that hold the tokens [start, end), of all groups."""
    manager = state.kv_cache_manager
    groups = zip(manager.get_blocks(request_id).blocks, manager.kv_cache_config.groups, strict=True)
    return [
        block
        for blocks, group in groups
        for block in blocks[start // group.spec.block_size : -(-end // group.spec.block_size)]
        if not block.is_null
    ]
