"""Waiting requests: which get blocks, in which order, and the calls to the connector."""

import pytest

from core.kv.stats import PrefixCacheStats
from core.request import PrefillStats, RequestStatus
from core.wire.sampling import SamplingParams


@pytest.fixture
def load(loading_world, remote):
    """Add a request whose first ``num_remote`` tokens are loaded, and start the load."""

    def start(request_id: str, num_tokens: int, num_remote: int, **new):
        loading_world.script.remote[request_id] = remote(num_remote)
        return loading_world.add(request_id, num_tokens, **new)

    return start


# ---- the gate


def test_request_is_admitted_only_if_all_its_tokens_fit(make_world):
    world = make_world(num_blocks=6, max_num_batched_tokens=20)
    world.add("a", 40, max_tokens=2)  # three of five blocks
    world.step()
    world.step()
    world.add("b", 33)  # three blocks: a chunk of one would fit, the whole does not
    world.step()
    assert world.last.num_scheduled_tokens == {"a": 1}
    assert world.waiting_ids == ["b"]
    assert world.num_blocks_of("b") == 0
    world.run()
    assert set(world.ends) == {"a", "b"}


def test_head_of_the_queue_without_blocks_holds_up_those_after_it(make_world):
    world = make_world(num_blocks=6)
    world.add("a", 40, max_tokens=9)
    world.step()
    world.add("large", 40)
    world.add("small", 5)
    world.step()
    assert world.waiting_ids == ["large", "small"]


def test_watermark_keeps_blocks_free_beside_running_requests_only(make_world):
    world = make_world(num_blocks=11, watermark=0.3)  # three blocks
    world.add("a", 16 * 8, max_tokens=2)  # eight of ten: alone it may
    world.step()
    assert world.running_ids == ["a"]
    world.add("b", 5)
    world.step()
    assert world.waiting_ids == ["b"]


def test_failed_admission_changes_no_reference(make_world):
    world = make_world(num_blocks=6)
    prompt = world.prompt(79)
    world.add("a", prompt[:40], max_tokens=30)
    world.step()
    used = world.num_used_blocks
    world.add("b", prompt)
    world.step()
    assert world.waiting_ids == ["b"]
    assert world.num_used_blocks == used


# ---- the connector


def test_connector_sees_new_requests_once_and_the_manager_before(loading_world):
    loading_world.add("a")
    loading_world.run()
    assert loading_world.script.calls[0] == ("bind", loading_world.manager)
    assert loading_world.script.named("on_new_request") == [("a",)]


def test_connector_is_asked_beyond_the_local_hit(make_world):
    world = make_world(with_connector=True)
    prompt = world.prompt(40)
    world.add("a", prompt)
    world.run()
    world.script.calls.clear()
    world.add("b", prompt)
    world.step()
    assert world.script.named("match") == [("b", 32)]


def test_connector_learns_of_every_admission_also_without_a_load(loading_world):
    loading_world.add("a", 20)
    loading_world.step()
    assert loading_world.script.named("alloc") == [("a", 0, 2)]


def test_connector_is_told_all_blocks_not_only_new_ones(make_world, remote):
    world = make_world(with_connector=True)
    prompt = world.prompt(60)
    world.add("a", prompt[:40])
    world.run()
    world.script.calls.clear()
    world.script.remote["b"] = remote(48)
    world.add("b", prompt)
    world.step()
    assert world.script.named("alloc") == [("b", 16, 3)]


def test_connector_that_cannot_tell_yet_is_asked_again(loading_world, remote):
    world = loading_world
    world.script.remote["a"] = remote(None)
    world.add("a", 20)
    world.add("b", 20)
    world.step()
    assert world.running_ids == ["b"]
    assert world.num_blocks_of("a") == 0
    world.script.remote["a"] = remote(0)
    world.step()
    assert world.running_ids == ["b", "a"]
    assert [call[0] for call in world.script.named("match")] == ["a", "b", "a"]


def test_connector_is_not_asked_while_no_slot_is_free(make_world):
    world = make_world(with_connector=True, max_num_seqs=1)
    world.add("a", max_tokens=9)
    world.step()
    world.add("b")
    world.script.calls.clear()
    world.step()
    assert world.script.named("match") == []


def test_connector_gets_a_message_in_empty_steps(loading_world):
    loading_world.step()
    assert loading_world.script.named("meta") == [(set(), 0)]
    assert loading_world.last.kv_connector_metadata is not None


