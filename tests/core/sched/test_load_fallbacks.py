"""KV that could not be loaded: which policy decides about a request, and what is reported."""

import pytest

from core.request import RequestStatus
from core.wire.messages import TransferUsage

USAGE = TransferUsage(transport="fake", transferred_tokens=32, transferred_bytes=256, verified_blocks=2)


@pytest.fixture
def world(loading_world):
    return loading_world


@pytest.fixture
def load(world, remote):
    def start(request_id: str, prompt, num_remote: int, **new):
        world.script.remote[request_id] = remote(num_remote)
        request = world.add(request_id, prompt, **new)
        world.step()
        assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        return request

    return start


def block_ids(world, request_id: str) -> list[int]:
    return world.manager.get_block_ids(request_id)[0]


# ---- the policy that decides -------------------------------------------------------------------------------------------


def test_a_requests_own_policy_counts(world, load, make_world, remote, load_error):
    load("a", 40, 32, kv_load_failure_policy="fail")
    world.fail_load("a")
    (output,) = world.step()
    assert (output.finish_reason, output.error) == ("error", load_error)
    world.assert_clean()
    strict = make_world(with_connector=True, kv_load_failure_policy="fail")
    strict.script.remote["b"] = remote(32)
    request = strict.add("b", 40, kv_load_failure_policy="recompute")
    strict.step()
    strict.fail_load("b")
    strict.run()
    strict.assert_right(request, 4)


def test_policies_differ_among_those_that_share_an_invalid_block(world):
    prompt = world.prompt(40)
    world.add("a", prompt, max_tokens=20, kv_load_failure_policy="fail")
    second = world.add("b", prompt, max_tokens=20)
    third = world.add("c", prompt, max_tokens=20)
    world.step()
    world.spoil(block_ids(world, "b")[0])
    world.script.report.invalid_block_ids = {block_ids(world, "b")[0]}
    world.step()
    assert world.ends == {"a": "error"}
    assert (second.num_computed_tokens, third.num_computed_tokens) == (0, 32)
    world.run()
    assert world.tokens["b"] == world.tokens["c"] == world.expected(prompt, 20)
    world.assert_clean()


# ---- what the first output reports -------------------------------------------------------------------------------------


def test_first_output_says_what_was_recomputed_and_why(world, load):
    load("a", 40, 32)
    world.fail_load("a")
    world.script.report.transfer_usage["a"] = USAGE
    world.step()
    (first,) = world.step()
    (second,) = world.step()
    usage = first.transfer_usage
    assert (usage.transport, usage.verified_blocks, usage.recomputed_tokens, usage.fallback_reason) == (
        "fake",
        2,
        32,
        "peer_lost",
    )
    assert second.transfer_usage is None


def test_cost_that_is_reported_after_the_failure_does_not_hide_it(world, load):
    load("a", 70, 64)
    ids = block_ids(world, "a")
    world.script.report.invalid_block_ids = {ids[2]}
    world.step()
    world.complete_load("a", USAGE)
    world.spoil(ids[2])
    world.step()
    (output,) = world.step()
    assert output.transfer_usage.transport == "fake"
    assert output.transfer_usage.recomputed_tokens == 32
    assert output.transfer_usage.fallback_reason == "rejected"


def test_reason_comes_from_the_error_of_the_request(world, load, load_error):
    load("a", 70, 64)
    world.end_load_partly("a", bad=[2], error=load_error)
    world.step()
    (output,) = world.step()
    assert output.transfer_usage.fallback_reason == "peer_lost"
    assert output.transfer_usage.recomputed_tokens == 32


@pytest.mark.parametrize("is_lost", [False, True])
def test_load_after_a_preemption_does_not_replace_what_was_told_of_the_first(make_world, remote, is_lost):
    world = make_world(num_blocks=8, with_connector=True, policy="priority")
    world.script.remote["a"] = remote(32)
    request = world.add("a", 44, max_tokens=30, priority=9)
    world.step()
    world.complete_load("a", USAGE)
    costs = []
    while request.num_output_tokens < 2:
        costs += [output.transfer_usage for output in world.step()]
    world.script.remote["a"] = remote(32)
    world.add("b", 40, max_tokens=70, priority=0)  # in the end it needs all blocks
    num_loads = 0
    while not request.status.is_finished:
        costs += [output.transfer_usage for output in world.step() if output.request_id == "a"]
        if "a" in world.script.loading:
            num_loads += 1
            world.fail_load("a") if is_lost else world.complete_load("a", USAGE)
    assert (request.num_preemptions, num_loads) == (1, 1)
    assert list(filter(None, costs)) == [USAGE]
    world.assert_right(request, 30)


def test_prefill_stats_are_a_snapshot_of_the_first_admission(world, load):
    load("a", 40, 32)
    world.fail_load("a")
    world.step()
    (first,) = world.step()
    (second,) = world.step()
    stats = first.prefill_stats
    assert (stats.num_prompt_tokens, stats.num_local_cached_tokens, stats.num_external_cached_tokens) == (40, 0, 32)
    assert second.prefill_stats is None


def test_failures_are_counted_by_reason_and_policy(world, load, remote):
    load("a", 40, 32)
    load("b", 40, 32, kv_load_failure_policy="fail")
    world.fail_load("a")
    world.fail_load("b")
    world.script.remote["c"] = remote(32, is_async=False, is_corrupt=True)
    world.add("c", 40)
    world.step()
    world.step()
    stats = world.scheduler.make_stats()
    assert stats.num_load_fallbacks == {
        ("peer_lost", "recompute"): 1,
        ("peer_lost", "fail"): 1,
        ("rejected", "recompute"): 1,
    }


def test_a_load_that_fails_progressively_counts_once(world, load):
    load("a", 70, 64)
    ids = block_ids(world, "a")
    for position in (3, 2, 1):
        world.script.report.invalid_block_ids = {ids[position]}
        world.step()
    assert sum(world.scheduler.make_stats().num_load_fallbacks.values()) == 1


def test_tokens_that_are_computed_twice_count_at_most_as_the_prompt(make_world, remote):
    """Most of the prompt is loaded, is bad, is computed here, and is found to be bad once more before the first token."""
    world = make_world(with_connector=True, max_num_batched_tokens=16)
    world.script.remote["a"] = remote(64)
    request = world.add("a", 100)
    world.step()
    world.end_load_partly("a", bad=[0])
    world.step()
    while request.num_computed_tokens < 64:
        world.step()
    first = block_ids(world, "a")[0]
    world.script.report.invalid_block_ids = {first}
    world.spoil(first)
    outputs = []
    while not outputs:
        outputs = world.step()
    assert outputs[0].transfer_usage.recomputed_tokens == 100
    world.run()
    world.assert_right(request, 4)


def test_what_is_lost_after_the_first_token_is_counted_and_not_told(make_world, remote):
    world = make_world(with_connector=True)
    request = world.add("a", 40)
    world.step()
    first = block_ids(world, "a")[0]
    world.spoil(first)
    world.script.report.invalid_block_ids = {first}
    world.step()
    assert world.scheduler.make_stats().num_load_fallbacks == {("rejected", "recompute"): 1}
    assert world.scheduler.state.transfer_usage == {}
    world.run()
    world.assert_right(request, 4)
