"""Ends of requests past the connector: handoff and delayed frees."""

import pytest

from core.errors import InvalidRequest, NoWorker
from core.request import RequestStatus


@pytest.fixture
def world(loading_world):
    return loading_world


def test_last_output_of_a_prefilled_request_carries_its_handoff(world, some_handoff):
    world.script.keep.add("a")
    world.script.handoffs["a"] = some_handoff
    request = world.add("a", 40, max_tokens=1, needs_handoff=True)
    (output,) = world.step()
    assert output.finish_reason == "length"
    assert output.kv_handoff is some_handoff
    assert output.new_token_ids == world.expected(request.all_token_ids[:40].tolist(), 1)


def test_kept_blocks_are_freed_when_the_sending_has_ended(world):
    world.script.keep.add("a")
    world.add("a", 40, max_tokens=1)
    world.step()
    assert world.scheduler.has_requests()
    assert not world.scheduler.has_unfinished_requests()
    for _ in range(3):
        world.step()
        assert world.num_used_blocks == 3
    world.complete_send("a")
    world.step()
    assert world.num_used_blocks == 0
    world.assert_clean()


def test_kept_blocks_are_not_reused(make_world):
    world = make_world(num_blocks=4, with_connector=True)
    world.script.keep.add("a")
    world.add("a", 40, max_tokens=1)
    world.step()
    kept = {block_id: world.model.read_block(block_id) for block_id in world.manager.get_block_ids("a")[0]}
    world.add("b", 40)
    world.step()
    assert world.waiting_ids == ["b"]
    assert all(world.model.read_block(block_id) == content for block_id, content in kept.items())
    world.complete_send("a")
    world.run()
    assert world.ends["b"] == "length"


def test_kept_blocks_count_as_parked(world):
    world.script.keep.add("a")
    world.add("a", 40, max_tokens=1)
    world.step()
    assert world.scheduler.make_stats().num_parked_blocks == 3


def test_blocks_that_kept_requests_share_count_once(world):
    common = world.prompt(32)
    for name in ("a", "b"):
        world.script.keep.add(name)
        world.add(name, [*common, *world.prompt(8, seed=ord(name))], max_tokens=1)
    world.step()
    assert world.manager.get_block_ids("a")[0][:2] == world.manager.get_block_ids("b")[0][:2]
    assert world.scheduler.make_stats().num_parked_blocks == world.num_used_blocks == 4


def test_finished_id_reaches_the_worker_side_although_the_blocks_are_kept(world):
    world.script.keep.add("a")
    world.add("a", 40, max_tokens=1)
    world.step()
    assert world.schedule().finished_req_ids == {"a"}


def test_connector_gets_the_blocks_of_computed_tokens_only(world):
    world.add("a", 32, max_tokens=1)
    world.step()
    ((request_id, block_ids, status),) = world.script.named("finished")
    assert (request_id, status) == ("a", RequestStatus.FINISHED_LENGTH_CAPPED)
    assert [len(group) for group in block_ids] == [2]


def test_connector_gets_no_blocks_of_a_request_that_never_ran(world):
    world.add("a", 32)
    world.abort("a")
    assert world.script.named("finished") == [("a", ([],), RequestStatus.FINISHED_ABORTED)]


def test_connector_is_asked_once_per_request(world):
    for name in "abc":
        world.add(name, max_tokens=2)
    world.step()
    world.abort("b")
    world.run()
    world.abort("a", "b", "c")
    assert sorted(call[0] for call in world.script.named("finished")) == ["a", "b", "c"]


def test_blocks_wait_for_both_the_load_and_the_reader(world, remote):
    world.script.remote["a"] = remote(32)
    world.add("a", 40)
    world.step()
    world.scheduler.connector.request_finished = lambda request, block_ids: (True, None)
    world.abort("a")
    world.end_load("a")
    world.step()
    assert world.num_used_blocks == 2
    world.complete_send("a")
    world.step()
    world.assert_clean()


def test_reader_may_end_before_the_load(world, remote):
    world.script.remote["a"] = remote(32)
    world.add("a", 40)
    world.step()
    world.scheduler.connector.request_finished = lambda request, block_ids: (True, None)
    world.abort("a")
    world.complete_send("a")
    world.step()
    assert world.num_used_blocks == 2
    world.end_load("a")
    world.step()
    world.assert_clean()


def test_id_of_an_ended_request_can_be_used_again_once_its_blocks_are_free(world):
    world.script.keep.add("a")
    world.add("a", 40, max_tokens=1)
    world.step()
    assert world.abort("a") == []
    with pytest.raises(NoWorker, match="a transfer still uses its blocks") as refused:
        world.add("a")
    assert refused.value.retryable
    world.complete_send("a")
    world.step()
    world.add("a")
    with pytest.raises(InvalidRequest, match="in use"):
        world.add("a")


def test_unexpected_end_of_a_sending_is_counted_and_ignored(world):
    world.script.keep.add("a")
    world.add("a", 40, max_tokens=1)
    world.step()
    world.script.report.finished_sending |= {"nobody", "a"}
    world.step()
    world.script.report.finished_sending.add("a")
    world.step()
    assert world.num_used_blocks == 0
    assert world.scheduler.make_stats().num_ignored_reports == 2


def test_requests_end_only_with_a_finished_status(world):
    world.add("a")
    with pytest.raises(AssertionError):
        world.scheduler.finish_requests(["a"], RequestStatus.PREEMPTED)


def test_push_work_of_the_connector_keeps_the_engine_stepping(world):
    assert not world.scheduler.has_requests()
    world.scheduler.connector.has_pending_push_work = lambda: True
    assert world.scheduler.has_requests()
    assert not world.scheduler.has_unfinished_requests()


def test_request_that_ended_before_its_output_has_no_output_with_blocks_kept(world):
    request = world.add("a")
    world.schedule()
    world.scheduler.connector.request_finished = lambda request, block_ids: (True, None)
    world.abort("a")
    assert world.finish_step() == []
    assert request.num_output_tokens == 0
    assert request.status is RequestStatus.FINISHED_ABORTED
    world.complete_send("a")
    world.step()
    world.assert_clean()
