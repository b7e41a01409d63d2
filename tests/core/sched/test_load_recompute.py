"""KV that could not be loaded is computed here: the request continues with the right tokens."""

import pytest

from core.request import RequestStatus
from core.sched.remote_kv import settle_failed_load


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


# ---- asynchronous loads, by request ------------------------------------------------------------------------------------


def test_request_whose_load_failed_is_computed_here(world, load):
    request = load("a", 40, 32)
    world.fail_load("a")
    assert world.step() == []
    assert world.schedule().num_scheduled_tokens == {"a": 40}
    world.finish_step()
    world.run()
    world.assert_right(request, 4)
    assert world.ends == {"a": "length"}
    world.assert_clean()


def test_after_a_failed_load_the_connector_is_not_asked_again(world, load, remote):
    request = load("a", 40, 32)
    world.script.remote["a"] = remote(32)  # would offer the same again
    world.fail_load("a")
    world.run()
    world.assert_right(request, 4)
    assert world.script.named("match") == [("a", 0)]
    assert world.script.named("alloc")[1] == ("a", 0, 3)
    world.assert_clean()


def test_connector_that_cannot_tell_does_not_hold_up_a_failed_load(world, load, remote):
    load("a", 40, 32)
    world.script.remote["a"] = remote(None)
    world.fail_load("a")
    world.run()
    assert world.ends == {"a": "length"}


def test_failed_load_keeps_its_local_hits(world, remote):
    prompt = world.prompt(60)
    world.add("a", prompt[:20])
    world.run()
    world.script.remote["b"] = remote(48)
    request = world.add("b", prompt)
    world.step()
    world.fail_load("b")
    world.step()
    assert request.num_computed_tokens == 16
    assert world.holding_ids == ["b"]
    assert world.schedule().num_scheduled_tokens == {"b": 44}
    world.finish_step()
    world.run()
    world.assert_right(request, 4)
    assert len(world.script.named("match")) == 2, "with something valid left the connector is not asked again"
    world.assert_clean()


def test_failure_is_only_acted_upon_when_the_load_has_ended(world, load):
    request = load("a", 40, 32)
    world.fail_load("a", is_terminal=False)
    for _ in range(3):
        world.step()
        assert world.last.num_scheduled_tokens == {}
        assert world.num_used_blocks == 2
    world.end_load("a")  # brings garbage
    world.run()
    world.assert_right(request, 4)
    world.assert_clean()


def test_failed_loads_go_back_to_the_head_of_the_queue_in_their_order(make_world, remote):
    world = make_world(with_connector=True, max_num_batched_tokens=16)
    for name in "abc":
        world.script.remote[name] = remote(32)
        world.add(name, 40)
    world.step()
    for name in "bca":
        world.fail_load(name)
    world.step()
    world.add("d", 40)
    world.step()
    assert (world.running_ids, world.waiting_ids) == (["a"], ["b", "c", "d"])
    world.run()
    world.assert_clean()


def test_failed_load_keeps_its_place_by_priority(make_world, remote):
    world = make_world(with_connector=True, policy="priority", max_num_seqs=1)
    world.script.remote["slow"] = remote(32)
    world.add("slow", 40, priority=5)
    world.step()
    world.add("urgent", 20, priority=0)
    world.add("last", 20, priority=9)
    world.fail_load("slow")
    world.step()
    while "urgent" not in world.ends:
        world.step()
    assert world.waiting_ids in (["slow", "last"], ["last"])
    world.run()
    assert list(world.ends) == ["urgent", "slow", "last"]


def test_idle_engine_continues_after_the_report(world, load):
    """Empty steps change nothing until the report; the step after it computes."""
    load("a", 40, 32)
    for _ in range(3):
        assert world.step() == []
    world.fail_load("a")
    world.step()
    (output,) = world.step()
    assert len(output.new_token_ids) == 1


