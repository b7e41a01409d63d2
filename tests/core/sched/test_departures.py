"""Blocks that steps in flight fill for departing requests: others share them, so they are sealed, or evicted if bad."""

import pytest

from core.kv.seals import BROKEN
from core.wire.messages import ErrorInfo

NOT_FINITE = ErrorInfo(code="not_finite", message="no finite logits", http_status=500, retryable=False)


@pytest.fixture
def ahead(make_world):
    return make_world(with_connector=True, async_scheduling=True)


def sealed(world, request_id) -> list[bool]:
    """Say for each block of a request whether it has a seal of its present generation."""
    pool = world.manager.block_pool
    block_ids = world.manager.get_block_ids(request_id)[0]
    return [pool.seals.sealed_generation(block_id) == pool.blocks[block_id].generation for block_id in block_ids]


def share(world, **new):
    """Let ``b`` hit what the same step fills for ``a``; that step is in flight. Return ``b``."""
    prompt = world.prompt(100, seed=5)
    world.add("a", prompt[:70], max_tokens=50)
    request = world.add("b", prompt, **new)
    world.step()
    assert world.last.num_scheduled_tokens == {"a": 70, "b": 36}
    assert world.in_flight
    return request


def fail(world, request_id):
    """Let the newest step in flight report that it has got no token for a request."""
    step, result = world.in_flight.pop()

    def failing():
        output = result()
        del output.sampled_token_ids[request_id]
        output.failed[request_id] = NOT_FINITE
        return output

    world.in_flight.append((step, failing))


def test_blocks_of_a_handoff_are_sealed_though_an_aborted_request_filled_them(ahead, some_handoff):
    ahead.script.keep.add("b")
    ahead.script.handoffs["b"] = some_handoff
    request = share(ahead, max_tokens=1, needs_handoff=True)
    ahead.abort("a")
    while "b" not in ahead.ends:
        ahead.step()
    assert sealed(ahead, "b") == [True] * 6 + [False]
    ahead.assert_right(request, 1)
    ahead.complete_send("b")
    ahead.step()
    ahead.assert_clean()


def test_each_step_in_flight_seals_what_it_fills(make_world):
    world = make_world(async_scheduling=True, max_num_batched_tokens=32)
    prompt = world.prompt(100, seed=5)
    world.add("a", prompt)
    world.step()
    request = world.add("b", prompt[:60], max_tokens=3)
    world.step()
    world.step()
    world.abort("a")
    world.run()
    pool = world.manager.block_pool
    hits = [block for block in pool.blocks if block.block_hash is not None]
    assert len(hits) == 6
    assert all(pool.seals.sealed_generation(block.block_id) == block.generation for block in hits)
    world.assert_right(request, 3)
    world.assert_clean()


def test_what_a_step_in_flight_fills_for_a_preempted_request_is_a_sealed_hit(make_world):
    world = make_world(num_blocks=9, block_size=4, hash_block_size=4, async_scheduling=True)
    requests = [world.add("a", 15, max_tokens=9)]
    world.step()
    requests.append(world.add("b", 14, max_tokens=9))
    world.step()
    block_ids = world.manager.get_block_ids("b")[0]
    world.step()
    assert world.last.preempted_req_ids == {"b"}
    pool = world.manager.block_pool
    blocks = [pool.blocks[block_id] for block_id in block_ids[:3]]
    assert [block.block_hash for block in blocks] == list(requests[1].block_hashes[:3])
    assert all(pool.seals.sealed_generation(block.block_id) == block.generation for block in blocks)
    world.run()
    for request in requests:
        world.assert_right(request, 9)
    world.assert_clean()


@pytest.fixture
def half_computed(make_world):
    """A world in which ``a`` has left while the second of its steps is in flight; its first block is known to be bad."""
    world = make_world(with_connector=True, async_scheduling=True, max_num_batched_tokens=48)
    world.add("a", world.prompt(100, seed=5))
    world.step()
    world.step()
    assert world.last.num_scheduled_tokens == {"a": 48}
    first = world.manager.get_block_ids("a")[0][0]
    world.abort("a")
    world.spoil(first)
    world.script.report.invalid_block_ids.add(first)
    return world


