"""Slots for tokens: hits, capacity rules, hashing at the right moment, and no effects of an allocation that fails."""

import pytest

from core.kv.events import BlockStored
from core.kv.invariants import find_violations
from core.kv.manager import KVCacheManager
from core.kv.seals import BROKEN, SealTable, decode_seal, map_seal_memory
from core.kv.stats import PrefixCacheStats


def admit(manager, request, num_new_tokens=None, **options):
    """Look up and allocate like the scheduler; on success advance the request. Returns (blocks or None, hit tokens)."""
    hits, num_hits = manager.get_computed_blocks(request)
    if num_new_tokens is None:
        num_new_tokens = request.num_tokens - num_hits - options.get("num_external_computed_tokens", 0)
    blocks = manager.allocate_slots(request, num_new_tokens, num_hits, hits, **options)
    if blocks is not None:
        request.num_computed_tokens = num_hits + num_new_tokens + options.get("num_external_computed_tokens", 0)
    return blocks, num_hits


def state(manager):
    """Everything that an allocation could change."""
    pool = manager.block_pool
    return (
        [(block.ref_cnt, block.block_hash, block.generation) for block in pool.blocks],
        [block.block_id for block in pool.free_block_queue],
        [
            ({key: list(blocks) for key, blocks in group.req_to_blocks.items()}, dict(group.num_cached_block))
            for group in manager.coordinator.managers
        ],
    )


# ---- prefix hits -----------------------------------------------------------------------------------------------------


def test_second_request_hits_the_full_blocks_of_the_first(make_manager, make_request):
    manager = make_manager()
    admit(manager, make_request("a", range(40)))
    second = make_request("b", [*range(40), 7, 8])
    blocks, num_hits = admit(manager, second)
    assert num_hits == 32
    assert [len(group) for group in blocks.blocks] == [1]
    assert manager.get_block_ids("b")[0][:2] == manager.get_block_ids("a")[0][:2]
    assert [manager.block_pool.blocks[i].ref_cnt for i in manager.get_block_ids("b")[0]] == [2, 2, 1]
    assert find_violations(manager) == []


def test_hits_are_not_hashed_again(make_manager, make_request):
    manager = make_manager(enable_kv_cache_events=True)
    admit(manager, make_request("a", range(40)))
    manager.take_events()
    second = make_request("b", range(64))
    admit(manager, second)
    (stored,) = manager.take_events()
    assert stored == BlockStored(tuple(second.block_hashes[2:4]), second.block_hashes[1], 16, 0, tuple(range(32, 64)))


def test_hit_leaves_one_token_to_compute(make_manager, make_request):
    manager = make_manager()
    admit(manager, make_request("a", range(32)))
    assert manager.get_computed_blocks(make_request("b", range(32)))[1] == 16
    assert manager.get_computed_blocks(make_request("c", range(33)))[1] == 32


def test_lookup_takes_no_reference(make_manager, make_request):
    manager = make_manager()
    admit(manager, make_request("a", range(32)))
    before = state(manager)
    manager.get_computed_blocks(make_request("b", range(33)))
    assert state(manager) == before


def test_freed_request_is_still_a_hit_and_costs_its_blocks_again(make_manager, make_request):
    manager = make_manager(num_blocks=5)
    first = make_request("a", range(48))
    admit(manager, first)
    manager.free(first)
    assert manager.usage == 0.0
    second = make_request("b", range(65))
    # 48 tokens hit three blocks of the free queue, two more are needed, four are free.
    assert admit(manager, second)[0] is None
    assert admit(manager, make_request("c", range(64)))[1] == 48


def test_salt_and_opting_out_prevent_hits(make_manager, make_request):
    manager = make_manager()
    admit(manager, make_request("a", range(40)))
    assert manager.get_computed_blocks(make_request("b", range(40), cache_salt="tenant"))[1] == 0
    reader = make_request("c", range(40))
    reader.skip_reading_prefix_cache = True
    assert manager.get_computed_blocks(reader) == (manager.empty_kv_cache_blocks, 0)


def test_without_caching_nothing_is_hashed_or_hit(make_manager, make_request):
    manager = make_manager(enable_caching=False)
    request = make_request("a", range(40))
    admit(manager, request)
    manager.cache_blocks(request, 40)
    assert len(manager.block_pool.cached_blocks) == 0
    assert manager.get_computed_blocks(make_request("b", range(40)))[1] == 0


