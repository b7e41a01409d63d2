"""Whether a vLLM server makes progress: the age of its last sign of work.

A sign is a token of a request of ours, or a step that the server has counted. A server makes no steps while all of its requests
wait for blocks of a handoff, but it counts them: that is a sign, too, for as long as a load may take. Times are arguments.
"""

from __future__ import annotations

from collections import deque

from agent.vllm_server import ServerLoad
from core.engine.step_watch import StepReading

_MEMORY_S = 60.0
_LEAST_GAP_S = 1.0  # a server is asked about its steps so often only


class ServerProgress:
    """The time of the last sign, and the longest gap between two signs of the last minute.

    Loads of blocks are signs for ``load_timeout_s`` after the last token or step.
    """

    def __init__(self, now: float, load_timeout_s: float) -> None:
        self._load_timeout_s = load_timeout_s
        self._last = now
        self._last_work = now  # the last token or step
        self._num_steps = 0
        self._gaps: deque[tuple[float, float]] = deque()  # (time, seconds), each longer than those after it

    def begin(self, now: float) -> None:
        """Note that there is work, after a time without any."""
        self._last = self._last_work = now

    def note(self, now: float) -> None:
        """Note a sign of work."""
        gap = now - self._last
        self._last = self._last_work = now
        while self._gaps and self._gaps[-1][1] <= gap:
            self._gaps.pop()
        self._gaps.append((now, gap))

    def note_load(self, load: ServerLoad, num_requests: int, now: float) -> None:
        """Note the server's load while it has ``num_requests`` of ours; more steps than before are a sign."""
        if load.num_steps != self._num_steps:
            self._num_steps = load.num_steps
            self.note(now)
        elif 0 < num_requests <= load.num_loading and now <= self._last_work + self._load_timeout_s:
            self._last = now

    def reading(self, now: float, *, has_work: bool) -> StepReading:
        """Return the progress at this moment."""
        while self._gaps and self._gaps[0][0] < now - _MEMORY_S:
            self._gaps.popleft()
        slowest_s = max(_LEAST_GAP_S, self._gaps[0][1] if self._gaps else 0.0)
        stalled_s = now - self._last if has_work else 0.0
        return StepReading(
            stalled_s=stalled_s,
            since_progress_s=stalled_s,
            slowest_step_s=slowest_s,
            restart_bound_s=float("inf"),  # a new agent would not help
        )
