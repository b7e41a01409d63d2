"""The driver of a pure machine: events and actions by type, one timer that may fire early, and the end by a bug."""

from dataclasses import dataclass
from operator import attrgetter

import pytest

from core.machine_driver import ByType, MachineDriver, TimerDue
from core.testing.clock import FakeClock


@dataclass
class Ask:
    text: str


class AskAgain(Ask):
    pass


@dataclass
class Reply:
    message: str


class Timers:
    """Keeps what was planned."""

    def __init__(self):
        self.now = FakeClock(100.0).now
        self.planned = []

    def call_at(self, when, callback):
        self.planned.append((when, callback))
        return self

    def cancel(self):
        self.planned.pop()


class World:
    def __init__(self, on_error=None):
        self.due, self.log, self.timers = None, [], Timers()
        events = ByType({Ask: self.answer, TimerDue: self.tick})
        actions = ByType({Reply: attrgetter("message"), object: self.log.append})
        self.driver = MachineDriver(events, actions, lambda: self.due, self.timers, on_error)

    def answer(self, event, now):
        return [now, Reply(event.text), "after the reply"]

    def tick(self, event, now):
        return ["tick"]


@pytest.fixture
def world():
    return World()


def test_event_runs_its_handler_and_the_actions_in_order(world):
    assert world.driver.handle(Ask("hello")) == "hello"
    assert world.log == [100.0, "after the reply"]


def test_type_without_a_handler_has_that_of_its_nearest_base(world):
    assert world.driver.handle(AskAgain("hello")) == "hello"
    with pytest.raises(KeyError):
        world.driver.handle("an event of an unknown type")


def test_timer_is_planned_again_only_for_an_earlier_time(world):
    for due, planned in ((7.0, [7.0]), (9.0, [7.0]), (5.0, [5.0]), (None, [5.0])):
        world.due = due
        world.driver.handle(Ask(""))
        assert [when for when, _ in world.timers.planned] == planned


def test_timer_that_fires_early_is_planned_again(world):
    world.due = 7.0
    world.driver.carry_out([])
    world.due = 9.0
    callback = world.timers.planned[0][1]
    callback()
    assert world.log == ["tick"]
    assert [when for when, _ in world.timers.planned] == [9.0]


def test_error_of_a_handler_is_given_to_on_error_or_raised():
    errors = []
    assert World(errors.append).driver.handle("an event of an unknown type") is None
    assert [type(error) for error in errors] == [KeyError]
    with pytest.raises(KeyError):
        World().driver.handle("an event of an unknown type")


def test_stopped_driver_ignores_events_and_has_no_timer(world):
    world.due = 7.0
    world.driver.handle(Ask(""))
    world.driver.stop()
    assert world.timers.planned == []
    assert world.driver.handle(Ask("hello")) is None