@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_hits_work_for_blocks_larger_than_a_hash_block(make_manager, make_request, block_size):
    manager = make_manager(num_blocks=25, block_size=block_size)
    admit(manager, make_request("a", range(300)))
    assert manager.get_computed_blocks(make_request("b", range(300)))[1] == 299 // block_size * block_size
    assert manager.get_computed_blocks(make_request("c", [*range(200), *range(100)]))[1] == 200 // block_size * block_size


# ---- slots -----------------------------------------------------------------------------------------------------------


def test_decode_token_takes_a_block_only_at_a_boundary(make_manager, make_request):
    manager = make_manager()
    request = make_request("a", range(15))
    admit(manager, request)
    taken = []
    for token in range(18):
        request.append_output_token(token)
        blocks = manager.allocate_slots(request, 1)
        request.num_computed_tokens += 1
        taken.append(sum(map(len, blocks.blocks)))
    assert taken == [0] + [1] + [0] * 15 + [1]
    assert find_violations(manager) == []


def test_chunked_prefill_hashes_each_block_when_its_last_token_is_scheduled(make_manager, make_request):
    manager = make_manager()
    request = make_request("a", range(50))
    hashed = []
    for chunk in (15, 1, 20, 14):
        manager.allocate_slots(request, chunk)
        request.num_computed_tokens += chunk
        hashed.append(len(manager.block_pool.cached_blocks))
    assert hashed == [0, 1, 2, 3]


def test_tokens_that_are_not_known_yet_are_never_hashed(make_manager, make_request):
    manager = make_manager()
    request = make_request("a", range(31))
    admit(manager, request)
    manager.allocate_slots(request, 1)  # the token of the step in flight
    assert len(manager.block_pool.cached_blocks) == 1


def test_slots_stop_at_the_model_length(make_manager, make_request):
    manager = make_manager(max_model_len=40)
    request = make_request("a", range(38))
    admit(manager, request)
    assert sum(map(len, manager.allocate_slots(request, 66).blocks)) == 0


@pytest.mark.parametrize("num_new_tokens", [0, -1])
def test_nothing_to_do_is_an_error(make_manager, make_request, num_new_tokens):
    manager = make_manager()
    with pytest.raises(ValueError, match="nothing to allocate"):
        manager.allocate_slots(make_request("a", range(8)), num_new_tokens)


def test_loaded_tokens_get_blocks_and_no_hash_until_they_arrive(make_manager, make_request):
    manager = make_manager()
    admit(manager, make_request("other", range(16)))
    request = make_request("a", range(50))
    options = {"num_external_computed_tokens": 34, "delay_cache_blocks": True}
    blocks, num_hits = admit(manager, request, num_new_tokens=0, **options)
    assert num_hits == 16
    assert [len(group) for group in blocks.blocks] == [3]  # ceil(50 / 16) without the hit
    assert [block for block in manager.get_blocks("a").blocks[0] if block.block_hash is None] == blocks.blocks[0]
    assert manager.get_computed_blocks(make_request("b", range(50)))[1] == 16
    manager.cache_blocks(request, request.num_computed_tokens)
    assert manager.get_computed_blocks(make_request("b", range(50)))[1] == 48
    assert find_violations(manager) == []


def test_full_block_prompt_that_was_loaded_needs_no_block_to_sample(make_manager, make_request):
    manager = make_manager()
    request = make_request("a", range(32))
    admit(manager, request, num_new_tokens=0, num_external_computed_tokens=32, delay_cache_blocks=True)
    manager.cache_blocks(request, 32)
    request.num_computed_tokens = 31
    assert sum(map(len, manager.allocate_slots(request, 1).blocks)) == 0
    assert len(manager.block_pool.cached_blocks) == 2


# ---- capacity --------------------------------------------------------------------------------------------------------


def refusals():
    """Each a way not to fit into the ten blocks of the pool, four of which are taken and two more cached."""
    return {
        "too many new tokens": (97, {}),
        "too many with loaded tokens": (1, {"num_external_computed_tokens": 96}),
        "the whole sequence must fit": (1, {"full_sequence_must_fit": True}),
        "blocks are reserved": (33, {"reserved_blocks": 4}),
    }


