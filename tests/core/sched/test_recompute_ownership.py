"""Requests that share an invalid block: the first recomputes it, the others wait, even if one leaves."""

import pytest

from core.request import NewRequest, Request, RequestStatus
from core.sched.recompute_ownership import OwnedBlock, RecomputeOwnership
from core.sched.running import preempt
from core.sched.state import Step
from core.wire.sampling import SamplingParams

PROMPT_TOKENS = 70


@pytest.fixture
def shared(make_world):
    """Return a builder of a world in which requests a, b, c share two blocks that turn out invalid in the last step."""

    def build(max_tokens: int = 30, **config):
        world = make_world(with_connector=True, **config)
        prompt = world.prompt(PROMPT_TOKENS)
        world.requests = {"a": world.add("a", prompt, max_tokens=max_tokens)}
        while not world.requests["a"].num_output_tokens:
            world.step()
        world.requests |= {name: world.add(name, prompt, max_tokens=max_tokens) for name in "bc"}
        world.step()
        world.shared = world.manager.get_block_ids("a")[0][:4]
        assert world.manager.get_block_ids("c")[0][:4] == world.shared
        world.spoil(world.shared[1])
        world.script.report.invalid_block_ids = {world.shared[1]}
        assert world.step() == []
        return world

    return build


def assert_all_right(world, *names):
    world.run()
    for name in names:
        world.assert_right(world.requests[name], world.requests[name].max_tokens)
    assert not world.scheduler.state.recompute_ownership
    world.assert_sound()
    world.assert_clean()


def test_first_falls_back_and_the_others_keep_what_they_had_and_wait(shared):
    world = shared(max_num_batched_tokens=256)
    a, b, c = (world.requests[name] for name in "abc")
    assert (a.num_computed_tokens, b.num_computed_tokens, c.num_computed_tokens) == (16, 64, 64)
    assert world.schedule().num_scheduled_tokens == {"a": 56}
    world.finish_step()
    assert set(world.schedule().num_scheduled_tokens) == {"a", "b", "c"}
    world.finish_step()
    assert_all_right(world, "a", "b", "c")


def test_no_request_continues_before_the_last_shared_block_is_whole(shared):
    world = shared(max_num_batched_tokens=20)
    scheduled = []
    for _ in range(3):
        scheduled.append(world.schedule().num_scheduled_tokens)
        world.finish_step()
    assert scheduled == [{"a": 20}, {"a": 20}, {"a": 16}]
    assert world.schedule().num_scheduled_tokens == {"a": 1, "b": 7, "c": 7}
    world.finish_step()
    assert_all_right(world, "a", "b", "c")


def test_sharers_hold_the_same_blocks_when_all_is_over(shared):
    world = shared()
    for _ in range(2):
        world.step()
    tables = [world.manager.get_block_ids(name)[0] for name in "abc"]
    assert tables[0][:4] == tables[1][:4] == tables[2][:4] == world.shared


def test_owner_that_is_aborted_is_followed_by_the_next(shared):
    world = shared()
    world.abort("a")
    world.schedule()
    assert set(world.last.num_scheduled_tokens) == {"b"}
    assert world.last.scheduled_new_reqs[0].num_computed_tokens == 16
    world.finish_step()
    assert_all_right(world, "b", "c")


def test_owners_that_leave_one_by_one(shared):
    world = shared(max_num_batched_tokens=20)
    world.step()
    world.abort("a")
    world.step()
    world.abort("b")
    assert_all_right(world, "c")


def test_owner_that_is_preempted_is_followed_by_the_next(shared):
    world = shared(max_tokens=8)
    preempt(world.scheduler.state, Step(token_budget=0), world.requests["a"])
    world.model._batch.pop("a", None)
    assert set(world.schedule().num_scheduled_tokens) >= {"b"}
    assert "c" not in world.last.num_scheduled_tokens
    world.finish_step()
    assert_all_right(world, "a", "b", "c")


def test_owner_that_ends_with_the_block_complete_leaves_it_whole(make_world):
    world = make_world(with_connector=True)
    prompt = world.prompt(PROMPT_TOKENS)
    world.requests = {"a": world.add("a", prompt, max_tokens=2), "b": world.add("b", prompt, max_tokens=20)}
    world.step()
    block_id = world.manager.get_block_ids("a")[0][1]
    world.spoil(block_id)
    world.script.report.invalid_block_ids = {block_id}
    world.step()
    world.step()
    assert world.ends == {"a": "length"}
    world.schedule()
    assert world.last.scheduled_new_reqs[0].num_computed_tokens == 64, "nothing is recomputed twice"
    world.finish_step()
    assert_all_right(world, "a", "b")


def test_sharer_that_leaves_is_forgotten(shared):
    world = shared()
    world.abort("b", "c")
    assert_all_right(world, "a")


def test_sharer_that_waits_may_be_preempted(shared):
    world = shared(num_blocks=9, max_tokens=8)
    assert_all_right(world, "a", "b", "c")


def test_second_report_about_an_owned_block_changes_nothing(shared):
    world = shared(max_num_batched_tokens=20)
    world.step()
    world.script.report.invalid_block_ids = {world.shared[2]}
    world.step()
    assert_all_right(world, "a", "b", "c")


def test_waiting_sharer_whose_own_block_turns_out_invalid(shared):
    world = shared()
    own = world.manager.get_block_ids("c")[0][-1]
    world.spoil(own)
    world.script.report.invalid_block_ids = {own}
    assert_all_right(world, "a", "b", "c")