def test_choices_that_loaded_one_handoff_recompute_it_once(make_world, remote):
    world = make_world(with_connector=True)
    prompt = world.prompt(70)
    for index in range(3):
        world.script.remote[f"a/{index}"] = remote(64)
        world.add(f"a/{index}", prompt, choice_index=index)
    world.step()
    for index in range(3):
        world.fail_load(f"a/{index}")
    world.step()
    outputs = world.step()
    assert world.last.num_scheduled_tokens == {"a/0": 70, "a/1": 6, "a/2": 6}
    assert [output.transfer_usage.recomputed_tokens for output in outputs] == [64, 0, 0]
    assert {output.transfer_usage.fallback_reason for output in outputs} == {"peer_lost"}
    world.run()
    assert all(tokens == world.expected(prompt, 4) for tokens in world.tokens.values())
    world.assert_clean()


def test_full_block_prompt_whose_load_failed(world, load):
    request = load("a", 32, 32, max_tokens=3)
    world.fail_load("a")
    world.run()
    world.assert_right(request, 3)
    world.assert_clean()


def test_load_of_a_whole_sequence_that_failed_needs_blocks_reserved_again(world, load):
    """While it was complete it needed none; others that load must leave it what it lacks now."""
    load("a", 40, 40)
    assert not world.scheduler.state.inflight_prefills
    world.end_load_partly("a", bad=[1], late=[2])
    world.step()
    assert list(world.scheduler.state.inflight_prefills) == ["a"]


def test_abort_in_the_step_of_the_failure(world, load):
    load("a", 40, 32)
    world.schedule()
    world.fail_load("a")
    world.abort("a")
    assert world.finish_step() == []
    world.assert_clean()


def test_abort_between_the_failure_and_the_next_step(world, load):
    load("a", 40, 32)
    world.fail_load("a")
    world.step()
    world.abort("a")
    assert world.num_used_blocks == 0
    world.assert_clean()


def test_reused_id_starts_with_a_clean_record(world, load):
    load("a", 40, 32)
    world.fail_load("a")
    world.step()
    world.abort("a")
    request = load("a", 40, 32)
    world.complete_load("a")
    world.run()
    world.assert_right(request, 4)
    assert len(world.script.named("alloc")) == 3, "nothing was declined"


# ---- asynchronous loads, by block --------------------------------------------------------------------------------------


def test_loaded_blocks_before_the_invalid_one_are_kept(world, load):
    request = load("a", 70, 64)
    world.end_load_partly("a", bad=[2])
    world.step()
    assert request.num_computed_tokens == 32
    assert world.schedule().num_scheduled_tokens == {"a": 38}
    world.finish_step()
    world.run()
    world.assert_right(request, 4)
    world.assert_clean()


def test_blocks_recomputed_in_place_get_a_new_generation_and_become_hits(world, load):
    request = load("a", 70, 64)
    ids = block_ids(world, "a")
    blocks = world.manager.block_pool.blocks
    before = [blocks[block_id].generation for block_id in ids]
    world.end_load_partly("a", bad=[1])
    world.step()
    world.schedule()
    assert block_ids(world, "a")[:4] == ids
    assert [blocks[block_id].generation > old for block_id, old in zip(ids, before, strict=True)] == [False, True, True, True]
    world.finish_step()
    assert [blocks[block_id].block_hash for block_id in ids] == request.block_hashes[:4]


def test_only_the_valid_prefix_becomes_a_hit(world, load):
    request = load("a", 70, 64)
    world.end_load_partly("a", bad=[2])
    world.step()
    assert all(world.manager.block_pool.get_cached_block(value, 0) is None for value in request.block_hashes)
    settle_failed_load(world.scheduler.state, request)
    cached = [world.manager.block_pool.get_cached_block(value, 0) for value in request.block_hashes[:2]]
    assert [block.block_id for block in cached] == block_ids(world, "a")[:2]
    assert world.manager.block_pool.get_cached_block(request.block_hashes[2], 0) is None


@pytest.mark.parametrize("order", [(3, 1), (1, 3), (1, 1)])
def test_progressive_failures_keep_the_earliest(world, load, order):
    request = load("a", 70, 64)
    ids = block_ids(world, "a")
    for position in order:
        world.spoil(ids[position])
        world.script.report.invalid_block_ids = {ids[position]}
        world.step()
        assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert request.num_computed_tokens == 16
    load_ = world.script.loading["a"]
    world.script.report.finished_recving.add("a")
    world.worker.write(load_, False)
    world.spoil(*(ids[position] for position in order))
    del world.script.loading["a"]
    world.step()
    (output,) = world.step()
    assert output.transfer_usage.recomputed_tokens == 48
    world.run()
    world.assert_right(request, 4)
    world.assert_clean()