@pytest.mark.parametrize("reason", refusals())
def test_refusal_leaves_everything_as_it_was(make_manager, make_request, reason):
    num_new_tokens, options = refusals()[reason]
    manager = make_manager()
    cached = make_request("cached", range(1000, 1032))
    admit(manager, cached)
    admit(manager, make_request("running", range(64)))
    manager.free(cached)
    request = make_request("a", [*range(1000, 1032), *range(200)])
    hits, num_hits = manager.get_computed_blocks(request)
    assert num_hits == 32
    before = state(manager)
    assert manager.allocate_slots(request, num_new_tokens, num_hits, hits, **options) is None
    assert state(manager) == before
    assert find_violations(manager) == []


def test_refused_running_request_keeps_its_blocks(make_manager, make_request):
    manager = make_manager(num_blocks=4)
    request = make_request("a", range(80))
    manager.allocate_slots(request, 48)
    request.num_computed_tokens = 48
    before = state(manager)
    assert manager.allocate_slots(request, 1) is None
    assert state(manager) == before


def test_gate_ignores_reserved_blocks(make_manager, make_request):
    manager = make_manager()
    options = {"full_sequence_must_fit": True, "reserved_blocks": 8}
    assert manager.allocate_slots(make_request("a", range(160)), 32, **options) is not None
    assert manager.allocate_slots(make_request("b", range(160)), 1, full_sequence_must_fit=True) is None


def test_watermark_holds_back_admissions_beside_others_only(make_manager, make_request):
    manager = make_manager(watermark=0.2)  # two of eleven blocks
    request = make_request("a", range(200))
    assert manager.allocate_slots(request, 144, has_scheduled_reqs=True) is None
    assert manager.allocate_slots(request, 128, has_scheduled_reqs=True) is not None
    request.num_computed_tokens = 128
    assert manager.allocate_slots(request, 32, has_scheduled_reqs=True) is not None  # runs already
    manager.free(request)
    request.num_computed_tokens = 0
    assert manager.allocate_slots(request, 160, has_scheduled_reqs=False) is not None


def test_watermark_counts_in_the_gate(make_manager, make_request):
    manager = make_manager(watermark=0.2)
    request = make_request("a", range(130))
    assert manager.allocate_slots(request, 1, full_sequence_must_fit=True) is None
    assert manager.allocate_slots(request, 1, full_sequence_must_fit=True, has_scheduled_reqs=False) is not None


def test_longest_prompt_that_can_ever_fit_is_independent_of_running_requests(make_manager, make_request):
    manager = make_manager()
    admit(manager, make_request("other", range(100)))
    assert manager.max_tokens_that_fit == 160
    assert make_manager(max_model_len=100).max_tokens_that_fit == 100


@pytest.mark.parametrize("watermark", [-0.1, 1.0])
def test_watermark_out_of_range_is_refused(make_manager, watermark):
    with pytest.raises(ValueError, match="share of the pool"):
        make_manager(watermark=watermark)


def test_model_length_below_one_is_refused(make_manager):
    with pytest.raises(ValueError, match="max_model_len"):
        make_manager(max_model_len=0)


# ---- end, rollback and the rest --------------------------------------------------------------------------------------


def test_free_is_idempotent_and_ignores_unknown_requests(make_manager, make_request):
    manager = make_manager()
    request = make_request("a", range(40))
    manager.free(request)
    admit(manager, request)
    manager.free(request)
    manager.free(request)
    assert manager.usage == 0.0
    assert find_violations(manager) == []


def test_tail_of_a_freed_request_is_evicted_before_its_head(make_manager, make_request):
    manager = make_manager(num_blocks=5)
    request = make_request("a", range(64))
    admit(manager, request)
    manager.free(request)
    admit(manager, make_request("b", range(500, 532)))
    assert manager.get_computed_blocks(make_request("c", range(64)))[1] == 32


def test_rolled_back_blocks_are_no_hits_have_new_names_and_can_be_hashed_again(make_manager, make_request):
    manager = make_manager()
    request = make_request("a", range(80))
    admit(manager, request)
    generations = {block.block_id: block.generation for block in manager.get_blocks("a").blocks[0]}
    request.num_computed_tokens = 35
    beyond = manager.truncate(request, 35).blocks[0]
    assert [block.block_id for block in beyond] == manager.get_block_ids("a")[0][2:]
    grown = {b.block_id for b in manager.get_blocks("a").blocks[0] if b.generation > generations[b.block_id]}
    assert grown == {block.block_id for block in beyond}
    assert manager.get_computed_blocks(make_request("b", range(80)))[1] == 32
    manager.allocate_slots(request, 45)
    assert manager.get_computed_blocks(make_request("b", range(80)))[1] == 64
    assert find_violations(manager) == []


