"""Early pulls in the scheduler: hits for the request that comes, and room for everything else."""

from __future__ import annotations

import pytest

from core.engine.core import EngineCore
from core.errors import InvalidRequest
from core.kv.invariants import find_violations
from core.request import NewRequest, RequestStatus
from core.sched.running import preempt
from core.sched.state import Step
from core.testing.hash_model import HashAttention
from core.testing.scripted_loads import Remote
from core.wire.kv import GroupBlocks, KVHandoff, KVLayoutInfo
from core.wire.messages import TransferUsage
from core.wire.sampling import SamplingParams
from tests.core.sched.conftest import World

BLOCK = 16


def handoff(num_tokens: int, num_groups: int = 1) -> KVHandoff:
    num_blocks = num_tokens // BLOCK
    ids = tuple(range(1, num_blocks + 1))
    groups = tuple(
        GroupBlocks(group_id=group_id, block_ids=ids, generations=ids, block_hashes=(b"h" * 16,) * num_blocks)
        for group_id in range(num_groups)
    )
    layout = KVLayoutInfo(
        dtype="float32", order="HND", block_size=BLOCK, num_layers=1, num_kv_heads=1, head_dim=1, block_bytes=128
    )
    return KVHandoff(
        transfer_id="kv",
        engine_id="p",
        incarnation=1,
        control_address="tcp://p:1",
        model_fingerprint=b"test",
        layout=layout,
        groups=groups,
        num_tokens=num_tokens,
        lease_ms=0,
    )


def announce(world: World, prompt: list[int], num_tokens: int, round_number: int | None = None, name: str = "r/early") -> None:
    """Let so many tokens of a prompt be readable; ``round_number`` is the round that will load them."""
    if round_number is not None:
        world.script.remote[f"{name}/{round_number}"] = Remote(num_tokens)
    new = NewRequest(
        request_id=name,
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=1),
        kv_handoff=handoff(num_tokens, len(world.config.attentions)),
        is_early=True,
    )
    world.scheduler.pull_early(new, world.hasher)


def num_early(world: World) -> int:
    return world.scheduler.make_stats().num_early_blocks


def check_nothing_left(world: World) -> None:
    world.step()
    world.step()
    pool = world.manager.block_pool
    assert not world.scheduler.requests
    assert pool.num_free_blocks == pool.num_usable_blocks
    assert find_violations(world.manager) == []


def test_request_finds_what_was_read_early_and_loads_the_rest():
    world = World(with_connector=True)
    prompt = world.prompt(70)
    announce(world, prompt, 32, 0)
    world.step()
    assert world.script.loading["r/early/0"].start == 0
    world.complete_load("r/early/0", TransferUsage(transport="shm", transferred_tokens=32, transferred_bytes=200))
    announce(world, prompt, 64, 1)
    world.step()
    world.step()
    assert world.script.loading["r/early/1"].start == 32
    world.complete_load("r/early/1", TransferUsage(transport="shm", transferred_tokens=32, transferred_bytes=200))
    world.step()
    world.script.remote["r/0"] = Remote(70)
    world.add("r/0", prompt, early_pull="r/early", kv_handoff=handoff(64))
    world.step()
    load = world.script.loading["r/0"]
    assert (load.start, load.end) == (64, 70)
    world.complete_load("r/0")
    world.clock.advance(0.5)
    outputs = []
    while world.scheduler.has_unfinished_requests():
        outputs += world.step()
    usage = outputs[0].transfer_usage
    assert (usage.early_tokens, usage.early_bytes, usage.exposed_ms) == (64, 400, 500.0)
    check_nothing_left(world)


def test_request_waits_for_a_round_that_is_loading():
    world = World(with_connector=True)
    prompt = world.prompt(40)
    announce(world, prompt, 32, 0)
    world.step()
    world.script.remote["r/0"] = Remote(40)
    world.add("r/0", prompt, early_pull="r/early", kv_handoff=handoff(32))
    world.step()
    assert "r/0" in world.waiting_ids
    world.complete_load("r/early/0")
    world.step()
    world.step()
    assert world.script.loading["r/0"].start == 32


