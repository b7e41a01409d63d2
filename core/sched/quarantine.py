"""Blocks that an abandoned transfer may still write.

A block enters quarantine with the report that its transfer will not end in time, and leaves it with the report that no more
bytes can arrive. In between it has an extra reference, so it is not reused, and its request gets a fresh block instead.
"""

from __future__ import annotations

from collections.abc import Iterable

from core.sched.state import SchedulerState


def quarantine_blocks(state: SchedulerState, block_ids: Iterable[int]) -> None:
    """Keep these blocks, before anything else of the report is applied that might free them.

    Ids of no block, and of blocks in quarantine, are counted and ignored.
    """
    pool = state.kv_cache_manager.block_pool
    for block_id in sorted(block_ids):
        if not 0 < block_id < pool.num_blocks or block_id in state.quarantined:
            state.num_ignored_reports += 1
            continue
        state.quarantined.add(block_id)
        pool.touch((pool.blocks[block_id],))


def release_quarantined(state: SchedulerState, block_ids: Iterable[int]) -> None:
    """Release these blocks: nothing can arrive any more. Others are counted and ignored."""
    pool = state.kv_cache_manager.block_pool
    for block_id in sorted(block_ids):
        if block_id not in state.quarantined:
            state.num_ignored_reports += 1
            continue
        state.quarantined.remove(block_id)
        pool.free_blocks((pool.blocks[block_id],))