def test_late_bytes_in_a_shared_block_give_all_requests_fresh_ones(make_world):
    world = make_world(with_connector=True)
    prompt = world.prompt(PROMPT_TOKENS)
    world.requests = {name: world.add(name, prompt, max_tokens=20) for name in "abc"}
    world.step()
    block_id = world.manager.get_block_ids("a")[0][1]
    world.script.report.quarantined_block_ids = {block_id}
    world.spoil(block_id)
    world.step()
    for _ in range(4):
        world.step()
        world.let_late_bytes_arrive()
        world.assert_sound()
    assert all(block_id not in world.manager.get_block_ids(name)[0] for name in "abc")
    world.end_quarantine()
    assert_all_right(world, "a", "b", "c")


def test_loading_request_waits_for_a_running_owner(make_world, remote):
    world = make_world(with_connector=True)
    prompt = world.prompt(PROMPT_TOKENS)
    a = world.add("a", prompt[:40], max_tokens=30)
    world.step()
    world.script.remote["b"] = remote(64)
    b = world.add("b", prompt)
    world.step()
    assert b.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    block_id = world.manager.get_block_ids("a")[0][0]
    world.spoil(block_id)
    world.script.report.invalid_block_ids = {block_id}
    world.complete_load("b")
    world.requests = {"a": a, "b": b}
    world.step()
    assert (a.num_computed_tokens, b.num_computed_tokens) == (0, 32)
    assert set(world.schedule().num_scheduled_tokens) == {"a"}
    world.finish_step()
    assert set(world.schedule().num_scheduled_tokens) == {"a", "b"}
    world.finish_step()
    assert_all_right(world, "a", "b")


def test_owner_that_is_aborted_while_it_loads_is_followed_by_the_next(make_world, remote):
    """Its blocks stay with it until the load has ended, but it will not write them."""
    world = make_world(with_connector=True)
    prompt = world.prompt(PROMPT_TOKENS)
    first = world.add("a", prompt[:40])
    world.step()
    world.requests = {}
    for name in "bc":
        world.script.remote[name] = remote(64)
        world.requests[name] = world.add(name, prompt)
    world.step()
    hit = world.manager.get_block_ids("c")[0][0]
    world.spoil(hit)
    world.script.report.invalid_block_ids = {hit}
    world.step()
    world.abort(first.request_id)
    world.step()
    assert world.requests["b"].num_computed_tokens == 0
    world.abort("b")
    world.step()
    assert world.requests["c"].num_computed_tokens == 0
    world.complete_load("c")
    world.end_load("b")
    assert_all_right(world, "c")


def test_ownership_does_not_pass_to_a_load_that_will_give_its_blocks_back(make_world, remote, load_error):
    world = make_world(with_connector=True)
    prompt = world.prompt(PROMPT_TOKENS)
    world.add("a", prompt[:40])
    world.step()
    world.requests = {}
    for name in "bc":
        world.script.remote[name] = remote(64)
        world.requests[name] = world.add(name, prompt)
    world.step()
    hit = world.manager.get_block_ids("c")[0][0]
    world.spoil(hit)
    world.script.report.invalid_block_ids = {hit}
    world.step()
    world.complete_load("b")
    world.fail_load("c")
    world.abort("a")
    world.step()
    assert_all_right(world, "b", "c")


def test_owner_that_begins_again_in_other_blocks_has_repaired_nothing(make_world, remote):
    world = make_world(with_connector=True)
    prompt = world.prompt(PROMPT_TOKENS)
    world.add("a", prompt[:40])
    world.step()
    world.requests = {}
    for name in "bc":
        world.script.remote[name] = remote(64)
        world.requests[name] = world.add(name, prompt)
    world.step()
    hit = world.manager.get_block_ids("c")[0][0]
    world.spoil(hit)
    world.script.report.invalid_block_ids = {hit}
    world.complete_load("c")
    world.step()
    world.abort("a")
    world.complete_load("b")
    world.step()
    world.schedule()
    assert hit not in world.manager.get_block_ids("b")[0]
    assert "c" not in world.last.num_scheduled_tokens
    world.finish_step()
    assert_all_right(world, "b", "c")


# ---- the container -----------------------------------------------------------------------------------------------------


@pytest.fixture
def request_():
    def make(name):
        return Request(NewRequest(request_id=name, prompt_token_ids=[1], sampling=SamplingParams()), None)

    return make


def test_blocks_without_waiting_requests_are_not_kept(request_, load_error):
    ownership = RecomputeOwnership()
    ownership.add({7: OwnedBlock(request_("a"), 16, load_error), 8: OwnedBlock(request_("a"), 32, load_error)}, {"b": {7}})
    assert ownership.owners == {7: "a"}
    assert ownership.holds_back("b")
    assert not ownership.holds_back("a")


def test_is_false_without_waiting_requests(request_, load_error):
    ownership = RecomputeOwnership()
    ownership.add({7: OwnedBlock(request_("a"), 16, load_error)}, {})
    assert not ownership
    assert ownership.owners == {}


def test_orphans_keep_the_error_that_made_them(request_, load_error):
    ownership = RecomputeOwnership()
    ownership.add({7: OwnedBlock(request_("a"), 16, load_error)}, {"b": {7}, "c": {7}})
    assert ownership.take_orphans(lambda name: {"a": [7], "b": [7], "c": []}[name]) == {}
    assert not ownership.holds_back("c")
    assert ownership.take_orphans(lambda name: {"a": [], "b": [7]}[name]) == {7: load_error}
    assert not ownership
