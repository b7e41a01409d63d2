"""Loads that begin ahead of free running slots: how many, and what may pass those that are held back."""

from __future__ import annotations

import pytest

from core.testing.scripted_loads import Remote
from tests.core.sched.conftest import World


def test_loads_ahead_leave_free_what_running_requests_may_ask_for(make_world, remote):
    world = make_world(with_connector=True, max_num_seqs=4, num_blocks=31)  # thirty blocks
    for number in range(12):
        world.script.remote[f"r{number}"] = remote(32)
        world.add(f"r{number}", 32, max_tokens=64)  # two blocks now, six at the end
    world.step()
    assert world.holding_ids == [f"r{number}" for number in range(7)], "7 x 2 blocks, and 4 x 4 to grow"


def test_more_loads_begin_where_blocks_suffice_for_all(make_world, remote):
    world = make_world(with_connector=True, max_num_seqs=4, num_blocks=65)
    for number in range(12):
        world.script.remote[f"r{number}"] = remote(32)
        world.add(f"r{number}", 32, max_tokens=64)
    world.step()
    assert len(world.holding_ids) == 12


def test_loads_ahead_leave_room_for_those_that_run_next_by_priority(make_world, remote):
    world = make_world(with_connector=True, max_num_seqs=2, num_blocks=24, policy="priority")
    for name, priority, max_tokens in (("long1", 5, 160), ("long2", 5, 160), ("a", 0, 16), ("b", 0, 16), ("c", 9, 16)):
        world.script.remote[name] = remote(32)
        world.add(name, 32, max_tokens=max_tokens, priority=priority)
        if name == "long2":
            world.step()
    world.step()
    assert world.holding_ids == ["a", "b", "long1", "long2", "c"], "c: 2 blocks, and 2 x 1 to grow"


@pytest.fixture
def crowded() -> World:
    """Two slots and 32 blocks: three loads of 3 blocks have begun, so a load of 25 blocks is held back."""
    world = World(with_connector=True, max_num_seqs=2, num_blocks=33)
    for name in ("l0", "l1", "l2"):
        add_load(world, name, 40)
    add_load(world, "big", 400)
    return world


def add_load(world: World, name: str, num_tokens: int) -> None:
    world.script.remote[name] = Remote(num_tokens)
    world.add(name, num_tokens, max_tokens=4)


def test_requests_without_a_load_pass_a_load_that_is_held_back(crowded):
    crowded.add("computed", 20)
    crowded.step()
    assert crowded.holding_ids == ["l0", "l1", "l2"]
    assert crowded.running_ids == ["computed"]
    assert crowded.waiting_ids == ["big"]


def test_no_load_passes_one_that_is_held_back(crowded):
    add_load(crowded, "small", 16)
    crowded.step()
    assert crowded.holding_ids == ["l0", "l1", "l2"]
    assert crowded.waiting_ids == ["big", "small"]


def test_load_that_is_held_back_begins_whatever_has_passed_it(crowded):
    crowded.step()
    crowded.complete_load("l0")
    for number in range(40):
        crowded.add(f"computed{number}", 20)
        crowded.step()
    assert "l0" in crowded.ends
    assert crowded.holding_ids == ["l1", "l2"]
    crowded.complete_load("l1")
    for number in range(40, 60):
        crowded.add(f"computed{number}", 20)
        crowded.step()
    assert crowded.holding_ids == ["l2", "big"]


def test_step_looks_past_a_few_loads_that_are_held_back(crowded):
    for number in range(100):
        add_load(crowded, f"more{number}", 40)
    crowded.step()
    assert len(crowded.script.named("match")) < 30
    assert len(crowded.waiting_ids) == 101


def test_load_that_is_held_back_takes_no_spare_blocks_of_the_connector(crowded, monkeypatch):
    calls = []
    monkeypatch.setattr(crowded.scheduler.connector, "free_spare_blocks", lambda: calls.append("free"))
    crowded.step()
    assert crowded.waiting_ids == ["big"]
    assert calls == []