def test_end_of_a_request_reaches_the_connector_with_an_empty_step(loading_world):
    loading_world.add("a", max_tokens=1)
    loading_world.step()
    loading_world.step()
    assert loading_world.last.total_num_scheduled_tokens == 0
    assert loading_world.script.named("meta")[-1] == ({"a"}, 0)


def test_prompt_logprobs_refuse_external_tokens(loading_world, remote):
    world = loading_world
    world.script.remote["a"] = remote(16)
    world.add("a", 20, sampling=SamplingParams(max_tokens=2, prompt_logprobs=1))
    world.step()
    assert world.last.num_scheduled_tokens == {"a": 20}
    assert world.script.named("alloc") == [("a", 0, 2)]


# ---- synchronous loads


def test_synchronous_load_runs_in_the_same_step(loading_world, remote):
    world = loading_world
    world.script.remote["a"] = remote(16, is_async=False)
    request = world.add("a", 20, max_tokens=3)
    output = world.schedule()
    assert output.has_sync_kv_loads
    assert output.num_scheduled_tokens == {"a": 4}
    world.finish_step()
    world.run()
    assert world.tokens["a"] == world.expected(request.all_token_ids[:20].tolist(), 3)


def test_step_without_a_load_has_no_synchronous_loads(loading_world):
    loading_world.add("a")
    assert not loading_world.schedule().has_sync_kv_loads


def test_synchronous_load_of_everything_leaves_the_last_token(loading_world, remote):
    world = loading_world
    world.script.remote["a"] = remote(32, is_async=False)
    request = world.add("a", 32, max_tokens=3)
    assert world.schedule().num_scheduled_tokens == {"a": 1}
    world.finish_step()
    world.run()
    assert world.tokens["a"] == world.expected(request.all_token_ids[:32].tolist(), 3)


def test_synchronously_loaded_blocks_are_hits_only_after_the_step(make_world, remote):
    world = make_world(with_connector=True)
    prompt = world.prompt(40)
    world.script.remote["a"] = remote(32, is_async=False)
    world.add("a", prompt, max_tokens=9)
    world.add("b", prompt, max_tokens=9)
    assert world.schedule().num_scheduled_tokens == {"a": 8, "b": 40}
    world.finish_step()
    world.add("c", prompt, max_tokens=9)
    assert world.schedule().num_scheduled_tokens["c"] == 8
    world.finish_step()
    world.run()
    assert world.tokens["a"] == world.tokens["b"] == world.tokens["c"] == world.expected(prompt, 9)


def test_synchronously_loaded_blocks_become_hits(make_world, remote):
    world = make_world(with_connector=True)
    prompt = world.prompt(40)
    world.script.remote["a"] = remote(32, is_async=False)
    world.add("a", prompt, max_tokens=1)
    world.step()
    world.add("b", prompt, max_tokens=1)
    assert world.schedule().num_scheduled_tokens == {"b": 8}
    world.finish_step()
    assert world.tokens["b"] == world.expected(prompt, 1)


# ---- asynchronous loads


def test_asynchronous_load_takes_blocks_but_no_tokens_and_no_slot(make_world, remote):
    world = make_world(with_connector=True, max_num_seqs=1, max_num_batched_tokens=20)
    world.script.remote["a"] = remote(40)
    a = world.add("a", 40)
    world.add("b", 20)
    output = world.schedule()
    assert a.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert a.num_computed_tokens == 40
    assert world.num_blocks_of("a") == 3
    assert output.num_scheduled_tokens == {"b": 20}
    assert [new.request_id for new in output.scheduled_new_reqs] == ["b"]
    assert not output.has_sync_kv_loads
    assert world.holding_ids == ["a"]


def test_load_starts_with_an_empty_step(loading_world, load):
    load("a", 40, 32)
    loading_world.step()
    assert loading_world.last.total_num_scheduled_tokens == 0
    assert list(loading_world.script.loading) == ["a"]


def test_loading_blocks_are_no_hits(make_world, remote):
    world = make_world(with_connector=True)
    prompt = world.prompt(40)
    world.script.remote["a"] = remote(32)
    world.add("a", prompt)
    world.add("b", prompt)
    assert world.schedule().num_scheduled_tokens == {"b": 40}


def test_load_must_not_take_blocks_that_a_prefill_relies_on(make_world, remote):
    world = make_world(num_blocks=11, with_connector=True, max_num_batched_tokens=32, long_prefill_token_threshold=16)
    world.add("prefill", 96)  # six blocks in the end
    world.step()
    world.script.remote["large"] = remote(80)
    world.add("large", 80)
    world.step()
    assert world.num_blocks_of("prefill") == 3  # seven blocks are free, three of them spoken for, "large" takes five
    assert world.waiting_ids == ["large"]
    assert world.script.loading == {}
    world.abort("large")
    world.script.remote["small"] = remote(64)
    world.add("small", 64)
    world.step()
    assert world.num_blocks_of("prefill") == 4  # six are free, two of them spoken for, "small" takes four
    assert list(world.script.loading) == ["small"]