def test_invalid_partial_last_block(world, load):
    request = load("a", 40, 40)
    world.end_load_partly("a", bad=[2])
    world.step()
    assert request.num_computed_tokens == 32
    world.run()
    world.assert_right(request, 4)
    world.assert_clean()


def test_invalid_last_block_of_a_full_block_prompt(world, load):
    request = load("a", 32, 32)
    world.end_load_partly("a", bad=[1])
    world.step()
    assert world.schedule().num_scheduled_tokens == {"a": 16}
    world.finish_step()
    world.run()
    world.assert_right(request, 4)
    world.assert_clean()


def test_invalid_first_block_gives_all_blocks_back(world, load):
    request = load("a", 40, 32)
    world.end_load_partly("a", bad=[0])
    world.step()
    world.schedule()
    assert world.script.named("match") == [("a", 0)]
    world.finish_step()
    world.run()
    world.assert_right(request, 4)
    world.assert_clean()


def test_invalid_local_hit_of_a_loading_request(world, remote):
    prompt = world.prompt(60)
    world.add("a", prompt[:33])
    world.run()
    world.script.remote["b"] = remote(48)
    request = world.add("b", prompt)
    world.step()
    hit = block_ids(world, "b")[1]
    world.end_load_partly("b", bad=[1])
    world.step()
    assert request.num_computed_tokens == 16
    assert world.manager.block_pool.blocks[hit].block_hash is None
    world.run()
    world.assert_right(request, 4)
    world.assert_clean()


def test_invalid_block_of_a_request_that_waits_loaded(make_world, remote):
    world = make_world(num_blocks=6, with_connector=True)
    world.script.remote["a"] = remote(16)
    request = world.add("a", 64)
    world.step()
    world.add("b", 60, max_tokens=9)
    world.step()
    world.complete_load("a")
    world.step()
    world.step()
    assert request.status is RequestStatus.WAITING
    world.spoil(*block_ids(world, "a"))
    world.script.report.invalid_block_ids = set(block_ids(world, "a"))
    world.run()
    world.assert_right(request, 4)
    world.assert_clean()


# ---- synchronous loads -------------------------------------------------------------------------------------------------


def test_invalid_synchronous_load_is_recomputed_and_its_token_dropped(world, remote):
    world.script.remote["a"] = remote(32, is_async=False, is_corrupt=True)
    request = world.add("a", 40)
    assert world.step() == []
    assert request.status is RequestStatus.RUNNING
    assert request.num_computed_tokens == 0
    assert request.num_output_tokens == 0
    (new,) = world.schedule().scheduled_new_reqs
    assert (new.num_computed_tokens, len(new.token_ids)) == (0, 40), "the runner must forget the token that it has appended"
    world.finish_step()
    world.run()
    world.assert_right(request, 4)
    assert len(world.script.named("match")) == 1
    world.assert_clean()


def test_synchronous_load_keeps_what_is_valid_and_makes_it_a_hit(make_world, remote):
    world = make_world(with_connector=True)
    prompt = world.prompt(60)
    world.add("a", prompt[:20])
    world.run()
    world.script.remote["b"] = remote(48, is_async=False, is_corrupt=True)
    request = world.add("b", prompt)
    world.step()
    assert request.num_computed_tokens == 16
    other = world.add("c", prompt)
    assert world.schedule().num_scheduled_tokens == {"b": 44, "c": 12}, "c hits what b computes in this step"
    world.finish_step()
    world.run()
    world.assert_right(request, 4)
    world.assert_right(other, 4)
    world.assert_clean()


def test_failure_of_one_leaves_the_tokens_of_others_alone(world, remote):
    other = world.add("b", 20, max_tokens=6)
    world.step()
    world.script.remote["a"] = remote(32, is_async=False, is_corrupt=True)
    request = world.add("a", 40)
    (output,) = world.step()
    assert output.request_id == "b"
    world.run()
    world.assert_right(other, 6)
    world.assert_right(request, 4)
    world.assert_clean()


