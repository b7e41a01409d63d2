"""Virtual time: an event loop without waiting, and processes that can die, freeze and have clocks of their own.

Everything in a simulation is an event of one ``EventLoop``; events of equal time run in the order in which they were planned,
so a run depends only on its inputs. Knows nothing of the simulated processes.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from functools import partial

Callback = Callable[[], object]

_ROUNDING_S = 1e-9  # a timer never fires early by the clock that it was planned by


class Timer:
    """A planned event. ``due`` is in the loop's seconds."""

    __slots__ = ("_callback", "due")

    def __init__(self, due: float, callback: Callback) -> None:
        self.due = due
        self._callback: Callback | None = callback

    @property
    def is_over(self) -> bool:
        """True once it has run or was cancelled."""
        return self._callback is None

    def cancel(self) -> None:
        """Drop the event. Idempotent."""
        self._callback = None

    def fire(self) -> bool:
        """Run the event, once; returns False if it has run or was cancelled."""
        callback, self._callback = self._callback, None
        if callback is None:
            return False
        callback()
        return True


class EventLoop:
    """A heap of events. ``num_events`` counts those that have run, ``now`` is the time of the last one in seconds."""

    def __init__(self) -> None:
        self.num_events = 0
        self.now = 0.0
        self._heap: list[tuple[float, int, Timer]] = []
        self._num_planned = 0

    def call_later(self, delay_s: float, callback: Callback) -> Timer:
        """Plan an event; a negative delay counts as none."""
        timer = Timer(self.now + max(0.0, delay_s), callback)
        self._num_planned += 1
        heapq.heappush(self._heap, (timer.due, self._num_planned, timer))
        return timer

    def run_next(self) -> bool:
        """Advance to the next event and run it; False if there is none."""
        while self._heap:
            due, _, timer = heapq.heappop(self._heap)
            if timer.is_over:
                continue
            self.now += due - self.now  # not ``due``: recorded seeds were found with this rounding
            self.num_events += 1
            timer.fire()
            return True
        return False


class ProcessClock:
    """The clock of one process: it starts at any value, and its seconds may be longer or shorter than the loop's."""

    def __init__(self, loop: EventLoop, origin: float = 0.0, rate: float = 1.0) -> None:
        self._loop = loop
        self._origin = origin - loop.now * rate
        self._rate = rate

    def now(self) -> float:
        """Return monotonic seconds of this process."""
        return self._origin + self._loop.now * self._rate

    def jump(self, seconds: float) -> None:
        """Go forward by so much at once, as after a pause of the machine."""
        self._origin += seconds

    def delay_until(self, when: float) -> float:
        """Return the loop's seconds until this clock shows ``when``."""
        return (when - self.now()) / self._rate


class Process:
    """A process with events of its own: none run after its death, none while it is frozen.

    Events that come due while it is frozen run when it thaws, in the order in which they came due.
    """

    def __init__(self, loop: EventLoop, name: str, clock: ProcessClock | None = None) -> None:
        self.name = name
        self.clock = clock or ProcessClock(loop)
        self.is_alive = True
        self.is_frozen = False
        self._loop = loop
        self._deferred: deque[Timer] = deque()
        self._by_clock: list[tuple[float, Timer]] = []  # those planned by this process's clock, with its time
        self._on_death: list[Callback] = []

    def call_later(self, delay_s: float, callback: Callback) -> Timer:
        """Plan an event of this process, in the loop's seconds."""
        timer = Timer(self._loop.now + max(0.0, delay_s), callback)
        self._loop.call_later(delay_s, lambda: self._run(timer))
        return timer

    def call_at(self, when: float, callback: Callback) -> Timer:
        """Plan an event for when this process's own clock shows ``when``, or a little more."""
        timer = self.call_later(self.clock.delay_until(when) + _ROUNDING_S, callback)
        self._by_clock = [(when, timer), *(entry for entry in self._by_clock if not entry[1].is_over)]
        return timer

    def jump(self, seconds: float) -> None:
        """Let the clock jump ahead; what is planned by it comes as much earlier."""
        self.clock.jump(seconds)
        for when, timer in reversed(self._by_clock):
            self._loop.call_later(self.clock.delay_until(when) + _ROUNDING_S, partial(self._run, timer))

    def on_death(self, callback: Callback) -> None:
        """Call a function at the moment of death."""
        self._on_death.append(callback)

    def kill(self) -> None:
        """Die: everything planned is lost. Idempotent."""
        if self.is_alive:
            self.is_alive = False
            self._deferred.clear()
            for callback in self._on_death:
                callback()

    def freeze(self) -> None:
        """Stop the process, with its memory still mapped."""
        self.is_frozen = True

    def thaw(self) -> None:
        """Continue, with the events that came due meanwhile."""
        self.is_frozen = False
        while self._deferred and self.is_alive and not self.is_frozen:
            self._deferred.popleft().fire()

    def _run(self, timer: Timer) -> None:
        if not self.is_alive or timer.is_over:
            return
        if self.is_frozen:
            self._deferred.append(timer)
        else:
            timer.fire()


class ProcessTimers:
    """The timers of a process, as a ``MachineDriver`` uses them."""

    def __init__(self, process: Process) -> None:
        self.now = process.clock.now
        self.call_at = process.call_at


class Queue:
    """Passes calls to a process in their order, each a little later: a queue between two threads."""

    def __init__(self, process: Process, loop: EventLoop, delay_s: Callable[[], float]) -> None:
        self._process = process
        self._loop = loop
        self._delay_s = delay_s
        self._last_due = 0.0

    def put(self, callback: Callback) -> None:
        """Queue a call."""
        self._last_due = max(self._last_due, self._loop.now + self._delay_s())
        self._process.call_later(self._last_due - self._loop.now, callback)