def test_loads_reserve_what_they_will_still_compute(make_world, remote):
    world = make_world(num_blocks=11, with_connector=True)
    world.script.remote["a"] = remote(16)
    world.add("a", 96)  # loads one block, computes five later
    world.script.remote["b"] = remote(80)
    world.add("b", 80)
    world.step()
    assert list(world.script.loading) == ["a"]
    assert world.waiting_ids == ["b"]
    world.complete_load("a")
    for _ in range(6):
        world.step()
        if "b" in world.script.loading:
            world.complete_load("b")
    world.run()
    assert set(world.ends) == {"a", "b"}


# ---- order


def test_skipped_requests_go_back_to_the_front_in_their_order(loading_world, remote):
    world = loading_world
    for name in "abcd":
        world.script.remote[name] = remote(None)
        world.add(name)
    world.add("e", max_tokens=50)
    world.step()
    assert world.waiting_ids == ["a", "b", "c", "d"]
    assert world.running_ids == ["e"]
    world.add("f", max_tokens=50)
    world.script.remote["f"] = remote(None)
    world.step()
    assert world.waiting_ids == ["a", "b", "c", "d", "f"]


def test_skipped_requests_stay_in_front_of_those_not_visited(make_world, remote):
    world = make_world(with_connector=True, max_num_seqs=1)
    for name in "ab":
        world.script.remote[name] = remote(None)
        world.add(name)
    for name in "cde":
        world.add(name)
    world.step()
    assert world.running_ids == ["c"]
    assert world.waiting_ids == ["a", "b", "d", "e"]


def test_loading_requests_keep_their_order(loading_world, load):
    for name in "abcd":
        load(name, 20, 20)
    for _ in range(3):
        loading_world.step()
        assert loading_world.holding_ids == ["a", "b", "c", "d"]
    loading_world.complete_load("c")
    loading_world.step()
    loading_world.step()
    assert loading_world.holding_ids == ["a", "b", "d"]


def test_block_holder_comes_before_older_requests_without_blocks(make_world, remote):
    world = make_world(with_connector=True, max_num_seqs=1)
    world.script.remote["deferred"] = remote(None)
    world.add("deferred")
    world.script.remote["holder"] = remote(20)
    world.add("holder")
    world.step()
    assert world.holding_ids == ["holder"]
    world.complete_load("holder")
    world.step()
    del world.script.remote["deferred"]  # both could run now; there is one slot
    world.step()
    assert world.running_ids == ["holder"]


def test_holder_without_its_next_block_holds_up_all_but_holders(make_world, remote):
    world = make_world(num_blocks=11, with_connector=True, policy="priority", max_num_batched_tokens=512)
    world.script.remote["first"] = remote(16)
    world.add("first", 32, priority=5, max_tokens=2)  # holds one block, needs another
    world.step()
    world.script.remote["second"] = remote(64)
    world.add("second", 144, priority=1, max_tokens=2)  # holds four, needs five more
    world.step()
    assert world.holding_ids == ["second", "first"]
    world.add("filler", 16, priority=0, max_tokens=9)
    world.step()
    assert world.running_ids == ["filler"]  # four blocks are left: too few for "second"
    world.complete_load("second")
    world.complete_load("first")
    world.step()
    world.add("none", 5, priority=0)
    world.step()
    assert world.running_ids == ["filler", "first"]
    assert world.holding_ids == ["second"]
    assert world.waiting_ids == ["none"]
    world.run()
    assert set(world.ends) == {"first", "second", "filler", "none"}


def test_failed_allocation_of_a_holder_keeps_its_blocks_and_place(make_world, remote):
    world = make_world(num_blocks=6, with_connector=True)
    world.script.remote["a"] = remote(16)
    world.add("a", 64, max_tokens=2)
    world.step()
    world.add("b", 60, max_tokens=4)  # takes the other four
    world.step()
    world.complete_load("a")
    world.step()
    world.step()
    assert world.status("a") is RequestStatus.WAITING
    assert world.holding_ids == ["a"]
    assert world.num_blocks_of("a") == 1
    world.run()
    assert set(world.ends) == {"a", "b"}
    world.assert_clean()


# ---- what is counted


