"""Turns of fetches: bounded together and for each host, and a wait that ends is the router's load, not the host's fault."""

from __future__ import annotations

import asyncio

import pytest

from core.errors import Overloaded
from router.images.turns import FetchTurns

NEVER_S = 30.0


async def hold(turns: FetchTurns, host: str, holders: list[str], release: asyncio.Event) -> None:
    async with turns.take(host):
        holders.append(host)
        await release.wait()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize(("max_fetches", "num_slow"), [(1, 1), (2, 1), (3, 2), (4, 3), (8, 6)])
async def test_one_host_leaves_a_quarter_of_the_turns_to_others(max_fetches, num_slow):
    turns, holders, release = FetchTurns(max_fetches, NEVER_S), [], asyncio.Event()
    waits = [asyncio.create_task(hold(turns, host, holders, release)) for host in ["slow"] * 20 + ["fast"] * 3]
    await settle()
    assert (holders.count("slow"), holders.count("fast")) == (num_slow, max_fetches - num_slow)
    release.set()
    await asyncio.gather(*waits)
    assert (holders.count("slow"), holders.count("fast")) == (20, 3)


async def test_a_wait_without_a_turn_ends_as_overload():
    turns = FetchTurns(1, 0.02)
    async with turns.take("slow"):
        for host in ("fast", "slow"):
            with pytest.raises(Overloaded, match="too many images"):
                async with turns.take(host):
                    pytest.fail("it had a turn")
    async with turns.take("fast"):  # those that have given up hold nothing
        pass


async def test_a_cancelled_wait_leaves_the_turn_to_the_next():
    turns, holders, release = FetchTurns(1, NEVER_S), [], asyncio.Event()
    waits = [asyncio.create_task(hold(turns, host, holders, release)) for host in ("a", "b", "c")]
    await settle()
    waits[1].cancel()
    release.set()
    await asyncio.gather(*waits, return_exceptions=True)
    assert holders == ["a", "c"]
