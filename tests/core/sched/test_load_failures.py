"""KV that could not be loaded ends the requests that rely on it, and nobody else."""

import pytest

from core.request import RequestStatus


@pytest.fixture
def world(make_world):
    return make_world(with_connector=True, kv_load_failure_policy="fail")


@pytest.fixture
def load(world, remote):
    def start(request_id: str, num_tokens: int, num_remote: int, **new):
        world.script.remote[request_id] = remote(num_remote)
        request = world.add(request_id, num_tokens, **new)
        world.step()
        return request

    return start


def test_failed_load_ends_the_request_with_the_connectors_error(world, load, load_error):
    load("a", 40, 32)
    world.fail_load("a")
    (output,) = world.step()
    assert output.request_id == "a"
    assert output.finish_reason == "error"
    assert output.error == load_error
    assert output.new_token_ids == []
    assert world.schedule().finished_req_ids == {"a"}
    world.finish_step()
    world.assert_clean()


def test_failed_and_ended_in_one_report_frees_at_once(world, load):
    load("a", 40, 32)
    world.fail_load("a")
    world.step()
    assert world.num_used_blocks == 0
    assert not world.scheduler.requests


def test_blocks_of_a_failed_load_stay_until_it_has_ended(world, load):
    load("a", 40, 32)
    world.fail_load("a", is_terminal=False)
    world.step()
    assert world.ends == {"a": "error"}
    world.step()
    assert world.num_used_blocks == 2
    assert world.scheduler.has_requests()
    world.end_load("a")
    world.step()
    assert world.num_used_blocks == 0
    world.assert_clean()


def test_late_bytes_of_a_failed_load_hit_nobody(make_world, remote):
    world = make_world(num_blocks=6, with_connector=True, kv_load_failure_policy="fail")
    world.script.remote["a"] = remote(32)
    world.add("a", 40)
    world.step()
    world.fail_load("a", is_terminal=False)
    world.step()
    other = world.add("b", 40, max_tokens=5)
    world.step()
    world.end_load("a")
    world.run()
    assert world.tokens["b"] == world.expected(other.all_token_ids[:40].tolist(), 5)


def test_failed_blocks_are_no_hits(world, load):
    request = load("a", 40, 32)
    world.fail_load("a")
    world.step()
    world.add("b", request.all_token_ids.tolist())
    assert world.schedule().num_scheduled_tokens == {"b": 40}


def test_local_hits_of_a_failed_load_stay_hits(make_world, remote):
    world = make_world(with_connector=True, kv_load_failure_policy="fail")
    prompt = world.prompt(60)
    world.add("a", prompt[:20])
    world.run()
    world.script.remote["b"] = remote(48)
    world.add("b", prompt)
    world.step()
    world.fail_load("b")
    world.step()
    world.add("c", prompt)
    assert world.schedule().num_scheduled_tokens == {"c": 44}


def test_failure_leaves_other_requests_alone(world, load):
    other = world.add("b", 20, max_tokens=6)
    load("a", 40, 32)
    world.fail_load("a")
    outputs = world.step()
    assert {output.request_id: output.finish_reason for output in outputs} == {"b": None, "a": "error"}
    world.run()
    assert world.tokens["b"] == world.expected(other.all_token_ids[:20].tolist(), 6)


def test_failure_of_a_load_aborted_meanwhile_says_nothing(world, load):
    load("a", 40, 32)
    world.abort("a")
    world.fail_load("a")
    assert world.step() == []
    world.assert_clean()


def test_failure_of_an_unknown_request_says_nothing(world, load_error):
    world.script.report.failed_recving["nobody"] = load_error
    assert world.step() == []


def test_connector_is_told_the_end_of_a_failed_request_once(world, load):
    load("a", 40, 32)
    world.fail_load("a", is_terminal=False)
    world.step()
    world.end_load("a")
    world.step()
    ((request_id, _, status),) = world.script.named("finished")
    assert (request_id, status) == ("a", RequestStatus.FINISHED_ERROR)


