"""``MachineDriver`` runs a pure state machine: it routes events and actions by type and keeps the machine's timer.

A machine does no I/O and reads no clock. Its handlers take an event and the time and return actions; ``next_timer`` says when
it needs a ``TimerDue``. The same driver runs in asyncio (``LoopTimers``) and in simulated time, which brings timers of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, Protocol, TypeVar

from core.clock import Clock

T = TypeVar("T")
ReplyT = TypeVar("ReplyT")
EventHandler = Callable[[Any, float], Iterable[object]]
ActionHandler = Callable[[Any], ReplyT | None]


class TimerDue:
    """The event that ``next_timer`` has asked for. It may come early."""


class ByType(dict[type, T]):
    """Values by type. A type without a value has the value of its nearest base; ``object`` is the base of every type."""

    def __missing__(self, kind: type) -> T:
        """Raises: KeyError: no base has a value."""
        for base in kind.__mro__[1:]:
            if base in self:
                self[kind] = self[base]
                return self[kind]
        raise KeyError(kind)


class TimerHandle(Protocol):
    """A planned call."""

    def cancel(self) -> None:
        """Drop the call."""


class Timers(Protocol):
    """A clock and its timers."""

    def now(self) -> float:
        """Return monotonic seconds."""

    def call_at(self, when: float, callback: Callable[[], None]) -> TimerHandle:
        """Call ``callback`` when the clock shows ``when``, or soon after."""


class LoopTimers:
    """Timers of the running event loop, by ``clock``."""

    def __init__(self, clock: Clock) -> None:
        self.now = clock.now

    def call_at(self, when: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """Call ``callback`` when the clock shows ``when``, or soon after."""
        return asyncio.get_running_loop().call_later(max(0.0, when - self.now()), callback)


class MachineDriver(Generic[ReplyT]):
    """Drives one machine in one thread.

    ``events`` and ``actions`` map types to handlers, see ``ByType``. ``on_error`` receives exceptions of ``handle``: the state
    of the machine is unknown afterwards. Without it the exception propagates.
    """

    def __init__(
        self,
        events: Mapping[type, EventHandler],
        actions: Mapping[type, ActionHandler[ReplyT]],
        next_timer: Callable[[], float | None],
        timers: Timers,
        on_error: Callable[[Exception], None] | None = None,
    ) -> None:
        self._events = events
        self._actions = actions
        self._next_timer = next_timer
        self._timers = timers
        self._on_error = on_error
        self._timer: TimerHandle | None = None
        self._timer_at = 0.0
        self._is_stopped = False

    def handle(self, event: object) -> ReplyT | None:
        """Pass an event to its handler and carry out the actions; returns the result of ``carry_out``.

        Does nothing after ``stop``.
        """
        if self._is_stopped:
            return None
        try:
            return self.carry_out(self._events[type(event)](event, self._timers.now()))
        except Exception as error:
            if self._on_error is None:
                raise
            self._on_error(error)
            return None

    def carry_out(self, actions: Iterable[object]) -> ReplyT | None:
        """Carry out actions in order and set the timer; returns the last result of an action that is not None."""
        reply = None
        for action in actions:
            result = self._actions[type(action)](action)
            reply = reply if result is None else result
        due = self._next_timer()
        if due is not None and (self._timer is None or due < self._timer_at):  # a timer that fires early does no harm
            self.cancel_timer()
            self._timer_at, self._timer = due, self._timers.call_at(due, self.on_timer)
        return reply

    def on_timer(self) -> None:
        """Let the machine do the work that is due now."""
        self.cancel_timer()
        self.handle(TimerDue())

    def stop(self) -> None:
        """Cancel the timer and ignore later events."""
        self._is_stopped = True
        self.cancel_timer()

    def cancel_timer(self) -> None:
        """Cancel the timer; the next event may plan another."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
