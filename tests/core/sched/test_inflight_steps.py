"""Steps in flight: what is scheduled ahead, what counts for nothing, and which blocks wait for the step that may write them."""

import pytest

from core.kv.seals import BROKEN
from core.sched import finish as release
from core.sched.inflight_steps import detach_from_inflight_steps


@pytest.fixture
def ahead(make_world):
    """A world of three blocks of four tokens, with async scheduling and a connector."""
    return make_world(num_blocks=4, block_size=4, hash_block_size=4, with_connector=True, async_scheduling=True)


def test_a_request_is_never_computed_beyond_its_longest_end(make_world):
    world = make_world(async_scheduling=True)
    request = world.add("a", 20, max_tokens=6)
    computed = 0
    while world.scheduler.has_unfinished_requests():
        world.step()
        computed += world.last.total_num_scheduled_tokens
    assert computed == 25  # the last token is put out and not fed back
    world.assert_right(request, 6)
    world.assert_clean()


def test_a_stop_token_voids_one_token_and_no_more(make_world):
    world = make_world(async_scheduling=True)
    prompt = world.prompt(20)
    expected = world.expected(prompt, 9)
    request = world.add("a", prompt, max_tokens=50, stop_token_ids=frozenset(expected[3:4]))
    computed = 0
    while world.scheduler.has_unfinished_requests():
        world.step()
        computed += world.last.total_num_scheduled_tokens
    assert computed == 24
    assert world.ends == {"a": "stop"}
    assert (request.num_in_flight_tokens, request.num_computed_tokens) == (0, 23)
    world.assert_right(request, 4)
    world.assert_clean()


def load_into_the_blocks_of_a_request_that_has_left(world):
    """End a request with a step in flight, and load what takes every block there is. Return the loading request."""
    world.add("a", 4, max_tokens=6)
    world.step()
    world.step()
    assert world.last.num_scheduled_tokens == {"a": 1}  # its second block is about to be written
    world.abort("a")
    prompt = world.prompt(11, seed=77)
    world.script.remote["b"] = world.remote(10, is_async=False)
    return world.add("b", prompt, max_tokens=1)


def test_a_load_gets_no_block_that_a_void_step_may_still_write(ahead, remote):
    ahead.remote = remote
    request = load_into_the_blocks_of_a_request_that_has_left(ahead)
    assert sum(ahead.held_blocks().values()) == 1
    ahead.step()
    assert ahead.last.num_scheduled_tokens == {}  # it waits until the step is over
    ahead.run()
    ahead.assert_right(request, 1)
    ahead.assert_clean()


def test_without_pins_the_void_step_spoils_the_load(ahead, remote, monkeypatch):
    """The test above would notice."""
    ahead.remote = remote
    monkeypatch.setattr(
        release,
        "detach_from_inflight_steps",
        lambda state, request: detach_from_inflight_steps(state, request, pins_blocks=False),
    )
    request = load_into_the_blocks_of_a_request_that_has_left(ahead)
    ahead.run()
    with pytest.raises(AssertionError):
        ahead.assert_right(request, 1)


def test_a_block_is_a_hit_once_its_last_token_is_known(make_world):
    world = make_world(block_size=4, hash_block_size=4, async_scheduling=True)
    request = world.add("a", 6, max_tokens=8)
    while request.num_computed_tokens < 8:
        world.step()
    assert world.manager.num_cached_tokens("a") == 4  # the eighth token is being chosen or computed
    world.step()
    world.step()
    assert world.manager.num_cached_tokens("a") == 8
    world.run()
    world.assert_right(request, 8)


def test_a_preempted_request_chooses_its_token_again(make_world):
    world = make_world(num_blocks=6, block_size=4, hash_block_size=4, enable_caching=False, async_scheduling=True)
    requests = [world.add(name, 7, max_tokens=9) for name in "ab"]
    world.run()
    assert sum(request.num_preemptions for request in requests) > 0
    for request in requests:
        world.assert_right(request, 9)
    world.assert_clean()


def test_a_request_is_no_victim_of_its_own_next_step(make_world):
    world = make_world(num_blocks=6, block_size=4, hash_block_size=4, async_scheduling=True)
    pool = world.manager.block_pool
    held = pool.get_new_blocks(2)  # as by loads that take their time
    request = world.add("a", 12, max_tokens=4)
    for _ in range(8):
        world.step()
    assert len(world.tokens["a"]) == 1
    assert request.num_preemptions == 1
    pool.free_blocks(held)
    world.run()
    world.assert_right(request, 4)
    world.assert_clean()


def test_a_request_with_a_handoff_waits_for_every_token(make_world, some_handoff):
    world = make_world(with_connector=True, async_scheduling=True)
    world.script.keep.add("a")
    world.script.handoffs["a"] = some_handoff
    request = world.add("a", 20, max_tokens=3, needs_handoff=True)
    while world.scheduler.has_unfinished_requests():
        world.step()
        assert request.num_in_flight_tokens in (0, 20, 1)
        assert request.num_computed_tokens < request.num_tokens + 1
    assert not world.held_blocks()
    world.complete_send("a")
    world.step()
    world.assert_clean()


def test_an_id_may_be_used_again_while_its_first_step_is_under_way(make_world):
    world = make_world(async_scheduling=True)
    world.add("a", 20, max_tokens=9)
    world.step()
    world.step()
    world.abort("a")
    del world.tokens["a"]
    request = world.add("a", 30, max_tokens=5)
    world.run()
    world.assert_right(request, 5)
    world.assert_clean()


def test_blocks_of_a_synchronous_load_are_no_hit_while_its_step_is_in_flight(make_world, remote):
    world = make_world(with_connector=True, async_scheduling=True)
    world.script.remote["a"] = remote(31, is_async=False)
    request = world.add("a", 32, max_tokens=20)
    world.step()
    world.schedule()
    pool = world.manager.block_pool
    assert world.last.num_scheduled_tokens == {"a": 1}
    assert len(pool.cached_blocks) == 0
    world.finish_step()
    assert len(pool.cached_blocks) == 2
    world.run()
    world.assert_right(request, 20)
    world.assert_clean()


def test_bad_block_is_not_sealed_by_the_step_of_an_ended_request(make_world, remote):
    world = make_world(with_connector=True, async_scheduling=True)
    prompt, pool = world.prompt(64), world.manager.block_pool
    request = world.add("a", prompt[:32], max_tokens=40)
    for _ in range(3):
        world.step()
    bad = world.manager.get_block_ids("a")[0][0]
    world.script.remote["b"] = remote(63, is_async=False)
    world.add("b", prompt, kv_load_failure_policy="fail")
    world.schedule()
    assert bad in world.manager.get_block_ids("b")[0]
    world.spoil(bad)
    world.script.report.invalid_block_ids.add(bad)
    world.finish_step()
    assert world.ends == {"b": "error"}
    world.schedule()
    assert world.last.num_scheduled_tokens == {"a": 34}
    world.finish_step()
    assert pool.seals.sealed_generation(bad) == BROKEN, "it is being computed again"
    world.run()
    world.assert_right(request, 40)
    world.assert_clean()