def test_failed_round_leaves_nothing_and_the_request_loads_everything():
    world = World(with_connector=True)
    prompt = world.prompt(40)
    announce(world, prompt, 32, 0)
    world.step()
    world.fail_load("r/early/0")
    world.script.remote["r/0"] = Remote(40)
    world.add("r/0", prompt, early_pull="r/early", kv_handoff=handoff(32))
    world.step()
    world.step()
    assert world.script.loading["r/0"].start == 0
    assert not world.scheduler.make_stats().num_load_fallbacks


def test_nothing_of_a_partly_bad_round_becomes_a_hit():
    world = World(with_connector=True)
    prompt = world.prompt(60)
    announce(world, prompt, 48, 0)
    world.step()
    world.end_load_partly("r/early/0", bad=[1], late=[2])
    world.step()
    world.step()
    assert num_early(world) == 0
    world.script.remote["r/0"] = Remote(60)
    world.add("r/0", prompt, early_pull="r/early", kv_handoff=handoff(48))
    world.step()
    assert world.script.loading["r/0"].start == 0
    assert len(world.scheduler.quarantined) == 1


def hold_early(world, num_tokens):
    """Have the first 48 tokens of a prompt loaded early."""
    announce(world, world.prompt(num_tokens), 48, 0)
    world.step()
    world.complete_load("r/early/0")
    world.step()


def test_early_blocks_give_way_before_a_running_request_is_preempted():
    world = World(with_connector=True, num_blocks=8)
    world.add("a", 30, max_tokens=60)
    world.step()
    hold_early(world, 50)
    assert num_early(world) == 3
    world.run()
    assert world.scheduler.make_stats().num_preemptions == 0
    assert world.scheduler.make_stats().num_early_given_way == 1
    check_nothing_left(world)


def test_running_request_waits_for_the_blocks_of_an_aborted_round_unpreempted():
    world = World(with_connector=True, num_blocks=8)
    world.add("a", 30, max_tokens=60)
    world.step()
    announce(world, world.prompt(50), 48, 0)
    for _ in range(60):
        world.step()
        if world.scheduler.state.early_pulls.leaving:
            break
    assert world.running_ids == ["a"]
    assert world.last.total_num_scheduled_tokens == 0
    world.end_load("r/early/0")
    world.run()
    assert world.scheduler.make_stats().num_preemptions == 0
    check_nothing_left(world)


def test_early_blocks_give_way_to_the_admission_of_another_request():
    world = World(with_connector=True, num_blocks=8)
    hold_early(world, 50)
    world.add("a", 100, max_tokens=1)
    world.step()
    assert world.ends == {"a": "length"}
    assert num_early(world) == 0


def test_early_pulls_stay_if_their_blocks_would_not_suffice_for_an_admission():
    world = World(with_connector=True, num_blocks=17)
    world.add("a", 60, max_tokens=60)
    world.step()
    hold_early(world, 60)
    world.add("big", 200)  # 13 blocks: 9 are free, and 3 are held early
    world.step()
    assert world.waiting_ids == ["big"]
    assert num_early(world) == 3


def test_all_early_pulls_give_way_at_once_if_only_together_they_suffice():
    world = World(with_connector=True, num_blocks=17)
    for number in range(3):
        announce(world, world.prompt(50, seed=number), 48, number, name=f"r{number}/early")
        world.step()
    world.add("big", 250, max_tokens=1)  # 16 blocks: 7 are free
    world.step()
    assert num_early(world) == 0
    assert world.waiting_ids == ["big"]
    for number in range(3):
        world.end_load(f"r{number}/early/{number}")
    world.run()
    assert world.ends == {"big": "length"}
    check_nothing_left(world)


def test_blocks_that_only_early_pulls_share_count_once_for_an_admission():
    world = World(with_connector=True, num_blocks=9)
    prompt = world.prompt(50)
    announce(world, prompt, 48, 0, name="r0/early")
    world.step()
    world.complete_load("r0/early/0")
    world.step()
    announce(world, [*prompt[:48], *world.prompt(18, seed=1)], 64, 1, name="r1/early")
    world.step()
    world.complete_load("r1/early/1")
    world.step()
    assert world.num_used_blocks == 4
    world.add("big", 120, max_tokens=1)  # 8 blocks: 4 are free
    world.run()
    assert world.ends == {"big": "length"}
    check_nothing_left(world)


