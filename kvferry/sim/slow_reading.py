"""Clients that read their answers slowly, or stop reading for a while, and the router's buffers for them.

The router writes updates until the client's connection is full; later updates wait in the router and are written together. A
connection that stays full for ``send_timeout_s`` is cut, and its request ends. ``router.http.connections`` does this for the
real router.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

from core.errors import Cancelled
from core.wire.messages import ErrorInfo
from kvferry.sim.loop import EventLoop, Process, Timer
from router.dispatch.types import Update

if TYPE_CHECKING:
    from kvferry.sim.client import Client
    from kvferry.sim.plan import RequestPlan

SEND_TIMEOUT_S = 3.0  # of routers with slow clients
_SHARE = 0.15  # of runs with slow clients
_SHARE_OF_REQUESTS = 0.4  # in these runs
_LONG_STOP_SHARE = 0.4  # of slow clients that stop for longer than their router waits


@dataclass(frozen=True, slots=True)
class Reading:
    """How one client reads: a write every ``read_s`` seconds, and nothing from ``stops_at`` on for ``stop_s`` seconds."""

    read_s: float
    stops_at: float
    stop_s: float
    room: int  # writes that its connection holds unread

    @property
    def resumes_at(self) -> float:
        """When it reads again, in the loop's seconds."""
        return self.stops_at + self.stop_s

    def longest_s(self, num_tokens: int) -> float:
        """Return how much later than other clients it may have its whole answer."""
        return self.stop_s + self.read_s * (num_tokens + 2)

    def __str__(self) -> str:
        return f"reads every {self.read_s:.3f} s, not from {self.stops_at:.3f} for {self.stop_s:.3f} s, room {self.room}"


def draw_slow_readers(seed: int, requests: tuple[RequestPlan, ...], *, is_wanted: bool | None) -> tuple[RequestPlan, ...]:
    """Return the requests, some with slow clients; whether there are any is drawn if ``is_wanted`` is None."""
    random = Random(f"{seed}/slow clients")
    if random.random() >= _SHARE if is_wanted is None else not is_wanted:
        return requests
    return tuple(
        replace(request, reading=_draw_reading(random, request.at)) if random.random() < _SHARE_OF_REQUESTS else request
        for request in requests
    )


def _draw_reading(random: Random, at: float) -> Reading:
    is_long = random.random() < _LONG_STOP_SHARE
    return Reading(
        read_s=random.choice((0.001, 0.05, 0.5)),
        stops_at=at + random.choice((0.1, 1.0)) * random.random(),
        stop_s=SEND_TIMEOUT_S * (random.uniform(1.1, 3.0) if is_long else random.uniform(0.1, 0.9)),
        room=random.choice((1, 2, 8)),
    )


class SlowConnection:
    """The connection of a slow client. ``finish_choices`` and ``cut`` are the router's: it owns the request.

    The request may have ended in the router long before its client has read everything.
    """

    def __init__(
        self,
        client: Client,
        process: Process,
        loop: EventLoop,
        finish_choices: Callable[[Client], None],
        cut: Callable[[Client], None],
    ) -> None:
        assert client.plan.reading is not None
        self.client = client
        self._reading = client.plan.reading
        self._process = process
        self._loop = loop
        self._finish_choices = finish_choices
        self._cut_request = cut
        self._waiting: list[Update] = []  # for room in the connection
        self._num_unread = 0
        self._sending: Timer | None = None  # runs while the connection is full
        self._is_reading = False
        self._ended: tuple[ErrorInfo | None, float] | None = None
        self.is_closed = False

    def put(self, update: Update) -> None:
        """Add an update."""
        self._waiting.append(update)
        self._process.call_later(0.0, self._write)

    def end(self, error: ErrorInfo | None) -> None:
        """Record that the router has ended the request; the client still has to read the rest."""
        self._ended = error, self._loop.now
        self._process.call_later(0.0, self._write)

    def close(self) -> None:
        """Write nothing more."""
        self.is_closed = True

    def _is_full(self) -> bool:
        return self._num_unread >= self._reading.room

    def _write(self) -> None:
        if self.is_closed or self._is_full():
            return
        updates, self._waiting = self._waiting, []
        for update in updates:
            self.client.on_update(update)
        if self.client.ended_choices:
            self._finish_choices(self.client)
        if updates:
            self._num_unread += 1
            self._plan_read()
            if self._is_full():
                self._sending = self._process.call_later(SEND_TIMEOUT_S, self._on_timeout)
        self._close_if_done()

    def _plan_read(self) -> None:
        if not self._is_reading:
            self._is_reading = True
            due, reading = self._loop.now + self._reading.read_s, self._reading
            due = reading.resumes_at if reading.stops_at <= due < reading.resumes_at else due
            self._loop.call_later(due - self._loop.now, self._read)

    def _read(self) -> None:
        """The client reads one write; the router sees it when it next runs."""
        self._is_reading = False
        if self.is_closed:
            return
        self._num_unread -= 1
        self.client.last_read_at = self._loop.now
        if self._num_unread:
            self._plan_read()
        self._process.call_later(0.0, self._resume)

    def _resume(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None
        self._write()

    def _on_timeout(self) -> None:
        """Cut the connection, unless the client has read while the router was paused."""
        if self.is_closed or not self._is_full():
            return
        self.close()
        self.client.was_cut = True
        self.client.end(Cancelled.code, "it did not read its answer", self._loop.now)
        self._cut_request(self.client)

    def _close_if_done(self) -> None:
        if self._ended is not None and not self._waiting and not self._num_unread:
            self.close()
            self.client.on_end(*self._ended)
