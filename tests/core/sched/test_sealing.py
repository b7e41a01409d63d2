"""Seals follow the steps: broken when one is scheduled that writes a block, set when it has run."""

import pytest

from core.kv.seals import BROKEN, decode_seal
from core.request import ModelRunnerOutput
from core.sched.remote_kv import promote_loaded_request
from core.wire.messages import ErrorInfo


def is_sealed(world, block_id) -> bool:
    return world.model.seals.sealed_generation(block_id) != BROKEN


def sealed(world, request_id) -> list[bool]:
    """Say for each block of a request whether it has a seal."""
    return [is_sealed(world, block_id) for block_id in world.manager.get_block_ids(request_id)[0]]


def seal_of(world, block_id):
    return decode_seal(world.model.seals.row(block_id))


def load(world, remote, request_id, num_tokens, num_remote, *, is_async=True, is_corrupt=False):
    world.script.remote[request_id] = remote(num_remote, is_async, is_corrupt)
    return world.add(request_id, num_tokens)


def test_blocks_are_sealed_after_the_step_that_fills_them_and_not_before(world):
    request = world.add("a", 40, max_tokens=30)
    world.schedule()
    assert sealed(world, "a") == [False, False, False]
    world.finish_step()
    assert sealed(world, "a") == [True, True, False]
    first, second, _ = world.manager.get_blocks("a").blocks[0]
    for block, block_hash in zip((first, second), request.block_hashes, strict=False):
        seal = seal_of(world, block.block_id)
        assert (seal.incarnation, seal.generation) == (1, block.generation)
        assert (seal.group_id, seal.block_hash, seal.num_tokens) == (0, block_hash, 16)


def test_decoding_seals_a_block_with_its_last_token(world):
    request = world.add("a", 40, max_tokens=30)
    while request.num_computed_tokens < 47:
        world.step()
        assert sealed(world, "a") == [True, True, False]
    world.step()
    assert sealed(world, "a") == [True, True, True]


def test_a_chunked_prompt_is_sealed_chunk_by_chunk(make_world):
    world = make_world(max_num_batched_tokens=20)
    world.add("a", 50)
    counts = []
    for _ in range(3):
        world.step()
        counts.append(sum(sealed(world, "a")))
    assert counts == [1, 2, 3]


def test_large_blocks_are_sealed_when_full(make_world):
    world = make_world(block_size=64, max_num_batched_tokens=48)
    request = world.add("a", 130)
    counts = []
    for _ in range(3):
        world.step()
        counts.append(sum(sealed(world, "a")))
    assert counts == [0, 1, 2]
    block_id = world.manager.get_block_ids("a")[0][0]
    assert seal_of(world, block_id).block_hash == request.block_hashes[3]
    assert seal_of(world, block_id).num_tokens == 64


def test_a_hit_of_the_same_step_is_sealed_once_the_step_has_run(world):
    prompt = world.prompt(40)
    world.add("a", prompt)
    world.add("b", prompt)
    world.step()
    assert world.manager.get_block_ids("a")[0][:2] == world.manager.get_block_ids("b")[0][:2]
    assert sealed(world, "b") == [True, True, False]


def test_seals_work_without_prefix_caching(make_world):
    world = make_world(enable_caching=False)
    request = world.add("a", 40)
    world.step()
    assert sealed(world, "a") == [True, True, False]
    assert seal_of(world, world.manager.get_block_ids("a")[0][1]).block_hash == request.block_hashes[1]


def test_a_reused_block_has_no_seal_before_anything_is_run(make_world):
    world = make_world(num_blocks=4)
    world.add("a", 40, max_tokens=1)
    world.step()
    world.step()
    sealed_ids = [block_id for block_id in range(1, 4) if is_sealed(world, block_id)]
    assert len(sealed_ids) == 2, "what is free keeps its seal until it is used again"
    world.add("b", 45)
    world.schedule()
    assert sealed(world, "b") == [False, False, False]


