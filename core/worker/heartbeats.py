"""The contents of heartbeats: load and progress, corrected for pauses of the whole process.

While the whole process is stopped its engine makes no progress, but it has not stalled. A timer that fires late shows such a
pause. Owns the times of these pauses.
"""

from __future__ import annotations

from collections import deque

from core.wire.messages import Heartbeat, Register, RegisterEncoder
from core.worker.actions import EngineLoad

_LEAST_PAUSE_S = 0.5  # a timer that is late by less says nothing
_MAX_PAUSES = 64  # that are remembered; a stall of so many is another matter


class Heartbeats:
    """The heartbeats of one worker. Times are seconds of its clock."""

    def __init__(self, registration: Register | RegisterEncoder) -> None:
        self._registration = registration
        self._pauses: deque[tuple[float, float]] = deque(maxlen=_MAX_PAUSES)  # (end, seconds)

    def on_timer(self, now: float, due: float | None) -> None:
        """Record that the timer ``due`` at this time has fired."""
        if due is not None and now - due >= _LEAST_PAUSE_S:
            self._pauses.append((now, now - due))

    def write(
        self,
        load: EngineLoad,
        now: float,
        *,
        is_draining: bool,
        num_reports: int = 0,
        others: tuple[int, int] = (0, 0),
        place: tuple[int, int] = (0, 1),
    ) -> Heartbeat:
        """Return the heartbeat for a router that has been sent so many reports.

        ``others`` are the queued prompts of other routers: their number, and that of their tokens. ``place`` is the router's
        place among the routers that have taken the worker in, from 0, and their number.
        """
        progress = load.progress
        return Heartbeat(
            engine_id=self._registration.engine_id,
            incarnation=self._registration.incarnation,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            kv_cache_usage=min(1.0, max(0.0, load.kv_cache_usage)),
            num_leased_blocks=load.num_leased_blocks,
            is_draining=is_draining,
            stalled_ms=min(progress.stalled_s, self._without_pauses(progress.since_progress_s, now)) * 1e3,
            slowest_step_ms=progress.slowest_step_s * 1e3,
            predicted_step_ms=progress.predicted_step_s * 1e3,
            is_warming_up=progress.is_warming_up,
            num_reports=num_reports,
            num_queued_tokens_of_others=others[1],
            num_other_routers=place[1] - 1,
            router_rank=place[0],
            num_queued_prompts_of_others=others[0],
        )

    def _without_pauses(self, since_progress_s: float, now: float) -> float:
        """Return the part of the time since the last progress in which the process could have made some."""
        since = now - since_progress_s
        paused_s = sum(max(0.0, min(seconds, end - since)) for end, seconds in self._pauses)
        return max(0.0, since_progress_s - paused_s)  # now - since may differ from since_progress_s in the last bit
