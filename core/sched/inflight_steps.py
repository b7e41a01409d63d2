"""Steps that are scheduled but not processed, and what becomes of them when a request leaves in the meantime.

With ``scheduler.async_scheduling`` the next step is scheduled and launched while one still runs. A request may then end,
fall back or lose its blocks while the newest step computes a token for it:

    host    | schedule n+1, launch | process n: r stops | schedule n+2, launch | process n+1: r's token is void
    device  |  n ............................ |  n+1 ..................................... | n+2 ...

The step's writes for ``r`` go into blocks of ``r``. These blocks get one more reference until the step is processed, because
nothing orders the bytes of a later load after the step's writes. If the step completes blocks that are already hits, the
blocks that it reads for them are pinned as well: otherwise a load could overwrite them before the step reads them, and the
result would be sealed under the wrong hash. The device runs steps in order, so blocks may move from one step to the next
without a pin. A preempted request therefore frees its blocks at once: the step that takes them admits no load.

A request that is rolled back has computed on bad KV: everything its in-flight steps compute is discarded. A request that
leaves (it stops, is aborted or preempted) has good KV, and its blocks, hashed in advance, may be hits already; the steps
still fill them. A ``Departure`` records these blocks: they are sealed when their step is processed, or evicted together with
the KV they were computed from.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from core.kv.block import KVCacheBlock
from core.request import Request
from core.sched.state import Departure, SchedulerState, Step


def discard_inflight_steps(state: SchedulerState, request: Request) -> None:
    """Discard what the in-flight steps compute for a request that is rolled back: its tokens and its KV.

    The request's counters return to their values before these steps. The blocks that the steps would have filled lose their
    hashes, so they are neither hits nor sealed. Blocks that a step may still write stay pinned until it is processed.
    """
    num_optimistic = request.num_computed_tokens
    for step, start, end in _discard_results(state, request):
        _pin(state, request, step, start, end)
    if request.num_computed_tokens < num_optimistic:
        state.kv_cache_manager.truncate(request, request.num_computed_tokens)


def detach_from_inflight_steps(state: SchedulerState, request: Request, *, pins_blocks: bool = True) -> None:
    """Discard the tokens that the in-flight steps compute for a request that leaves; its KV stays valid.

    Blocks that the steps fill keep their hashes and generations. With ``pins_blocks``, blocks that a step may still write, or
    read to fill a block that is a hit, stay pinned until the step is processed.
    """
    manager = state.kv_cache_manager
    for step, start, end in _discard_results(state, request):
        tables = [[(block, block.generation) for block in blocks] for blocks in manager.get_blocks(request.request_id).blocks]
        departure = Departure(step, request, start, end, tuple(tables))
        state.departures.append(departure)
        if pins_blocks:
            leaves_hits = any(block.block_hash is not None for block, _, _ in _filled_blocks(state, departure))
            _pin(state, request, step, 0 if leaves_hits else start, end)


def seal_departed_blocks(state: SchedulerState, step: Step) -> None:
    """Seal the blocks that the step has filled for requests that have left since, except those that were evicted."""
    pool = state.kv_cache_manager.block_pool
    if pool.seals is None:
        return
    for departure in _departures_of(state, step):
        for block, group_id, block_size in _filled_blocks(state, departure):
            if block.block_hash is not None and pool.seals.sealed_generation(block.block_id) != block.generation:
                pool.seal_block(block, group_id, block.block_hash, block_size)


def evict_departed_blocks(state: SchedulerState) -> None:
    """Evict the KV that departed requests have computed or that in-flight steps still compute for them, since it may be bad."""
    manager = state.kv_cache_manager
    state.free_spare_blocks()  # what is kept for readers may be bad as well
    manager.evict_blocks([block.block_id for block in manager.block_pool.free_block_queue])
    for request in state.early_pulls.rounds():  # they hold hits that departed requests may have computed
        state.early_pulls.spoiled.add(request.request_id)
        for blocks in manager.get_blocks(request.request_id).blocks:
            manager.evict_blocks([block.block_id for block in blocks if not block.is_null])
    for departure in state.departures:
        manager.evict_blocks([block.block_id for block, _, _ in _filled_blocks(state, departure)])


def evict_failed_departures(state: SchedulerState, step: Step, failed: Container[str]) -> bool:
    """Evict all KV of departed requests for which the step has failed; return True if there were any."""
    departures = [departure for departure in _departures_of(state, step) if departure.request.request_id in failed]
    for departure in departures:
        for block_ids in departure.live_block_ids():
            state.kv_cache_manager.evict_blocks(block_ids)
    return bool(departures)


def end_step(state: SchedulerState, step: Step) -> None:
    """Unpin the blocks of a step that has been processed, and drop its departures."""
    if step.pinned:
        state.kv_cache_manager.block_pool.free_blocks(reversed(step.pinned))
        step.pinned.clear()
    if state.departures:
        state.departures = [departure for departure in state.departures if departure.step is not step]


def _discard_results(state: SchedulerState, request: Request) -> Iterator[tuple[Step, int, int]]:
    """Void the in-flight results of a request, newest step first; yield each step and its token range [start, end).

    The request's counters are reduced step by step.
    """
    request_id = request.request_id
    request.num_output_placeholders = 0
    for step in reversed(state.inflight_steps):
        num_tokens = step.output.num_scheduled_tokens.get(request_id, 0)
        if not num_tokens or request_id in step.void:
            continue
        step.void.add(request_id)
        end = request.num_computed_tokens
        request.num_in_flight_tokens -= num_tokens
        request.num_computed_tokens -= num_tokens
        yield step, request.num_computed_tokens, end


def _first_written(step: Step, request: Request, start: int) -> int:
    """Return the first token whose KV the step may write: ``start``, or 0 if it also loads, as a load may begin anywhere."""
    return 0 if request in step.synchronous_loads else start


def _pin(state: SchedulerState, request: Request, step: Step, start: int, end: int) -> None:
    blocks = _blocks_of(state, request.request_id, _first_written(step, request, start), end)
    state.kv_cache_manager.block_pool.touch(blocks)
    step.pinned += blocks


def _departures_of(state: SchedulerState, step: Step) -> list[Departure]:
    return [departure for departure in state.departures if departure.step is step]


def _filled_blocks(state: SchedulerState, departure: Departure) -> Iterator[tuple[KVCacheBlock, int, int]]:
    """Yield block, group and block size of the blocks that the step completes and that were not reused or rewritten since."""
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