def test_blocks_filled_for_a_request_aborted_meanwhile_are_sealed_and_a_hit(world):
    world.add("a", 40)
    world.schedule()
    block_ids = world.manager.get_block_ids("a")[0]
    world.abort("a")
    assert not any(is_sealed(world, block_id) for block_id in block_ids)
    world.finish_step()
    assert [is_sealed(world, block_id) for block_id in block_ids] == [True, True, False]
    assert len(world.manager.block_pool.cached_blocks) == 2


def test_a_request_whose_step_failed_loses_all_its_seals(world):
    request = world.add("a", 20, max_tokens=40)
    while request.num_computed_tokens < 31:
        world.step()
    assert sealed(world, "a") == [True, False]
    block_ids = world.manager.get_block_ids("a")[0]
    error = ErrorInfo(code="not_finite", message="no finite logits", http_status=500, retryable=False)
    world.scheduler.update_from_output(world.schedule(), ModelRunnerOutput(failed={"a": error}))
    assert not any(is_sealed(world, block_id) for block_id in block_ids)


def test_nothing_built_on_a_failed_request_by_one_that_has_left_stays_a_hit(world):
    world.add("builder", 48, max_tokens=1)
    while world.scheduler.has_unfinished_requests():
        world.step()
    pool = world.manager.block_pool
    assert len(pool.cached_blocks) == 3
    world.add("failing", 20, max_tokens=40)  # shares the first block
    error = ErrorInfo(code="not_finite", message="no finite logits", http_status=500, retryable=False)
    world.scheduler.update_from_output(world.schedule(), ModelRunnerOutput(failed={"failing": error}))
    assert len(pool.cached_blocks) == 0
    assert not any(is_sealed(world, block.block_id) for block in pool.blocks[1:])


def test_a_loaded_prefix_is_sealed_when_it_is_promoted(make_world, remote):
    world = make_world(with_connector=True)
    load(world, remote, "a", 40, 32)
    world.step()
    assert sealed(world, "a") == [False, False]
    world.complete_load("a")
    world.step()
    assert sealed(world, "a") == [False, False], "nobody has looked at the report yet"
    world.schedule()
    assert sealed(world, "a") == [True, True, False]


def test_a_block_whose_last_token_is_computed_again_is_unsealed_for_that_step(make_world, remote):
    world = make_world(with_connector=True)
    load(world, remote, "a", 32, 32)
    world.step()
    world.complete_load("a")
    world.step()
    first, last = (world.manager.block_pool.blocks[block_id] for block_id in world.manager.get_block_ids("a")[0])
    assert world.schedule().num_scheduled_tokens == {"a": 1}
    assert sealed(world, "a") == [True, False]
    assert (first.generation, last.generation) == (1, 2), "who knows the loaded bytes must not take the others for them"
    assert last.block_hash is not None
    world.finish_step()
    assert sealed(world, "a") == [True, True]


def test_loaded_block_stays_sealed_if_its_recompute_never_happens(make_world, remote):
    world = make_world(with_connector=True)
    load(world, remote, "a", 32, 32)
    world.step()
    world.complete_load("a")
    world.step()
    block_ids = world.manager.get_block_ids("a")[0]
    assert promote_loaded_request(world.scheduler.state, world.scheduler.requests["a"])
    world.abort("a")
    world.step()
    assert all(is_sealed(world, block_id) for block_id in block_ids)


@pytest.mark.parametrize("num_tokens", [40, 33, 32])
def test_a_synchronous_load_is_sealed_with_the_step_that_needs_it(make_world, remote, num_tokens):
    world = make_world(with_connector=True)
    load(world, remote, "a", num_tokens, 32, is_async=False)
    world.schedule()
    assert not any(sealed(world, "a"))
    world.finish_step()
    assert sealed(world, "a")[:2] == [True, True]


def test_a_synchronous_load_that_failed_is_not_sealed(make_world, remote):
    world = make_world(with_connector=True)
    load(world, remote, "a", 40, 32, is_async=False, is_corrupt=True)
    world.schedule()
    block_ids = world.manager.get_block_ids("a")[0]
    world.finish_step()
    assert not any(is_sealed(world, block_id) for block_id in block_ids)


REFUSED = ErrorInfo(code="invalid_request", message="no token to choose", http_status=400, retryable=False)


