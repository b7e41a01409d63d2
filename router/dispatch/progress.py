"""Whether a worker's engine makes progress, by its heartbeats and answers: one state machine per worker, without I/O.

    SERVING ──no progress for longer than the bound──► STALLED ──progress──► ON PROBATION ──a success──► SERVING
                                                          ▲──────── no progress ───────┘

A stalled worker gets no requests. A worker on probation gets one request at a time, after a back-off that doubles with each
stall in a row. If no other worker could serve, it gets requests without these limits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from core.wire.messages import Heartbeat
from core.wire.progress import stall_bound_s

_BACKOFF_S = 1.0  # after the first stall
_MAX_BACKOFF_S = 60.0
_STEADY_S = 5.0  # answers this long after its return count as a success
_FORGIVEN_AFTER_S = 60.0  # without a stall, the next one counts as the first again


class Standing(Enum):
    """Whether a worker is expected to make progress."""

    SERVING = "serving"
    STALLED = "stalled"
    PROBATION = "probation"


@dataclass(slots=True)
class WorkerProgress:
    """The progress of one worker. Times are seconds of the router's clock."""

    standing: Standing = Standing.SERVING
    why: str = ""  # the reason while it is stalled, else empty
    is_backing_off: bool = False
    _heartbeat: Heartbeat | None = field(default=None, repr=False)  # the last heartbeat, if no answer arrived after it
    _heartbeat_at: float | None = None  # when the last heartbeat arrived
    _since: float = 0.0  # time of the last progress
    _is_confirmed: bool = False  # by a second heartbeat without progress
    _num_stalls: int = 0  # in a row
    _returned_at: float = 0.0
    _answered_at: float | None = None  # time of the last answer after its return

    def on_heartbeat(self, heartbeat: Heartbeat, now: float) -> None:
        """Record what the worker reports of its engine; ``judge`` decides at the next tick, when all messages are read.

        A process that was paused as a whole reports a stall too, in its first heartbeat; its second one reports progress.
        Therefore only a second heartbeat confirms a stall. Time before the last heartbeat does not count as stalled unless
        that heartbeat reported a stall, independent of the worker's clock.
        """
        stalled_s, previous, previous_at = heartbeat.stalled_ms / 1e3, self._heartbeat, self._heartbeat_at
        has_grown = previous is not None and 0 < previous.stalled_ms <= heartbeat.stalled_ms
        is_same_stall = has_grown and previous_at is not None and stalled_s >= now - previous_at
        if not is_same_stall:
            self._since = max(now - stalled_s, previous_at if previous_at is not None else now)
        self._is_confirmed = is_same_stall
        self._heartbeat, self._heartbeat_at = heartbeat, now

    def on_answer(self, now: float) -> None:
        """Record output of the engine, which supersedes the last heartbeat."""
        self._heartbeat = None
        self._answered_at = now

    def on_success(self) -> None:
        """Record that the worker completed a request, or its part of one."""
        if self.standing is Standing.PROBATION:
            self._serve()

    def judge(self, now: float) -> bool:
        """Update the standing; return True if the worker has just stalled or resumed."""
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
        previous = self._heartbeat
        if previous is None or previous.is_warming_up or not self._is_confirmed:
            return False
        return self._stalled_s > stall_bound_s(previous.slowest_step_ms / 1e3, previous.predicted_step_ms / 1e3)

    @property
    def _stalled_s(self) -> float:
        """Seconds without progress at its last heartbeat."""
        return self._heartbeat_at - self._since if self._heartbeat_at is not None else 0.0

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
