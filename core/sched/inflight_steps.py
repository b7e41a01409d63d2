"""Steps that were scheduled and are not processed yet, and what becomes of them when a request leaves in the meantime.

With ``scheduler.async_scheduling`` the next step is scheduled and launched while one still runs, so that a request may end,
fall back or lose its blocks while the newest step computes a token for it:

    host    | schedule n+1, launch | process n: r stops | schedule n+2, launch | process n+1: r's token is void
    device  |  n ............................ |  n+1 ..................................... | n+2 ...

That token is void. What the step writes for it goes into blocks of the request; these get one more reference until the step is
processed, because nothing orders the bytes of a load from elsewhere behind the step. If it completes blocks that others may
hit, what it reads for them gets one as well: bytes that came before it is read would be sealed as what follows from it. Other
steps are ordered behind it by the device, which is why a preempted request gives its blocks up at once: the step that takes
them admits no load.

A request that is rolled back has computed on KV that is bad: nothing of it is kept. One that leaves (it stops, is aborted or
preempted) has not, and others may have hit its blocks already, which were hashed in advance: the steps fill them all the same.
A ``Departure`` remembers these, so that they are sealed with their step, or taken back with the KV that they rest on.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from core.kv.block import KVCacheBlock
from core.request import Request
from core.sched.state import Departure, SchedulerState, Step


def void_steps(state: SchedulerState, request: Request) -> None:
    """Let what the steps in flight compute for a request count for nothing, its KV included: it is rolled back.

    Its counters are what they were before these steps. Blocks that they would have filled lose the hashes they got in advance:
    nobody may hit what nobody vouches for, or seals. What they may still write is given to nobody before they are processed.
    """
    num_optimistic = request.num_computed_tokens
    for step, start, end in _take_out(state, request):
        _pin(state, request, step, start, end)
    if request.num_computed_tokens < num_optimistic:
        state.kv_cache_manager.truncate(request, request.num_computed_tokens)


def leave_steps(state: SchedulerState, request: Request, *, pins_blocks: bool = True) -> None:
    """Let the tokens of the steps in flight count for nothing, for a request that leaves; its KV stays what it is.

    Blocks that the steps fill keep their hashes and generations. ``pins_blocks``: what the steps may still write, or read for
    what others may hit, is given to nobody before they are processed.
    """
    manager = state.kv_cache_manager
    for step, start, end in _take_out(state, request):
        tables = [[(block, block.generation) for block in blocks] for blocks in manager.get_blocks(request.request_id).blocks]
        departure = Departure(step, request, start, end, tuple(tables))
        state.departures.append(departure)
        if pins_blocks:
            leaves_hits = any(block.block_hash is not None for block, _, _ in _filled_blocks(state, departure))
            _pin(state, request, step, 0 if leaves_hits else start, end)


def seal_left_behind(state: SchedulerState, step: Step) -> None:
    """Seal what the step has filled for requests that have left since, as far as it is still trusted."""
    pool = state.kv_cache_manager.block_pool
    if pool.seals is None:
        return
    for departure in _departures_of(state, step):
        for block, group_id, block_size in _filled_blocks(state, departure):
            if block.block_hash is not None and pool.seals.sealed_generation(block.block_id) != block.generation:
                pool.seal_block(block, group_id, block.block_hash, block_size)


def evict_left_behind(state: SchedulerState) -> None:
    """Keep nothing of what requests that are gone have computed, nor what steps in flight compute for them: it may be bad."""
    manager = state.kv_cache_manager
    manager.evict_blocks([block.block_id for block in manager.block_pool.free_block_queue])
    for departure in state.departures:
        manager.evict_blocks([block.block_id for block, _, _ in _filled_blocks(state, departure)])


def evict_failed_departures(state: SchedulerState, step: Step, failed: Container[str]) -> bool:
    """Take back all KV of requests that have left and for which the step has failed; tell whether there were any."""
    departures = [departure for departure in _departures_of(state, step) if departure.request.request_id in failed]
    for departure in departures:
        for block_ids in departure.live_block_ids():
            state.kv_cache_manager.evict_blocks(block_ids)
    return bool(departures)


def end_step(state: SchedulerState, step: Step) -> None:
    """Let go of the blocks that the step alone has kept: it has run."""
    if step.pinned:
        state.kv_cache_manager.block_pool.free_blocks(reversed(step.pinned))
        step.pinned.clear()
    if state.departures:
        state.departures = [departure for departure in state.departures if departure.step is not step]


def _take_out(state: SchedulerState, request: Request) -> Iterator[tuple[Step, int, int]]:
    """Make the results of the steps in flight void for a request, newest step first; yield each with the tokens it computes.

    The request's counters go back, step by step.
    """
    request_id = request.request_id
    request.num_output_placeholders = 0
    for step in reversed(state.in_flight):
        num_tokens = step.output.num_scheduled_tokens.get(request_id, 0)
        if not num_tokens or request_id in step.void:
            continue
        step.void.add(request_id)
        end = request.num_computed_tokens
        request.num_in_flight_tokens -= num_tokens
        request.num_computed_tokens -= num_tokens
        yield step, request.num_computed_tokens, end


def _first_written(step: Step, request: Request, start: int) -> int:
    """Return the first token whose KV a step may write that computes from ``start`` on: what it loads may begin anywhere."""
    return 0 if request in step.synchronous_loads else start


def _pin(state: SchedulerState, request: Request, step: Step, start: int, end: int) -> None:
    blocks = _blocks_of(state, request.request_id, _first_written(step, request, start), end)
    state.kv_cache_manager.block_pool.touch(blocks)
    step.pinned += blocks


def _departures_of(state: SchedulerState, step: Step) -> list[Departure]:
    return [departure for departure in state.departures if departure.step is step]


def _filled_blocks(state: SchedulerState, departure: Departure) -> Iterator[tuple[KVCacheBlock, int, int]]:
    """Yield block, group and block size of each block that the step completes, if it is not reused or rewritten since."""
    start = _first_written(departure.step, departure.request, departure.start)
    groups = zip(departure.tables, state.kv_cache_manager.kv_cache_config.groups, strict=True)
    for group_id, (blocks, group) in enumerate(groups):
        size = group.spec.block_size
        for block, generation in blocks[start // size : departure.end // size]:
            if not block.is_null and block.generation == generation:
                yield block, group_id, size


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
