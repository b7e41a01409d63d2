"""Requests whose KV comes from elsewhere: parked, promoted, run."""

import pytest

from core.request import KVConnectorOutput, RequestStatus
from core.sched.remote_kv import promote_loaded_request, update_from_kv_xfer_finished
from core.wire.messages import TransferUsage

USAGE = TransferUsage(transport="fake", transferred_tokens=32, transferred_bytes=256)


@pytest.fixture
def world(loading_world):
    return loading_world


@pytest.fixture
def load(world, remote):
    def start(request_id: str, num_tokens: int, num_remote: int, **new):
        world.script.remote[request_id] = remote(num_remote)
        request = world.add(request_id, num_tokens, **new)
        world.step()
        assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        return request

    return start


def prompt_of(request) -> list[int]:
    return request.all_token_ids[: request.num_prompt_tokens].tolist()


def test_loading_request_waits_until_its_kv_has_arrived(world, load):
    load("a", 40, 32)
    for _ in range(3):
        world.step()
        assert world.last.num_scheduled_tokens == {}
    assert world.status("a") is RequestStatus.WAITING_FOR_REMOTE_KVS


def test_arrival_is_promoted_and_run_in_one_pass(world, load):
    request = load("a", 40, 32)
    world.complete_load("a")
    world.step()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS  # reported, not looked at yet
    assert world.schedule().num_scheduled_tokens == {"a": 8}
    assert request.status is RequestStatus.RUNNING
    world.finish_step()
    world.run()
    assert world.tokens["a"] == world.expected(prompt_of(request), 4)
    world.assert_clean()


def test_runner_sees_a_loaded_request_as_new_with_its_computed_tokens(world, load):
    load("a", 40, 32)
    world.complete_load("a")
    world.step()
    (new,) = world.schedule().scheduled_new_reqs
    assert new.num_computed_tokens == 32
    assert new.block_ids == world.manager.get_block_ids("a")


def test_full_prompt_needs_no_new_block_and_computes_one_token(world, load):
    request = load("a", 32, 32, max_tokens=3)
    assert world.num_blocks_of("a") == 2
    world.complete_load("a")
    world.step()
    assert world.schedule().num_scheduled_tokens == {"a": 1}
    assert world.num_blocks_of("a") == 2
    assert request.num_computed_tokens == 32
    world.finish_step()
    world.run()
    assert world.tokens["a"] == world.expected(prompt_of(request), 3)


def test_all_blocks_of_a_full_prompt_are_cached_before_its_last_token_is_dropped(world, load):
    request = load("a", 32, 32)
    pool = world.manager.block_pool
    world.complete_load("a")
    world.step()
    assert [pool.get_cached_block(block_hash, 0) for block_hash in request.block_hashes] == [None, None]
    assert promote_loaded_request(world.scheduler.state, request)
    assert request.num_computed_tokens == 31
    cached = [pool.get_cached_block(block_hash, 0).block_id for block_hash in request.block_hashes]
    assert cached == world.manager.get_block_ids("a")[0]


def test_prompt_of_one_token_is_loaded_once(world, load):
    request = load("a", 1, 1)
    world.complete_load("a")
    world.step()
    assert world.schedule().num_scheduled_tokens == {"a": 1}
    assert len(world.script.named("match")) == 1
    world.finish_step()
    world.run()
    assert world.tokens["a"] == world.expected(prompt_of(request), 4)
    world.assert_clean()


def test_partial_last_block_is_loaded_and_continued(world, load):
    request = load("a", 40, 40)
    world.complete_load("a")
    world.step()
    assert world.schedule().num_scheduled_tokens == {"a": 1}
    world.finish_step()
    world.run()
    assert world.tokens["a"] == world.expected(prompt_of(request), 4)


def test_connector_is_told_a_second_time_with_nothing_to_load(world, load):
    load("a", 40, 32)
    world.complete_load("a")
    world.step()
    world.step()
    assert world.script.named("alloc") == [("a", 32, 2), ("a", 0, 3)]
    assert len(world.script.named("match")) == 1