def read(world) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the tokens that were looked up and found in the prefix cache, and then by the connector."""
    stats = world.scheduler.make_stats()
    local = stats.num_prefix_queried_tokens, stats.num_prefix_hit_tokens
    return local, (stats.num_external_queried_tokens, stats.num_external_hit_tokens)


def test_prefill_stats_come_once_with_the_first_output(make_world):
    world = make_world(max_num_batched_tokens=32)
    prompt = world.prompt(50)
    world.add("a", prompt)
    world.run()
    world.add("b", prompt)
    (output,) = world.step()
    assert output.prefill_stats == PrefillStats(50, 48, 0)
    assert output.prefill_stats.num_cached_tokens == 48
    (output,) = world.step()
    assert output.prefill_stats is None


def test_prefill_stats_count_external_tokens(loading_world, load):
    world = loading_world
    load("a", 40, 40)
    world.step()
    world.complete_load("a")
    world.step()
    (output,) = world.step()
    assert output.prefill_stats == PrefillStats(40, 0, 40)


def test_prefill_stats_survive_a_preemption_unchanged(make_world):
    world = make_world(num_blocks=5, max_num_batched_tokens=16)
    world.add("a", 15, max_tokens=6)
    world.step()
    b = world.add("b", 40, max_tokens=1)
    for _ in range(3):
        world.step()
    assert b.status is RequestStatus.PREEMPTED
    stats = {}
    while world.scheduler.has_unfinished_requests():
        stats |= {output.request_id: output.prefill_stats for output in world.step() if output.prefill_stats}
    assert stats == {"b": PrefillStats(40, 0, 0)}  # although the second admission hit its own blocks
    assert world.manager.prefix_cache_stats.preempted_hits > 0


def test_prefill_stats_never_exceed_the_prompt(world):
    prompt = world.prompt(20)
    output = world.expected(prompt, 30)
    world.add("a", [*prompt, *output])
    world.run()
    world.add("b", prompt, output_token_ids=output[:20], max_tokens=21)
    (out,) = world.step()
    assert out.prefill_stats == PrefillStats(20, 20, 0)


def test_prefix_cache_counts_admissions_and_preempted_ones_apart(make_world):
    world = make_world(num_blocks=3)
    world.add("a", 16, max_tokens=2)
    world.add("b", 16, max_tokens=2)
    world.step()
    assert world.manager.prefix_cache_stats == PrefixCacheStats(requests=2, queries=32)
    world.run()
    assert world.manager.prefix_cache_stats == PrefixCacheStats(2, 32, 0, preempted_requests=1, preempted_queries=17)


def test_connector_counts_what_it_was_asked_beyond_local_hits(make_world, remote):
    world = make_world(with_connector=True)
    prompt = world.prompt(60)
    world.add("a", prompt[:20])
    world.run()
    assert read(world) == ((20, 0), (20, 0))
    world.script.remote["b"] = remote(48)
    world.add("b", prompt)
    world.step()
    assert read(world) == ((80, 16), (64, 32))
    world.complete_load("b")
    world.run()
    assert read(world) == ((80, 16), (64, 32))


def test_deferred_and_failed_admissions_are_not_counted(make_world, remote):
    world = make_world(num_blocks=4, with_connector=True)
    world.script.remote["a"] = remote(None)
    world.add("a")
    world.add("b", 40, max_tokens=9)
    world.add("c", 40)
    world.step()
    assert world.manager.prefix_cache_stats.requests == 1
    world.step()
    assert world.manager.prefix_cache_stats.requests == 1


def test_request_without_prefix_lookup_is_not_counted(world):
    world.add("a", 20, sampling=SamplingParams(max_tokens=1, prompt_logprobs=1))
    world.step()
    assert world.manager.prefix_cache_stats.requests == 0


def test_prefill_stats_tell_how_long_the_request_waited_for_its_first_admission(make_world):
    world = make_world(max_num_seqs=1)
    world.add("a", max_tokens=2)
    world.step()
    world.add("b")
    world.clock.advance(1.5)
    world.step()
    world.clock.advance(2.0)
    (output,) = world.step()
    assert output.request_id == "b"
    assert output.prefill_stats.queue_s == pytest.approx(3.5)


def test_request_taken_over_counts_no_more_loaded_prompt_tokens_than_it_has(loading_world, load):
    prompt, output = loading_world.prompt(40), loading_world.expected(loading_world.prompt(40), 30)
    request = load("a", prompt, 64, output_token_ids=output[:30], max_tokens=40)
    loading_world.step()
    assert request.prefill_stats == PrefillStats(40, 0, 40)