def test_nothing_of_a_failed_synchronous_load_is_a_hit_for_the_same_step(world, remote):
    prompt = world.prompt(50)
    world.script.remote["a"] = remote(32, is_async=False, is_corrupt=True)
    first, second = world.add("a", prompt), world.add("b", prompt)
    world.run()
    world.assert_right(first, 4)
    world.assert_right(second, 4)
    world.assert_clean()


def test_preemption_between_the_failure_and_the_next_step(make_world, remote):
    world = make_world(num_blocks=8, with_connector=True, max_num_batched_tokens=64)
    first = world.add("a", 47, max_tokens=40)
    world.step()
    world.script.remote["b"] = remote(48, is_async=False, is_corrupt=True)
    second = world.add("b", 50, max_tokens=30)
    world.step()
    assert "b" in world.scheduler.state.rolled_back
    world.run()
    assert second.num_preemptions > 0
    world.assert_right(first, 40)
    world.assert_right(second, 30)
    assert world.scheduler.state.rolled_back == set()
    world.assert_clean()


def test_rolled_back_request_that_is_preempted_in_the_step_that_sends_it_again(make_world, remote):
    world = make_world(num_blocks=7, with_connector=True, policy="priority")
    world.script.remote["b"] = remote(32, is_async=False, is_corrupt=True)
    late = world.add("b", 44, max_tokens=8, priority=9)
    first = world.add("a", 46, max_tokens=20, priority=0)
    world.step()
    assert sorted(world.running_ids) == ["a", "b"]
    world.run()
    world.assert_right(first, 20)
    world.assert_right(late, 8)
    world.assert_clean()


def test_abort_of_a_rolled_back_request(world, remote):
    world.script.remote["a"] = remote(32, is_async=False, is_corrupt=True)
    world.add("a", 40)
    world.step()
    world.abort("a")
    assert world.scheduler.state.rolled_back == set()
    world.assert_clean()


def test_garbage_that_no_token_can_be_sampled_from_is_no_failure_of_the_request(world, remote, load_error):
    """A model may well answer garbage with NaN: the request has to compute again, not to end."""
    world.script.remote["a"] = remote(32, is_async=False, is_corrupt=True)
    request = world.add("a", 40)
    world.schedule()
    output = world.model.execute_model(world.last)
    output.failed["a"] = load_error
    output.sampled_token_ids.clear()
    assert world.scheduler.update_from_output(world.last, output) == []
    world.run()
    world.assert_right(request, 4)
    world.assert_clean()


# ---- reported late: blocks that passed for good ------------------------------------------------------------------------


def test_block_that_turns_out_invalid_in_the_middle_of_a_long_prompt(make_world, remote):
    world = make_world(with_connector=True, max_num_batched_tokens=16)
    world.script.remote["a"] = remote(32)
    request = world.add("a", 100)
    world.step()
    world.complete_load("a")
    for _ in range(3):
        world.step()
    ids = block_ids(world, "a")
    world.spoil(ids[1])
    world.script.report.invalid_block_ids = {ids[1]}
    world.step()
    assert request.num_computed_tokens == 16
    world.run()
    world.assert_right(request, 4)
    world.assert_clean()


def test_nothing_that_was_computed_from_an_invalid_block_stays_a_hit(make_world):
    world = make_world(with_connector=True)
    prompt = world.prompt(70)
    request = world.add("a", prompt, max_tokens=20)
    world.add("b", [*prompt[:32], *range(40)])  # builds on the same block, and is gone
    world.step()
    while "b" not in world.ends:
        world.step()
    world.script.report.invalid_block_ids = {block_ids(world, "a")[1]}
    world.step()
    world.add("c", [*prompt[:32], *range(40)], max_tokens=1)
    world.schedule()
    assert world.last.num_scheduled_tokens["c"] == 72 - 32, "two blocks that a has or computes in this step, and no more"
    world.finish_step()
    world.run()
    world.assert_right(request, 20)