def test_block_ids_for_computed_tokens_leave_those_of_later_tokens_out(make_manager, make_request):
    manager = make_manager()
    manager.allocate_slots(make_request("a", range(50)), 50)
    ids = manager.get_block_ids("a")[0]
    assert [manager.get_block_ids_for_computed_tokens("a", n) for n in (0, 16, 20)] == [([],), (ids[:1],), (ids[:2],)]
    assert manager.get_block_ids_for_computed_tokens("unknown", 20) == ([],)


def test_evicted_blocks_are_no_hits(make_manager, make_request):
    manager = make_manager()
    admit(manager, make_request("a", range(64)))
    manager.evict_blocks([manager.get_block_ids("a")[0][1]])
    assert manager.get_computed_blocks(make_request("b", range(64)))[1] == 16


def test_reset_waits_for_running_requests(make_manager, make_request):
    manager = make_manager(enable_kv_cache_events=True)
    request = make_request("a", range(64))
    admit(manager, request)
    assert not manager.reset_prefix_cache()
    manager.free(request)
    assert manager.reset_prefix_cache()
    assert manager.get_computed_blocks(make_request("b", range(64)))[1] == 0
    assert [type(event).__name__ for event in manager.take_events()] == ["BlockStored", "AllBlocksCleared"]


def test_stats_are_drained_and_count_preempted_requests_apart(make_manager):
    manager = make_manager()
    manager.record_prefix_cache_stats(100, 32, preempted=False)
    manager.record_prefix_cache_stats(50, 0, preempted=False)
    manager.record_prefix_cache_stats(60, 48, preempted=True)
    assert manager.prefix_cache_stats == PrefixCacheStats(2, 150, 32, 1, 60, 48)


def test_stats_ignore_lookups_without_a_cache(make_manager):
    manager = make_manager(enable_caching=False)
    manager.record_prefix_cache_stats(100, 0, preempted=False)
    assert manager.prefix_cache_stats == PrefixCacheStats()


# ---- seals -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def sealing(make_manager):
    return make_manager(seals=SealTable(map_seal_memory(11), incarnation=1, layout_version=1))


def sealed(manager, request_id):
    seals = manager.block_pool.seals
    return [seals.sealed_generation(block_id) != BROKEN for block_id in manager.get_block_ids(request_id)[0]]


def test_full_blocks_are_sealed_once_and_hits_are_left_to_those_who_fill_them(sealing, make_request):
    first, second = make_request("a", range(40)), make_request("b", range(60))
    admit(sealing, first)
    admit(sealing, second)
    sealing.seal_blocks(second, 60)
    assert sealed(sealing, "b") == [False, False, True, False]
    sealing.seal_blocks(first, 40)
    assert sealed(sealing, "b") == [True, True, True, False]
    assert find_violations(sealing) == []


def test_slots_that_will_be_written_again_lose_their_seal_first(sealing, make_request):
    request = make_request("a", range(32))
    admit(sealing, request, 0, num_external_computed_tokens=32, delay_cache_blocks=True)
    sealing.seal_blocks(request, 32)
    assert sealed(sealing, "a") == [True, True]
    request.num_computed_tokens = 31
    sealing.allocate_slots(request, 1)
    assert sealed(sealing, "a") == [True, False]
    sealing.seal_blocks(request, 32)
    assert sealed(sealing, "a") == [True, True]


def test_rolled_back_blocks_lose_their_seals_and_get_new_ones(sealing, make_request):
    request = make_request("a", range(48))
    admit(sealing, request)
    sealing.seal_blocks(request, 48)
    sealing.truncate(request, 20)
    assert sealed(sealing, "a") == [True, False, False]
    request.num_computed_tokens = 16
    sealing.allocate_slots(request, 32)
    sealing.seal_blocks(request, 48)
    assert sealed(sealing, "a") == [True, True, True]
    assert find_violations(sealing) == []


def test_evicted_blocks_lose_their_seals(sealing, make_request):
    request = make_request("a", range(40))
    admit(sealing, request)
    sealing.seal_blocks(request, 40)
    sealing.evict_blocks(sealing.get_block_ids("a")[0][1:2])
    assert sealed(sealing, "a") == [True, False, False]


