"""When a block is sealed: in the post-processing of the step that has filled it.

The step's sampled tokens are on the host by then, so every write of the step is done. Blocks are sealed before the tokens are
applied, since a request that ends describes its blocks to readers at once. Seals are broken at scheduling time, by
``core.kv.pool``.
"""

from __future__ import annotations

from collections.abc import Container

from core.request import RequestStatus, SchedulerOutput
from core.sched.state import SchedulerState


def seal_computed_blocks(state: SchedulerState, scheduler_output: SchedulerOutput, dropped: Container[str]) -> None:
    """Seal the blocks that the step has completed, for every request whose step was good.

    ``dropped`` requests, whose results of this step are discarded, seal nothing. Blocks of departed requests are sealed by
    ``core.sched.inflight_steps``. The loop runs over every request of the step; most have not reached the end of a hash block
    and need one comparison only:

        tokens  |------ before ------|- n -|       n = scheduled in this step
                              end of a block ^     passed in this step if C mod size < n, C = tokens computed now
    """
    manager = state.kv_cache_manager
    async_scheduling = state.async_scheduling
    if manager.block_pool.seals is None and not async_scheduling:
        return
    requests, running, size = state.requests, RequestStatus.RUNNING, manager.hash_block_size
    for request_id, num_scheduled in scheduler_output.num_scheduled_tokens.items():
        request = requests.get(request_id)
        if request is None:
            continue
        num_computed = request.num_computed_tokens - request.num_in_flight_tokens + num_scheduled
        if num_computed % size >= num_scheduled or request.status is not running or request_id in dropped:
            continue
        if async_scheduling:  # when the step was scheduled the block's last token was perhaps not known, nor its hash
            manager.cache_blocks(request, num_computed)
        manager.seal_blocks(request, num_computed)
