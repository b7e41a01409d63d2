"""Blocks that a request is about to write again: which stay, which are replaced by fresh ones."""

from core.kv.invariants import find_violations


def compute(manager, request):
    """Allocate for all tokens of a request, and count them as computed."""
    hits, num_hits = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, request.num_tokens - num_hits, num_hits, hits) is not None
    request.num_computed_tokens = request.num_tokens


def test_blocks_that_others_hold_are_released_and_replaced(make_manager, make_request):
    manager = make_manager()
    request = make_request("a", range(80))
    compute(manager, request)
    pool = manager.block_pool
    ids = manager.get_block_ids("a")[0]
    held = pool.blocks[ids[3]]
    pool.touch([held])
    request.num_computed_tokens = 16
    manager.drop_shared_tail(request, 16)
    manager.truncate(request, 16)
    assert manager.get_block_ids("a")[0] == ids[:3]
    assert held.ref_cnt == 1
    (fresh,) = manager.allocate_slots(request, 64).blocks
    assert len(fresh) == 2
    assert held not in fresh
    assert find_violations(manager, {held.block_id: 1}) == []


def test_shared_blocks_stay_where_they_may_be_written_or_are_not_touched(make_manager, make_request):
    manager = make_manager()
    request = make_request("a", range(80))
    compute(manager, request)
    ids = manager.get_block_ids("a")[0]
    pool = manager.block_pool
    shared = [pool.blocks[block_id] for block_id in ids[:4]]
    pool.touch(shared)
    manager.drop_shared_tail(request, 33, kept={ids[3]})  # the third is written from its second slot on
    assert manager.get_block_ids("a")[0] == ids
    pool.free_blocks(shared)


def test_cached_tokens_of_a_request_that_loads_are_its_local_hits(make_manager, make_request):
    manager = make_manager()
    first = make_request("a", range(40))
    compute(manager, first)
    request = make_request("b", range(80))
    hits, num_hits = manager.get_computed_blocks(request)
    manager.allocate_slots(request, 0, num_hits, hits, num_external_computed_tokens=32, delay_cache_blocks=True)
    assert manager.num_cached_tokens("b") == num_hits == 32
    request.num_computed_tokens = 64
    manager.cache_blocks(request, 64)
    assert manager.num_cached_tokens("b") == 64
