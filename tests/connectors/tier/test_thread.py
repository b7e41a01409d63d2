"""The thread of a tier: orders, watched lookups, the end and a bug."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

import pytest

from connectors.tier.thread import TierThread
from kvstore.base import LookupTicket

WAIT_S = 20.0


class EchoLogic:
    """Reports each order, dies of the order "bug", and works in no other thread than the first one."""

    is_waiting = False

    def __init__(self) -> None:
        self.orders: list[str] = []
        self.is_closed = False
        self.threads: set[int] = set()

    def submit(self, order: str) -> None:
        self.threads.add(threading.get_ident())
        self.orders.append(order)

    def step(self) -> bool:
        self.threads.add(threading.get_ident())
        if "bug" in self.orders:
            raise RuntimeError("a bug")
        return False

    def take_reports(self) -> list[str]:
        orders, self.orders = self.orders, []
        return orders

    def close(self) -> None:
        self.threads.add(threading.get_ident())
        self.is_closed = True


class Running:
    """A thread, and what came of it."""

    def __init__(self) -> None:
        self.logic = EchoLogic()
        self.reports: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.wakeups: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.deaths: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        self.thread: TierThread[str, str] = TierThread(
            self.logic, self.reports.put, lambda: self.wakeups.put(None), self.deaths.put
        )


@pytest.fixture
def start() -> Iterator[Callable[[], Running]]:
    made: list[Running] = []

    def start() -> Running:
        made.append(Running())
        made[-1].thread.start()
        return made[-1]

    yield start
    for running in made:
        running.thread.stop()


@pytest.fixture
def running(start) -> Running:
    return start()


def test_orders_are_carried_out_one_after_the_other_in_one_thread(running):
    for order in ("a", "b", "c"):
        running.thread.submit(order)
    assert [running.reports.get(timeout=WAIT_S) for _ in range(3)] == ["a", "b", "c"]
    running.thread.submit("d")
    assert running.reports.get(timeout=WAIT_S) == "d"
    assert len(running.logic.threads) == 1
    assert threading.get_ident() not in running.logic.threads


def test_engine_is_woken_once_for_each_lookup_that_is_answered(running):
    answered, open_ticket = LookupTicket([], 1), LookupTicket([], 2)
    answered.is_done = True
    running.thread.watch(open_ticket)
    running.thread.watch(answered)
    running.wakeups.get(timeout=WAIT_S)
    running.thread.submit("turn")
    running.reports.get(timeout=WAIT_S)
    assert running.wakeups.empty()
    open_ticket.is_done = True
    running.wakeups.get(timeout=WAIT_S)
    assert running.wakeups.empty()


def test_bug_is_told_and_leaves_nothing_held(running):
    running.thread.submit("bug")
    assert str(running.deaths.get(timeout=WAIT_S)) == "a bug"
    running.thread.stop()
    assert running.logic.is_closed


def test_stopped_thread_has_closed_its_logic_and_told_of_no_death(start):
    running = start()
    running.thread.stop()
    assert running.logic.is_closed
    assert running.deaths.empty()
