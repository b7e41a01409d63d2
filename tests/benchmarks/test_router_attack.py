"""The measuring of attacks on the router: what counts as a callback, as a goal, and as an attack."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.support.benchmark_goals import check_goal


@pytest.fixture
def attack(load_benchmark, monkeypatch):
    monkeypatch.syspath_prepend("benchmarks")
    return load_benchmark("router_attack")


async def test_longest_callback_is_found_by_its_cpu_time(attack):
    longest = attack.Longest()

    def busy():
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass

    with longest.watching():
        asyncio.get_running_loop().call_soon(busy)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert longest.callback_s >= 0.02
    assert "busy" in longest.what
    longest.reset()
    asyncio.get_running_loop().call_soon(busy)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert longest.callback_s < 0.02  # it watches no longer


def test_goals_say_what_was_missed(attack):
    goals = attack._goals([attack.Result("a", 50.0, 0.0, 999.0)])
    assert [(goal["name"], goal["met"]) for goal in goals] == [("a: longest callback", True), ("a: memory", False)]
    for goal in goals:
        check_goal(goal)


def test_attacks_have_names_of_their_own(attack):
    names = [each.name for each in attack.ATTACKS]
    assert len(set(names)) == len(names)
    assert set(attack._QUICK) <= set(names)
