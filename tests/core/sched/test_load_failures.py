"""KV that could not be loaded ends the requests that rely on it, and no other."""

import pytest

from core.config_workers import SchedulerSection
from core.kv.invariants import find_violations
from core.kv.manager import KVCacheManager
from core.kv.seals import BROKEN
from core.kv.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from core.request import KVConnectorOutput, NewRequest, Request, RequestStatus
from core.sched.load_failures import handle_load_failures
from core.sched.quarantine import quarantine_blocks
from core.sched.state import SchedulerState
from core.testing.clock import FakeClock
from core.wire.sampling import SamplingParams


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


def test_late_bytes_of_a_failed_load_hit_no_other_block(make_world, remote):
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


def test_nothing_after_an_invalid_block_stays_a_hit(world, remote):
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


def test_kept_blocks_built_on_an_invalid_block_are_no_hit_and_have_no_seal(world):
    prompt = world.prompt(70)
    world.script.keep.add("a")
    world.add("a", prompt, max_tokens=1)
    world.step()
    kept = world.manager.get_block_ids("a")[0]
    world.add("b", prompt[:30], max_tokens=9)
    world.step()
    assert world.manager.get_block_ids("b")[0][0] == kept[0]
    world.spoil(*kept)
    world.script.report.invalid_block_ids = {kept[0]}
    world.step()
    assert world.ends == {"a": "length", "b": "error"}
    seals = world.manager.block_pool.seals
    assert {seals.sealed_generation(block_id) for block_id in kept} == {BROKEN}
    world.add("c", prompt)
    assert world.schedule().num_scheduled_tokens == {"c": 70}
    world.finish_step()
    world.run()
    assert world.tokens["c"] == world.expected(prompt, 4)
    world.complete_send("a")
    world.step()
    world.assert_clean()


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


def test_block_that_only_this_steps_tokens_fill_is_no_load(world):
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


def test_invalid_block_that_no_request_holds_changes_nothing(world):
    world.add("a", 20)
    world.script.report.invalid_block_ids = {60}
    (output,) = world.step()
    assert output.finish_reason is None


# ---- several groups ----------------------------------------------------------------------------------------------------


@pytest.fixture
def two_groups():
    """A running request of 80 tokens in two KV cache groups, with blocks of 16 and of 32 tokens."""
    specs = [FullAttentionSpec(block_size=size, num_kv_heads=1, head_dim=1, dtype_bytes=4) for size in (16, 32)]
    config = KVCacheConfig(20, tuple(KVCacheGroup((index,), spec) for index, spec in enumerate(specs)))
    manager = KVCacheManager(config, 200, 32, 16, enable_caching=False)
    state = SchedulerState(SchedulerSection(), manager, 200, None, FakeClock())
    new = NewRequest(request_id="r", prompt_token_ids=[1] * 80, sampling=SamplingParams())
    request = state.requests["r"] = Request(new, None)
    assert manager.allocate_slots(request, 80) is not None
    request.num_computed_tokens, request.status = 80, RequestStatus.RUNNING
    state.running.append(request)
    return state, request


def test_several_groups_fall_back_to_where_all_of_them_can_continue(two_groups):
    state, request = two_groups
    small, large = state.kv_cache_manager.get_block_ids("r")
    request.num_in_flight_tokens = 8
    assert handle_load_failures(state, KVConnectorOutput(invalid_block_ids={small[3]})) == {}
    assert request.num_computed_tokens == 32
    assert state.kv_cache_manager.get_block_ids("r") == (small, large), "they are written again in place"
    blocks = state.kv_cache_manager.block_pool.blocks
    is_renewed = [blocks[block_id].generation > 1 for block_id in [*small, *large]]
    assert is_renewed == [False, False, True, True, True, False, True, True]
    assert state.rolled_back == {"r"}


def test_quarantine_in_one_group_leaves_the_other_its_blocks(two_groups):
    state, request = two_groups
    manager = state.kv_cache_manager
    small, large = manager.get_block_ids("r")
    quarantine_blocks(state, {large[1]})
    handle_load_failures(state, KVConnectorOutput(quarantined_block_ids={large[1]}))
    assert request.num_computed_tokens == 32
    assert manager.get_block_ids("r") == (small, large[:1])
    fresh = manager.allocate_slots(request, 48)
    assert [len(group) for group in fresh.blocks] == [0, 2]
    assert large[1] not in manager.get_block_ids("r")[1]
    assert find_violations(manager, {large[1]: 1}) == []
