"""Whether an engine makes progress, under a clock that the test moves."""

from __future__ import annotations

from itertools import pairwise

import pytest

from core.engine.step_watch import MAX_KNOWN_SIZES, FirstSteps, StepSize, StepTimes, StepWatch
from core.wire.progress import stall_bound_s

SIZE = StepSize(num_tokens=5, num_requests=5)
WARM_UP_S = 120.0


class Engine:
    """Reports to a watch what an engine thread would."""

    def __init__(self):
        self.now = 100.0
        self.size = SIZE
        self.watch = StepWatch(lambda: self.size, FirstSteps(WARM_UP_S))

    def step(self, seconds, size=SIZE):
        self.size = size
        self.watch.begin_step(self.now)
        self.now += seconds
        self.watch.end_step(self.now)

    def warm_up(self):
        self.step(0.5)
        self.step(0.1)
        self.watch.rest()

    def reading(self, after_s=0.0):
        return self.watch.reading(self.now + after_s)


@pytest.fixture
def engine():
    return Engine()


def test_an_engine_without_work_is_not_stalled(engine):
    engine.warm_up()
    assert engine.reading(after_s=3600.0).stalled_s == 0.0


def test_a_step_in_hand_has_an_age_and_a_prediction(engine):
    engine.warm_up()
    engine.watch.begin_step(engine.now)
    reading = engine.reading(after_s=3.0)
    assert (reading.stalled_s, reading.is_warming_up) == (3.0, False)
    assert (reading.slowest_step_s, reading.predicted_step_s) == pytest.approx((0.1, 0.3))


def test_an_engine_that_sleeps_on_a_message_is_stalled_since_it_came(engine):
    engine.warm_up()
    engine.watch.on_message(engine.now + 50.0)
    engine.watch.on_message(engine.now + 53.0)
    assert engine.reading(after_s=54.0).stalled_s == 4.0
    engine.watch.take(engine.now + 55.0)
    assert engine.reading(after_s=55.5).stalled_s == 0.5, "one more waits, but something has happened"


def test_an_engine_that_hangs_between_two_steps_is_stalled(engine):
    engine.warm_up()
    engine.step(0.1)
    assert engine.reading(after_s=7.0).stalled_s == 7.0


def test_the_first_step_of_a_size_warms_up_for_a_bounded_time(engine):
    engine.warm_up()
    engine.size = StepSize(num_tokens=256, num_requests=1)
    engine.watch.begin_step(engine.now)
    assert engine.reading(after_s=WARM_UP_S).is_warming_up
    assert not engine.reading(after_s=WARM_UP_S).is_restart_due
    late = engine.reading(after_s=WARM_UP_S + 1)
    assert (late.is_warming_up, late.is_restart_due) == (False, True)


def test_an_engine_that_has_not_begun_warms_up(engine):
    engine.watch.on_message(engine.now)
    assert engine.reading(after_s=60.0).is_warming_up
    engine.watch.rest()
    assert not engine.reading().is_warming_up


def test_a_hang_in_the_very_first_step_is_noticed_once_a_step_was_timed_before():
    size, timed = StepSize(num_tokens=100, num_requests=2), StepSize(num_tokens=64, num_requests=1)
    for known, is_excused in ((None, True), ((timed, 0.1), False)):
        watch = StepWatch(lambda: size, FirstSteps(WARM_UP_S, compiles_shapes=False, known=known))
        watch.rest()
        watch.on_message(100.0)
        watch.take(100.0)
        watch.begin_step(100.0)
        reading = watch.reading(103.0)
        assert reading.is_warming_up is is_excused
        assert (reading.stalled_s, reading.bound_s) == (3.0, 2.0)


def test_the_first_step_of_a_size_does_not_raise_the_bound(engine):
    engine.step(30.0)
    engine.step(0.1)
    assert engine.reading().bound_s == 2.0


def test_the_second_step_of_a_size_may_take_what_the_first_took(engine):
    engine.warm_up()
    long = StepSize(num_tokens=1024, num_requests=1)
    engine.step(5.0, long)
    engine.size = long
    engine.watch.begin_step(engine.now)
    assert engine.reading(after_s=5.5).stalled_s < engine.reading(after_s=5.5).bound_s


