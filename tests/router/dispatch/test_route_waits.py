"""Prompts that wait for workers while the router settles: when they look again, and how many at a time."""

from __future__ import annotations

import asyncio
from collections import Counter
from unittest.mock import AsyncMock

import pytest

from core.errors import Overloaded
from core.testing.clock import FakeClock
from core.wire.messages import Heartbeat
from core.wire.sampling import SamplingParams
from router.dispatch.route_waits import WOKEN_PER_TURN, RouteWaits
from router.dispatch.types import Submission


@pytest.fixture
async def start_settling(start_router):
    """Start a router that settles after a pause, and whose timer is called by the test alone; its workers are cut off."""

    async def start(*workers: dict, **settings):
        clock = FakeClock()
        under_test = await start_router(has_http=False, clock=clock, **settings)
        for facts in workers:
            worker = await under_test.add("aggregated", **facts)
            worker.sends_heartbeats = False
        gateway = under_test.router.gateway
        await under_test.until(lambda: gateway.core.membership.pauses._last_tick is not None)
        gateway._do_what_is_due = AsyncMock()
        clock.advance(30.0)
        tick(under_test)
        under_test.find_cut_off()
        return under_test

    return start


def tick(under_test) -> None:
    gateway = under_test.router.gateway
    gateway._perform(gateway.core.on_timer(gateway.now))
    gateway._waits.note_change()


def counted(monkeypatch, owner, name: str) -> list:
    """Return a list that grows by each call."""
    calls, call = [], getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: calls.append(args) or call(*args, **kwargs))
    return calls


def opened(under_test, name: str, num_tokens: int = 1, wait=None, **fields):
    """Submit a prompt; it waits as those of HTTP requests do."""
    gateway = under_test.router.gateway

    async def wait_for_change(*seen: int) -> float:
        await gateway.wait_for_change(*seen)
        return 0.0

    sampling = SamplingParams(seed=7, max_tokens=2)
    submission = Submission(request_id=name, prompt_token_ids=(5,) * num_tokens, sampling=sampling, **fields)
    return asyncio.create_task(gateway.open("client", [submission], wait or wait_for_change))


async def test_a_prompt_is_not_submitted_again_for_messages_that_open_no_worker(start_settling, monkeypatch):
    under_test = await start_settling({"max_model_len": 64}, {"max_model_len": 4096})
    core = under_test.router.gateway.core
    small, large = under_test.workers
    await under_test.reconnect(small)
    submitted, offered = counted(monkeypatch, core, "submit"), counted(monkeypatch, core.route_costs, "offers")
    messages = counted(monkeypatch, core, "on_message")
    opening = opened(under_test, "r", 99)
    await under_test.until(lambda: submitted)
    for _ in range(20):
        await small.send(Heartbeat(engine_id=small.engine_id, incarnation=small.incarnation))
    await under_test.until(lambda: len(messages) >= 20)
    await asyncio.sleep(0)
    assert (len(submitted), len(offered)) == (1, 0)
    tick(under_test)
    await under_test.until(lambda: len(submitted) == 2)
    await under_test.reconnect(large)
    await opening
    assert (len(submitted), len(offered)) == (3, 1)


async def test_prompts_that_wait_are_submitted_again_a_few_in_each_turn(start_settling, monkeypatch):
    under_test = await start_settling({})
    core, turn, turns = under_test.router.gateway.core, 0, Counter()
    submit = core.submit
    monkeypatch.setattr(core, "submit", lambda *args: turns.update([turn]) or submit(*args))
    tasks = [opened(under_test, f"r{number}") for number in range(5 * WOKEN_PER_TURN)]
    await under_test.until(lambda: turns.total() == len(tasks))
    turns.clear()
    tick(under_test)
    tick(under_test)
    for turn in range(100):  # noqa: B007 - the turn of a submission
        await asyncio.sleep(0)
    assert turns.total() == len(tasks)
    assert max(turns.values()) == WOKEN_PER_TURN
    await under_test.reconnect(under_test.workers[0])
    await asyncio.gather(*tasks)


