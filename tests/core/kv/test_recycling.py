"""Requests of windowed and chunked groups, by example: which blocks are freed when, what loads bring, how far to go back."""

import pytest

from core.kv.invariants import find_violations
from core.kv.manager import KVCacheManager
from core.kv.seals import BROKEN, SealTable, map_seal_memory
from core.kv.spec import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheConfig, KVCacheGroup, SlidingWindowSpec

SHAPE = {"block_size": 16, "num_kv_heads": 1, "head_dim": 8, "dtype_bytes": 2}
FULL = FullAttentionSpec(**SHAPE)
WINDOW = SlidingWindowSpec(sliding_window=33, **SHAPE)  # the token and two blocks before it
CHUNKS = ChunkedLocalAttentionSpec(attention_chunk_size=64, **SHAPE)


def make(*specs, num_blocks=60, **options):
    groups = tuple(KVCacheGroup((number,), spec) for number, spec in enumerate(specs))
    options = {"max_in_flight_tokens": 64} | options
    seals = SealTable(map_seal_memory(num_blocks), incarnation=1, layout_version=1)
    return KVCacheManager(KVCacheConfig(num_blocks, groups), 1024, 16, 16, seals=seals, **options)


def compute(manager, request, num_tokens):
    """Let steps compute this many tokens, at most 64 each."""
    while num_tokens:
        step = min(num_tokens, 64)
        assert manager.allocate_slots(request, step) is not None
        request.num_computed_tokens += step
        num_tokens -= step


def held(manager, request, group_id=1):
    """Positions of the blocks that are not null."""
    return [index for index, block_id in enumerate(manager.get_block_ids(request.request_id)[group_id]) if block_id]


def test_blocks_that_left_the_window_are_freed_before_the_next_step_takes_its_own(make_request):
    manager = make(FULL, WINDOW)
    request = make_request("r", range(200))
    compute(manager, request, 64)
    assert held(manager, request) == [0, 1, 2, 3]
    compute(manager, request, 64)  # token 64 sees 32 and later ones
    assert held(manager, request) == [2, 3, 4, 5, 6, 7]
    assert held(manager, request, 0) == list(range(8))
    assert find_violations(manager) == []


def test_blocks_of_a_step_in_flight_stay_until_it_is_processed(make_request):
    manager = make(FULL, WINDOW)
    request = make_request("r", range(200))
    compute(manager, request, 64)
    request.num_in_flight_tokens = 64
    manager.allocate_slots(request, 64)
    assert held(manager, request) == list(range(8))


def test_a_step_that_gets_no_blocks_has_given_back_its_own_all_the_same(make_request):
    manager = make(FULL, WINDOW, num_blocks=12)
    request = make_request("r", range(200))
    compute(manager, request, 64)
    assert manager.allocate_slots(request, 64) is None
    assert held(manager, request) == [2, 3]
    assert find_violations(manager) == []


def test_what_was_given_back_is_a_hit_until_it_is_reused(make_request):
    manager = make(FULL, WINDOW)
    first = make_request("first", range(200))
    compute(manager, first, 192)
    blocks, num_tokens = manager.get_computed_blocks(make_request("second", range(64 + 1)))
    assert num_tokens == 64
    assert [block.is_null for block in blocks.blocks[1]] == [True, True, False, False]
    manager.allocate_slots(make_request("second", range(64 + 1)), 1, num_tokens, blocks)
    assert find_violations(manager) == []


def test_load_of_a_prompt_takes_only_the_blocks_of_the_window(make_request):
    manager = make(FULL, WINDOW, CHUNKS)
    request = make_request("r", range(160))
    got = manager.allocate_slots(request, 0, num_external_computed_tokens=160, delay_cache_blocks=True)
    assert [len(blocks) for blocks in got.blocks] == [10, 3, 2]
    # The last token is computed again; it sees 127 and later ones, and its chunk begins at 128.
    assert held(manager, request, 1) == [7, 8, 9]
    assert held(manager, request, 2) == [8, 9]


