"""Virtual time: order, death, frost, clocks of one's own."""

import pytest

from kvferry.sim.loop import EventLoop, Process, ProcessClock, Queue


@pytest.fixture
def loop() -> EventLoop:
    return EventLoop()


def run(loop: EventLoop) -> None:
    while loop.run_next():
        pass


def test_events_run_in_order_of_time_then_of_planning(loop):
    seen = []
    for delay_s, name in ((2.0, "late"), (1.0, "first"), (1.0, "second"), (-5.0, "now")):
        loop.call_later(delay_s, lambda name=name: seen.append((loop.now, name)))
    run(loop)
    assert seen == [(0.0, "now"), (1.0, "first"), (1.0, "second"), (2.0, "late")]
    assert loop.num_events == 4


def test_cancelled_event_does_not_happen(loop):
    seen = []
    timer = loop.call_later(1.0, lambda: seen.append("no"))
    timer.cancel()
    assert timer.is_over
    assert not loop.run_next()
    assert seen == []


def test_events_may_plan_events(loop):
    seen = []
    loop.call_later(1.0, lambda: loop.call_later(0.5, lambda: seen.append(loop.now)))
    run(loop)
    assert seen == [1.5]


def test_dead_process_does_nothing_and_reports_it_once(loop):
    process, seen = Process(loop, "p"), []
    process.call_later(1.0, lambda: seen.append("event"))
    process.on_death(lambda: seen.append("death"))
    process.kill()
    process.kill()
    run(loop)
    assert seen == ["death"]


def test_frozen_process_catches_up_in_order_when_it_thaws(loop):
    process, seen = Process(loop, "p"), []
    process.call_later(2.0, lambda: seen.append((loop.now, "second")))
    process.call_later(1.0, lambda: seen.append((loop.now, "first")))
    cancelled = process.call_later(1.5, lambda: seen.append((loop.now, "cancelled")))
    process.freeze()
    loop.call_later(3.0, cancelled.cancel)
    loop.call_later(5.0, process.thaw)
    run(loop)
    assert seen == [(5.0, "first"), (5.0, "second")]


def test_process_that_dies_while_it_catches_up_stops_there(loop):
    process, seen = Process(loop, "p"), []
    process.call_later(1.0, process.kill)
    process.call_later(2.0, lambda: seen.append("after death"))
    process.freeze()
    loop.call_later(5.0, process.thaw)
    run(loop)
    assert seen == []


def test_clock_of_a_process_has_its_own_origin_and_rate(loop):
    clock = ProcessClock(loop, origin=100.0, rate=1.5)
    process, seen = Process(loop, "p", clock), []
    process.call_at(103.0, lambda: seen.append((loop.now, clock.now())))
    run(loop)
    assert seen == [(pytest.approx(2.0), pytest.approx(103.0))]


@pytest.mark.parametrize("rate", [0.75, 0.9, 1.1, 1.3])
def test_timer_is_due_by_its_own_clock_when_it_fires(loop, rate):
    clock = ProcessClock(loop, origin=98_765.4321, rate=rate)
    process, late = Process(loop, "p", clock), []
    for tenth in range(200):
        due = clock.now() + tenth / 10
        process.call_at(due, lambda due=due: late.append(clock.now() - due))
    run(loop)
    assert min(late) >= 0
    assert max(late) < 1e-6


@pytest.mark.parametrize("rate", [0.5, 1.0, 1.7])
def test_clock_that_jumps_brings_its_timers_forward_once_and_in_order(loop, rate):
    process = Process(loop, "worker", ProcessClock(loop, 100.0, rate))
    seen: list[str] = []
    cancelled = process.call_at(102.0, lambda: seen.append("cancelled"))
    for seconds in (4.0, 1.0, 2.0, 6.0):
        process.call_at(100.0 + seconds, lambda seconds=seconds: seen.append(f"{seconds} at {process.clock.now():.3f}"))
    process.call_later(0.5 / rate, lambda: (cancelled.cancel(), process.jump(3.0)))
    run(loop)
    assert seen == ["1.0 at 103.500", "2.0 at 103.500", "4.0 at 104.000", "6.0 at 106.000"]


def test_queue_keeps_the_order_whatever_each_call_takes(loop):
    delays = iter((5.0, 1.0, 3.0))
    queue, seen = Queue(Process(loop, "p"), loop, lambda: next(delays)), []
    for name in "abc":
        queue.put(lambda name=name: seen.append((loop.now, name)))
    run(loop)
    assert seen == [(5.0, "a"), (5.0, "b"), (5.0, "c")]