async def test_a_worker_that_reconnects_just_before_the_wait_is_noticed(start_settling):
    under_test = await start_settling({})
    gateway = under_test.router.gateway

    async def reconnect_and_wait(*seen: int) -> float:
        await under_test.reconnect(under_test.workers[0])
        await gateway.wait_for_change(*seen)
        return 0.0

    opening = opened(under_test, "r", wait=reconnect_and_wait)
    await under_test.until(opening.done)
    assert opening.exception() is None


async def test_a_prompt_that_finds_only_a_full_worker_waits_for_those_that_are_cut_off(start_settling):
    under_test = await start_settling({"max_num_choices": 1}, {"max_num_choices": 1})
    gateway = under_test.router.gateway
    full, other = under_test.workers
    full.script = other.script = under_test.script(pause_after=1)
    await under_test.reconnect(full)
    await opened(under_test, "r1")
    opening = opened(under_test, "r2")
    await under_test.until(lambda: opening.done() or gateway._waits)
    assert not opening.done()
    await under_test.reconnect(other)
    await opening
    with pytest.raises(Overloaded):
        await opened(under_test, "r3")


@pytest.fixture
async def limited(start_settling):
    """Start a router with a limit of three: one request runs, and fills the worker that is back; another one is cut off."""
    under_test = await start_settling(*[{"max_num_choices": 1}] * 2, max_requests=3)
    full, other = under_test.workers
    full.script = other.script = under_test.script(pause_after=1)
    await under_test.reconnect(full)
    await opened(under_test, "running")
    return under_test


async def turns(number: int = 10) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def cancel(tasks) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_the_routers_limit_holds_for_prompts_that_come_at_once_and_wait(limited):
    gateway, gate = limited.router.gateway, asyncio.Event()
    tasks = [opened(limited, f"r{number}", wait=lambda *_: gate.wait()) for number in range(4)]
    await turns()
    assert [task.done() for task in tasks] == [False, False, True, True]
    assert gateway._num_refused == 2
    await cancel(tasks)
    assert gateway._num_refused == 0


async def test_prompts_that_wait_are_not_dropped_for_those_that_come_while_they_are_woken(limited):
    gateway, gate = limited.router.gateway, asyncio.Event()

    async def wait_for_gate(*seen) -> float:
        await gateway.wait_for_change(*seen)
        await gate.wait()
        return 0.0

    old = [opened(limited, f"old{number}", wait=wait_for_gate) for number in range(2)]
    await limited.until(lambda: len(gateway._waits) == 2)
    tick(limited)
    await limited.until(lambda: not gateway._waits)
    new = [opened(limited, f"new{number}") for number in range(2)]
    await turns()
    gate.set()
    await turns()
    assert [task.done() for task in (*old, *new)] == [False, False, True, True]
    await cancel([*old, *new])


async def test_the_time_that_a_prompt_waited_for_a_worker_counts_as_its_clients_wait(start_settling):
    under_test = await start_settling({})
    gateway = under_test.router.gateway
    opening = opened(under_test, "r")
    await under_test.until(lambda: gateway._waits)
    gateway._clock.advance(0.5)
    tick(under_test)
    gateway._clock.advance(0.5)
    await under_test.reconnect(under_test.workers[0])
    await opening
    await under_test.until(lambda: not gateway.num_requests)
    names = ("time_to_first_token", "e2e_request_latency")
    assert [under_test.metric(f"kvferry_{name}_seconds_sum") for name in names] == [1.0, 1.0]


# ---- the router's own requests ---------------------------------------------------------------------------------------------


async def test_a_stream_without_a_worker_has_one_that_returns_before_prompts_that_wait(start_settling):
    under_test = await start_settling(*[{"max_num_choices": 1}] * 3)
    gateway = under_test.router.gateway
    core, requests = gateway.core, gateway.core.dispatcher.requests
    full, dead, other = under_test.workers
    for worker in under_test.workers:
        worker.script = under_test.script(pause_after=1)
    await under_test.reconnect(dead)
    await opened(under_test, "begun")
    await under_test.until(lambda: requests["begun"].has_begun)
    await under_test.reconnect(full)
    await opened(under_test, "r2")
    gateway._perform(core.on_unreachable(core.membership.get(requests["begun"].current).peer, gateway.now))
    tick(under_test)
    waiting = opened(under_test, "r3")
    await under_test.until(lambda: gateway._waits)
    await under_test.reconnect(other)
    tick(under_test)
    assert requests["begun"].current.engine_id == other.engine_id
    waiting.cancel()