def test_what_a_request_that_has_left_computed_from_a_bad_block_is_no_hit(half_computed):
    pool = half_computed.manager.block_pool
    assert len(pool.cached_blocks) == 6
    half_computed.drain()
    assert len(pool.cached_blocks) == 0
    assert all(pool.seals.sealed_generation(block.block_id) == BROKEN for block in pool.blocks[1:])


def test_requests_that_share_blocks_computed_from_a_bad_block_recompute_them(half_computed):
    request = half_computed.add("b", half_computed.prompt(100, seed=5), max_tokens=3)
    half_computed.step()
    assert "b" in half_computed.scheduler.state.rolled_back
    half_computed.run()
    half_computed.assert_right(request, 3)
    half_computed.assert_clean()


def test_what_failed_for_a_request_that_has_left_is_no_hit(ahead):
    ahead.add("a", 40, max_tokens=9)
    ahead.step()
    fail(ahead, "a")
    ahead.abort("a")
    ahead.drain()
    pool = ahead.manager.block_pool
    assert len(pool.cached_blocks) == 0
    assert all(pool.seals.sealed_generation(block.block_id) == BROKEN for block in pool.blocks[1:])
    assert ahead.ends == {}


def test_an_error_on_bad_kv_does_not_end_the_request_that_was_rolled_back(ahead, remote):
    ahead.script.remote["a"] = remote(32, is_async=False, is_corrupt=True)
    request = ahead.add("a", 40, max_tokens=5)
    ahead.step()
    ahead.schedule()  # on KV that is not yet known to be bad
    ahead.in_flight.append((ahead.last, ahead.model.launch_model(ahead.last)))
    fail(ahead, "a")
    ahead.finish_oldest()
    assert "a" in ahead.scheduler.state.rolled_back
    ahead.run()
    assert ahead.ends == {"a": "length"}
    ahead.assert_right(request, 5)
    ahead.assert_clean()


def test_an_error_of_a_request_that_has_left_does_not_end_the_next_of_its_id(ahead):
    ahead.add("a", 20, max_tokens=9)
    ahead.step()
    fail(ahead, "a")
    ahead.abort("a")
    request = ahead.add("a", 30, max_tokens=5)
    ahead.run()
    assert ahead.ends == {"a": "length"}
    ahead.assert_right(request, 5)
    ahead.assert_clean()


def test_what_a_void_step_loads_is_pinned_as_well(ahead, remote):
    ahead.script.remote["a"] = remote(32, is_async=False)
    ahead.add("a", 40)
    ahead.step()
    block_ids = ahead.manager.get_block_ids("a")[0]
    ahead.abort("a")
    assert sorted(ahead.held_blocks()) == sorted(block_ids)
    assert all(ahead.manager.block_pool.blocks[block_id].ref_cnt == 1 for block_id in block_ids)
    ahead.drain()
    assert not ahead.held_blocks()
    ahead.assert_clean()


def test_hits_read_by_an_in_flight_step_of_a_departed_request_go_to_no_load(make_world, remote):
    world = make_world(num_blocks=9, with_connector=True, async_scheduling=True, max_num_batched_tokens=20, max_model_len=64)
    for number in range(4):
        world.add(f"other-{number}", 3, max_tokens=12)
    world.step()
    prompt = world.prompt(50)
    world.add("a", prompt[:48])
    for _ in range(3):
        world.step()
    read, hit = world.manager.get_block_ids("a")[0][:2], world.manager.get_block_ids("a")[0][2]
    world.abort("a")
    world.script.remote["load"] = remote(32, is_async=True)
    world.add("load", 33, max_tokens=1)
    world.schedule()
    assert not set(read) & set(world.manager.get_block_ids("load")[0])
    world.finish_step()
    assert world.manager.block_pool.blocks[hit].block_hash is not None
    while "load" not in world.script.loading:
        world.step()
    world.complete_load("load")
    world.run()
    request = world.add("again", prompt, max_tokens=3)
    world.run()
    world.assert_right(request, 3)
    world.assert_clean()