def begin_loads(world: World) -> None:
    """Begin three loads of 3 blocks for two slots: the next one may need no more blocks than are free."""
    for name in ("l0", "l1", "l2"):
        world.script.remote[name] = Remote(40)
        world.add(name, 40)
    world.step()


def test_early_pulls_stay_if_their_blocks_would_not_suffice_for_a_load():
    world = World(with_connector=True, max_num_seqs=2, num_blocks=33)
    announce(world, world.prompt(60), 48, 0)
    world.step()
    begin_loads(world)
    world.script.remote["big"] = Remote(400)
    world.add("big", 400)
    world.step()
    assert world.waiting_ids == ["big"]
    assert num_early(world) == 3


def test_early_pulls_give_way_to_a_load_ahead_of_free_slots():
    world = World(with_connector=True, max_num_seqs=2, num_blocks=36)
    announce(world, world.prompt(60), 48, 0)
    world.step()
    world.complete_load("r/early/0")
    begin_loads(world)
    world.step()
    world.script.remote["big"] = Remote(400)
    world.add("big", 400)  # 25 blocks: 23 are free, and 3 are held early
    world.step()
    assert world.holding_ids == ["l0", "l1", "l2", "big"]
    assert num_early(world) == 0


def test_early_pull_begins_only_if_the_whole_prompt_would_fit():
    world = World(with_connector=True, num_blocks=8)
    world.add("a", 60, max_tokens=30)
    world.step()
    announce(world, world.prompt(100), 16, 0)
    world.step()
    assert num_early(world) == 0
    for _ in range(40):
        world.step()
    assert "a" in world.ends
    assert num_early(world) == 1


def test_early_pull_begins_once_the_connector_can_tell_and_holds_up_no_other():
    world = World(with_connector=True)
    announce(world, world.prompt(60), 32)
    world.script.remote["r/early/0"] = Remote(None)
    announce(world, world.prompt(60, seed=1), 32, 0, name="other/early")
    world.step()
    assert set(world.script.loading) == {"other/early/0"}
    world.script.remote["r/early/1"] = Remote(32)
    world.step()
    assert set(world.script.loading) == {"other/early/0", "r/early/1"}


@pytest.mark.parametrize("is_loading", [True, False])
def test_end_of_an_early_pull_frees_its_blocks(is_loading):
    world = World(with_connector=True)
    announce(world, world.prompt(50), 48, 0)
    world.step()
    if not is_loading:
        world.complete_load("r/early/0")
        world.step()
    world.abort("r/early")
    if is_loading:
        world.end_load("r/early/0")
    check_nothing_left(world)


@pytest.mark.parametrize("is_loading", [True, False])
def test_end_of_its_request_ends_an_early_pull(is_loading):
    world = World(with_connector=True)
    prompt = world.prompt(50)
    announce(world, prompt, 48, 0)
    world.step()
    world.script.remote["r/0"] = Remote(None)
    world.add("r/0", prompt, early_pull="r/early", kv_handoff=handoff(48))
    if not is_loading:
        world.complete_load("r/early/0")
    world.step()
    world.abort("r/0")
    if is_loading:
        world.end_load("r/early/0")
    check_nothing_left(world)


def test_abort_by_name_does_not_end_a_pull_that_its_request_has_claimed():
    world = World(with_connector=True)
    prompt = world.prompt(50)
    announce(world, prompt, 48, 0)
    world.step()
    world.script.remote["r/0"] = Remote(50)
    world.add("r/0", prompt, early_pull="r/early", kv_handoff=handoff(48))
    world.abort("r/early")
    world.complete_load("r/early/0")
    world.step()
    world.step()
    assert world.script.loading["r/0"].start == 48


def test_chunks_of_a_prompt_are_announced_and_its_end_is_not():
    world = World(with_connector=True, max_num_batched_tokens=32)
    described = []
    world.scheduler.connector.describe_prefix = lambda request, start, end: described.append((start, end)) or handoff(end)
    world.add("p", 90, max_tokens=1, announces=True)
    prefixes = [output.sealed_prefix for _ in range(3) for output in world.step()]
    assert described == [(0, 32), (32, 64)]
    assert [prefix.first_token if prefix else None for prefix in prefixes] == [0, 32, None]
    world.step()
    assert not world.scheduler.state.announced