@pytest.mark.parametrize(("num_tokens", "first"), [(161, 8), (160, 7), (176, 8)])
def test_window_of_a_loaded_prompt_is_the_one_of_its_last_token(make_request, num_tokens, first):
    manager = make(FULL, WINDOW)
    request = make_request("r", range(num_tokens))
    manager.allocate_slots(request, 0, num_external_computed_tokens=num_tokens, delay_cache_blocks=True)
    assert held(manager, request)[0] == first
    assert first * 16 <= num_tokens - 33  # the first token that the last one sees


def test_local_hits_before_the_window_of_a_load_are_not_taken(make_request):
    manager = make(FULL, WINDOW)
    compute(manager, make_request("first", range(65)), 65)
    request = make_request("second", range(160))
    blocks, num_local = manager.get_computed_blocks(request)
    manager.allocate_slots(request, 0, num_local, blocks, num_external_computed_tokens=96, delay_cache_blocks=True)
    assert num_local == 64
    assert held(manager, request) == [7, 8, 9]
    assert manager.num_cached_tokens("second") == 0  # no position is left at which it could continue after a failed load
    assert find_violations(manager) == []


@pytest.mark.parametrize(
    ("spec", "wanted", "place"),
    [
        (WINDOW, 128, 128),  # sees block 6, which is the first that is left
        (WINDOW, 127, 0),  # down to 112, which sees block 5
        (CHUNKS, 160, 160),
        (CHUNKS, 127, 64),  # the chunk before is gone, but at its start nothing is needed
        (FULL, 127, 112),
    ],
)
def test_request_goes_back_to_where_every_group_holds_what_is_needed(make_request, spec, wanted, place):
    manager = make(FULL, spec)
    request = make_request("r", range(300))
    compute(manager, request, 128)
    compute(manager, request, 1)
    compute(manager, request, 63)
    assert manager.find_boundary("r", wanted) == place


def test_null_blocks_are_replaced_by_fresh_ones_where_a_request_writes_again(make_request):
    manager = make(FULL, WINDOW)
    request = make_request("r", range(300))
    compute(manager, request, 192)
    before = manager.get_block_ids("r")
    request.num_computed_tokens = 0
    manager.drop_shared_tail(request, 0)
    manager.truncate(request, 0)
    assert manager.get_block_ids("r") == (before[0], [])
    compute(manager, request, 64)
    full, windowed = manager.get_block_ids("r")
    assert full == before[0]
    assert len(windowed) == 4
    assert 0 not in windowed
    assert find_violations(manager) == []


def test_only_blocks_that_are_there_are_sealed(make_request):
    manager = make(FULL, WINDOW)
    request = make_request("r", range(160))
    manager.allocate_slots(request, 0, num_external_computed_tokens=160, delay_cache_blocks=True)
    manager.cache_blocks(request, 160)
    manager.seal_blocks(request, 160)
    seals = manager.block_pool.seals
    assert seals.sealed_generation(0) == BROKEN
    assert all(seals.sealed_generation(block_id) for ids in manager.get_block_ids("r") for block_id in ids if block_id)


def test_blocks_of_all_groups_are_evicted_from_the_end_of_the_sequence(make_request):
    manager = make(FULL, CHUNKS)
    request = make_request("r", range(48))
    manager.allocate_slots(request, 48)
    tables = manager.get_block_ids("r")
    manager.free(request)
    freed = [block.block_id for block in manager.block_pool.free_block_queue][-6:]
    assert freed == [ids[index] for index in (2, 1, 0) for ids in tables]


def test_demand_of_a_running_request_is_what_it_can_still_take(make_request):
    """Its table has an entry for every token; what counts is the bound of the window less what it holds alone."""
    manager = make(WINDOW)
    request = make_request("r", range(900))
    assert manager.get_num_missing_blocks(request) == 7  # 32 + 64 tokens, and one block more
    compute(manager, request, 640)
    assert len(held(manager, request, 0)) == 6
    assert manager.get_num_missing_blocks(request) == 1
