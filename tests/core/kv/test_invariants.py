"""The checker finds each kind of damage; a checker that finds nothing would prove nothing."""

import pytest

from core.kv.invariants import find_violations
from core.kv.seals import ExpectedSeal, SealTable, map_seal_memory


@pytest.fixture
def manager(make_manager, make_request):
    manager = make_manager(seals=SealTable(map_seal_memory(11), incarnation=1, layout_version=1))
    request = make_request("a", range(40))
    manager.allocate_slots(request, 40)
    manager.seal_blocks(request, 40)
    assert find_violations(manager) == []
    return manager


def leak_a_reference(manager):
    manager.block_pool.blocks[1].ref_cnt += 1


def lose_a_reference(manager):
    manager.block_pool.blocks[1].ref_cnt -= 1


def tie_a_cycle(manager):
    blocks = manager.block_pool.blocks
    blocks[8].next_free_block = blocks[6]


def break_a_back_link(manager):
    blocks = manager.block_pool.blocks
    blocks[8].prev_free_block = blocks[5]


def miscount(manager):
    manager.block_pool.free_block_queue.num_free_blocks -= 1


def lose_a_free_block(manager):
    manager.block_pool.free_block_queue.popleft()


def free_a_block_in_use(manager):
    manager.block_pool.free_block_queue.append(manager.block_pool.blocks[1])


def forget_a_hash(manager):
    manager.block_pool.blocks[1].block_hash = None


def change_a_group(manager):
    manager.block_pool.blocks[1].group_id = 1


def hash_unmapped(manager):
    manager.block_pool.blocks[3].block_hash = bytes(16)


def list_a_block_twice(manager):
    blocks = manager.coordinator.managers[0].req_to_blocks["a"]
    blocks.append(blocks[0])
    blocks[0].ref_cnt += 1


def claim_more_cached_blocks(manager):
    manager.coordinator.managers[0].num_cached_block["a"] = 4


def leave_a_count_behind(manager):
    manager.coordinator.managers[0].num_cached_block["gone"] = 0


def hash_the_null_block(manager):
    manager.block_pool.null_block.block_hash = bytes(16)


def claim_more_sealed_blocks(manager):
    manager.coordinator.managers[0].num_sealed_block["a"] = 4


def keep_a_seal_over_a_new_generation(manager):
    manager.block_pool.blocks[1].generation += 1


def seal_another_content(manager):
    block = manager.block_pool.blocks[1]
    manager.block_pool.seals.seal(1, ExpectedSeal(block.generation, 0, bytes(16), 16))


def seal_for_another_group(manager):
    block = manager.block_pool.blocks[1]
    manager.block_pool.seals.seal(1, ExpectedSeal(block.generation, 1, block.block_hash, 16))


def write_over_a_seal(manager):
    manager.block_pool.seals.buffer[64:72] = bytes(8)


def lose_a_block_in_the_middle(manager):
    manager.coordinator.managers[0].req_to_blocks["a"][1] = manager.block_pool.null_block


def exceed_the_bound_of_admission(manager):
    manager.coordinator.managers[0].max_admission_blocks = 2


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (leak_a_reference, "should have 1 references"),
        (lose_a_reference, "should have 1 references"),
        (tie_a_cycle, "cycle"),
        (break_a_back_link, "do not match"),
        (miscount, "counts 6 blocks and links 7"),
        (lose_a_free_block, "is not in the free queue"),
        (free_a_block_in_use, "is in the free queue"),
        (forget_a_hash, "under"),
        (change_a_group, "under"),
        (hash_unmapped, "hashed but not in the prefix map"),
        (list_a_block_twice, "holds a block twice"),
        (claim_more_cached_blocks, "shorter than its cached prefix"),
        (leave_a_count_behind, "for different requests"),
        (hash_the_null_block, "null block changed"),
        (claim_more_sealed_blocks, "shorter than its sealed prefix"),
        (keep_a_seal_over_a_new_generation, "seal of another life"),
        (seal_another_content, "seal of another content"),
        (seal_for_another_group, "seal of another content"),
        (write_over_a_seal, "cannot be read"),
        (lose_a_block_in_the_middle, "should have 0 null blocks, all at its head"),
        (exceed_the_bound_of_admission, "holds 3 blocks, more than the 2 it was admitted by"),
    ],
)
def test_damage_is_found(manager, damage, message):
    damage(manager)
    assert any(message in violation for violation in find_violations(manager))


def test_references_held_elsewhere_are_accounted_for(manager):
    manager.block_pool.touch([manager.block_pool.blocks[2]])
    assert find_violations(manager) != []
    assert find_violations(manager, {2: 1}) == []