def test_connector_sees_the_report_before_the_failure_is_applied(world, load):
    load("a", 40, 32)
    world.fail_load("a")
    world.script.calls.clear()
    world.step()
    assert [call[0] for call in world.script.calls if call[0] in ("update", "finished")] == ["update", "finished"]


# ---- by block


def test_invalid_block_of_an_asynchronous_load_fails_the_request(world, load):
    load("a", 40, 32)
    world.script.report.invalid_block_ids = {world.manager.get_block_ids("a")[0][1]}
    (output,) = world.step()
    assert output.finish_reason == "error"
    assert output.error.code == "transfer_error"
    assert output.error.retryable
    assert world.num_used_blocks == 2  # the load has not ended
    world.end_load("a")
    world.step()
    world.assert_clean()


def test_invalid_synchronous_load_fails_the_request_and_drops_its_token(world, remote):
    world.script.remote["a"] = remote(32, is_async=False, is_corrupt=True)
    world.add("a", 40)
    (output,) = world.step()
    assert (output.finish_reason, output.new_token_ids) == ("error", [])
    assert world.num_used_blocks == 0
    world.assert_clean()


def test_nothing_behind_an_invalid_block_stays_a_hit(world, remote):
    world.script.remote["a"] = remote(32, is_async=False, is_corrupt=True)
    request = world.add("a", 50)
    world.step()
    world.add("b", request.all_token_ids.tolist())
    assert world.schedule().num_scheduled_tokens == {"b": 50}
    world.finish_step()
    world.run()
    assert world.tokens["b"] == world.expected(request.all_token_ids[:50].tolist(), 4)


def test_blocks_before_the_invalid_one_stay_hits(make_world, remote):
    world = make_world(with_connector=True, kv_load_failure_policy="fail")
    prompt = world.prompt(60)
    world.add("a", prompt[:20])
    world.run()
    world.script.remote["b"] = remote(48, is_async=False, is_corrupt=True)
    world.add("b", prompt)
    world.step()
    assert world.ends["b"] == "error"
    world.add("c", prompt)
    assert world.schedule().num_scheduled_tokens == {"c": 44}


def test_every_request_that_shares_an_invalid_block_fails(world):
    prompt = world.prompt(40)
    world.add("a", prompt, max_tokens=20)
    world.add("b", prompt, max_tokens=20)
    world.add("c", 20, max_tokens=20)
    world.step()
    shared = world.manager.get_block_ids("a")[0][0]
    assert world.manager.get_block_ids("b")[0][0] == shared
    world.script.report.invalid_block_ids = {shared}
    world.step()
    assert world.ends == {"a": "error", "b": "error"}
    assert world.running_ids == ["c"]
    world.add("d", prompt)
    assert world.schedule().num_scheduled_tokens["d"] == 40


def test_invalid_block_of_a_request_that_waits_loaded_fails_it(make_world, remote):
    world = make_world(num_blocks=6, with_connector=True, kv_load_failure_policy="fail")
    world.script.remote["a"] = remote(16)
    world.add("a", 64)
    world.step()
    world.add("b", 60, max_tokens=9)
    world.step()
    world.complete_load("a")
    world.step()
    world.step()
    assert world.status("a") is RequestStatus.WAITING
    world.script.report.invalid_block_ids = set(world.manager.get_block_ids("a")[0])
    world.step()
    assert world.ends == {"a": "error"}
    world.run()
    world.assert_clean()


def test_block_that_only_this_steps_tokens_fill_is_nobodys_load(world):
    world.add("a", 40, max_tokens=9)
    world.schedule()
    world.script.report.invalid_block_ids = {world.manager.get_block_ids("a")[0][2]}
    outputs = world.finish_step()
    assert [output.finish_reason for output in outputs] == [None]


def test_partly_loaded_last_block_is_looked_at(world, load):
    load("a", 60, 40)
    world.script.report.invalid_block_ids = {world.manager.get_block_ids("a")[0][2]}
    world.step()
    assert world.ends == {"a": "error"}


def test_invalid_block_that_nobody_holds_changes_nothing(world):
    world.add("a", 20)
    world.script.report.invalid_block_ids = {60}
    (output,) = world.step()
    assert output.finish_reason is None
