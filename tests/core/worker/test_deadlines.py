"""Deadlines of requests: reported in order, and never for a request that has ended."""

from __future__ import annotations

import random

from core.worker.deadlines import Deadlines


def due(deadlines: Deadlines, now: float) -> list[str]:
    found = []
    while (request_id := deadlines.pop_due(now)) is not None:
        found.append(request_id)
    return found


def test_requests_are_due_in_the_order_of_their_time():
    deadlines = Deadlines()
    for name, time in (("b", 2.0), ("a", 1.0), ("c", 3.0)):
        deadlines.add(name, time)
    assert deadlines.next_time == 1.0
    assert due(deadlines, 0.9) == []
    assert due(deadlines, 2.0) == ["a", "b"]
    assert deadlines.next_time == 3.0


def test_an_ended_request_is_never_due():
    deadlines = Deadlines()
    deadlines.add("a", 1.0)
    deadlines.remove("a")
    deadlines.remove("never there")
    assert due(deadlines, 9.0) == []


def test_an_id_that_is_used_again_has_its_own_deadline():
    deadlines = Deadlines()
    deadlines.add("a", 1.0)
    deadlines.add("b", 9.0)
    deadlines.add("c", 9.0)
    deadlines.remove("a")
    deadlines.add("a", 5.0)
    assert due(deadlines, 1.0) == []
    assert due(deadlines, 5.0) == ["a"]


def test_what_ended_is_forgotten():
    deadlines, random_times = Deadlines(), random.Random(3)
    for number in range(1000):
        deadlines.add(str(number), random_times.random())
        deadlines.remove(str(number - 5))
    assert len(deadlines) <= 12
