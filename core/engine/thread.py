"""The engine's thread: an inbox for the engine, and a loop that sleeps when there is no work.

Owns the thread and the order of the engine's messages. Does not know routers, roles or event loops: outputs and the death of
the engine go to callbacks, which run on this thread. Any thread may submit.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from core.clock import Clock, SystemClock
from core.engine.core import Engine
from core.engine.engine_messages import AbortRequests, AddRequests, EngineMessage, Wake, take_in
from core.engine.step_watch import FirstSteps, StepReading, StepWatch
from core.errors import EngineDead
from core.log import event
from core.request import EngineCoreOutput, NewRequest
from core.sched.stats import EngineStats

logger = logging.getLogger(__name__)

THREAD_NAME = "kvferry-engine"


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


class EngineThread:
    """Runs an engine until it is stopped or dies.

    ``on_outputs`` gets the outputs of a step, refusals included. ``on_death`` gets the error that ended the loop: the engine
    computes nothing any more, and the worker has to answer every request itself. ``prepare`` runs first on the thread, for
    settings that are a thread's own (``core.engine.build.apply_cpu_threads``). ``first_steps`` says how the first step of a
    size is judged.
    """

    def __init__(
        self,
        engine: Engine,
        on_outputs: Callable[[list[EngineCoreOutput]], None],
        on_death: Callable[[BaseException], None],
        prepare: Callable[[], None] | None = None,
        clock: Clock | None = None,
        first_steps: FirstSteps | None = None,
    ) -> None:
        self._engine = engine
        self._clock = clock or SystemClock()
        self._on_outputs = on_outputs
        self._on_death = on_death
        self._prepare = prepare
        self._inbox: queue.SimpleQueue[EngineMessage | _Stop] = queue.SimpleQueue()  # admission bounds what can be in it
        self._watch = StepWatch(lambda: engine.step_size, first_steps or FirstSteps())
        self._death: BaseException | None = None
        self._submit_lock = threading.Lock()  # no message follows the order to stop
        self._is_closed = False
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit_add(self, requests: Sequence[NewRequest]) -> None:
        """Submit new requests. One that cannot be served comes back as an output with an error.

        Raises:
            EngineDead: the loop has ended, or was asked to.
        """
        self._submit(AddRequests(requests))

    def submit_abort(self, request_ids: Sequence[str]) -> None:
        """Abort requests; they end before the next step.

        Raises:
            EngineDead: the loop has ended, or was asked to.
        """
        self._submit(AbortRequests(request_ids))

    def wake(self) -> None:
        """Request one more step, because a connector has something to report. Never raises; any thread."""
        with self._submit_lock:
            self._put(Wake())

    def stats(self) -> EngineStats:
        """Return the reading after the last step."""
        return self._engine.stats

    def is_alive(self) -> bool:
        """True between ``start`` and the end of the loop."""
        return self._thread.is_alive() and self._death is None

    def reading(self) -> StepReading:
        """Return whether the engine makes progress. Any thread; an engine that was asked to stop counts as healthy."""
        return StepReading() if self._is_closed else self._watch.reading(self._clock.now())

    def stop(self, timeout_s: float) -> bool:
        """End the loop after the step in progress and shut the engine down on its own thread; False if that takes too long.

        Waits for the end of a loop that has died, too. One that was never started is shut down here. Idempotent.
        """
        with self._submit_lock:
            self._is_closed = True
            self._put(_Stop())
        if self._thread.ident is None:
            self._engine.shutdown()
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _submit(self, message: EngineMessage) -> None:
        with self._submit_lock:
            if self._death is not None:
                raise EngineDead(f"the engine has ended: {self._death!r}")
            if self._is_closed:
                raise EngineDead("the engine was stopped")
            self._put(message)

    def _put(self, message: EngineMessage | _Stop) -> None:
        self._watch.on_message(self._clock.now())  # first: the engine never takes more than was put
        self._inbox.put(message)

    def _run(self) -> None:
        try:
            self._loop()
        finally:
            self._engine.shutdown()

    def _loop(self) -> None:
        try:
            if self._prepare is not None:
                self._prepare()
            while not self._is_stopping:
                self._turn()
        except BaseException as error:  # the worker's main loop: every error must be reported
            self._death = error
            logger.exception(event("engine_died", error=repr(error)))
            self._on_death(error)

    def _turn(self) -> None:
        """Take in what has come, sleeping if there is nothing to do, then do one step."""
        outputs = self._drain_inbox()
        if not self._is_stopping and self._engine.has_work():
            outputs += self._step()
        if outputs:
            self._on_outputs(outputs)

    def _step(self) -> list[EngineCoreOutput]:
        self._watch.begin_step(self._clock.now())
        outputs = self._engine.step()
        self._watch.end_step(self._clock.now())
        return outputs

    def _drain_inbox(self) -> list[EngineCoreOutput]:
        refusals: list[EngineCoreOutput] = []
        must_wait = not self._engine.has_work()
        if must_wait:
            self._watch.rest()
        try:
            refusals += self._handle(self._inbox.get(block=must_wait))
            while True:
                refusals += self._handle(self._inbox.get_nowait())
        except queue.Empty:
            return refusals

    def _handle(self, message: EngineMessage | _Stop) -> list[EngineCoreOutput]:
        self._watch.take(self._clock.now())
        if isinstance(message, _Stop):
            self._is_stopping = True
            return []
        return take_in(self._engine, message)
