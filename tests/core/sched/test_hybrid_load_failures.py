"""Loads that fail in a cache of several groups: back to where every group holds what it needs, then the right tokens."""

import pytest

from core.testing.hash_model import HashAttention

WINDOW = 40  # tokens; blocks have 16
HYBRIDS = {
    "window first": (HashAttention(window=WINDOW), HashAttention()),
    "window last": (HashAttention(), HashAttention(window=WINDOW)),
    "two windows": (HashAttention(window=17), HashAttention(), HashAttention(window=WINDOW)),
    "chunks": (HashAttention(), HashAttention(chunk=64)),
}


@pytest.fixture(params=HYBRIDS)
def hybrid(request, make_world):
    return make_world(with_connector=True, attentions=HYBRIDS[request.param])


def window_groups(world):
    return [group for group, attention in enumerate(world.config.attentions) if not attention.sees_all]


def start_load(world, remote, num_tokens, num_loaded, request_id="r"):
    request = world.add(request_id, world.prompt(num_tokens, seed=len(request_id) + ord(request_id[-1])))
    world.script.remote[request_id] = remote(num_loaded)
    world.step()
    return request


@pytest.mark.parametrize("num_loaded", [30, 100, 150])
def test_load_of_several_groups_brings_the_tokens(hybrid, remote, num_loaded):
    request = start_load(hybrid, remote, 150, num_loaded)
    hybrid.complete_load("r")
    hybrid.run()
    hybrid.assert_right(request, 4)
    hybrid.assert_clean()


def test_loads_of_a_window_leave_out_tokens_without_attention(hybrid, remote):
    start_load(hybrid, remote, 150, 140)
    tables = hybrid.manager.get_block_ids("r")
    for group in window_groups(hybrid):
        assert tables[group][0] == 0
        assert tables[group][-1] != 0


@pytest.mark.parametrize("position", [0, 4, 8])
def test_bad_full_group_block_costs_later_blocks_and_freed_window_blocks(hybrid, remote, position):
    full = next(group for group, attention in enumerate(hybrid.config.attentions) if attention.sees_all)
    request = start_load(hybrid, remote, 150, 144)
    hybrid.end_load_partly("r", bad=[position], group_id=full)
    hybrid.step()
    hybrid.assert_sound()
    hybrid.run()
    hybrid.assert_right(request, 4)
    hybrid.assert_clean()


def test_bad_block_of_a_window_is_computed_again(hybrid, remote):
    for group in window_groups(hybrid):
        request = start_load(hybrid, remote, 150, 144, f"group {group}")
        hybrid.end_load_partly(request.request_id, bad=[8], group_id=group)
        hybrid.step()
        hybrid.assert_sound()
        hybrid.run()
        hybrid.assert_right(request, 4)
        hybrid.assert_clean()


def test_late_bytes_of_a_window_hit_no_other_block(hybrid, remote):
    group = window_groups(hybrid)[0]
    request = start_load(hybrid, remote, 150, 144)
    hybrid.end_load_partly("r", late=[8], group_id=group)
    for _ in range(6):
        hybrid.step()
        hybrid.let_late_bytes_arrive()
        hybrid.assert_sound()
    hybrid.end_quarantine()
    hybrid.run()
    hybrid.assert_right(request, 4)
    hybrid.assert_clean()


def test_failed_load_keeps_its_local_hit(hybrid, remote):
    """At the start every group needs nothing; the hit is found again when the request is admitted again."""
    prompt = hybrid.prompt(150)
    first = hybrid.add("first", prompt[:80])
    hybrid.run()
    hybrid.assert_right(first, 4)
    request = hybrid.add("r", prompt)
    hybrid.script.remote["r"] = remote(144)
    hybrid.step()
    num_hit = hybrid.script.named("match")[-1][1]
    assert num_hit >= 64
    hybrid.fail_load("r")
    hybrid.run()
    hybrid.assert_right(request, 4)
    assert hybrid.script.named("match")[-1] == ("r", num_hit)
    assert request.prefill_stats is None
    hybrid.assert_clean()


@pytest.mark.parametrize("num_loaded", [48, 144])
def test_synchronous_load_of_garbage_is_computed_again(hybrid, remote, num_loaded):
    request = hybrid.add("r", 150)
    hybrid.script.remote["r"] = remote(num_loaded, is_async=False, is_corrupt=True)
    hybrid.step()
    hybrid.assert_sound()
    hybrid.run()
    hybrid.assert_right(request, 4)
    hybrid.assert_clean()


def test_request_that_must_not_recompute_ends_with_the_error(hybrid, remote):
    request = hybrid.add("r", 150, kv_load_failure_policy="fail")
    hybrid.script.remote["r"] = remote(144)
    hybrid.step()
    hybrid.end_load_partly("r", bad=[8], group_id=window_groups(hybrid)[0])
    hybrid.run()
    assert request.status.is_finished
    assert "r" not in hybrid.tokens or not hybrid.tokens["r"]
    hybrid.assert_clean()


@pytest.mark.parametrize("is_shared", [True, False])
def test_sealed_blocks_before_the_bad_ones_of_a_failed_load_are_not_rewritten(make_world, remote, is_shared):
    """The window after it is gone, so the request goes back to the start, over blocks that another one may use."""
    world = make_world(with_connector=True, attentions=(HashAttention(), HashAttention(window=20)))
    prompt = world.prompt(150)
    first = world.add("first", prompt[:64], max_tokens=40 if is_shared else 1)
    while "first" not in world.tokens:
        world.step()
    block_ids = world.manager.get_block_ids("first")[0][:4] if is_shared else []
    world.script.remote["second"] = remote(149, is_async=False, is_corrupt=True)
    second = world.add("second", prompt)
    while "second" not in world.scheduler.state.rolled_back:
        world.step()
    world.step()
    assert not set(block_ids) & set(world.manager.get_block_ids("second")[0])
    world.run()
    world.assert_right(first, 40 if is_shared else 1)
    world.assert_right(second, 4)
    world.assert_clean()