def test_freed_blocks_keep_their_seals_until_they_are_reused(sealing, make_request):
    request = make_request("a", range(160))
    admit(sealing, request)
    sealing.seal_blocks(request, 160)
    ids = sealing.get_block_ids("a")[0]
    sealing.free(request)
    assert all(sealing.block_pool.seals.sealed_generation(block_id) for block_id in ids)
    admit(sealing, make_request("b", range(1000, 1160)))
    assert not any(sealing.block_pool.seals.sealed_generation(block_id) for block_id in ids)


def test_a_reset_takes_all_seals_off_unless_it_is_refused(sealing, make_request):
    request = make_request("a", range(40))
    admit(sealing, request)
    sealing.seal_blocks(request, 40)
    ids = sealing.get_block_ids("a")[0]
    assert not sealing.reset_prefix_cache()
    assert sealed(sealing, "a") == [True, True, False]
    sealing.free(request)
    assert sealing.reset_prefix_cache()
    assert not any(sealing.block_pool.seals.sealed_generation(block_id) for block_id in ids)
    assert find_violations(sealing) == []


@pytest.mark.parametrize(("num_tokens", "block", "num_tail"), [(40, 2, 8), (33, 2, 1), (15, 0, 15)])
def test_the_last_block_of_a_handoff_is_sealed_for_its_tokens(sealing, make_request, hasher, num_tokens, block, num_tail):
    request = make_request("a", range(num_tokens))
    admit(sealing, request)
    sealing.seal_blocks(request, num_tokens)
    block_hash = hasher.prefix_hash(request.block_hashes, request.all_token_ids, num_tokens)
    sealing.seal_partial_block(request, num_tokens, block_hash)
    assert sealed(sealing, "a") == [True] * (block + 1)
    last = decode_seal(sealing.block_pool.seals.row(sealing.get_block_ids("a")[0][block]))
    assert (last.block_hash, last.num_tokens) == (block_hash, num_tail)
    assert find_violations(sealing) == []


def test_a_full_last_block_keeps_its_own_seal(sealing, make_request):
    request = make_request("a", range(40))
    admit(sealing, request)
    sealing.seal_blocks(request, 40)
    sealing.seal_partial_block(request, 32, bytes(16))
    sealing.seal_partial_block(request, 20, bytes(16))
    assert sealed(sealing, "a") == [True, True, False]
    assert find_violations(sealing) == []


def test_every_group_is_sealed_under_its_own_number(make_config, make_request):
    seals = SealTable(map_seal_memory(11), incarnation=1, layout_version=1)
    manager = KVCacheManager(make_config(block_sizes=(16, 32)), 1024, 32, 16, enable_caching=False, seals=seals)
    request = make_request("a", range(40))
    admit(manager, request)
    manager.seal_blocks(request, 40)
    manager.seal_partial_block(request, 40, b"p" * 16)
    rows = [[decode_seal(seals.row(block_id)) for block_id in ids] for ids in manager.get_block_ids("a")]
    assert [[(seal.group_id, seal.num_tokens) for seal in group] for group in rows] == [
        [(0, 16), (0, 16), (0, 8)],
        [(1, 32), (1, 8)],
    ]
    assert [seal.block_hash for seal in (rows[0][1], rows[1][0])] == [request.block_hashes[1]] * 2
    assert [seal.block_hash for seal in (rows[0][2], rows[1][1])] == [b"p" * 16] * 2


def test_without_a_table_nothing_is_sealed(make_manager, make_request):
    manager, request = make_manager(), make_request("a", range(40))
    admit(manager, request)
    manager.seal_blocks(request, 40)
    manager.seal_partial_block(request, 40, bytes(16))
    assert find_violations(manager) == []


def test_a_table_of_another_size_is_refused(make_manager):
    with pytest.raises(ValueError, match="10 blocks does not fit a pool of 11"):
        make_manager(seals=SealTable(map_seal_memory(10), incarnation=1, layout_version=1))


def test_admission_cap_counts_in_the_gate_only(make_manager, make_request):
    manager = make_manager(num_blocks=6)
    manager.coordinator.managers[0].max_admission_blocks = 2
    before = state(manager)
    request = make_request("a", list(range(100)))  # seven blocks, and five are free
    assert manager.allocate_slots(request, 100, full_sequence_must_fit=True) is None
    assert state(manager) == before