async def test_a_held_request_has_a_worker_that_returns_before_prompts_that_wait(start_settling):
    under_test = await start_settling({"max_num_choices": 2}, {"max_num_choices": 1}, max_requests=100)
    gateway = under_test.router.gateway
    full, other = under_test.workers
    full.script = other.script = under_test.script(pause_after=1)
    await under_test.reconnect(full)
    for number in range(2):
        await opened(under_test, f"r{number}", tenant=1)
    waiting = opened(under_test, "more", tenant=1)
    await under_test.until(lambda: gateway._waits)
    await opened(under_test, "held", tenant=2)
    assert gateway.core.dispatcher.num_waiting == 1
    await under_test.reconnect(other)
    assert gateway.core.dispatcher.num_waiting == 0
    waiting.cancel()


# ---- the order ---------------------------------------------------------------------------------------------------------------


async def woken_in_order(waits: RouteWaits, number: int) -> tuple[list[int], list[asyncio.Task]]:
    order: list[int] = []

    async def wait(index: int) -> None:
        await waits.wait()
        order.append(index)

    tasks = [asyncio.create_task(wait(index)) for index in range(number)]
    await asyncio.sleep(0)
    assert len(waits) == number
    return order, tasks


async def test_tasks_are_woken_in_the_order_in_which_they_wait_and_each_once():
    waits = RouteWaits()
    order, tasks = await woken_in_order(waits, 3 * WOKEN_PER_TURN)
    waits.note_change()
    waits.note_change()
    await asyncio.gather(*tasks)
    assert order == [*range(3 * WOKEN_PER_TURN)]
    assert len(waits) == 0


async def test_a_prompt_that_is_refused_again_stays_before_those_that_came_later(start_settling):
    under_test = await start_settling(*[{"max_num_choices": 1}] * 2)
    gateway, gate = under_test.router.gateway, asyncio.Event()
    full, other = under_test.workers
    full.script = other.script = under_test.script(pause_after=1)

    async def wait_for_gate(*seen) -> float:
        await gateway.wait_for_change(*seen)
        await gate.wait()
        return 0.0

    await under_test.reconnect(full)
    await opened(under_test, "running")
    old = opened(under_test, "old", wait=wait_for_gate)
    await under_test.until(lambda: gateway._waits)
    tick(under_test)
    await under_test.until(lambda: not gateway._waits)
    new = opened(under_test, "new")
    await under_test.until(lambda: gateway._waits)
    gate.set()
    await under_test.until(lambda: len(gateway._waits) == 2)
    await under_test.reconnect(other)
    await under_test.until(lambda: old.done() or new.done())
    assert list(gateway.core.dispatcher.requests) == ["running", "old"]
    await cancel([old, new])


async def test_a_task_that_missed_a_change_has_its_turn_before_those_with_later_places():
    waits = RouteWaits()
    missed = waits.looked()
    order, tasks = await woken_in_order(waits, 2 * WOKEN_PER_TURN)
    waits.note_change()
    await waits.wait(missed)
    assert order == []
    await asyncio.gather(*tasks)


async def test_a_task_that_is_cancelled_takes_no_turn():
    waits = RouteWaits()
    order, tasks = await woken_in_order(waits, 2 * WOKEN_PER_TURN)
    waits.note_change()
    for task in tasks[:WOKEN_PER_TURN]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == [*range(WOKEN_PER_TURN, 2 * WOKEN_PER_TURN)]
    assert len(waits) == 0


async def test_a_task_that_missed_a_change_does_not_wait_for_the_next():
    waits = RouteWaits()
    place = waits.looked()
    waits.note_change()
    task = asyncio.create_task(waits.wait(place))
    await asyncio.wait([task], timeout=1.0)
    assert task.done()