def refuse(world, *request_ids):
    """Run a step in which these requests get no token by their own fault."""
    output = world.schedule()
    sampled = {request_id: [1] for request_id in output.num_scheduled_tokens if request_id not in request_ids}
    refused = dict.fromkeys(request_ids, REFUSED)
    return world.scheduler.update_from_output(output, ModelRunnerOutput(sampled, refused=refused))


def test_refused_request_evicts_nothing_and_breaks_no_seal(world):
    prompt = world.prompt(48)
    world.add("builder", prompt, max_tokens=1)
    while world.scheduler.has_unfinished_requests():
        world.step()
    pool = world.manager.block_pool
    before = {block.block_id for block in pool.blocks[1:] if is_sealed(world, block.block_id)}
    assert len(before) == len(pool.cached_blocks) == 3
    world.add("refused", prompt, max_tokens=40)  # shares the first two blocks
    world.add("other", 20, max_tokens=40)
    outputs = refuse(world, "refused")
    assert {output.request_id: output.error for output in outputs} == {"other": None, "refused": REFUSED}
    assert before <= {block.block_id for block in pool.blocks[1:] if is_sealed(world, block.block_id)}
    assert len(pool.cached_blocks) == 4, "the three that were there, and the other request's"
    assert [request.request_id for request in world.scheduler.running] == ["other"]


def test_blocks_computed_for_a_refused_request_are_sealed_hits(world):
    world.add("refused", 40, max_tokens=40)
    output = world.schedule()
    block_ids = world.manager.get_block_ids("refused")[0]
    world.scheduler.update_from_output(output, ModelRunnerOutput(refused={"refused": REFUSED}))
    assert [is_sealed(world, block_id) for block_id in block_ids] == [True, True, False]
    assert len(world.manager.block_pool.cached_blocks) == 2
    assert not world.scheduler.has_unfinished_requests()


def test_refusal_of_a_request_that_was_aborted_meanwhile_changes_nothing(world):
    world.add("gone", 40, max_tokens=40)
    output = world.schedule()
    world.abort("gone")
    outputs = world.scheduler.update_from_output(output, ModelRunnerOutput(refused={"gone": REFUSED}))
    assert outputs == []
    assert len(world.manager.block_pool.cached_blocks) == 2


def test_nothing_kept_for_readers_survives_a_failed_request(make_world):
    world = make_world(with_connector=True)
    prompt = world.prompt(48)
    builder = world.add("builder", prompt, max_tokens=1)
    while world.scheduler.has_unfinished_requests():
        world.step()
    pool = world.manager.block_pool
    (found,), _ = world.manager.coordinator.find_longest_cache_hit(builder.block_hashes, 48)
    blocks = list(found)
    pool.touch(blocks)  # as pins of readers do

    def free_spare_blocks() -> None:
        spare = list(blocks)
        blocks.clear()
        pool.free_blocks(spare)

    world.scheduler.connector.free_spare_blocks = free_spare_blocks
    world.add("failing", prompt[:20], max_tokens=40)
    error = ErrorInfo(code="not_finite", message="no finite logits", http_status=500, retryable=False)
    world.scheduler.update_from_output(world.schedule(), ModelRunnerOutput(failed={"failing": error}))
    assert len(pool.cached_blocks) == 0
    assert not any(is_sealed(world, block.block_id) for block in pool.blocks[1:])


def test_a_handoff_that_was_built_on_a_failed_request_is_not_read(make_world, some_handoff):
    world = make_world(with_connector=True)
    world.script.keep.add("builder")
    world.script.handoffs["builder"] = some_handoff
    prompt = world.prompt(48)
    world.add("builder", prompt, max_tokens=1, needs_handoff=True)
    while "builder" not in world.ends:
        world.step()
    pool = world.manager.block_pool
    world.add("failing", prompt[:20], max_tokens=40)
    error = ErrorInfo(code="not_finite", message="no finite logits", http_status=500, retryable=False)
    world.scheduler.update_from_output(world.schedule(), ModelRunnerOutput(failed={"failing": error}))
    assert len(pool.cached_blocks) == 0
    assert not any(is_sealed(world, block.block_id) for block in pool.blocks[1:])