def test_prompt_of_one_chunk_is_never_announced():
    world = World(with_connector=True, max_num_batched_tokens=64)
    world.scheduler.connector.describe_prefix = lambda request, start, end: pytest.fail("it is described")
    world.add("p", 60, max_tokens=1, announces=True)
    world.run()
    assert not world.scheduler.state.announced


def test_preempted_prompt_is_announced_from_its_beginning_again():
    world = World(with_connector=True, max_num_batched_tokens=32)
    described = []
    world.scheduler.connector.describe_prefix = lambda request, start, end: described.append((start, end)) or handoff(end)
    request = world.add("p", 90, max_tokens=1, announces=True)
    world.step()
    world.manager.evict_blocks(world.manager.get_block_ids("p")[0])
    preempt(world.scheduler.state, Step(token_budget=0), request)
    assert request.status is RequestStatus.PREEMPTED
    world.run()
    assert described == [(0, 32), (0, 32), (32, 64)]


def test_pull_that_begins_again_does_not_meet_the_round_that_gave_way():
    world = World(with_connector=True, num_blocks=8)
    prompt = world.prompt(50)
    announce(world, prompt, 32, 0)
    world.step()
    world.abort("r/early")
    announce(world, prompt, 48, 1)
    world.step()
    assert set(world.script.loading) == {"r/early/0", "r/early/1"}
    world.end_load("r/early/0")
    world.complete_load("r/early/1")
    world.step()
    world.step()
    assert num_early(world) == 3
    world.abort("r/early")
    check_nothing_left(world)


def test_nothing_is_read_early_after_two_failed_rounds():
    world = World(with_connector=True)
    prompt = world.prompt(90)
    for number, num_tokens in enumerate((16, 32)):
        announce(world, prompt, num_tokens, number)
        world.step()
        world.fail_load(f"r/early/{number}")
        world.step()
        world.step()
    announce(world, prompt, 64, 2)
    world.step()
    assert not world.script.loading
    world.abort("r/early")
    check_nothing_left(world)


def test_early_pull_ends_when_its_request_is_refused():
    world = World(with_connector=True)
    prompt = world.prompt(70)
    announce(world, prompt, 64, 0)
    world.step()
    world.complete_load("r/early/0")
    world.step()
    core = EngineCore(world.scheduler, world.model, world.hasher, vocab_size=50_000)
    known = {"output_token_ids": (1,), "early_pull": "r/early"}
    new = NewRequest(request_id="r/0", prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=1), **known)
    with pytest.raises(InvalidRequest):
        core.add_request(new)
    assert not world.scheduler.has_unfinished_requests()
    check_nothing_left(world)


def test_every_choice_finds_what_was_read_early():
    world = World(with_connector=True)
    prompt = world.prompt(70)
    announce(world, prompt, 64, 0)
    world.step()
    world.complete_load("r/early/0")
    for index in range(2):
        world.script.remote[f"r/{index}"] = Remote(70)
        world.add(f"r/{index}", prompt, early_pull="r/early", kv_handoff=handoff(64))
    world.step()
    world.step()
    assert {(load.start, load.end) for load in world.script.loading.values()} == {(64, 70)}
    assert set(world.script.loading) == {"r/0", "r/1"}
    for index in range(2):
        world.complete_load(f"r/{index}")
    world.run()
    check_nothing_left(world)


def test_round_loads_only_what_is_no_hit_here():
    world = World(with_connector=True)
    prompt = world.prompt(70)
    world.add("before", [*prompt[:32], *world.prompt(8)], max_tokens=1)
    world.run()
    announce(world, prompt, 64, 0)
    world.step()
    assert (world.script.loading["r/early/0"].start, world.script.loading["r/early/0"].end) == (32, 64)
    world.complete_load("r/early/0")
    world.step()
    world.abort("r/early")
    check_nothing_left(world)


def test_round_of_a_windowed_group_holds_the_blocks_of_its_window_only():
    world = World(with_connector=True, attentions=(HashAttention(), HashAttention(window=20)))
    announce(world, world.prompt(90), 80, 0)
    world.step()
    world.complete_load("r/early/0")
    world.step()
    assert num_early(world) == 5 + 2
    world.abort("r/early")
    check_nothing_left(world)
