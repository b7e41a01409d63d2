"""Whether a worker's engine makes progress, as its heartbeats and its answers tell: a state machine per worker, without I/O.

    SERVING ──no progress for longer than the bound──► STALLED ──progress──► ON PROBATION ──a success──► SERVING
                                                          ▲──────── no progress ───────┘

A stalled worker gets nothing. One on probation is kept in reserve: it gets a request only while it has none, after a back-off
that doubles with each stall in a row; where nobody else could serve it gets what there is. Knows nothing of requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from core.wire.messages import Heartbeat
from core.wire.progress import stall_bound_s

_BACKOFF_S = 1.0  # after the first stall
_MAX_BACKOFF_S = 60.0
_STEADY_S = 5.0  # of answers since the stall count as a success
_FORGIVEN_AFTER_S = 60.0  # without a stall, the next one is the first again


class Standing(Enum):
    """How far a worker is trusted to make progress."""

    SERVING = "serving"
    STALLED = "stalled"
    PROBATION = "probation"


@dataclass(slots=True)
class WorkerProgress:
    """What is known of one worker; times are seconds of the router's clock."""

    standing: Standing = Standing.SERVING
    why: str = ""  # it has stalled; empty if it has not
    is_backing_off: bool = False
    _told: Heartbeat | None = field(default=None, repr=False)  # the last one, if no answer has come since
    _told_at: float | None = None  # when the last one came
    _since: float = 0.0  # when the last progress was, by the router's clock
    _is_confirmed: bool = False  # by a second heartbeat without progress
    _num_stalls: int = 0  # in a row
    _returned_at: float = 0.0
    _answered_at: float | None = None  # last, since it has returned

    def on_heartbeat(self, heartbeat: Heartbeat, now: float) -> None:
        """Take what the worker says of its engine. It is judged with the next tick, when all that has come is read.

        A whole process that stood still says so too, in its first heartbeat; but its second one tells of progress. And no
        time counts twice, whatever the worker's clock does: progress was at the last heartbeat, if that did not deny it.
        """
        stalled_s, told, told_at = heartbeat.stalled_ms / 1e3, self._told, self._told_at
        has_grown = told is not None and 0 < told.stalled_ms <= heartbeat.stalled_ms
        goes_on = has_grown and told_at is not None and stalled_s >= now - told_at
        if not goes_on:
            self._since = max(now - stalled_s, told_at if told_at is not None else now)
        self._is_confirmed = goes_on
        self._told, self._told_at = heartbeat, now

    def on_answer(self, now: float) -> None:
        """The engine has put something out: whatever the last heartbeat said is over."""
        self._told = None
        self._answered_at = now

    def on_success(self) -> None:
        """A request has ended well, or the part of it that the worker had."""
        if self.standing is Standing.PROBATION:
            self._serve()

    def judge(self, now: float) -> bool:
        """Draw conclusions; returns True if the worker has stalled, or comes back."""
        has_stalled = self._has_stalled()
        if self.standing is Standing.STALLED:
            if has_stalled:
                return False
            self._return(now)
            return True
        if has_stalled:
            self._stall(now)
            return True
        if self.standing is Standing.PROBATION:
            self.is_backing_off = now < self._returned_at + self._backoff_s
            if self._answered_at is not None and self._answered_at >= self._returned_at + _STEADY_S:
                self._serve()
        return False

    @property
    def _backoff_s(self) -> float:
        return min(_MAX_BACKOFF_S, _BACKOFF_S * 2.0 ** (self._num_stalls - 1))

    def _has_stalled(self) -> bool:
        told = self._told
        if told is None or told.is_warming_up or not self._is_confirmed:
            return False
        return self._stalled_s > stall_bound_s(told.slowest_step_ms / 1e3, told.predicted_step_ms / 1e3)

    @property
    def _stalled_s(self) -> float:
        """How long it had made no progress at its last heartbeat."""
        return self._told_at - self._since if self._told_at is not None else 0.0

    def _stall(self, now: float) -> None:
        is_another = self.standing is Standing.PROBATION or now < self._returned_at + _FORGIVEN_AFTER_S
        self._num_stalls = self._num_stalls + 1 if is_another else 1
        self.standing = Standing.STALLED
        self.why = f"its engine makes no progress for {self._stalled_s:.1f} s"

    def _return(self, now: float) -> None:
        self.standing = Standing.PROBATION
        self.why = ""
        self.is_backing_off = True
        self._returned_at = now
        self._answered_at = None

    def _serve(self) -> None:
        self.standing = Standing.SERVING
        self.is_backing_off = False
