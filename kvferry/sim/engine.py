"""The engine thread under virtual time: the loop of ``core.engine.thread`` as events.

A step takes time, during which other processes run: it is scheduled at one moment, its KV is written at a later one, and its
result is applied at a third. Messages that arrive in between wait in the inbox, as for a thread. With async scheduling a step
is launched when it is scheduled, and computed as late as possible, after its successor is scheduled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Protocol

from core.engine.core import Engine, EngineCore
from core.engine.engine_messages import EngineMessage, Wake, take_in
from core.engine.step_watch import FirstSteps, StepReading, StepSize, StepWatch
from core.request import EngineCoreOutput, SchedulerOutput
from kvferry.sim.loop import Process

WARM_UP_S = 5.0  # how long the first step of a size may take
TURN_S = 0.0002  # of an empty step, and from a message to the turn that processes it
_NO_TIMER_IS_DUE_S = 1e-8  # by then the timers of this moment have fired, which come a little late


class EngineWatch(Protocol):
    """Observes the engine and checks what it does."""

    def on_scheduled(self, step: SchedulerOutput) -> None:
        """A step was scheduled and has not run."""

    def on_settled(self) -> None:
        """A turn has ended: everything is consistent."""

    def on_asleep(self) -> None:
        """The engine sleeps until a message arrives; no timer is due."""


class EngineTurns(ABC):
    """The messages for an engine's next turn, and whether a turn is planned."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._inbox: deque[EngineMessage] = deque()
        self._is_awake = False
        self._is_hung = False
        self._deferred: list[Callable[[], None]] = []  # calls that came due while it hung
        self._step_watch = StepWatch(self._step_size, FirstSteps(WARM_UP_S))

    def submit(self, message: EngineMessage) -> None:
        """Queue a message, and wake the engine."""
        self._step_watch.on_message(self._now())
        self._inbox.append(message)
        if not self._is_awake:
            self._is_awake = True
            self._call_later(TURN_S, self._turn)

    def wake(self) -> None:
        """Wake the engine: the connector has a report."""
        self.submit(Wake())

    def reading(self) -> StepReading:
        """Return whether the engine makes progress."""
        return self._step_watch.reading(self._now())

    def hang(self) -> None:
        """Stop the engine, while the rest of the process runs on."""
        self._is_hung = True

    def resume(self) -> None:
        """Continue."""
        self._is_hung = False
        deferred, self._deferred = self._deferred, []
        for callback in deferred:
            self._call_later(0.0, callback)

    def _call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Plan a call of the engine's thread."""

        def call() -> None:
            if self._is_hung:
                self._deferred.append(callback)
            else:
                callback()

        self._process.call_later(delay_s, call)

    def _now(self) -> float:
        return self._process.clock.now()

    def _take_inbox(self, engine: Engine) -> list[EngineCoreOutput]:
        """Process the waiting messages; return their immediate outputs."""
        outputs: list[EngineCoreOutput] = []
        while self._inbox:
            self._step_watch.take(self._now())
            outputs += take_in(engine, self._inbox.popleft())
        return outputs

    @abstractmethod
    def _step_size(self) -> StepSize:
        """Return the size of the present step."""

    @abstractmethod
    def _turn(self) -> None:
        """Process the waiting messages, and begin a step if there is work."""


class SimEngine(EngineTurns):
    """Runs an engine. ``step_s`` draws how long a step with tokens takes."""

    def __init__(
        self,
        process: Process,
        engine: EngineCore,
        on_outputs: Callable[[list[EngineCoreOutput]], None],
        step_s: Callable[[], float],
        watch: EngineWatch,
        log: Callable[[str, object], None],
    ) -> None:
        super().__init__(process)
        self._log = log
        self.core = engine
        self._on_outputs = on_outputs
        self._step_s = step_s
        self._watch = watch
        self._busy_s = 0.0  # duration of the step in flight
        self.num_kept_steps = 0  # steps that were in flight while their successors were scheduled

    def _turn(self) -> None:
        outputs = self._take_inbox(self.core)
        if not self.core.has_work():
            self._end_turn(outputs)
            return
        self._step_watch.begin_step(self._now())
        step = self.core.schedule_step()
        self._watch.on_scheduled(step)
        self._log("steps", step.num_scheduled_tokens)
        duration_s = self._step_s() if step.total_num_scheduled_tokens else TURN_S
        if self.core.scheduler.async_scheduling:
            self._launch(step, outputs, duration_s)
        else:
            self._call_later(duration_s / 2, lambda: self._run(step, outputs, duration_s / 2))

    def _run(self, step: SchedulerOutput, outputs: list[EngineCoreOutput], rest_s: float) -> None:
        self.core.launch_step(step)
        self._call_later(rest_s, lambda: self._end_turn(outputs + self.core.finish_launched_steps()))

    def _launch(self, step: SchedulerOutput, outputs: list[EngineCoreOutput], duration_s: float) -> None:
        """Launch a step; results that need not stay in flight are applied when it has run."""
        self.core.launch_step(step)
        if not self.core.keeps_newest_step():
            wait_s, self._busy_s = self._busy_s + duration_s, 0.0
        else:  # without another step there is nothing to wait for: the next step is scheduled at once
            wait_s, self._busy_s = self._busy_s or TURN_S, duration_s
            self.num_kept_steps += 1
        self._call_later(wait_s, lambda: self._end_turn(outputs + self.core.finish_launched_steps()))

    def _step_size(self) -> StepSize:
        return self.core.step_size

    def _end_turn(self, outputs: list[EngineCoreOutput]) -> None:
        self._step_watch.end_step(self._now())
        if outputs:
            self._on_outputs(outputs)
        self._is_awake = self.core.has_work() or bool(self._inbox)
        self._watch.on_settled()
        if self._is_awake:
            self._call_later(0.0, self._turn)
        else:
            self._step_watch.rest()
            self._call_later(_NO_TIMER_IS_DUE_S, self._check_asleep)

    def _check_asleep(self) -> None:
        if not self._is_awake:
            self._watch.on_asleep()