def test_loaded_blocks_become_hits_for_others(world, load):
    request = load("a", 40, 32)
    world.complete_load("a")
    world.run()
    world.add("b", prompt_of(request))
    assert world.schedule().num_scheduled_tokens == {"b": 8}
    world.finish_step()
    world.run()
    assert world.tokens["b"] == world.tokens["a"]


def test_continued_request_computes_its_prefilled_token(world, remote):
    """A decode worker: the prompt's KV is loaded, the first token came from the prefill worker."""
    prompt = world.prompt(32)
    tokens = world.expected(prompt, 5)
    world.script.remote["a"] = remote(32)
    world.add("a", prompt, output_token_ids=tokens[:1], max_tokens=5)
    world.step()
    world.complete_load("a")
    world.step()
    assert world.schedule().num_scheduled_tokens == {"a": 1}
    world.finish_step()
    world.run()
    assert world.tokens["a"] == tokens[1:]


def test_preempted_request_may_load_again(make_world, remote):
    world = make_world(num_blocks=4, with_connector=True)
    a = world.add("a", 16, max_tokens=20)
    world.script.remote["b"] = remote(16)
    b = world.add("b", 16, max_tokens=20)
    world.step()
    world.complete_load("b")
    while not b.num_preemptions:
        world.step()
    world.script.remote["b"] = remote(b.num_tokens)
    world.manager.evict_blocks(range(1, 4))
    while "b" not in world.script.loading:
        world.step()
    world.complete_load("b")
    world.step()
    world.step()
    assert b.status is RequestStatus.RUNNING
    world.run()
    assert world.tokens["b"] == world.expected(prompt_of(b), 20)
    assert world.tokens["a"] == world.expected(prompt_of(a), 20)
    world.assert_clean()


def test_cost_of_a_load_goes_out_with_the_first_output_after_it(world, load):
    load("a", 40, 32)
    world.complete_load("a", USAGE)
    assert world.step() == []
    (first,) = world.step()
    (second,) = world.step()
    assert first.transfer_usage == USAGE
    assert second.transfer_usage is None


def test_cost_of_a_load_is_forgotten_with_its_request(world, load):
    load("a", 40, 32)
    world.complete_load("a", USAGE)
    world.step()
    world.abort("a")
    assert world.scheduler.state.transfer_usage == {}


def test_cost_of_a_load_without_its_request_is_forgotten(world, load):
    load("a", 40, 32)
    world.abort("a")
    world.complete_load("a", USAGE)
    world.step()
    assert world.scheduler.state.transfer_usage == {}
    world.assert_clean()


def test_cost_of_a_load_of_an_unknown_request_is_ignored(world):
    world.add("a", 40)
    world.script.report.transfer_usage["gone"] = USAGE
    world.run()
    assert world.scheduler.state.transfer_usage == {}
    assert world.ends == {"a": "length"}


def test_abort_while_loading_keeps_the_blocks_until_the_load_has_ended(world, load):
    load("a", 40, 32)
    assert world.abort("a") == ["a"]
    assert world.num_blocks_of("a") == 2
    assert world.holding_ids == []
    assert world.scheduler.has_requests()
    assert not world.scheduler.has_unfinished_requests()
    assert world.schedule().finished_req_ids == {"a"}
    world.finish_step()
    assert world.num_used_blocks == 2
    world.end_load("a")
    world.step()
    assert world.num_used_blocks == 0
    world.assert_clean()


def test_late_bytes_of_an_aborted_load_hit_no_other_block(make_world, remote):
    world = make_world(num_blocks=6, with_connector=True)
    world.script.remote["a"] = remote(32)
    world.add("a", 40)
    world.step()
    world.abort("a")
    other = world.add("b", 40, max_tokens=5)
    world.step()
    world.end_load("a")  # brings garbage
    world.run()
    assert world.tokens["b"] == world.expected(prompt_of(other), 5)
    world.assert_clean()


