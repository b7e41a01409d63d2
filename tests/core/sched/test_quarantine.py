"""Blocks that a transfer may still write are not allocated until it cannot write them any more."""

import pytest

from core.request import RequestStatus


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


def num_quarantined(world) -> int:
    return world.scheduler.make_stats().num_quarantined_blocks


def test_request_continues_in_fresh_blocks_while_late_bytes_arrive(world, load):
    request = load("a", 70, 64, max_tokens=10)
    ids = world.end_load_partly("a", late=[2])
    world.step()
    world.schedule()
    assert world.manager.get_block_ids("a")[0][:2] == ids[:2]
    assert not set(world.manager.get_block_ids("a")[0][2:]) & set(ids[2:3])
    world.finish_step()
    while world.scheduler.has_unfinished_requests():
        world.let_late_bytes_arrive()
        world.step()
        world.assert_sound()
    world.assert_right(request, 10)
    assert num_quarantined(world) == 1
    world.end_quarantine()
    world.step()
    assert num_quarantined(world) == 0
    world.assert_clean()


def test_total_failure_with_reads_in_flight(world, load, load_error):
    request = load("a", 70, 64)
    world.script.report.failed_recving["a"] = load_error
    world.end_load_partly("a", late=[1, 3])
    world.step()
    assert num_quarantined(world) == 2
    world.let_late_bytes_arrive()
    world.run()
    world.assert_right(request, 4)
    assert world.num_used_blocks == 2
    world.end_quarantine()
    world.assert_clean()


def test_failed_request_ends_at_once_and_leaves_only_the_quarantine(world, load, load_error):
    load("a", 70, 64, kv_load_failure_policy="fail")
    world.script.report.failed_recving["a"] = load_error
    ids = world.end_load_partly("a", late=[1, 3])
    (output,) = world.step()
    assert output.error == load_error
    assert world.num_used_blocks == 2
    assert not world.scheduler.requests
    assert not world.scheduler.has_unfinished_requests()
    assert world.scheduler.has_requests()
    other = world.add("b", 300, max_tokens=20)
    while world.scheduler.has_unfinished_requests():
        world.step()
        world.let_late_bytes_arrive()
        assert not {ids[1], ids[3]} & set(world.manager.get_block_ids("b")[0])
    world.assert_right(other, 20)
    world.end_quarantine()
    world.assert_clean()


def test_engine_goes_on_stepping_until_the_quarantine_has_ended(world, load, load_error):
    load("a", 70, 64, kv_load_failure_policy="fail")
    world.script.report.failed_recving["a"] = load_error
    world.end_load_partly("a", late=[1, 3])
    world.step()
    world.step()  # tells the runner of the end
    assert world.scheduler.has_requests()
    world.end_quarantine()
    world.step()
    assert not world.scheduler.has_requests()


def test_aborted_load_ends_at_once_and_leaves_only_the_quarantine(world, load):
    load("a", 70, 64)
    world.abort("a")
    assert world.num_used_blocks == 4
    world.end_load_partly("a", late=[0, 1])
    world.step()
    assert not world.scheduler.requests
    stats = world.scheduler.make_stats()
    assert (stats.num_quarantined_blocks, stats.num_parked_blocks, stats.num_loading_blocks) == (2, 0, 0)
    world.end_quarantine()
    world.assert_clean()


def test_no_block_counts_twice(world, load):
    load("a", 70, 64)
    world.end_load_partly("a", late=[2])
    world.step()  # the load has ended, its request has not been looked at
    stats = world.scheduler.make_stats()
    assert (stats.num_loading_blocks, stats.num_quarantined_blocks) == (3, 1)


def test_block_is_free_again_before_the_request_is_looked_at(world, load):
    """Then it may as well be written in place."""
    request = load("a", 70, 64)
    ids = world.end_load_partly("a", late=[2])
    world.step()
    world.end_quarantine()
    world.schedule()
    world.finish_step()
    assert num_quarantined(world) == 0
    world.run()
    world.assert_right(request, 4)
    assert ids
    world.assert_clean()


def test_begin_and_end_in_one_report_keep_nothing(world, load):
    request = load("a", 70, 64)
    ids = world.end_load_partly("a", late=[2])
    world.script.report.unquarantined_block_ids = {ids[2]}
    world.run()
    assert num_quarantined(world) == 0
    world.assert_right(request, 4)
    world.assert_clean()


def test_quarantined_block_is_no_hit(make_world, remote):
    world = make_world(with_connector=True)
    request = world.add("a", 40, max_tokens=20)
    world.step()
    block_id = world.manager.get_block_ids("a")[0][0]
    world.script.report.quarantined_block_ids = {block_id}
    world.step()
    assert world.manager.block_pool.blocks[block_id].block_hash is None
    world.let_late_bytes_arrive()
    world.run()
    world.assert_right(request, 20)
    world.end_quarantine()
    world.assert_clean()


def test_request_waits_for_blocks_that_are_quarantined(make_world, remote):
    world = make_world(num_blocks=6, with_connector=True)
    world.script.remote["a"] = remote(64)
    request = world.add("a", 70)
    world.step()
    world.end_load_partly("a", late=[1, 2])
    for _ in range(3):
        world.step()
        assert world.last.num_scheduled_tokens == {}
    world.end_quarantine()
    world.step()
    world.step()
    assert world.last.num_scheduled_tokens == {"a": 54}
    world.run()
    world.assert_right(request, 4)
    world.assert_clean()


def test_ids_that_mean_nothing_are_counted(world):
    request = world.add("a", 20)
    report = world.script.report
    report.quarantined_block_ids = {-1, 0, 10**6}
    report.unquarantined_block_ids = {-1, 5}
    world.run()
    assert world.scheduler.make_stats().num_ignored_reports == 5
    world.assert_right(request, 4)
    world.assert_clean()


def test_block_is_quarantined_once_however_often_it_is_reported(world, load):
    load("a", 70, 64)
    ids = world.end_load_partly("a", late=[2])
    world.step()
    world.script.report.quarantined_block_ids = {ids[2]}
    world.step()
    world.end_quarantine()
    world.run()
    assert world.scheduler.make_stats().num_ignored_reports == 1
    world.assert_clean()


def test_free_block_can_be_quarantined(world):
    """A report after the end of the load still protects the block."""
    world.script.report.quarantined_block_ids = {1}
    world.step()
    request = world.add("a", 40)
    world.step()
    assert 1 not in world.manager.get_block_ids("a")[0]
    world.let_late_bytes_arrive()
    world.run()
    world.assert_right(request, 4)
    world.end_quarantine()
    world.assert_clean()