def test_a_first_step_that_compiled_for_long_does_not_excuse_the_second(engine):
    engine.warm_up()
    engine.step(100.0, StepSize(num_tokens=1024))
    engine.watch.begin_step(engine.now)
    assert engine.reading().bound_s < 32.0


def test_the_longest_step_of_a_class_is_no_stall_after_its_shortest(engine):
    """The class has steps of 1,024 to 2,047 tokens, and a minute without any has passed."""
    engine.warm_up()
    for _ in range(3):
        engine.step(3.0, StepSize(num_tokens=1024, num_requests=1))
    engine.now += 120.0
    engine.step(0.1)
    engine.size = StepSize(num_tokens=2047, num_requests=1)
    engine.watch.begin_step(engine.now)
    assert engine.reading(after_s=6.5).stalled_s < engine.reading(after_s=6.5).bound_s


def test_the_slowest_step_is_forgotten_after_a_minute(engine):
    engine.warm_up()
    engine.step(1.0)
    assert engine.reading(after_s=59.0).slowest_step_s == 1.0
    assert engine.reading(after_s=71.0).slowest_step_s == 0.0


def test_a_restart_is_due_later_than_routers_leave(engine):
    engine.warm_up()
    engine.watch.begin_step(engine.now)
    for seconds in range(9):
        assert not engine.reading(after_s=seconds).is_restart_due
    assert engine.reading(after_s=9.0).stalled_s > engine.reading(after_s=9.0).bound_s
    assert not engine.reading(after_s=10.0).is_restart_due
    assert engine.reading(after_s=10.1).is_restart_due


def test_each_stall_at_most_doubles_the_bound(engine):
    engine.warm_up()
    bounds = []
    for _ in range(4):
        engine.step(60.0)
        bounds.append(stall_bound_s(engine.reading().slowest_step_s, 0.0))
    assert bounds[0] <= 2 * 2.0
    assert all(after <= 2.6 * before for before, after in pairwise(bounds)), bounds
    assert bounds[-1] > bounds[0], "an engine that has become slow is left in peace in the end"


def test_the_known_sizes_are_bounded():
    times = StepTimes()
    for bits in range(64):
        for more in range(64):
            times.note(StepSize(1 << bits, 1 << more), 0.1, now=0.0)
    assert len(times) == MAX_KNOWN_SIZES
    assert times.is_first(StepSize(1, 1)), "the oldest is forgotten"


def test_sizes_within_a_factor_of_two_are_one_class():
    times = StepTimes()
    times.note(StepSize(num_tokens=130), 0.1, now=0.0)
    assert not times.is_first(StepSize(num_tokens=255))
    assert times.is_first(StepSize(num_tokens=256))


def test_where_nothing_is_compiled_other_sizes_tell_of_a_first_step():
    times = StepTimes(compiles_shapes=False)
    assert times.is_first(SIZE)
    times.note(StepSize(num_tokens=64, num_requests=1), 0.2, now=0.0)
    assert not times.is_first(StepSize(num_tokens=250, num_requests=2))
    assert times.predict_s(StepSize(num_tokens=250, num_requests=2)) == pytest.approx(3 * 0.2 * 2)
    assert times.predict_s(StepSize(num_tokens=3, num_requests=1)) == pytest.approx(3 * 0.2)
    assert times.is_first(StepSize(num_tokens=64, num_requests=1, num_images=1)), "of images nothing is known"


def test_a_hang_in_the_first_step_of_a_size_is_no_measure_of_it():
    times = StepTimes(compiles_shapes=False)
    times.note(StepSize(num_tokens=64), 0.1, now=0.0)
    times.note(StepSize(num_tokens=128), 60.0, now=1.0)
    assert times.predict_s(StepSize(num_tokens=128)) < 3.0


def test_a_process_that_stood_still_as_a_whole_needs_no_restart(engine):
    engine.warm_up()
    engine.reading()
    engine.step(0.1)
    engine.watch.begin_step(engine.now)
    assert not engine.reading(after_s=60.0).is_restart_due
    assert not engine.reading(after_s=66.0).is_restart_due
    due = [after_s for after_s in range(67, 80) if engine.reading(after_s=float(after_s)).is_restart_due]
    assert due, "but an engine that does not go on then has stalled"