def test_abort_after_the_report_frees_at_once(world, load):
    load("a", 40, 32)
    world.complete_load("a")
    world.step()
    world.abort("a")
    assert world.num_used_blocks == 0
    world.assert_clean()


def test_reused_id_waits_for_its_own_load(world, load):
    load("a", 40, 32)
    world.complete_load("a")
    world.step()
    world.abort("a")
    request = load("a", 40, 32)
    world.step()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    world.complete_load("a")
    world.run()
    assert world.tokens["a"] == world.expected(prompt_of(request), 4)


def test_abort_of_a_loaded_request_that_waits_for_a_slot(make_world, remote):
    world = make_world(with_connector=True, max_num_seqs=2, num_blocks=6)
    world.script.remote["a"] = remote(16)
    world.add("a", 64)
    world.step()
    world.add("b", 60, max_tokens=9)
    world.step()
    world.complete_load("a")
    world.step()
    world.step()
    assert world.status("a") is RequestStatus.WAITING
    world.abort("a")
    assert world.num_used_blocks == world.num_blocks_of("b")
    world.run()
    world.assert_clean()


def test_connector_learns_the_blocks_of_an_aborted_load(world, load):
    load("a", 40, 32)
    block_ids = world.manager.get_block_ids("a")
    world.abort("a")
    assert world.script.named("finished") == [("a", block_ids, RequestStatus.FINISHED_ABORTED)]


def test_unexpected_ends_of_loads_are_counted_and_ignored(world, load):
    load("a", 40, 32)
    world.add("b")
    world.step()
    world.complete_load("a")
    world.script.report.finished_recving |= {"nobody", "b"}
    world.step()
    for _ in range(2):  # before and after the request runs
        world.script.report.finished_recving.add("a")
        world.step()
    assert world.scheduler.make_stats().num_ignored_reports == 4
    world.run()
    assert world.ends == {"a": "length", "b": "length"}


def test_repeated_end_before_the_first_is_processed_is_counted_only(world, load):
    request = load("a", 40, 32)
    world.complete_load("a")
    world.step()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    update_from_kv_xfer_finished(world.scheduler.state, KVConnectorOutput(finished_recving={"a"}))
    assert world.scheduler.make_stats().num_ignored_reports == 1
    assert world.num_blocks_of("a") == 2
    world.run()
    assert world.tokens["a"] == world.expected(prompt_of(request), 4)
    world.assert_clean()


def test_repeated_end_of_a_load_keeps_the_blocks_of_a_finished_request(world, load):
    load("a", 40, 32)
    world.scheduler.connector.request_finished = lambda request, block_ids: (True, None)
    world.abort("a")
    world.end_load("a")
    world.step()
    world.script.report.finished_recving.add("a")
    world.step()
    assert world.num_used_blocks == 2
    assert world.scheduler.make_stats().num_ignored_reports == 1
    world.complete_send("a")
    world.step()
    world.assert_clean()


def test_invalid_blocks_outside_the_pool_are_counted_and_ignored(world):
    world.add("a")
    world.step()
    world.script.report.invalid_block_ids |= {-1, 0, 10**6}
    world.run()
    assert world.ends == {"a": "length"}
    assert world.scheduler.make_stats().num_ignored_reports == 3


def test_loads_take_part_in_gauges(world, load):
    load("a", 40, 32)
    load("b", 40, 32)
    world.add("c", 20)
    world.step()
    stats = world.scheduler.make_stats()
    assert (stats.num_running, stats.num_waiting, stats.num_loading) == (1, 0, 2)
    assert (stats.num_loading_blocks, stats.num_parked_blocks) == (4, 0)
    assert stats.kv_cache_usage == pytest.approx(6 / 64)
    world.abort("a")
    stats = world.scheduler.make_stats()
    assert (stats.num_loading, stats.num_loading_blocks, stats.num_parked_blocks) == (1, 2, 2)
